"""DeepSpeed at stages 0 to 2: one flat 16-bit buffer, fp32 parts of it, gradient buckets, and the step's copies.

Semantics of DeepSpeed 0.19.8: `fp16/fused_optimizer.py` (stage 0 in 16 bits), `zero/stage_1_and_2.py`. Gradients are
reduced and accumulated in the compute dtype, which is DeepSpeed's default (`engine.py: get_data_types`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec, Unit
from zplan.planner.peer_buckets import Flush, Parts, cut, flushes, large_spans
from zplan.planner.peer_sizes import (
    FP32,
    FP64,
    MOMENTS,
    Arrival,
    after,
    arrivals,
    by_phase,
    ceil_multiple,
    first_backward,
    kind_of,
    line,
    numel_of,
    trained,
)
from zplan.planner.timeline import Timeline

ALIGNMENT = 2
"""`nccl_start_alignment_factor`: the flat buffer is padded to so many elements a rank."""

MicroStep = Literal["last", "earlier"]
"""Which micro-step of an optimizer step the phases are of. At stage 1 an earlier one holds all accumulated gradients
to its end; the last one gives them up as it reduces them."""

_Z12, _FP16 = "DeepSpeed 0.19.8 zero/stage_1_and_2.py", "DeepSpeed 0.19.8 fp16/fused_optimizer.py"


def stage0_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """`FP16_Optimizer`, which bf16 uses too; in fp32 the optimizer works on the parameters themselves."""
    units = trained(spec.units)
    numel, c = numel_of(units), choice.itemsize
    always, step = time.always, (time.phases.index("step"),) * 2
    lines = [
        line("params.flat", c * numel, [always], "states", f"{_FP16}: fp16_groups_flat"),
        *frozen_lines(spec, choice, time),
    ]
    if c != FP32:
        lines.append(line("optim.master", FP32 * numel, [always], "states", f"{_FP16}: fp32_groups_flat"))
    lines += [line(name, FP32 * numel, [always], "states", "FusedAdam, fp32") for name in MOMENTS]
    lines += _kept_gradients(units, choice, time)
    if c != FP32:
        # One list of fp32 gradients, and the flat copy of it, before the 16-bit ones are dropped.
        for name in ("grads.fp32.list", "grads.fp32.flat"):
            lines.append(line(name, FP32 * numel, [step], "buffers", f"{_FP16}: step, grads_groups_flat"))
    return lines


def _kept_gradients(units: Sequence[Unit], choice: Choice, time: Timeline) -> list[Line]:
    """`param.grad` of every unit until the step; until its unit is done a gradient is an activation line's."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for u in units:
        start = 0 if choice.accumulation > 1 else after(u, units, time)
        groups.setdefault((kind_of(u), u.numel), []).append((start, len(time.phases) - 1))
    note = "param.grad in the compute dtype until the step"
    return [
        line(_unique(f"grads.full.{kind}", numel, groups), choice.itemsize * numel, spans, "buffers", note)
        for (kind, numel), spans in groups.items()
    ]


def _unique(line_id: str, numel: int, groups: dict[tuple[str, int], list[tuple[int, int]]]) -> str:
    """A line's id, with its elements where blocks differ."""
    kind = line_id.rpartition(".")[2]
    return line_id if sum(k == kind for k, _ in groups) == 1 else f"{line_id}.{numel}"


def frozen_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """Frozen parameters stay as they are, whole on every rank."""
    nbytes = sum(u.numel * (u.itemsize or choice.itemsize) for u in spec.units if u.frozen)
    return [line("params.frozen", nbytes, [time.always], "states", "not in the optimizer's flat groups")]


@dataclass(frozen=True)
class Split:
    """Stages 1 and 2 on one rank."""

    units: tuple[Unit, ...]
    choice: Choice
    time: Timeline
    rank: int
    parts: Parts
    flat_numel: int
    flushes: tuple[Flush, ...]

    @cached_property
    def owned(self) -> list[Arrival]:
        """Parameters of which this rank owns a piece, in the order of backward."""
        return [a for a in arrivals(self.units) if self.parts.owned(a, self.rank)]

    @property
    def owned_numel(self) -> int:
        """Whole parameters, pieces of which are owned: so much is kept of their gradients."""
        return sum(a.param.numel for a in self.owned)

    @property
    def first_owned(self) -> int:
        """Phase in which the first bucket with an owned gradient is sent off."""
        mine = {a.param.name for a in self.owned}
        return next(
            (f.phase for f in self.flushes if any(a.param.name in mine for a in f.params)), self.time.last_backward
        )


def split(spec: ModelSpec, choice: Choice, time: Timeline, rank: int) -> Split:
    units = tuple(trained(spec.units))
    flat = ceil_multiple(numel_of(units), ALIGNMENT * choice.world_size)
    found, parts = _cut(units, time.phases, choice.zero.reduce_bucket_size, flat, choice.world_size)
    return Split(units, choice, time, rank, parts, flat, found)


@lru_cache(maxsize=16)
def _cut(
    units: tuple[Unit, ...], phases: tuple[str, ...], bucket_numel: int, flat_numel: int, ranks: int
) -> tuple[tuple[Flush, ...], Parts]:
    """What all ranks and batches share."""
    time = Timeline(phases, {phase: i for i, phase in enumerate(phases)})
    return tuple(flushes(units, bucket_numel, time)), cut(units, flat_numel, ranks)


