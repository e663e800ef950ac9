"""What a rank holds outside the training step: while it starts, evaluates, generates, saves, loads and exports.

Each activity is a small ledger of its own over its own phases, so that those of the step stay what `zplan verify`
compares. Its lines are what is alive between two steps, and what the activity takes beside that. The runtime's side of
each stands in the module that its docstring names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zplan.planner.activations import counted, evaluation_peaks
from zplan.planner.config import Choice
from zplan.planner.ledger import Ledger, Line, Source, Tier, merge
from zplan.planner.models import Architecture, ModelSpec
from zplan.planner.placement import Placement, place
from zplan.planner.saving import ALIGN_BYTES, BLOCK_BYTES, BLOCKS, CHECKSUM_NUMEL, PART_NUMEL, RANGE_NUMEL
from zplan.planner.states import FP32, by_class

INT64 = 8
BF16 = 2

RANDOM_STATE_BYTES = 5056
"""Of torch's generator on the CPU."""

ENCODERS = ("bert", "vit", "t5")
"""Families that do not generate token by token."""


class Activity(NamedTuple):
    """One thing that a run does beside its steps."""

    name: str
    ledger: Ledger
    """Of one rank."""
    every_rank: bool = True
    """False: one process does it alone, so a node holds it once."""
    note: str = ""
    plain: bool = True
    """Whether `zplan run` itself comes to it; otherwise only a script of the user's own does."""

    @property
    def device_bytes(self) -> int:
        return self.ledger.peak_bytes()

    @property
    def host_bytes(self) -> int:
        """Of one rank, pinned or not."""
        return host_peak(self.ledger)

    @property
    def phase(self) -> str:
        """Where the device holds most."""
        return self.ledger.peak_phase()


def host_peak(ledger: Ledger) -> int:
    """Most host memory of one rank in one phase, pinned or not."""
    both = zip(ledger.per_phase("host"), ledger.per_phase("pinned"), strict=True)
    return max((a + b for a, b in both), default=0)


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


Kept = Sequence[tuple[Line, int]]
"""`(line, instances)` of what is alive between two steps."""


def _activity(
    name: str, phases: Sequence[str], kept: Kept, own: Iterable[Line], note: str, *, plain: bool = True
) -> Activity:
    always = (0, len(phases) - 1)
    base = [line._replace(spans=(always,) * n) for line, n in kept]
    return Activity(name, merge(phases, base, own), note=note, plain=plain)


def _largest(placements: Sequence[Placement]) -> int:
    """Elements of the largest parameter."""
    return max((e.numel for p in one_of_each(placements) for e in p.layout.entries), default=0)


def one_of_each(placements: Sequence[Placement]) -> list[Placement]:
    """The first unit of each size class; its like have equal sizes."""
    return list({p.size_class: p for p in reversed(placements)}.values())


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
    own += by_class("init.halves", [(p, _taken_apart(p), (i, i)) for i, p in units if p.split], "buffers")
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
        nbytes = _largest(placements) * (FP32 + BF16)
        low = _largest(placements) * FP32
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
    return _activity("evaluate", tuple(peaks), kept, own, f"{choice.micro_batch} x {choice.seq} tokens, no gradients")


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
    return _activity(
        "generate", phases, kept, own, f"a script: {c.micro_batch} x {c.seq} tokens with a cache", plain=False
    )


# --- checkpoints ---------------------------------------------------------------------------------------------------


