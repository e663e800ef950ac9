"""DeepSpeed at stage 3: parts of every parameter, what is gathered of them, a gradient bucket, the step by sub-groups.

Semantics of DeepSpeed 0.19.8: `zero/stage3.py`, and `peer_fetch.py` for what is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec, Param, Unit
from zplan.planner.peer_buckets import Flush, flushes, large_spans
from zplan.planner.peer_fetch import gathered
from zplan.planner.peer_sizes import FP32, FP64, MOMENTS, by_phase, kind_of, line, per_rank, trained
from zplan.planner.timeline import Timeline

NORM_CHUNK = 250_000_000
"""Elements of which `_constant_buffered_norm2` makes an fp64 copy at a time."""

_Z3, _FETCH = "DeepSpeed 0.19.8 zero/stage3.py", "DeepSpeed 0.19.8 zero/partitioned_param_coordinator.py"


def params_of(units: Sequence[Unit]) -> list[Param]:
    return [p for u in units for p in u.params]


def part_numel(params: Sequence[Param], ranks: int) -> int:
    """Elements that one rank holds: a part of each parameter, padded."""
    return sum(per_rank(p.numel, ranks) for p in params)


def sub_groups(params: Sequence[Param], ranks: int, size: int) -> list[int]:
    """Elements of each sub-group, the unit of the step (`_create_fp16_sub_groups`)."""
    out, held = [], 0
    for p in params:
        held += per_rank(p.numel, ranks)
        if held >= size:
            out.append(held)
            held = 0
    return [*out, held] if held else out


def stage3_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """All device lines of one rank."""
    n, c, always = choice.world_size, choice.itemsize, time.always
    units = trained(spec.units)
    everything = part_numel(params_of(spec.units), n)
    part = part_numel(params_of(units), n)
    lines = []
    if choice.offload.params == "none":
        lines.append(
            line("params.shard", c * everything, [always], "states", f"{_Z3}: lp_param_buffer, parts of all parameters")
        )
    if choice.offload.optimizer == "none":
        lines.append(line("optim.master", FP32 * part, [always], "states", f"{_Z3}: fp32_partitioned_groups_flat"))
        lines += [line(name, FP32 * part, [always], "states", "FusedAdam, fp32, by sub-group") for name in MOMENTS]
        note = f"{_Z3}: grad_partitions_flat_buffer, in the compute dtype, made once"
        lines.append(line("grads.shard", c * part, [always], "buffers", note))
        lines += _step_copies(units, choice, time)
    return [*lines, *_gathered(spec, choice, time), *_secondary(spec, choice, time), *_bucket(units, choice, time)]


def _gathered(spec: ModelSpec, choice: Choice, time: Timeline) -> Iterator[Line]:
    """Parameters in use or on their way; those that are small stay."""
    host, z = choice.offload.params != "none", choice.zero
    if choice.world_size == 1 and not host:
        return
    small = [p.numel for p in params_of(spec.units) if p.numel <= z.stage3_param_persistence_threshold]
    note = f"{_FETCH}: at most {z.stage3_param_persistence_threshold:,} elements, never released"
    yield line("params.persistent", choice.itemsize * sum(small), [time.always], "buffers", note)
    levels = gathered(
        spec.units,
        z,
        itemsize=choice.itemsize,
        ranks=choice.world_size,
        host=host,
        checkpointed=choice.checkpointing == "full",
        again=choice.accumulation > 1,
    )
    found, held = {}, 0
    for i, phase in enumerate(time.phases):
        if phase == "step":
            break
        found[i] = levels.get(phase, held)
        held = levels.get(f"after.{phase}", held)
    note = (
        f"{_FETCH}: max_live {z.stage3_max_live_parameters:,}, max_reuse {z.stage3_max_reuse_distance:,}, "
        f"prefetch {z.stage3_prefetch_bucket_size:,}; with the buffers they arrive in"
    )
    yield from by_phase("params.gathered", found, "buffers", note)


def _secondary(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """hpZ: from its forward to the step a parameter has a second shard, over the ranks of a node."""
    if choice.hpz == 1:
        return []
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for u in spec.units:
        if u.params:
            nbytes = choice.itemsize * part_numel(u.params, choice.hpz)
            groups.setdefault((kind_of(u), nbytes), []).append((time.at(f"forward.{u.name}"), len(time.phases) - 1))
    note = "DeepSpeed 0.19.8 zero/partition_parameters.py: ds_secondary_tensor, 1 / hpz of a parameter"
    return [
        line(f"params.secondary.{kind}", nbytes, spans, "buffers", note, source="estimate")
        for (kind, nbytes), spans in groups.items()
    ]


def _bucket(units: Sequence[Unit], choice: Choice, time: Timeline) -> Iterator[Line]:
    """The bucket, and what reducing it takes beside it."""
    c, n, size = choice.itemsize, choice.world_size, choice.zero.reduce_bucket_size
    note = f"{_Z3}: ipg_buckets, reduce_bucket_size {size:,}, made once"
    yield line("grads.ipg", c * size, [time.always], "buffers", note)
    found = flushes(units, size, time)
    for numel, spans in large_spans(found, time).items():
        yield line(f"grads.large.{numel}", c * numel, spans, "buffers", f"{_Z3}: a gradient larger than the bucket")
    copies: dict[int, int] = {}
    for f in found:
        nbytes = _scattered(f, c, n) + (_offloaded(f, c, n) if choice.offload.optimizer != "none" else 0)
        copies[f.phase] = max(copies.get(f.phase, 0), nbytes)
    note = "DeepSpeed 0.19.8 runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced, ranks' parts side by side"
    yield from by_phase("grads.scatter", copies, "buffers", note)


def _scattered(f: Flush, itemsize: int, ranks: int) -> int:
    """One gradient alone that needs no padding is reduced where it is."""
    if len(f.params) == 1 and not f.params[0].param.numel % ranks:
        return 0
    return itemsize * ranks * sum(per_rank(a.param.numel, ranks) for a in f.params)


def _offloaded(f: Flush, itemsize: int, ranks: int) -> int:
    """`partition_grads` to the host: one part on the device, with its fp64 copy for the norm or its fp32 one."""
    largest = max(per_rank(a.param.numel, ranks) for a in f.params)
    return itemsize * largest + max(FP64 * min(largest, NORM_CHUNK), FP32 * largest)


def _step_copies(units: Sequence[Unit], choice: Choice, time: Timeline) -> list[Line]:
    """The larger of the step's two moments: an fp64 copy of one part for its norm; one sub-group's gradients."""
    params, n, c = params_of(units), choice.world_size, choice.itemsize
    step = [(len(time.phases) - 1,) * 2]
    most = max(sub_groups(params, n, choice.zero.sub_group_size))
    cast = FP32 * most if c != FP32 else 0
    norm = FP64 * max(per_rank(p.numel, n) for p in params)
    if norm > c * most + cast:
        return [line("grads.norm64", norm, step, "buffers", f"{_Z3}: get_grad_norm_direct, one part in fp64")]
    note = f"{_Z3}: _prepare_fp32_grad_for_sub_group, sub_group_size {choice.zero.sub_group_size:,}"
    return [
        line("grads.flat", c * most, step, "buffers", note),
        line("grads.fp32", cast, step, "buffers", note),
    ]
