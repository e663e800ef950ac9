"""Cuts a module into flat units, one unit at a time, so that no rank holds more than one full fp32 unit beside its own.

The source of a unit's values is the module itself, or, where it was built on the meta device, an initializer: the
caller's `init(name, tensor)`, else each submodule's `reset_parameters()` run from the same seed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.placement import Placement, shards_states
from zplan.runtime.arena import Arena
from zplan.runtime.detect import Found
from zplan.runtime.unit import FlatUnit, Slot

Initializer = Callable[[str, Tensor], None]
"""Fills one full fp32 parameter, given its name. Must give equal values on all ranks."""

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_ring(placements: list[Placement], choice: Choice, arena: Arena) -> dict[tuple[str, int], Slot]:
    """K slots per size class of ringed units, keyed by class and index."""
    dtype = COMPUTE_DTYPE[choice.precision]
    ring: dict[tuple[str, int], Slot] = {}
    for p in placements:
        for k in range(choice.ring_slots if p.ringed else 0):
            if (p.size_class, k) not in ring:
                ring[p.size_class, k] = Slot(arena.take(f"params.ring.{p.size_class}", p.layout.padded_numel, dtype))
    return ring


def materialize(
    found: list[Found],
    placements: list[Placement],
    choice: Choice,
    arena: Arena,
    *,
    rank: int,
    init: Initializer | None,
    seed: int,
) -> list[FlatUnit]:
    """Build every unit that owns parameters; afterwards no parameter has storage of its own."""
    ring = make_ring(placements, choice, arena)
    by_name = {f.unit.name: f for f in found}
    units = []
    for p in placements:
        f = by_name[p.unit.name]
        unit = FlatUnit(p, f.params, rank)
        if p.ringed:
            unit.slot = ring[p.size_class, p.slot]
        full = _full_values(f, p, arena.device, init, seed)
        _cut(unit, full, choice, arena)
        del full
        unit.make_views(COMPUTE_DTYPE[choice.precision], arena, closes=shards_states(choice))
        _hand_over(unit, arena.device)
        units.append(unit)
    return units


@torch.no_grad()
def _full_values(f: Found, p: Placement, device: torch.device, init: Initializer | None, seed: int) -> Tensor:
    """The unit's padded flat values in fp32, on the device."""
    full = torch.zeros(p.layout.padded_numel, dtype=torch.float32, device=device)
    on_meta = [q.is_meta for q in f.params]
    if any(on_meta) and init is None:
        _reset(f, device, seed)
    for row, q, entry in zip(p.unit.params, f.params, p.layout.entries, strict=True):
        view = full[entry.offset : entry.end].view(row.shape)
        if q.is_meta:
            assert init is not None
            init(row.name, view)
        else:
            view.copy_(q)
    return full


def _reset(f: Found, device: torch.device, seed: int) -> None:
    """Give a unit that was built on meta its initial values by its own `reset_parameters`, equally on all ranks."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for name, module in f.module.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not any(q.is_meta for q in own.values()):
                continue
            if not hasattr(module, "reset_parameters"):
                raise ZplanError(
                    f"`{name or f.unit.name}` was built on the meta device and has no `reset_parameters`",
                    "pass `init=` to `zplan.initialize`: a function of (name, tensor) that fills one parameter",
                )
            for q in own.values():
                torch.utils.swap_tensors(q, nn.Parameter(torch.empty(q.shape, dtype=torch.float32, device=device)))
            module.reset_parameters()


@torch.no_grad()
def _cut(unit: FlatUnit, full: Tensor, choice: Choice, arena: Arena) -> None:
    """Keep what this rank keeps of the full values: flat buffer, master slices, moments."""
    p, name = unit.placement, unit.placement.size_class
    if not p.ringed:
        unit.flat = arena.take(f"params.flat.{name}", p.layout.padded_numel, COMPUTE_DTYPE[choice.precision])
        unit.flat.copy_(full)
        unit.whole = True
    if p.has_master:
        unit.master = arena.take(f"optim.master.{name}", p.owned_numel, torch.float32)
        if shards_states(choice):
            for piece in unit.layout.pieces:
                unit.shard_of(unit.master, piece).copy_(unit.own(full, piece))
        else:
            unit.master.copy_(full)
    unit.exp_avg = arena.take(f"optim.exp_avg.{name}", p.owned_numel, torch.float32, fill=0.0)
    unit.exp_avg_sq = arena.take(f"optim.exp_avg_sq.{name}", p.owned_numel, torch.float32, fill=0.0)


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
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ZplanError(
                    f"buffer `{f'{name}.{key}' if name else key}` is on the meta device and has no values",
                    "build the module's buffers on a real device, or fill them before `zplan.initialize`",
                )
            setattr(module, key, buffer.to(device))
