"""What DeepSpeed's offload takes of the host and of NVMe, on one rank.

Semantics of DeepSpeed 0.19.8: `zero/stage_1_and_2.py`, `zero/stage3.py`, `ops/adam/cpu_adam.py`, `swap_tensor/`. Pinned
memory comes from torch's caching host allocator, which hands out powers of two (`CachingHostAllocator.h`).
"""

from __future__ import annotations

from collections.abc import Iterator

from zplan.planner.config import Choice
from zplan.planner.ledger import Line, Tier
from zplan.planner.models import ModelSpec
from zplan.planner.peer_sizes import FP32, MOMENTS, ceil_multiple, line, numel_of, trained
from zplan.planner.peer_zero import ALIGNMENT, split
from zplan.planner.peer_zero3 import params_of, part_numel, sub_groups
from zplan.planner.timeline import Timeline

_Z12, _Z3, _SWAP = (
    f"DeepSpeed 0.19.8 {name}" for name in ("zero/stage_1_and_2.py", "zero/stage3.py", "runtime/swap_tensor")
)


def power_of_two(nbytes: int) -> int:
    """What a pinned allocation of so many bytes takes.

    Examples
    --------
    >>> power_of_two(5), power_of_two(8), power_of_two(0)
    (8, 8, 0)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """All lines off the device; none without offload."""
    if choice.offload.optimizer == "none":
        return []
    found = _stage3(spec, choice, time) if choice.stage == 3 else _stage12(spec, choice, time)
    return list(found)


def _pinned(line_id: str, sizes: list[int], choice: Choice, time: Timeline, note: str) -> Line:
    """Pinned allocations, or plain host memory of their exact sizes where `pin_memory` is off."""
    pin = choice.zero.pin_memory
    tier: Tier = "pinned" if pin else "host"
    nbytes = sum(map(power_of_two, sizes)) if pin else sum(sizes)
    kind = "states" if line_id.startswith("optim.") else "buffers"
    return line(line_id, nbytes, [time.always], kind, note, tier=tier)  # type: ignore[arg-type]


def _stage12(spec: ModelSpec, choice: Choice, time: Timeline) -> Iterator[Line]:
    """fp32 weights and gradients and a 16-bit copy are pinned; moments are not (`cpu_adam.py: zeros_like`)."""
    units, c = trained(spec.units), choice.itemsize
    part = ceil_multiple(numel_of(units), ALIGNMENT * choice.world_size) // choice.world_size
    largest = max(p.numel for p in params_of(units))
    yield _pinned("optim.master", [FP32 * part], choice, time, f"{_Z12}: single_partition_of_fp32_groups, pinned")
    for name in MOMENTS:
        yield line(name, FP32 * part, [time.always], "states", "DeepSpeedCPUAdam, not pinned", tier="host")
    yield _pinned("grads.host", [FP32 * part], choice, time, f"{_Z12}: gradients of the fp32 partition, pinned")
    note = f"{_Z12}: param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload"
    yield _pinned("offload.copies", [c * part, c * largest], choice, time, note)
    if choice.stage == 2 and choice.accumulation > 1:
        owned = [c * a.param.numel for a in split(spec, choice, time, 0).owned]
        note = f"{_Z12}: accumulated_grads_in_cpu, whole parameters that this rank owns a piece of"
        yield _pinned("grads.accumulated", owned, choice, time, note)


def _stage3(spec: ModelSpec, choice: Choice, time: Timeline) -> Iterator[Line]:
    """By sub-groups; with NVMe the states lie in files and pass through pinned buffers."""
    params, n, c = params_of(trained(spec.units)), choice.world_size, choice.itemsize
    part, always = part_numel(params, n), [time.always]
    groups = sub_groups(params, n, choice.zero.sub_group_size)
    yield _pinned("grads.shard", [c * part], choice, time, f"{_Z3}: grad_partitions_flat_buffer")
    if choice.offload.optimizer == "cpu":
        yield line("optim.master", FP32 * part, always, "states", f"{_Z3}: fp32_partitioned_groups_flat", tier="host")
        for name in MOMENTS:
            yield line(name, FP32 * part, always, "states", "DeepSpeedCPUAdam", tier="host")
        sizes = [FP32 * numel for numel in groups]
        yield _pinned("grads.host", sizes, choice, time, f"{_Z3}: subgroup_gradient_buffer, one a sub-group")
    else:
        for name in ("optim.master", *MOMENTS, "grads.nvme"):
            note = f"{_SWAP}: one file a sub-group"
            yield line(name, FP32 * part, always, "states", note, tier="nvme", source="estimate")
        count = choice.zero.optimizer_buffer_count
        note = f"{_SWAP}: buffer_count {count} of the largest sub-group in fp32"
        yield _pinned("offload.nvme.states", [FP32 * max(groups)] * count, choice, time, note)
    yield from _params(spec, choice, time)


def _params(spec: ModelSpec, choice: Choice, time: Timeline) -> Iterator[Line]:
    """Parts of the 16-bit parameters; what each was pinned with before they were joined stays in the allocator."""
    nbytes = choice.itemsize * part_numel(params_of(spec.units), choice.world_size)
    if choice.offload.params == "cpu":
        note = f"{_Z3}: param_groups_fp16_flat_cpu_memory"
        yield _pinned("params.shard", [nbytes], choice, time, note)
        parts = [choice.itemsize * part_numel([p], choice.world_size) for p in params_of(spec.units)]
        note = "DeepSpeed 0.19.8 zero/partition_parameters.py: ds_tensor before it is moved, kept by the host allocator"
        yield _pinned("params.first", parts, choice, time, note)
    elif choice.offload.params == "nvme":
        note = f"{_SWAP}: one file a parameter"
        yield line("params.shard", nbytes, [time.always], "states", note, tier="nvme", source="estimate")
        z = choice.zero
        note = f"{_SWAP}: buffer_count {z.param_buffer_count} x buffer_size {z.param_buffer_size:,}"
        sizes = [z.param_buffer_count * z.param_buffer_size * choice.itemsize]
        yield _pinned("offload.nvme.params", sizes, choice, time, note)
        room = min(z.param_max_in_cpu, part_numel(params_of(trained(spec.units)), choice.world_size))
        note = f"{_Z3}: _create_param_groups_fp16_flat_cpu_memory, max_in_cpu {z.param_max_in_cpu:,}"
        yield _pinned("params.cpu", [room * choice.itemsize], choice, time, note)
