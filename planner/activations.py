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
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import mul

from zplan.planner.aten import DEVICES, Aten, embedding_sort_bytes
from zplan.planner.config import ITEMSIZE, Choice, Device, Precision, Runtime
from zplan.planner.errors import ZplanError
from zplan.planner.families import DecoderTape, Recipe, StepTape
from zplan.planner.fused import WEIGHT_SUM, check_compiled, chunk_tokens
from zplan.planner.ledger import Line, Source
from zplan.planner.models import Adapters, Architecture, ModelSpec, Unit, decoder_units
from zplan.planner.tape import PARAMETER_GRADIENT, PRIME_B, PRIME_T, WIDTH, Level, RowSum, Storage, Tape, monomials

BATCH_PHASES = ("idle", "step")
"""First and last phase of a micro-step's inputs and labels. The loop makes them in `idle`, and drops those of the step
before, and its loss, there."""

SIMULATED_BLOCKS = 3
"""A first, a middle and a last block."""

SIMULATED_ADAPTED = 4
"""The first block of a frozen base is another than the middle ones, since no gradient leaves it, so that one of these
stands for the others and a second one for what borders on the first.
"""

CLASS_SPREAD = 3
"""Per cent by which the op lists of Hugging Face classes, exact on a CPU, may be off on a GPU, where they were not
measured. The largest difference seen there of an op list that was is 0.45 % of a phase, and has been explained since.
"""

BOUND = "upper bound: compiled blocks keep at most what uncompiled ones do"

COMPILED = 80
"""Per cent of that which they keep at least: 87 in a 1.3B model on an H200."""


@dataclass(frozen=True)
class Held:
    """What one unit gave birth to of one line: how much, from which phase of the tape to which."""

    id: str
    unit: str
    level: Level
    first: int
    last: int


@dataclass(frozen=True)
class Simulation:
    """One step on a tape. `working[p]`: levels of phase p above what is held in it; `detail`: what each unit saves.

    `flops[p]`, `attention[p]` and `written[p]`: the operations of phase p's matrix products and of its fused attention,
    and the bytes that its other ops write.
    """

    phases: tuple[str, ...]
    held: tuple[Held, ...]
    working: tuple[tuple[Level, ...], ...]
    detail: tuple[tuple[str, str, Level], ...]
    blocks: int
    """How many blocks ran; of a deeper model the last but one stands for those in between."""
    flops: tuple[Level, ...]
    attention: tuple[Level, ...]
    written: tuple[Level, ...]
    row_sums: tuple[RowSum, ...]
    """What the last coefficients of a level stand for."""

    @property
    def middle(self) -> str:
        """The block that stands for most."""
        return f"blocks.{max(0, self.blocks - 2)}"


@dataclass(frozen=True)
class UnitProfile:
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
    from zplan.planner.hfblocks import STYLES

    return model_type == "bert" or model_type in STYLES


def counted(spec: ModelSpec) -> bool:
    """Whether there is an op list for a model; without one it has no activation lines at all."""
    arch = spec.arch
    if arch is None or arch.runnable:
        return arch is not None
    return type_counted(arch.family) and not arch.dense_layers and not arch.trait("not_counted")


def prefers_eager(arch: Architecture) -> bool:
    """Whether a Hugging Face class refuses fused attention, or masks it by its windows, which is not counted."""
    return not arch.runnable and (bool(arch.trait("window")) or _only_eager(arch))


def _only_eager(arch: Architecture) -> bool:
    """Whether a class refuses fused attention; or torch has no kernel for Falcon's one pair of keys and values."""
    one_pair = arch.family == "falcon" and arch.kv_heads < arch.heads and not arch.trait("grouped")
    return arch.family in ("gemma2", "bloom") or one_pair


