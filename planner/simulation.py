"""One step of a model with few blocks on a tape, and its storages sorted into lines.

A first, a middle and a last block tell all about a model: middle blocks are all alike, so the lines of one stand for
all. What is alive at a phase's end in forward, or at its start in backward, becomes a line with its true lifetime; the
rest of the phase's levels is the phase's working line. `planner/activations.py` says what the lines' ids mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import embedding_sort_bytes, table_of
from zplan.planner.config import ITEMSIZE, Choice, Device, Precision, Runtime
from zplan.planner.families import DecoderTape, Recipe, StepTape
from zplan.planner.fused import WEIGHT_SUM, chunk_tokens
from zplan.planner.graph import PARAMETER_GRADIENT, Storage
from zplan.planner.models import Adapters, Architecture, ModelSpec, Unit, decoder_units
from zplan.planner.monomials import PRIME_B, PRIME_T, WIDTH, Level, RowSum, monomials
from zplan.planner.sequence import IMAGES
from zplan.planner.stacks import kind, shallow
from zplan.planner.tape import Tape

SIMULATED_BLOCKS = 3
"""A first, a middle and a last block."""

SIMULATED_ADAPTED = 4
"""The first block of a frozen base is another than the middle ones, since no gradient leaves it, so that one of these
stands for the others and a second one for what borders on the first.
"""


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


def step_tape(arch: Architecture) -> type[StepTape]:
    if arch.runnable:
        return DecoderTape
    from zplan.planner.hfclasses import class_tape

    return class_tape(arch.family)


def scale_of(arch: Architecture, choice: Choice, row_sums: tuple[RowSum, ...]) -> tuple[int, ...]:
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
        small_shape(arch, choice, adapters),
        adapters,
        choice.device,
        choice.precision,
        recipe_of(choice),
        *extents(arch, choice),
        choice.runtime,
    )


def extents(arch: Architecture, choice: Choice) -> tuple[int, int]:
    """Batch and sequence of the tape: symbols, [Note: symbols] in monomials.py.

    Chunks of tokens are cut of true numbers, and the patches of an image are the model's own.
    """
    if choice.cross_entropy == "chunked":
        return choice.micro_batch, choice.seq
    if arch.family in IMAGES:
        return 1 if choice.micro_batch == 1 else PRIME_B, choice.seq
    return 1 if choice.micro_batch == 1 else PRIME_B, 1 if choice.seq == 1 else PRIME_T


def recipe_of(choice: Choice) -> Recipe:
    return Recipe(*(getattr(choice, name) for name in Recipe._fields))


def small_shape(arch: Architecture, choice: Choice, adapters: Adapters | None) -> Architecture:
    """As many blocks as tell all about a model; in segments of several every block has a place of its own.

    Dense layers before sparse ones have one each, and so has the first sparse one, which borders on them; likewise the
    layers up to the first of another kind than theirs.
    """
    if choice.checkpointing == "full" and choice.checkpoint_every > 1:
        return arch
    others = (len(arch.dense_layers), arch.trait("other_layer"))
    enough = max(SIMULATED_ADAPTED if adapters else SIMULATED_BLOCKS, *(n and n + 3 for n in others))
    return shallow(arch, lambda layers: min(layers, enough))


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
    table, units = table_of(device, recipe.cudnn_width, flash=recipe.flash), units_with(arch, adapters)
    make = step_tape(arch)
    if runtime == "zplan":
        tape = Tape(in_place_accumulation=table.in_place_accumulation, kernels=table.kernels)
        run = make(Aten(tape, table), arch, units, ITEMSIZE[precision], recipe)
    else:
        from zplan.planner.peer_tape import steps_for, tape_for

        tape = tape_for(runtime, units, table)
        run = steps_for(make, tape, table, runtime, arch, units, precision, recipe)
    run.step(batch, seq)
    return _read(tape, arch)


def units_with(arch: Architecture, adapters: Adapters | None) -> tuple[Unit, ...]:
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


def dot(level: Level, scale: tuple[int, ...]) -> int:
    return sum(map(mul, level, scale))
