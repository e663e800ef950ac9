"""What a rank holds outside the training step: while it starts, evaluates, generates, saves, loads and exports.

Each activity is a small ledger of its own over its own phases, so that those of the step stay what `zplan verify`
compares. Its lines are what is alive between two steps, and what the activity takes beside that. The runtime's side of
each stands in the module that its docstring names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zplan.planner.activations import counted, evaluation_peaks
from zplan.planner.activities_disk import export, export_checkpoint, load, save, summon, taken_apart
from zplan.planner.activity import BF16, Activity, Kept, activity_of, largest
from zplan.planner.config import Choice
from zplan.planner.ledger import Ledger, Line, Source, Tier, merge
from zplan.planner.models import Architecture, ModelSpec
from zplan.planner.placement import Placement, place
from zplan.planner.states import FP32, by_class

ENCODERS = ("bert", "vit", "t5")
"""Families that do not generate token by token."""


def activities(spec: ModelSpec, choice: Choice, step: Ledger) -> tuple[Activity, ...]:
    """All activities of zplan's runtime under a choice.

    Parameters
    ----------
    spec, choice
        What the step's ledger was predicted from.
    step
        Ledger of the step, overheads included.
    """
    placements = place(spec, choice)
    idle = [(line, n) for tier in ("device", "host", "pinned", "nvme") for line, n in step.live("idle", tier)]
    kept = [(line, n) for line, n in idle if line.kind != "activations"]
    found = [
        initialise("initialise", placements, choice, kept, weights=True),
        initialise("initialise, meta_init", placements, choice, kept, fresh=True),
        initialise("initialise, built model", placements, choice, kept, built=True),
    ]
    if counted(spec):
        assert spec.arch is not None
        peaks = evaluation_peaks(spec, choice)
        found.append(evaluate(spec.arch, choice, kept, peaks))
        if spec.arch.family not in ENCODERS:
            found.append(generate(spec.arch, choice, kept, peaks))
    found += [save(placements, choice, kept), load(placements, choice, kept)]
    found += [export(spec, placements, choice, kept), summon(placements, choice, kept)]
    return (*found, export_checkpoint(placements))


# --- starting ------------------------------------------------------------------------------------------------------


def initialise(
    name: str,
    placements: Sequence[Placement],
    choice: Choice,
    kept: Kept,
    *,
    weights: bool = False,
    fresh: bool = False,
    built: bool = False,
) -> Activity:
    """Cutting the model into units, one after the other (`runtime/materialize.py`).

    Parameters
    ----------
    weights
        `zplan run --weights`: each parameter is read from a folder in its turn. Random values take less.
    fresh
        Built on the meta device without `init=`: the unit's own modules are made real, in fp32, and filled.
    built
        Built in fp32 on the host before `initialize`, whole on every rank.
    """
    phases = ("ring", *(f"unit.{p.unit.name}" for p in placements), "optimizer")
    units = list(enumerate(placements, start=1))
    values = [(p, p.layout.numel * (p.unit.itemsize or FP32), i) for i, p in units]
    full = [(p, p.layout.padded_numel * (p.unit.itemsize or FP32), (i, i)) for i, p in units]
    own = [*_born(placements, choice, kept, len(phases) - 1), *by_class("init.full", full, "buffers")]
    # Bits of values, and in a resident unit lower halves of what other ranks keep, a part at a time.
    own += by_class("init.halves", [(p, taken_apart(p), (i, i)) for i, p in units if p.split], "buffers")
    if fresh:
        own += by_class("init.fresh", [(p, n, (i, i)) for p, n, i in values], "buffers")
    if built:
        tier: Tier = "device" if choice.device == "cpu" else "host"
        source = by_class("init.source", [(p, n, (0, i)) for p, n, i in values], "buffers")
        own += [line._replace(tier=tier) for line in source]
    if weights and choice.device != "cpu":
        # The parameter as its file has it, and in fp32: a cast to another device happens where the values are.
        note = (
            "the largest parameter as it is read and in fp32; its pages of the file are shared by the ranks of a node"
        )
        nbytes = largest(placements) * (FP32 + BF16)
        low = largest(placements) * FP32
        span = ((1, len(phases) - 2),)
        own.append(Line("init.read", nbytes, span, "buffers", "host", "estimate", note, low, nbytes))
    notes = {
        "weights": "zplan run",
        "fresh": "a script: `with zplan.meta_init()`, no `init=`",
        "built": "a script: the whole model in fp32 on every rank before `zplan.initialize`",
    }
    which = "fresh" if fresh else "built" if built else "weights"
    return Activity(name, merge(phases, own), note=notes[which], plain=which == "weights")


def _born(placements: Sequence[Placement], choice: Choice, kept: Kept, end: int) -> Iterable[Line]:
    """What is kept between steps, from when it is there: a unit's with the unit, the optimizer's own at the end."""
    members: dict[str, list[int]] = {}
    for i, p in enumerate(placements, start=1):
        members.setdefault(p.size_class, []).append(i)
    # Placeholders come when the unit's full values have gone.
    closing = [(i, end) for i, p in enumerate(placements, start=2) if p.closes for _ in p.layout.entries]
    for line, n in kept:
        if line.kind == "overhead" or line.id.startswith("params.ring."):
            yield line._replace(spans=((0, end),) * n)
            continue
        if line.id == "params.placeholder":
            yield line._replace(spans=tuple(closing))
            continue
        units = next((v for k, v in members.items() if line.id.endswith(f".{k}")), [])
        if not units or line.id.startswith("grads."):
            yield line._replace(spans=((end, end),) * n)  # persistent gradients come after all units
        elif len(units) == n:
            yield line._replace(spans=tuple((first, end) for first in units))
        else:
            yield line._replace(spans=((0, end),) * n)  # of some units only: from the start, at most


# --- forward only --------------------------------------------------------------------------------------------------


def evaluate(arch: Architecture, choice: Choice, kept: Kept, peaks: Mapping[str, int]) -> Activity:
    """A forward of a micro-batch under `torch.no_grad`, with its loss (`runtime/train.py: Run.evaluate`).

    `peaks` are those of `evaluation_peaks`.
    """
    source: Source = "derived" if arch.runnable else "estimate"
    own = [
        Line(f"eval.{phase}", n, ((i, i),), "activations", source=source) for i, (phase, n) in enumerate(peaks.items())
    ]
    return activity_of("evaluate", tuple(peaks), kept, own, f"{choice.micro_batch} x {choice.seq} tokens, no gradients")


def kv_cache_bytes(arch: Architecture, *, batch: int, length: int, itemsize: int) -> int:
    """Keys and values of all layers for `batch` sequences of `length` tokens: 2 L B G T D elements.

    Latent attention keeps what keys and values are made of instead: one latent and one rotated part for all heads.

    Examples
    --------
    >>> arch = Architecture("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, tied=False)
    >>> kv_cache_bytes(arch, batch=1, length=8192, itemsize=2)
    1073741824
    """
    token = arch.trait("kv_rank") + arch.trait("rope") or 2 * arch.kv_heads * arch.head_dim
    return arch.layers * batch * length * token * itemsize


def generate(arch: Architecture, choice: Choice, kept: Kept, peaks: Mapping[str, int]) -> Activity:
    """Token by token with a cache of keys and values, for as many sequences as a micro-batch has, up to its length.

    zplan's own decoder has no such loop: this is what a script's `generate()` of a transformers model takes.
    """
    c = choice
    cache = kv_cache_bytes(arch, batch=c.micro_batch, length=c.seq, itemsize=c.itemsize)
    working = max(n for phase, n in peaks.items() if phase not in ("loss", "forward.head"))
    logits = c.micro_batch * arch.vocab * (c.itemsize + 3 * FP32)
    windowed = " (windows not used to shorten it)" if arch.window or arch.trait("window") else ""
    heads = f"{arch.kv_heads} x {arch.head_dim} a head"
    layer, made = cache // (2 * arch.layers), "one layer's keys, made anew"
    if arch.trait("kv_rank"):
        heads = f"{arch.trait('kv_rank')} + {arch.trait('rope')} for all heads"
        layer = c.micro_batch * c.seq * (arch.trait("kv_b") + arch.heads * arch.head_dim) * c.itemsize
        made = "one layer's keys and values of all heads"
    why = f"{c.micro_batch} x {c.seq} tokens, {arch.layers} layers, {heads}{windowed}"
    own = [
        Line("gen.kv", cache, ((0, 1),), "activations", source="derived", note=why),
        Line("gen.kv.update", layer, ((1, 1),), "activations", source="derived", note=made),
        Line("gen.prefill", working, ((0, 0),), "activations", source="estimate", note="as a forward of all tokens"),
        Line("gen.logits", logits, ((0, 1),), "activations", source="estimate", note="of one token, with what samples"),
    ]
    phases = ("generate.prefill", "generate.token")
    return activity_of(
        "generate", phases, kept, own, f"a script: {c.micro_batch} x {c.seq} tokens with a cache", plain=False
    )
