"""Cuts a module into flat units, one unit at a time, so that no rank holds more than one full fp32 unit beside its own.

The source of a unit's values is the module itself, or, where it was built on the meta device, an initializer: the
caller's `init(name, tensor)`, else the model's own (`fresh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from zplan.planner.config import Choice
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import Placement, shards_states, shares_flat
from zplan.planner.states import FP32
from zplan.runtime.arena import Arena
from zplan.runtime.detect import Found
from zplan.runtime.fresh import Fresh
from zplan.runtime.halves import Halves, round_whole
from zplan.runtime.mesh import Mesh
from zplan.runtime.quantized import check_device
from zplan.runtime.unit import FlatUnit, Slot

Initializer = Callable[[str, Tensor], None]
"""Fills one full fp32 parameter, given its name. Must give equal values on all ranks."""

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_ring(placements: list[Placement], choice: Choice, arena: Arena, mesh: Mesh) -> dict[tuple[str, int], Slot]:
    """K slots of each ring, keyed by its size class and index."""
    dtype = COMPUTE_DTYPE[choice.precision]
    ring: dict[tuple[str, int], Slot] = {}
    for p in placements:
        for k in range(choice.ring_slots if p.ringed else 0):
            if (p.ring, k) in ring:
                continue
            line = f"params.ring.{p.ring}"
            if choice.copies:
                shared = arena.take_shared(line, p.slot_numel, dtype, mesh)
                ring[p.ring, k] = Slot(shared.buffer, shared=shared)
            else:
                ring[p.ring, k] = Slot(arena.take(line, p.slot_numel, dtype))
    return ring


def materialize(  # noqa: PLR0913  the engine's parts
    model: nn.Module,
    found: list[Found],
    placements: list[Placement],
    choice: Choice,
    arena: Arena,
    *,
    mesh: Mesh,
    init: Initializer | None,
    seed: int,
    bound: Collection[str] = (),
) -> list[FlatUnit]:
    """Build every unit that owns parameters; afterwards no parameter has storage of its own.

    Parameters whose names are in `bound` come later, by ranges (`weights.py`), and are zero until then.
    """
    ring = make_ring(placements, choice, arena, mesh)
    rows = {unit.name: (f, params) for f in found for unit, params in f.segments()}
    fresh = Fresh(model, arena.device, seed)
    units = []
    with fresh.unreferenced():
        for p in placements:
            f, params = rows[p.unit.name]
            unit = FlatUnit(p, params, mesh.rank)
            if p.ringed:
                unit.slot = ring[p.ring, p.slot]
            full = None
            if any(row.name not in bound for row in p.unit.params):
                full = _full_values(f, unit, arena.device, init, fresh, bound)
            for row, q in zip(p.unit.params, params, strict=True):
                check_device(row.name, q, arena.device)
            _cut(unit, full, choice, arena, mesh)
            del full
            unit.make_views(_dtype(unit, choice), arena, closes=shards_states(choice) and p.closes)
            _hand_over(unit, arena.device)
            units.append(unit)
    fresh.fill_buffers()
    return units


def _dtype(unit: FlatUnit, choice: Choice) -> torch.dtype:
    """Frozen integers keep theirs; everything else takes the compute dtype."""
    if unit.placement.unit.itemsize is not None:
        return unit.params[0].dtype
    return COMPUTE_DTYPE[choice.precision]


@torch.no_grad()
def _full_values(
    f: Found,
    unit: FlatUnit,
    device: torch.device,
    init: Initializer | None,
    fresh: Fresh,
    bound: Collection[str],
) -> Tensor:
    """The unit's padded flat values, in fp32 (integers in their own dtype), on the device."""
    p = unit.placement
    dtype = torch.float32 if p.unit.itemsize is None else unit.params[0].dtype
    full = torch.zeros(p.layout.padded_numel, dtype=dtype, device=device)
    rows = zip(p.unit.params, unit.params, strict=True)
    if init is None and any(q.is_meta and row.name not in bound for row, q in rows):
        fresh.reset(f)
    for row, q, entry in zip(p.unit.params, unit.params, p.layout.entries, strict=True):
        view = full[entry.offset : entry.end].view(row.shape)
        if row.name in bound:
            continue
        if q.is_meta:
            assert init is not None
            init(row.name, view)
        else:
            view.copy_(q)
    return full


@torch.no_grad()
def _cut(unit: FlatUnit, full: Tensor | None, choice: Choice, arena: Arena, mesh: Mesh) -> None:
    """Keep what this rank keeps of the full values, zeros where there are none: flat buffer, master slices, states."""
    p, name, dtype = unit.placement, unit.placement.size_class, _dtype(unit, choice)
    if shares_flat(p, choice):
        unit.shared = arena.take_shared(f"params.flat.{name}", p.layout.padded_numel, dtype, mesh)
        unit.flat = unit.shared.buffer.zero_()
    elif not p.ringed:
        line = "params.frozen.whole" if p.frozen else "params.flat"
        unit.flat = arena.take(f"{line}.{name}", p.layout.padded_numel, dtype, fill=0)
    unit.whole = not p.ringed
    if p.has_shard:
        line = "params.frozen.shard" if p.frozen else "params.shard"
        unit.shard = arena.take(f"{line}.{name}", p.owned_numel, dtype, fill=0)
    if p.split:
        unit.low = arena.take(f"optim.master_low.{name}", p.owned_numel, torch.int16, fill=0)
    elif not p.frozen and (p.has_master or p.ringed):
        # Where there are no fp32 masters, a ringed unit keeps a shard in the compute dtype in their place.
        line = "optim.master" if p.has_master else "params.shard"
        unit.master = arena.take(f"{line}.{name}", p.owned_numel, torch.float32 if p.has_master else dtype, fill=0)
    for state in kind_of(choice.optimizer).states if not p.frozen else ():
        kept = torch.float32 if state.itemsize == FP32 else torch.bfloat16
        unit.states[state.name] = arena.take(f"optim.{state.name}.{name}", p.owned_numel, kept, fill=0.0)
    if full is not None:
        _fill(unit, full)


def _fill(unit: FlatUnit, full: Tensor) -> None:
    """Write the values into what this rank keeps of them."""
    if unit.flat is not None and unit.low is not None:
        round_whole(full, unit.flat)
    elif unit.flat is not None:
        unit.flat.copy_(full)
    if unit.placement.frozen:
        if unit.shard is not None:
            _keep_own(unit, unit.shard, full)
    elif unit.low is not None or unit.master is not None:
        _keep_own(unit, unit.weights, full)


def _keep_own(unit: FlatUnit, owned: Tensor | Halves, full: Tensor) -> None:
    """Copy this rank's slices, or everything where it keeps everything."""
    if owned.numel() == full.numel():
        owned.copy_(full)
        return
    for piece in unit.layout.pieces:
        start, end = piece.shard_offset, piece.shard_offset + piece.numel // unit.layout.world_size
        owned[start:end].copy_(unit.own(full, piece))


@torch.no_grad()
def _hand_over(unit: FlatUnit, device: torch.device) -> None:
    """Point parameters at views or placeholders, freeing whatever storage they had."""
    targets = unit.placeholders if unit.placement.ringed else unit.views
    for q, target in zip(unit.params, targets, strict=True):
        q.grad = None
        if q.is_meta:
            # `.data` can't cross from meta; swapping keeps the object that modules and users hold.
            torch.utils.swap_tensors(q, nn.Parameter(target, requires_grad=q.requires_grad))
        else:
            q.data = target
    unit.open = not unit.placement.ringed


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put buffers on the device in their own dtype (rotary tables stay fp32)."""
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
