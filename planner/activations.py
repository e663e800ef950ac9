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
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from zplan.planner.aten import DEVICES, Aten, DeviceTable, embedding_sort_bytes
from zplan.planner.config import ITEMSIZE, Choice, Device, Precision, Runtime
from zplan.planner.errors import ZplanError
from zplan.planner.families import DecoderTape, Recipe, StepTape
from zplan.planner.fused import WEIGHT_SUM, check_compiled, chunk_tokens
from zplan.planner.ledger import Line, Source
from zplan.planner.models import REMOTE, Adapters, Architecture, ModelSpec, Unit, decoder_units
from zplan.planner.sequence import IMAGES, POSITION_TABLES
from zplan.planner.stacks import Stacks, kind, shallow, stacks_of
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

REMOTE_SPREAD = 10
"""As `CLASS_SPREAD`, for op lists that no class was there to check on a CPU either; a guess."""

CLASS_SPREAD = 3
"""Per cent by which the op lists of Hugging Face classes, exact on a CPU, may be off on a GPU, where they were not
measured. The largest difference seen there of an op list that was is 0.45 % of a phase, and has been explained since.
"""

BOUND = "upper bound: compiled blocks keep at most what uncompiled ones do"

BIAS_STEP = 16
"""Tokens that the memory-efficient kernel takes a bias of scores in multiples of."""

COMPILED = 80
"""Per cent of that which they keep at least: 87 in a 1.3B model on an H200."""


class Held(NamedTuple):
    """What one unit gave birth to of one line: how much, from which phase of the tape to which."""

    id: str
    unit: str
    level: Level
    first: int
    last: int


class Simulation(NamedTuple):
    """One step on a tape. `working[p]`: levels of phase p above what is held in it; `detail`: what each unit saves.

    `flops[p]`, `attention[p]` and `written[p]`: the operations of phase p's matrix products and of its fused attention,
    and the bytes that its other ops write.
    """

    phases: tuple[str, ...]
    held: tuple[Held, ...]
    working: tuple[tuple[Level, ...], ...]
    detail: tuple[tuple[str, str, Level], ...]
    small: Architecture
    """What ran; of a deeper model the last block but one stands for those in between."""
    flops: tuple[Level, ...]
    attention: tuple[Level, ...]
    written: tuple[Level, ...]
    row_sums: tuple[RowSum, ...]
    """What the last coefficients of a level stand for."""


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
    from zplan.planner.hfblocks import STYLES

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
    return not arch.runnable and (bool(arch.trait("window")) or _only_eager(arch))


def _only_eager(arch: Architecture) -> bool:
    """Whether a class refuses fused attention; or torch has no kernel for Falcon's one pair of keys and values."""
    one_pair = arch.family == "falcon" and arch.kv_heads < arch.heads and not arch.trait("grouped")
    return arch.family in ("gemma2", "bloom", "gpt_oss") or one_pair


def _step_tape(arch: Architecture) -> type[StepTape]:
    if arch.runnable:
        return DecoderTape
    from zplan.planner.hfclasses import class_tape

    return class_tape(arch.family)


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
    scale = _scale(arch, choice, sim.row_sums)
    found: dict[str, dict[int, list[tuple[int, int]]]] = {}

    def put(line_id: str, nbytes: int, first: str, last: str) -> None:
        if nbytes:
            found.setdefault(line_id, {}).setdefault(nbytes, []).append((at[first], at[last]))

    for held in sim.held:
        nbytes = _dot(held.level, scale)
        for i in stacks.instances(held.unit):
            first, last = (stacks.phase(sim.phases[p], held.unit, i) for p in (held.first, held.last))
            if held.id.startswith("data."):
                first, last = BATCH_PHASES
            put(held.id, nbytes, first, last)
            if held.last == len(sim.phases) - 1 and first != "idle":
                # The loss and what its graph still holds: a leaf made of a frozen embedding's output, and its gradient.
                put(held.id, nbytes, "idle", "idle")
    for phase, levels in zip(sim.phases, sim.working, strict=True):
        total, kernel = max((_dot(v, scale), -_dot(v[WIDTH:], scale[WIDTH:])) for v in levels)
        # A kernel may run when the phase has already freed more than its workspace holds.
        kernel = min(-kernel, total)
        pass_, _, unit = phase.partition(".")
        line_id = f"{kind(unit or pass_)}.{pass_ if unit else 'forward'}"
        for i in stacks.instances(unit):
            real = stacks.phase(phase, unit, i)
            put(f"act.{line_id}", total - kernel, real, real)
            put(f"act.kernel.{line_id}", kernel, real, real)
    exact = arch.runnable and not choice.compile and not (spec.adapters and spec.adapters.quantized)
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
    scale, stacks = _scale(arch, choice, sim.row_sums), Stacks.of(arch, sim.small)
    working = {p: max(_dot(v, scale) for v in levels) for p, levels in zip(sim.phases, sim.working, strict=True)}
    out = {}
    for unit in dict.fromkeys(p.partition(".")[2] for p in sim.phases if p.startswith("forward.")):
        if stacks.place(unit) and not stacks.stands_for(unit):
            continue
        detail = tuple((label, _dot(level, scale)) for u, label, level in sim.detail if u == unit)
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
    if choice.padded and arch.family in IMAGES:
        raise ZplanError(
            f"`--padded`: images of model_type `{arch.family}` are all of one size, so none is padded", "leave it out"
        )
    if arch.family == "t5":
        _check_t5(choice)
    if arch.family in REMOTE:
        _check_remote(arch, choice)
    if choice.cross_entropy in ("fused", "chunked") and _own_head(arch):
        raise ZplanError(
            f"the head of model_type `{arch.family}` is no plain matrix, so `--loss {choice.cross_entropy}` has no "
            "place in it",
            "use --loss plain",
        )
    no_kernel = choice.attention == "sdpa" and choice.device == "cpu" and arch.trait("attention_dropout")
    if no_kernel and arch.family != "t5":
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
    grouped = arch.kv_heads < arch.heads and arch.family not in REMOTE  # Their code spreads keys and values itself.
    if fused and choice.device == "cuda" and choice.precision == "fp32" and grouped:
        raise ZplanError(
            f"{arch.heads} heads on {arch.kv_heads} key-value heads in fp32 have no fused attention in torch, "
            f"so the activations of model_type `{arch.family}` are not counted",
            "use --precision bf16",
        )