def _class_tape(arch: Architecture) -> type[StepTape]:
    if arch.family == "bert":
        from zplan.planner.hfbert import BertTape

        return BertTape
    from zplan.planner.hfgpts import TAPES
    from zplan.planner.hftape import ClassTape

    return TAPES.get(arch.family, ClassTape)


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
    at = {name: i for i, name in enumerate(phases)}
    scale = _scale(arch, choice, sim.row_sums)
    found: dict[str, dict[int, list[tuple[int, int]]]] = {}

    def put(line_id: str, nbytes: int, first: str, last: str) -> None:
        if nbytes:
            found.setdefault(line_id, {}).setdefault(nbytes, []).append((at[first], at[last]))

    for held in sim.held:
        nbytes = _dot(held.level, scale)
        for i in instances(held.unit, arch.layers, sim.blocks):
            first, last = (_real(sim.phases[p], held.unit, i, arch.layers, sim.blocks) for p in (held.first, held.last))
            if held.id.startswith("data."):
                first, last = BATCH_PHASES
            put(held.id, nbytes, first, last)
            if held.id == "act.loss.value":
                put(held.id, nbytes, "idle", "idle")
    for phase, levels in zip(sim.phases, sim.working, strict=True):
        total, kernel = max((_dot(v, scale), -_dot(v[WIDTH:], scale[WIDTH:])) for v in levels)
        # A kernel may run when the phase has already freed more than its workspace holds.
        kernel = min(-kernel, total)
        pass_, _, unit = phase.partition(".")
        line_id = f"{_kind(unit or pass_)}.{pass_ if unit else 'forward'}"
        for i in instances(unit, arch.layers, sim.blocks):
            real = _real(phase, unit, i, arch.layers, sim.blocks)
            put(f"act.{line_id}", total - kernel, real, real)
            put(f"act.kernel.{line_id}", kernel, real, real)
    exact = arch.runnable and not choice.compile and not (spec.adapters and spec.adapters.quantized)
    lines = _lines(found, "derived" if exact else "estimate")
    return (*(map(_compiled, lines) if choice.compile else lines), *_offloaded_inputs(arch, choice, at))