def stage12_lines(spec: ModelSpec, choice: Choice, time: Timeline, rank: int, micro_step: MicroStep) -> list[Line]:
    """All device lines of one rank."""
    s = split(spec, choice, time, rank)
    part, always = s.flat_numel // choice.world_size, time.always
    lines = [
        line("params.flat", choice.itemsize * s.flat_numel, [always], "states", f"{_Z12}: bit16_groups_flat"),
        *frozen_lines(spec, choice, time),
    ]
    if choice.offload.optimizer == "none":
        note = f"{_Z12}: single_partition_of_fp32_groups"
        lines.append(line("optim.master", FP32 * part, [always], "states", note))
        lines += [line(name, FP32 * part, [always], "states", "FusedAdam, fp32, this rank's part") for name in MOMENTS]
        lines += [*_owned_gradients(s, micro_step), *_step_copies(s)]
    else:
        lines += _transfers(s)
    return [*lines, *_buckets(s, micro_step)]


def _buckets(s: Split, micro_step: MicroStep) -> Iterator[Line]:
    """The buckets, what is reduced beside them, and what stage 1 accumulates."""
    c, time = s.choice, s.time
    z, first = c.zero, first_backward(s.units, time)
    waits = c.stage == 1 and c.accumulation > 1
    # Stage 1 makes its buckets in the first micro-step's backward and drops them after the last one's.
    span = (0, time.last_backward) if waits else (first, time.last_backward)
    count = 2 if z.overlap_comm else 1
    note = f"{_Z12}: setup_buckets, reduce_bucket_size {z.reduce_bucket_size:,}, overlap_comm {z.overlap_comm}"
    yield line("grads.ipg", c.itemsize * z.reduce_bucket_size, [span] * count, "buffers", note)
    copies: dict[int, int] = {}
    for f in s.flushes:
        if s.parts.pieces(f) > 1:
            copies[f.phase] = max(copies.get(f.phase, 0), c.itemsize * f.numel)
    note = f"{_Z12}: allreduce_bucket, flatten of a bucket with several owners"
    yield from by_phase("grads.reduced", copies, "buffers", note)
    for numel, spans in large_spans(s.flushes, time).items():
        yield line(f"grads.large.{numel}", c.itemsize * numel, spans, "buffers", f"{_Z12}: extra_large_param_to_reduce")
    if waits:
        yield from _accumulated(s, micro_step)


def _accumulated(s: Split, micro_step: MicroStep) -> list[Line]:
    """Stage 1 adds whole gradients up in `param.grad` and reduces them in the last micro-step."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for u in s.units:
        end = s.time.at(f"backward.{u.name}") if micro_step == "last" else s.time.last_backward
        groups.setdefault((kind_of(u), u.numel), []).append((0, end))
    note = f"{_Z12}: whole gradients in param.grad until the last micro-step reduces them"
    return [
        line(_unique(f"grads.accumulated.{kind}", numel, groups), s.choice.itemsize * numel, spans, "buffers", note)
        for (kind, numel), spans in groups.items()
    ]


def _owned_gradients(s: Split, micro_step: MicroStep) -> Iterator[Line]:
    """Copies of what this rank owns, whole parameters, from the first bucket that holds any to the step."""
    c, time = s.choice, s.time
    nbytes, step = c.itemsize * s.owned_numel, len(time.phases) - 1
    note = f"{_Z12}: grads_in_partition, whole parameters that this rank owns a piece of"
    if c.stage == 2 and c.accumulation > 1:
        yield line("grads.owned", nbytes, [time.always], "buffers", f"{_Z12}: all_grad_tensors, accumulated")
        yield line("grads.owned.new", nbytes, [(s.first_owned, time.last_backward)], "buffers", note)
    elif micro_step == "last":
        yield line("grads.owned", nbytes, [(s.first_owned, step)], "buffers", note)
    else:
        yield line("grads.owned", nbytes, [(step, step)], "buffers", note)


def _step_copies(s: Split) -> list[Line]:
    """The larger of the step's two moments: an fp64 copy of one gradient for its norm; flat and fp32 gradients."""
    step = [(len(s.time.phases) - 1,) * 2]
    part, c = s.flat_numel // s.choice.world_size, s.choice.itemsize
    norm = FP64 * max((s.parts.owned(a, s.rank) for a in s.owned), default=0)
    cast = FP32 * part if c != FP32 else 0
    if norm > c * part + cast:
        return [line("grads.norm64", norm, step, "buffers", f"{_Z12}: get_grad_norm_direct, one gradient in fp64")]
    return [
        line("grads.flat", c * part, step, "buffers", f"{_Z12}: step, flatten of averaged_gradients"),
        line("grads.fp32", cast, step, "buffers", f"{_Z12}: step, single_grad_partition"),
    ]


def _transfers(s: Split) -> Iterator[Line]:
    """With the optimizer on the host: a buffer as large as the largest parameter, and casts of one gradient."""
    c = s.choice
    largest = max(p.numel for u in s.units for p in u.params)
    note = f"{_Z12}: temp_grad_buffer_for_gpu_offload, the largest parameter"
    yield line("grads.transfer", c.itemsize * largest, [s.time.always], "buffers", note)
    casts: dict[int, int] = {}
    for f in s.flushes:
        most = max(s.parts.owned(a, s.rank) for a in f.params)
        casts[f.phase] = max(casts.get(f.phase, 0), FP64 * most)
    note = f"{_Z12}: set_norm_for_param_grad_in_gpu, one gradient in fp64"
    yield from by_phase("grads.norm64", casts, "buffers", note)