def _check_t5(choice: Choice) -> None:
    """See [Note: biased attention] in `planner/hft5.py`."""
    if choice.checkpoint_every > 1:
        raise ZplanError("`--checkpoint-every` is not counted for model_type `t5`", "leave it out")
    if choice.attention == "sdpa" and choice.device == "cuda" and choice.seq % BIAS_STEP:
        raise ZplanError(
            f"torch's fused attention pads the position bias of {choice.seq} tokens to a multiple of {BIAS_STEP}, "
            "which is not counted",
            f"use --seq {max(1, choice.seq // BIAS_STEP) * BIAS_STEP}, or --attention eager",
        )


def _check_remote(arch: Architecture, choice: Choice) -> None:
    if choice.attention == "eager" and arch.family != "internlm2":
        raise ZplanError(
            f"the code of model_type `{arch.family}` has no other attention than torch's fused one",
            "use --attention sdpa",
        )
    if choice.padded:
        raise ZplanError(
            f"`--padded`: masks of padded batches are not counted for model_type `{arch.family}`", "leave it out"
        )


def _own_head(arch: Architecture) -> bool:
    """Whether logits are more than features times a matrix: biased, capped or transformed."""
    biased = any(p.name.endswith("bias") for u in decoder_units(arch) if u.kind == "head" for p in u.params)
    return biased or bool(arch.trait("capped_logits") or arch.trait("normed_head"))


def _scale(arch: Architecture, choice: Choice, row_sums: tuple[RowSum, ...]) -> tuple[int, ...]:
    b, t = choice.micro_batch, choice.seq
    # GPT-2 looks up T positions for all sequences, OPT one for each token, in a table with two more rows.
    positions, rows = (b * t, arch.max_seq + 2) if arch.family == "opt" else (t, arch.max_seq)
    place = (positions, rows, arch.hidden)
    if arch.family == "t5":
        place = (t * t, arch.trait("buckets"), arch.heads)  # Of distances.
    tables = ((b * t, arch.vocab, arch.hidden), place, (b * t, arch.trait("types"), arch.hidden))
    tokens, placed, typed = (embedding_sort_bytes(*table) for table in tables)
    chunk = chunk_tokens(b * t, arch.vocab, choice.itemsize)
    scale = monomials(b, t, (tokens, placed, typed), chunk)
    if row_sums:
        from zplan.planner.reductions import row_sum_bytes

        scale += tuple(row_sum_bytes(*x.at(b, t)) for x in row_sums)
    return scale


def simulation(arch: Architecture, choice: Choice, adapters: Adapters | None = None) -> Simulation:
    """The tape of a step of the first, a middle and the last block, for every batch and sequence at once."""
    return _simulate(
        _small(arch, choice, adapters),
        adapters,
        choice.device,
        choice.precision,
        _recipe(choice),
        *_extents(arch, choice),
        choice.runtime,
    )


