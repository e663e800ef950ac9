"""The activation lines: what one rank's forward and backward hold beside states and buffers, in every phase.

The sum of these lines in a phase is the peak, over that phase, of all storages that are neither parameters nor runtime
buffers: an independent observer of live storages sees the same number, to the byte (`tests/test_activations.py`).

How the lines come about: a step of a model with at most three blocks (a first, a middle and a last one) runs on a tape.
What is alive at a phase's end in forward, or at its start in backward, becomes a line with its true lifetime; the rest
of the phase's peak is the phase's working line. Middle blocks are all alike, so the lines of one stand for all.

Ids: `data.*` the batch; `act.<unit>.saved` what lives from a unit's forward to its backward (`.tail`: past its last
parameter gradient); `act.<unit>.output` what a later unit uses; `act.<unit>.grad` the gradient that a unit hands on
(`.partial`: unfinished at its last parameter gradient); `act.<unit>.forward`, `.backward`, `.reduce` the working lines,
with the growing parameter gradients; `act.kernel.*` what kernels allocate for themselves within them; `grads.<unit>` a
unit's whole parameter gradients, in compute dtype, until the next unit's have landed; `grads.tied` the head's gradient
of a tied weight, which autograd keeps until the embedding's has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import table_of
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.fused import check_compiled
from zplan.planner.ledger import Line, Source
from zplan.planner.models import REMOTE, Architecture, ModelSpec
from zplan.planner.monomials import WIDTH
from zplan.planner.sequence import IMAGES, POSITION_TABLES
from zplan.planner.simulation import dot, extents, recipe_of, scale_of, simulation, small_shape, step_tape, units_with
from zplan.planner.stacks import Stacks, kind, stacks_of
from zplan.planner.tape import Tape

BATCH_PHASES = ("idle", "step")
"""First and last phase of a micro-step's inputs and labels. The loop makes them in `idle`, and drops those of the step
before, and its loss, there."""

REMOTE_SPREAD = 10
"""As `CLASS_SPREAD`, for op lists that no class was there to check; a guess."""

CLASS_SPREAD = 3
"""Per cent by which the op lists of Hugging Face classes may be off: exact on a CPU and in 248 cases on an H200, they
were not measured on other cards or in other versions of torch. The largest difference of a phase ever seen there, 2.1 %
of its case's peak, has been explained since.
"""

BOUND = "upper bound: compiled blocks keep at most what uncompiled ones do"

COMPILED = 80
"""Per cent of that which they keep at least: 87 in a 1.3B model on an H200."""


class UnitProfile(NamedTuple):
    """Bytes of one unit at one micro-batch and sequence.

    Attributes
    ----------
    saved
        Storages born in the unit's forward that live until backward. A block's input belongs to the unit that made it.
    forward, backward, reduce
        The most that lives in that phase beside what the ledger's other lines hold in it.
    detail
        `(label, bytes)` of the storages in `saved`.
    """

    saved: int
    forward: int
    backward: int
    reduce: int
    detail: tuple[tuple[str, int], ...]


def type_counted(model_type: str) -> bool:
    """Whether there is an op list for a Hugging Face class."""
    from zplan.planner.hfstyles import STYLES

    return model_type == "bert" or model_type in STYLES


def counted(spec: ModelSpec) -> bool:
    """Whether there is an op list for a model; without one it has no activation lines at all."""
    arch = spec.arch
    if arch is None or arch.runnable:
        return arch is not None
    return type_counted(arch.family) and _dense_first(arch) and not arch.trait("not_counted")


def _dense_first(arch: Architecture) -> bool:
    """Whether all dense layers of a mixture of experts, where there are any, come before all sparse ones."""
    return arch.dense_layers == tuple(range(len(arch.dense_layers)))


def prefers_eager(arch: Architecture) -> bool:
    """Whether a Hugging Face class refuses fused attention, or masks it by its windows, which is not counted."""
    if arch.runnable:
        return False
    from zplan.planner.class_limits import only_eager

    return bool(arch.trait("window")) or only_eager(arch)


def activation_lines(spec: ModelSpec, choice: Choice, phases: tuple[str, ...]) -> tuple[Line, ...]:
    """All lines of kind `activations`. Their sum in each phase is exact for the device of `choice`.

    Raises
    ------
    ZplanError
        When the sequence is longer than the model's positions, or the heads are too narrow for fused attention.
    """
    if not counted(spec):
        return ()
    arch = _architecture(spec, choice)
    sim = simulation(arch, choice, spec.adapters)
    stacks, at = Stacks.of(arch, sim.small), {name: i for i, name in enumerate(phases)}
    scale = scale_of(arch, choice, sim.row_sums)
    found: dict[str, dict[int, list[tuple[int, int]]]] = {}

    def put(line_id: str, nbytes: int, firsts: Iterable[str], lasts: Iterable[str]) -> None:
        if nbytes:
            spans = zip(map(at.__getitem__, firsts), map(at.__getitem__, lasts), strict=True)
            found.setdefault(line_id, {}).setdefault(nbytes, []).extend(spans)

    for held in sim.held:
        nbytes = dot(held.level, scale)
        firsts, lasts = (stacks.phases(sim.phases[p], held.unit) for p in (held.first, held.last))
        if held.id.startswith("data."):
            firsts, lasts = ((p,) for p in BATCH_PHASES)
        put(held.id, nbytes, firsts, lasts)
        if held.last == len(sim.phases) - 1 and firsts[0] != "idle":
            # The loss and what its graph still holds: a leaf made of a frozen embedding's output, and its gradient.
            idle = ("idle",) * len(firsts)
            put(held.id, nbytes, idle, idle)
    for phase, levels in zip(sim.phases, sim.working, strict=True):
        total, kernel = max((dot(v, scale), -dot(v[WIDTH:], scale[WIDTH:])) for v in levels)
        # A kernel may run when the phase has already freed more than its workspace holds.
        kernel = min(-kernel, total)
        pass_, _, unit = phase.partition(".")
        line_id = f"{kind(unit or pass_)}.{pass_ if unit else 'forward'}"
        real = stacks.phases(phase, unit)
        put(f"act.{line_id}", total - kernel, real, real)
        put(f"act.kernel.{line_id}", kernel, real, real)
    exact = arch.runnable and not choice.compile and not (spec.adapters and spec.adapters.quantized)
    # Older cards sum gradients of wider heads in other blocks: `efficient_attention.py`.
    same_blocks = choice.flash or (choice.precision == "fp32" and arch.head_dim <= 64)
    exact = exact and (same_blocks or choice.attention == "eager" or choice.device == "cpu")
    lines = _lines(found, "derived" if exact else "estimate", REMOTE_SPREAD if arch.family in REMOTE else CLASS_SPREAD)
    beside = (*_offloaded_inputs(arch, choice, at), *_split(arch, choice, at))
    return (*(map(_compiled, lines) if choice.compile else lines), *beside)


def _compiled(line: Line) -> Line:
    return line._replace(note=BOUND, low=line.nbytes * COMPILED // 100, high=line.nbytes)


def _split(arch: Architecture, choice: Choice, at: dict[str, int]) -> tuple[Line, ...]:
    if not choice.deterministic:
        return ()
    from zplan.planner.deterministic import split_lines

    return split_lines(arch, choice, at)


def _offloaded_inputs(arch: Architecture, choice: Choice, at: dict[str, int]) -> tuple[Line, ...]:
    """The hidden states that each checkpointed segment is called with, while they wait in pinned host memory."""
    if not choice.checkpoint_offload:
        return ()
    nbytes = choice.micro_batch * choice.seq * arch.hidden * choice.itemsize
    starts = [f"{s}.{i}" for s, n in stacks_of(arch).items() for i in range(0, n, choice.checkpoint_every)]
    spans = tuple((at[f"forward.{block}"], at[f"backward.{block}"]) for block in starts)
    note = "inputs of checkpointed segments; the copies themselves are assumed to finish within their block"
    return (Line("act.block.checkpoint", nbytes, spans, "activations", "pinned", "derived", note),)


def profile(spec: ModelSpec, choice: Choice) -> dict[str, UnitProfile]:
    """Numbers of each unit; those of a block that is not the last, where there is one, under `block`, or the stack's
    name.
    """
    arch = _architecture(spec, choice)
    sim = simulation(arch, choice, spec.adapters)
    scale, stacks = scale_of(arch, choice, sim.row_sums), Stacks.of(arch, sim.small)
    working = {p: max(dot(v, scale) for v in levels) for p, levels in zip(sim.phases, sim.working, strict=True)}
    out = {}
    for unit in dict.fromkeys(p.partition(".")[2] for p in sim.phases if p.startswith("forward.")):
        if stacks.place(unit) and not stacks.stands_for(unit):
            continue
        detail = tuple((label, dot(level, scale)) for u, label, level in sim.detail if u == unit)
        forward, backward, reduce = (working.get(f"{x}.{unit}", 0) for x in ("forward", "backward", "reduce"))
        out[kind(unit)] = UnitProfile(sum(n for _, n in detail), forward, backward, reduce, detail)
    return out


def _architecture(spec: ModelSpec, choice: Choice) -> Architecture:
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    if arch.family in IMAGES and choice.seq != arch.max_seq:
        raise ZplanError(
            f"a sequence of {choice.seq} tokens is no image of {spec.name}, which is {arch.max_seq}",
            f"use --seq {arch.max_seq}",
        )
    if arch.family in POSITION_TABLES and choice.seq > arch.max_seq:
        raise ZplanError(
            f"a sequence of {choice.seq} tokens is longer than the {arch.max_seq} positions of {spec.name}",
            f"use --seq {arch.max_seq} or less",
        )
    check_compiled(choice)
    if choice.kernels == "fused" and not (arch.runnable and arch.family == "llama"):
        raise ZplanError(
            f"there are no fused kernels for blocks of model_type `{arch.family}`", 'use "kernels": "torch"'
        )
    if choice.cross_entropy == "bf16" and choice.precision == "fp32":
        raise ZplanError("`--loss bf16` leaves out a cast to fp32, and all is fp32", "use --loss plain")
    if arch.family == "llama" and (arch.head_dim < 4 or arch.head_dim % 2):
        raise ZplanError(
            f"heads of width {arch.head_dim} have no rotary halves that attention kernels take",
            "use an even head_dim of at least 4",
        )
    if not arch.runnable:
        from zplan.planner.class_limits import check_class

        check_class(arch, choice)
    if choice.attention == "sdpa" and choice.device == "cuda" and not choice.flash and arch.shares_keys:
        _refuse_shared_keys(arch, choice)
    multiple = {2: 8, 4: 4}[choice.itemsize]
    if choice.device == "cuda" and choice.attention == "sdpa" and (arch.head_dim % multiple or arch.head_dim > 256):
        raise ZplanError(
            f"heads of width {arch.head_dim} are padded by flash attention or not taken by it, which is not modelled",
            "use --attention eager",
        )
    return arch


def _refuse_shared_keys(arch: Architecture, choice: Choice) -> None:
    if choice.precision == "fp32":
        return  # `class_limits.py` for classes; zplan's decoder spreads them in fp32.
    raise ZplanError(
        f"--attention sdpa: {arch.heads} heads on {arch.kv_heads} key-value heads need flash attention, which cards "
        "before compute capability 8.0 do not have",
        "use --attention eager",
    )


def evaluation_peaks(spec: ModelSpec, choice: Choice) -> dict[str, int]:
    """Peak bytes of each phase of a forward under `torch.no_grad`, inputs and loss included.

    Blocks are all alike there, since nothing is kept for a backward: `forward.blocks.1` stands for those in between.
    """
    arch = _architecture(spec, choice)
    table = table_of(choice.device, choice.cudnn_width, flash=choice.flash)
    small = small_shape(arch, choice, None)
    tape = Tape(in_place_accumulation=table.in_place_accumulation, gradients=False)
    make = step_tape(arch)
    recipe = recipe_of(choice)._replace(checkpointing="none")
    make(Aten(tape, table), small, units_with(small, spec.adapters), choice.itemsize, recipe).evaluate(
        *extents(arch, choice)
    )
    scale = scale_of(arch, choice, ())
    return {
        phase: max(dot(v, scale) for v in levels)
        for phase, levels in zip(tape.phases, tape.levels, strict=True)
        if phase != "idle"
    }


def _lines(found: dict[str, dict[int, list[tuple[int, int]]]], source: Source, spread: int) -> Iterable[Line]:
    """One line per id; instances of another size than most get a line of their own."""
    for line_id, sizes in found.items():
        ordered = sorted(sizes.items(), key=lambda item: -len(item[1]))
        for n, (nbytes, spans) in enumerate(ordered):
            name = line_id if not n else f"{line_id}.other{n}"
            off = nbytes * spread // 100 if source == "estimate" else 0
            low, high = (nbytes - off, nbytes + off) if source == "estimate" else (None, None)
            yield Line(name, nbytes, tuple(sorted(spans)), "activations", source=source, low=low, high=high)
