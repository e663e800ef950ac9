"""Has units gathered for the modules that read them: now or ahead of time, with room made in the ring.

[Note: windows] A unit can be read from the pre-forward of its module to its post-forward, and in backward from the
gradient of its output, or the pre-forward of its recompute if that comes first. Its gradients are reduced when the last
of them has landed, or, where some parameter got none, when the backward of its module is over (see [Note: time] in
calls.py). Frozen parameters, which backward needs for the gradient of the input alone, stay until then too. Recompute
is told from autograd's own state: a graph task is running. One recompute may run several units, of which a later one
may take an earlier one's slot, so the gradient of each one's recomputed output opens it again. A backward that gives
parameters no gradients (`torch.autograd.grad`) opens units and is no part of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from zplan.planner.errors import ZplanError
from zplan.runtime.calls import Call, Schedule
from zplan.runtime.detect import Found
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.unit import FlatUnit, Slot

LIGHT = 2**20
"""Elements of a unit, such as a final norm, whose compute is over before the next unit's gather has begun."""


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Windows:
    """Which units each module reads, and the schedule by which these are gathered. See [Note: windows]."""

    def __init__(self, found: Sequence[Found], units: Sequence[FlatUnit], gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        flat = {u.name: u for u in units}
        self.flat = {u.name: u for u in units if not u.placement.frozen}
        self.own = {f.unit.name: [flat[unit.name] for unit, _ in f.segments()] for f in found}
        self.needs = {f.unit.name: [*self.own[f.unit.name], *(flat[n] for n in f.reads)] for f in found}
        self.users = {u.name: [name for name, needed in self.needs.items() if u in needed] for u in units}
        lowest = next((f.unit.name for f in found if any(u.name in self.flat for u in self.needs[f.unit.name])), "")
        modules = {f.module for f in found}
        around = frozenset(f.unit.name for f in found if any(m in modules for m in list(f.module.modules())[1:]))
        self.schedule = Schedule([f.unit.name for f in found], around, lowest)
        self.running: list[tuple[str, Call | None]] = []
        """Modules whose forward runs, the innermost last; with the call where backward will follow."""
        self.ahead: int | None = None
        """Elements to gather ahead (`stage3_prefetch_bucket_size`); 0 for none, None for one unit."""

    def split_schedule(self, num_first: int) -> tuple[list[FlatUnit], list[FlatUnit]]:
        """The trainable units that a forward needs first, and all others."""
        first = [self.flat[n] for n in dict.fromkeys(self.schedule.order) if n in self.flat][:num_first]
        return first, [u for u in self.flat.values() if u not in first]

    def open(self, name: str, *, backward: bool = False) -> None:
        """Make everything that a unit's module reads readable now."""
        for unit in self._read(name, backward=backward):
            self._make_room(unit)
            self.gatherer.need(unit)

    def fetch(self, name: str, *, backward: bool = False) -> None:
        """Take part in a unit's gather without showing it."""
        for unit in self._read(name, backward=backward):
            self._make_room(unit)
            self.gatherer.prefetch(unit)

    def fetch_ahead(self, names: Iterable[str], *, backward: bool) -> None:
        """Gather what comes while this unit computes: as many elements as the config says, but one unit at least.

        Where it says nothing that is one unit in all, and beyond it where that is too short to hide any gather. The
        first that finds no free slot ends it, so that all ranks gather in schedule order.
        """
        left = 1 if self.ahead is None else self.ahead
        taken: set[Slot] = set()
        for name in names:
            if left <= 0:
                return
            needed = list(self._read(name, backward=backward))
            if not all(unit.slot not in taken and self._can_gather(unit) for unit in needed):
                return
            taken.update(unit.slot for unit in needed if unit.slot is not None)
            for unit in needed:
                self.gatherer.prefetch(unit)
            numel = sum(unit.layout.numel for unit in needed)
            if numel >= LIGHT or any(unit.slot is not None for unit in needed):
                left -= numel

    def release_all(self) -> None:
        for unit in self.gatherer.units:
            if unit.slot is not None and unit.open:
                self.gatherer.release(unit, spent=False)

    def retaken(self, unit: FlatUnit, rest: Sequence[str]) -> bool:
        """Whether another unit takes this one's slot later in this pass, so that its values there are spent."""
        if self.schedule.recording or unit.slot is None:
            return False
        return any(other is not unit and other.slot is unit.slot for n in rest for other in self.own[n])

    def _read(self, name: str, *, backward: bool) -> Iterator[FlatUnit]:
        """Units whose values a module's forward or backward reads."""
        for unit in self.needs[name]:
            if not backward or unit.placement.reads_in_backward:
                yield unit

    def _can_gather(self, unit: FlatUnit) -> bool:
        return unit.valid or self.gatherer.can_prefetch(unit)

    def _make_room(self, unit: FlatUnit) -> None:
        """Before a gather: end the window of whoever is in the slot."""
        if unit.slot is None or unit.valid:
            return
        holder = unit.slot.holder
        if holder is not None and holder.open and not holder.summoned:
            inside = next((n for n, _ in self.running if holder in self.own[n]), None)
            if inside is not None and not in_backward():
                raise ZplanError(
                    f"unit `{unit.name}` runs inside unit `{inside}`, and both use the same ring slot",
                    f'pass `resident=["{inside}"]` to `zplan.initialize`',
                )
            self.gatherer.release(holder, spent=False)