def save(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """A checkpoint, through a few blocks (`runtime/checkpoint_write.py`). In the background it is the pinned copy's."""
    trained = sum(p.layout.numel for p in placements if not p.frozen)
    frozen = sum(p.buffer_bytes(choice) for p in placements if p.frozen)
    own = [Line("save.random", RANDOM_STATE_BYTES, ((0, 0),), "buffers", "host", "derived")]
    phases = ("save.begin", *(("save.frozen",) if frozen else ()), "save.write")
    last = len(phases) - 1
    blocks, span = BLOCKS * BLOCK_BYTES, ((last, last),)
    if choice.device != "cpu" and choice.saving == "foreground":
        own.append(Line("save.blocks", blocks, span, "buffers", "pinned"))
    else:
        own.append(Line("save.blocks", blocks + ALIGN_BYTES, span, "buffers", "host"))
    if frozen:
        # `runtime/checkpoint_frozen.py: bit_sum`: indices, values and their product in 64 bits.
        nbytes = min(2**24, max(p.buffer_bytes(choice) for p in placements if p.frozen)) * INT64
        own.append(Line("save.bit_sum", nbytes, ((1, 1),) * 3, "buffers"))
        if choice.saving == "background":
            share = -(-frozen // choice.world_size)
            own.append(Line("save.frozen", share, ((last, last),), "buffers", "host"))
    own += _masters_on_the_way(placements, choice, last)
    disk = 3 * FP32 * trained + frozen
    return _activity("save", phases, kept, own, f"{choice.saving}; {disk / 1e9:.1f} GB on the disk, all ranks")


def _masters_on_the_way(placements: Sequence[Placement], choice: Choice, last: int) -> list[Line]:
    """Masters in halves are put together on their way: range by range as a file is written.

    A save in the background copies them first, by stretches that end with a piece, not with a parameter.
    """
    stretch, range_ = _longest(placements)
    behind = choice.saving == "background"
    numel = min(RANGE_NUMEL, stretch if behind else range_)
    nbytes = (numel + min(PART_NUMEL, numel)) * FP32
    at = 0 if behind else last
    note = "fp32 masters, put together of their halves, and the bits of a part of them"
    return [Line("save.masters", nbytes, ((at, at),), "buffers", note=note)] if nbytes else []


def _longest(placements: Sequence[Placement]) -> tuple[int, int]:
    """Most elements of a stretch of split masters that a rank writes, and of its part of one parameter."""
    split = one_of_each([p for p in placements if p.split])
    stretches = [_own(p) for p in split]
    ranges = [min(n, max(e.numel for e in p.layout.entries)) for n, p in zip(stretches, split, strict=True)]
    return max(stretches, default=0), max(ranges, default=0)


def _own(p: Placement) -> int:
    """Elements of a rank's slice of the largest piece."""
    return max(piece.numel for piece in p.layout.pieces) // p.layout.world_size


def _taken_apart(p: Placement) -> int:
    """Work space while a split unit's values are cut: bits, and in a resident unit lower halves that others keep."""
    if p.ringed:
        return FP32 * min(PART_NUMEL, _own(p))
    return (FP32 + BF16) * min(PART_NUMEL, p.layout.padded_numel)


def _halves(placements: Sequence[Placement], phase: tuple[int, int], *, copies: int = 1) -> list[Line]:
    """Work space for taking fp32 values apart (`runtime/halves.py`)."""
    nbytes = min(PART_NUMEL, _longest(placements)[1]) * FP32 * copies
    note = "bits of masters that are taken apart"
    return [Line("load.halves", nbytes, (phase,), "buffers", note=note)] if nbytes else []


def load(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """Ranges of a checkpoint straight into the final buffers, or resuming (`runtime/checkpoint_load.py`)."""
    own = [_range(placements), *_halves(placements, (0, 0), copies=1 if choice.device == "cpu" else 2)]
    return _activity("load, resume", ("load.fill",), kept, own, "after initialise")


def _range(placements: Sequence[Placement]) -> Line:
    """What a range is read into. Ranges of a checkpoint end with their parameter, whoever wrote it."""
    nbytes = min(RANGE_NUMEL, _largest(placements)) * FP32
    return Line("load.range", nbytes, ((0, 0),), "buffers", "host", note="one range as it is read")


# --- whole parameters ----------------------------------------------------------------------------------------------


def _checksum(placements: Sequence[Placement]) -> list[Line]:
    """Of each unit's values, to tell whether somebody wrote to them."""
    numel = max((p.layout.padded_numel for p in placements), default=0)
    note = "a part of a unit in 64 bits, which torch makes inside its sum"
    return [
        Line("summon.checksum", min(CHECKSUM_NUMEL, numel) * INT64, ((0, 0),), "buffers", source="derived", note=note),
        Line("summon.sum", INT64, ((0, 0),) * 2, "buffers"),
    ]


def summon(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """`zplan.summon(model)`: every ringed unit gathered beside the ring (`runtime/summon.py`)."""
    ringed = [p for p in placements if p.ringed]
    copies = by_class("summon", [(p, p.buffer_bytes(choice), (0, 0)) for p in ringed], "buffers")
    own = [*copies, *_checksum(placements)]
    return _activity("summon", ("summon",), kept, own, "a script: the whole model at once, on every rank", plain=False)


def export(spec: ModelSpec, placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """`save_16bit_model` and `--export`, unit by unit (`runtime/hf_export.py`, `runtime/model_folder.py`)."""
    ringed = [p.buffer_bytes(choice) for p in placements if p.ringed]
    own = [Line("summon.unit", max(ringed, default=0), ((0, 1),), "buffers"), *_checksum(placements)]
    turned = spec.arch is not None and spec.arch.family == "gpt2"
    cast = choice.precision != "bf16"
    most = max(
        (BF16 * p.numel * (cast + (turned and x.unit.kind == "block" and len(p.shape) == 2)))
        for x in one_of_each(placements)
        for p in x.unit.params
    )
    own.append(Line("export.cast", most, ((1, 1),), "buffers", note="one parameter as the folder has it"))
    if choice.device != "cpu":
        own.append(Line("export.host", BF16 * _largest(placements), ((1, 1),), "buffers", "host", note="rank 0"))
    return _activity("export", ("export.gather", "export.write"), kept, own, "16-bit folder, unit by unit")


def export_checkpoint(placements: Sequence[Placement]) -> Activity:
    """`zplan checkpoint export`: one process without a GPU, a parameter at a time (`runtime/hf_export.py`)."""
    numel = _largest(placements)
    own = [
        Line("export.whole", numel * FP32, ((0, 0),), "buffers", "host"),
        Line("export.cast", numel * BF16, ((0, 0),), "buffers", "host"),
        _range(placements),
    ]
    ledger = merge(("export.parameter",), own)
    return Activity("checkpoint export", ledger, every_rank=False, note="one process, no GPU", plain=False)