def _compiled(line: Line) -> Line:
    return replace(line, note=BOUND, low=line.nbytes * COMPILED // 100, high=line.nbytes)


def _offloaded_inputs(arch: Architecture, choice: Choice, at: dict[str, int]) -> tuple[Line, ...]:
    """The hidden states that each checkpointed segment is called with, while they wait in pinned host memory."""
    if not choice.checkpoint_offload:
        return ()
    nbytes = choice.micro_batch * choice.seq * arch.hidden * choice.itemsize
    starts = range(0, arch.layers, choice.checkpoint_every)
    spans = tuple((at[f"forward.blocks.{i}"], at[f"backward.blocks.{i}"]) for i in starts)
    note = "inputs of checkpointed segments; the copies themselves are assumed to finish within their block"
    return (Line("act.block.checkpoint", nbytes, spans, "activations", "pinned", "derived", note),)


def profile(spec: ModelSpec, choice: Choice) -> dict[str, UnitProfile]:
    """Numbers of each unit; those of a block that is not the last, where there is one, under `block`."""
    arch = _architecture(spec, choice)
    sim = simulation(arch, choice, spec.adapters)
    scale = _scale(arch, choice, sim.row_sums)
    working = {p: max(_dot(v, scale) for v in levels) for p, levels in zip(sim.phases, sim.working, strict=True)}
    out = {}
    for unit in dict.fromkeys(p.partition(".")[2] for p in sim.phases if p.startswith("forward.")):
        if unit.startswith("blocks.") and unit != sim.middle:
            continue
        detail = tuple((label, _dot(level, scale)) for u, label, level in sim.detail if u == unit)
        forward, backward, reduce = (working.get(f"{x}.{unit}", 0) for x in ("forward", "backward", "reduce"))
        out[_kind(unit)] = UnitProfile(sum(n for _, n in detail), forward, backward, reduce, detail)
    return out


def _architecture(spec: ModelSpec, choice: Choice) -> Architecture:
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    if arch.family in ("gpt2", "opt", "bert", "gptj") and choice.seq > arch.max_seq:
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
        _check_class(arch, choice)
    multiple = {2: 8, 4: 4}[choice.itemsize]
    if choice.device == "cuda" and choice.attention == "sdpa" and (arch.head_dim % multiple or arch.head_dim > 256):
        raise ZplanError(
            f"heads of width {arch.head_dim} are padded by flash attention or not taken by it, which is not modelled",
            "use --attention eager",
        )
    return arch


def _check_class(arch: Architecture, choice: Choice) -> None:
    """Refuse what the op lists of Hugging Face classes leave out."""
    if choice.cross_entropy in ("fused", "chunked") and _own_head(arch):
        raise ZplanError(
            f"the head of model_type `{arch.family}` is no plain matrix, so `--loss {choice.cross_entropy}` has no "
            "place in it",
            "use --loss plain",
        )
    if choice.attention == "sdpa" and choice.device == "cpu" and arch.trait("attention_dropout"):
        raise ZplanError(
            f"torch's fused attention on a CPU takes no dropout, which model_type `{arch.family}` has in its config",
            "use --attention eager",
        )
    fused, window = choice.attention == "sdpa", arch.trait("window")
    if fused and arch.family == "falcon" and _only_eager(arch):
        raise ZplanError(
            f"fused attention of {arch.heads} heads on one key-value head has no kernel in torch for the class of "
            "model_type `falcon`, and is not counted",
            "use --attention eager",
        )
    if fused and _only_eager(arch):
        raise ZplanError(f"the class of model_type `{arch.family}` refuses fused attention", "use --attention eager")
    if fused and window and choice.seq >= window:
        raise ZplanError(
            f"with windows of {window} tokens model_type `{arch.family}` masks fused attention of {choice.seq} tokens, "
            "which is not counted yet",
            f"use --seq {window - 1} or less, or --attention eager",
        )
    if fused and choice.device == "cuda" and choice.precision == "fp32" and arch.kv_heads < arch.heads:
        raise ZplanError(
            f"{arch.heads} heads on {arch.kv_heads} key-value heads in fp32 have no fused attention in torch, "
            f"so the activations of model_type `{arch.family}` are not counted",
            "use --precision bf16",
        )


def _own_head(arch: Architecture) -> bool:
    """Whether logits are more than features times a matrix: biased, capped or transformed."""
    biased = any(p.name.endswith("bias") for u in decoder_units(arch) if u.kind == "head" for p in u.params)
    return biased or bool(arch.trait("capped_logits"))


def _scale(arch: Architecture, choice: Choice, row_sums: tuple[RowSum, ...]) -> tuple[int, ...]:
    b, t = choice.micro_batch, choice.seq
    # GPT-2 looks up T positions for all sequences, OPT one for each token, in a table with two more rows.
    positions, rows = (b * t, arch.max_seq + 2) if arch.family == "opt" else (t, arch.max_seq)
    tables = ((b * t, arch.vocab), (positions, rows), (b * t, arch.trait("types")))
    tokens, placed, typed = (embedding_sort_bytes(n, rows, arch.hidden) for n, rows in tables)
    chunk = chunk_tokens(b * t, arch.vocab, choice.itemsize)
    scale = monomials(b, t, (tokens, placed, typed), chunk)
    if row_sums:
        from zplan.planner.reductions import row_sum_bytes

        scale += tuple(row_sum_bytes(*x.at(b, t)) for x in row_sums)
    return scale


def simulation(arch: Architecture, choice: Choice, adapters: Adapters | None = None) -> Simulation:
    """The tape of a step of the first, a middle and the last block, for every batch and sequence at once."""
    small = replace(arch, layers=_simulated(arch.layers, choice, adapters))
    return _simulate(
        small,
        adapters,
        choice.device,
        choice.precision,
        _recipe(choice),
        *_extents(choice),
        choice.runtime,
    )


def _extents(choice: Choice) -> tuple[int, int]:
    """Batch and sequence of the tape: symbols, [Note: symbols] in tape.py. Chunks of tokens are cut of true numbers."""
    if choice.cross_entropy == "chunked":
        return choice.micro_batch, choice.seq
    return 1 if choice.micro_batch == 1 else PRIME_B, 1 if choice.seq == 1 else PRIME_T


def _recipe(choice: Choice) -> Recipe:
    return Recipe(**{f.name: getattr(choice, f.name) for f in fields(Recipe)})


def _simulated(layers: int, choice: Choice, adapters: Adapters | None) -> int:
    """How many blocks tell all about a model; in segments of several every block has a place of its own."""
    if choice.checkpointing == "full" and choice.checkpoint_every > 1:
        return layers
    return min(layers, SIMULATED_ADAPTED if adapters else SIMULATED_BLOCKS)


def evaluation_peaks(spec: ModelSpec, choice: Choice) -> dict[str, int]:
    """Peak bytes of each phase of a forward under `torch.no_grad`, inputs and loss included.

    Blocks are all alike there, since nothing is kept for a backward: `forward.blocks.1` stands for those in between.
    """
    arch = _architecture(spec, choice)
    table, small = DEVICES[choice.device], replace(arch, layers=min(arch.layers, SIMULATED_BLOCKS))
    tape = Tape(in_place_accumulation=table.in_place_accumulation, gradients=False)
    make = DecoderTape if arch.runnable else _class_tape(arch)
    recipe = replace(_recipe(choice), checkpointing="none")
    make(Aten(tape, table), small, _units(small, spec.adapters), choice.itemsize, recipe).evaluate(*_extents(choice))
    scale = _scale(arch, choice, ())
    return {
        phase: max(_dot(v, scale) for v in levels)
        for phase, levels in zip(tape.phases, tape.levels, strict=True)
        if phase != "idle"
    }


@lru_cache(maxsize=64)
def _simulate(  # noqa: PLR0913  (the key of the cache)
    arch: Architecture,
    adapters: Adapters | None,
    device: Device,
    precision: Precision,
    recipe: Recipe,
    batch: int,
    seq: int,
    runtime: Runtime,
) -> Simulation:
    table, units = DEVICES[device], _units(arch, adapters)
    make: type[StepTape] = DecoderTape if arch.runnable else _class_tape(arch)
    if runtime == "zplan":
        tape = Tape(in_place_accumulation=table.in_place_accumulation, kernels=table.kernels)
        run = make(Aten(tape, table), arch, units, ITEMSIZE[precision], recipe)
    else:
        from zplan.planner.peer_tape import steps_for, tape_for

        tape = tape_for(runtime, units, table)
        run = steps_for(make, tape, table, runtime, arch, units, precision, recipe)
    run.step(batch, seq)
    return _read(tape, arch.layers)


def _units(arch: Architecture, adapters: Adapters | None) -> tuple[Unit, ...]:
    """Units of a shape, with adapters where there are any."""
    if adapters is None:
        return decoder_units(arch)
    from zplan.planner.adapters import adapt

    return adapt(ModelSpec("", decoder_units(arch), arch), adapters).units


def _read(tape: Tape, blocks: int) -> Simulation:
    """Sort the storages of a finished tape into lines."""
    turn = tape.phases.index("backward.loss")
    spans = {s: span for s in tape.storages if s.coefficient and (span := _span(tape, s, turn))}
    width = 2 * WIDTH + len(tape.row_sums)
    covered = [[0] * width for _ in tape.phases]
    for s, (first, last) in spans.items():
        for p in range(first, last + 1):
            covered[p][s.at] += s.coefficient
    working = [
        _maximal(tuple(x - y for x, y in zip(v, c, strict=True)) for v in levels)
        for levels, c in zip(tape.levels, covered, strict=True)
    ]
    for s, (first, last) in spans.items():
        # It dies in the next phase of forward. Where the phase's peak holds it anyway, its line says so.
        if s.died == last + 1 and any(min(v) >= 0 and v[s.at] >= s.coefficient for v in working[last + 1]):
            working[last + 1] = tuple(_less(v, s) for v in working[last + 1])
            spans[s] = (first, last + 1)
    groups: dict[tuple[str, str, int, int], list[int]] = {}
    for s, (first, last) in spans.items():
        line_id, unit = _line_id(tape, s, turn, last), _unit(tape.phases[s.born])
        parts = [(line_id, unit, first, last)]
        if line_id == "grads.tied" and tape.phases[last] == "reduce.embed":
            # Added up in place, the head's gradient of a tied weight becomes the embedding's.
            parts = [(line_id, unit, first, last - 1), ("grads.embed", "embed", last, last)]
        elif line_id.startswith("grads.") and line_id != "grads.tied" and s.born < turn:
            # A weight's gradient that the forward summed up becomes, in fp32, what autograd leaves on the parameter.
            landed = tape.phases.index(f"reduce.{unit}")
            parts = [(f"act.{_kind(unit)}.weight_sum", unit, first, landed - 1), (line_id, unit, landed, last)]
        for key in parts:
            groups.setdefault(key, [0] * width)[s.at] += s.coefficient
    return Simulation(
        tuple(tape.phases),
        tuple(Held(i, u, tuple(v), first, last) for (i, u, first, last), v in groups.items()),
        tuple(working),
        tuple(
            (_unit(tape.phases[s.born]), s.label, _less((0,) * width, s, -1))
            for s, (_, last) in spans.items()
            if s.born < turn <= last and s.label not in _NOT_SAVED
        ),
        blocks,
        tuple(map(tuple, tape.flops)),
        tuple(map(tuple, tape.attention)),
        tuple(map(tuple, tape.written)),
        tuple(tape.row_sums),
    )


_DATA = {"inputs": "data.inputs", "labels": "data.labels", "mask of tokens": "data.mask"}
_NOT_SAVED = (*_DATA, "loss")
"""Alive in backward, but not because a node saved them."""


def _span(tape: Tape, s: Storage, turn: int) -> tuple[int, int] | None:
    """First and last phase with a line for a storage: alive at their ends in forward, at their starts in backward."""
    died = len(tape.phases) - 1 if s.died is None else s.died
    first, last = (s.born, died - 1 if died < turn else died) if s.born < turn else (s.born + 1, died)
    return (first, last) if first <= last else None


def _line_id(tape: Tape, s: Storage, turn: int, last: int) -> str:
    own, ends = _unit(tape.phases[s.born]), tape.phases[last]
    if s.label in _DATA:
        return _DATA[s.label]
    if s.label.startswith("rotary"):
        return "act.rotary"
    if s.label in ("loss", "loss.grad"):
        return "act.loss.value" if s.label == "loss" else "act.loss.seed"
    if s.label == PARAMETER_GRADIENT:
        return f"grads.{_kind(own)}" if f"reduce.{own}" in tape.phases else "grads.tied"
    if s.label == WEIGHT_SUM:
        return f"act.{_kind(own)}.weight_sum"
    if s.label == "positions.ids":
        own = "positions"
    here = _unit(ends) == own
    if s.born >= turn:
        return _backward_id(s, own, ends, here=here)
    if ends == f"reduce.{own}":
        return f"act.{_kind(own)}.saved.tail"
    return f"act.{_kind(own)}.{'saved' if here and last >= turn else 'output'}"


def _backward_id(s: Storage, own: str, ends: str, *, here: bool) -> str:
    if ends == "backward.positions":
        return "act.positions.grad"
    if s.again:
        return f"act.{_kind(own)}.recomputed"
    return f"act.{_kind(own)}.grad" + (".partial" if here else "")


def _unit(phase: str) -> str:
    return phase.partition(".")[2] or phase


def _kind(unit: str) -> str:
    return "block" if unit.startswith("blocks.") else unit


def instances(unit: str, layers: int, blocks: int) -> range:
    """The real blocks that a simulated unit stands for; one dummy for units that are no block."""
    if not unit.startswith("blocks."):
        return range(1)
    k = int(unit[7:])
    if k == blocks - 1:
        return range(layers - 1, layers)
    return range(k, layers - 1 if k == blocks - 2 else k + 1)


def _real(phase: str, unit: str, instance: int, layers: int, blocks: int) -> str:  # noqa: PLR0913
    """Name in the real model of a simulated phase, seen from instance `instance` of a simulated unit.

    A middle block sees its neighbours; what lies before it counts from the front, what lies behind from the back.
    """
    pass_, dot, number = phase.partition("blocks.")
    if not dot or layers == blocks:
        return phase
    k, last = int(number), blocks - 1
    if unit == f"blocks.{last - 1}":
        return f"{pass_}blocks.{k + instance - last + 1}"
    near_front = unit in ("embed", "positions") or (unit.startswith("blocks.") and int(unit[7:]) < last)
    from_front = k < last if near_front else k == 0
    return f"{pass_}blocks.{k if from_front else layers - blocks + k}"


def _less(level: Level, s: Storage, times: int = 1) -> Level:
    return tuple(x - times * s.coefficient if i == s.at else x for i, x in enumerate(level))


def _maximal(levels: Iterable[Level]) -> tuple[Level, ...]:
    """Levels that some batch and sequence could make the largest: those that no other one exceeds in every monomial."""
    kept: list[Level] = []
    for v in sorted(set(levels), reverse=True):
        if not any(all(x <= y for x, y in zip(v, w, strict=True)) for w in kept):
            kept.append(v)
    return tuple(kept)


def _dot(level: Level, scale: tuple[int, ...]) -> int:
    return sum(map(mul, level, scale))


def _lines(found: dict[str, dict[int, list[tuple[int, int]]]], source: Source) -> Iterable[Line]:
    """One line per id; instances of another size than most get a line of their own."""
    for line_id, sizes in found.items():
        ordered = sorted(sizes.items(), key=lambda item: -len(item[1]))
        for n, (nbytes, spans) in enumerate(ordered):
            name = line_id if not n else f"{line_id}.other{n}"
            off = nbytes * CLASS_SPREAD // 100 if source == "estimate" else 0
            low, high = (nbytes - off, nbytes + off) if source == "estimate" else (None, None)
            yield Line(name, nbytes, tuple(sorted(spans)), "activations", source=source, low=low, high=high)