def _extents(arch: Architecture, choice: Choice) -> tuple[int, int]:
    """Batch and sequence of the tape: symbols, [Note: symbols] in tape.py. Chunks of tokens are cut of true numbers,
    and the patches of an image are the model's own.
    """
    if choice.cross_entropy == "chunked":
        return choice.micro_batch, choice.seq
    if arch.family in IMAGES:
        return 1 if choice.micro_batch == 1 else PRIME_B, choice.seq
    return 1 if choice.micro_batch == 1 else PRIME_B, 1 if choice.seq == 1 else PRIME_T


def _recipe(choice: Choice) -> Recipe:
    return Recipe(*(getattr(choice, name) for name in Recipe._fields))


def _small(arch: Architecture, choice: Choice, adapters: Adapters | None) -> Architecture:
    """As many blocks as tell all about a model; in segments of several every block has a place of its own.

    Dense layers before sparse ones have one each, and so has the first sparse one, which borders on them.
    """
    if choice.checkpointing == "full" and choice.checkpoint_every > 1:
        return arch
    dense = len(arch.dense_layers)
    enough = max(SIMULATED_ADAPTED if adapters else SIMULATED_BLOCKS, dense and dense + 3)
    return shallow(arch, lambda layers: min(layers, enough))


def evaluation_peaks(spec: ModelSpec, choice: Choice) -> dict[str, int]:
    """Peak bytes of each phase of a forward under `torch.no_grad`, inputs and loss included.

    Blocks are all alike there, since nothing is kept for a backward: `forward.blocks.1` stands for those in between.
    """
    arch = _architecture(spec, choice)
    table, small = _table(choice.device, choice.cudnn_width), _small(arch, choice, None)
    tape = Tape(in_place_accumulation=table.in_place_accumulation, gradients=False)
    make = _step_tape(arch)
    recipe = _recipe(choice)._replace(checkpointing="none")
    make(Aten(tape, table), small, _units(small, spec.adapters), choice.itemsize, recipe).evaluate(
        *_extents(arch, choice)
    )
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
    table, units = _table(device, recipe.cudnn_width), _units(arch, adapters)
    make = _step_tape(arch)
    if runtime == "zplan":
        tape = Tape(in_place_accumulation=table.in_place_accumulation, kernels=table.kernels)
        run = make(Aten(tape, table), arch, units, ITEMSIZE[precision], recipe)
    else:
        from zplan.planner.peer_tape import steps_for, tape_for

        tape = tape_for(runtime, units, table)
        run = steps_for(make, tape, table, runtime, arch, units, precision, recipe)
    run.step(batch, seq)
    return _read(tape, arch)


def _table(device: Device, cudnn_width: int) -> DeviceTable:
    return DEVICES[device]._replace(cudnn_width=cudnn_width)


def _units(arch: Architecture, adapters: Adapters | None) -> tuple[Unit, ...]:
    """Units of a shape, with adapters where there are any."""
    if adapters is None:
        return decoder_units(arch)
    from zplan.planner.adapters import adapt

    return adapt(ModelSpec("", decoder_units(arch), arch), adapters).units


def _read(tape: Tape, small: Architecture) -> Simulation:
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
            parts = [(f"act.{kind(unit)}.weight_sum", unit, first, landed - 1), (line_id, unit, landed, last)]
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
        small,
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
        return f"grads.{kind(own)}" if s.owner == own else "grads.tied"
    if s.label == WEIGHT_SUM:
        return f"act.{kind(own)}.weight_sum"
    if s.label == "positions.ids":
        own = "positions"
    here = _unit(ends) == own
    if s.born >= turn:
        return _backward_id(s, own, ends, here=here)
    if ends == f"reduce.{own}":
        return f"act.{kind(own)}.saved.tail"
    return f"act.{kind(own)}.{'saved' if here and last >= turn else 'output'}"


def _backward_id(s: Storage, own: str, ends: str, *, here: bool) -> str:
    if ends == "backward.positions":
        return "act.positions.grad"
    if s.again:
        return f"act.{kind(own)}.recomputed"
    return f"act.{kind(own)}.grad" + (".partial" if here else "")


def _unit(phase: str) -> str:
    return phase.partition(".")[2] or phase


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


def _lines(found: dict[str, dict[int, list[tuple[int, int]]]], source: Source, spread: int) -> Iterable[Line]:
    """One line per id; instances of another size than most get a line of their own."""
    for line_id, sizes in found.items():
        ordered = sorted(sizes.items(), key=lambda item: -len(item[1]))
        for n, (nbytes, spans) in enumerate(ordered):
            name = line_id if not n else f"{line_id}.other{n}"
            off = nbytes * spread // 100 if source == "estimate" else 0
            low, high = (nbytes - off, nbytes + off) if source == "estimate" else (None, None)
            yield Line(name, nbytes, tuple(sorted(spans)), "activations", source=source, low=low, high=high)
