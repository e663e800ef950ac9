"""Follows backward through the units: opens each, has its gradients reduced when all have landed or its call is over.

What units read and when is in [Note: windows] in windows.py, how the end of a call is told in [Note: time] in calls.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.runtime.calls import Call, Calls
from zplan.runtime.phases import Phases
from zplan.runtime.reducer import Reducer
from zplan.runtime.unit import FlatUnit
from zplan.runtime.uses import Uses, leaves_alone
from zplan.runtime.windows import Windows


class Backward:
    """Where one engine's backward is, and of what kind it is."""

    def __init__(self, windows: Windows, calls: Calls, uses: Uses, reducer: Reducer, phases: Phases) -> None:
        self.windows, self.schedule, self.gatherer = windows, windows.schedule, windows.gatherer
        self.calls, self.uses, self.reducer, self.phases = calls, uses, reducer, phases
        self.in_task = False
        self.asked = False
        """In `engine.backward`."""
        self.looking = False
        """In a backward that gives parameters no gradients."""
        self.discarding = False
        """In a backward whose gradients count as zeros."""
        self.begun: set[str] = set()

    # --- begin and end -----------------------------------------------------------------------------------------------

    def run(self, loss: Tensor, *, scale: Tensor | None, retain_graph: bool, discarding: bool) -> None:
        """The backward of a loss, for certain: times `scale`, or for gradients that count as zeros (`discarding`)."""
        self.asked, self.discarding = True, discarding
        try:
            if scale is None:
                loss.backward(retain_graph=retain_graph)
            else:
                # As the gradient of the loss itself: one number in place of the 1 that autograd starts from. In fp32,
                # since fp16 ends at 65,504.
                loss.float().backward(scale.clone(), retain_graph=retain_graph)
        finally:
            self.asked = self.discarding = False

    def empty(self) -> None:
        """A backward of nothing: take part in what the other ranks do in theirs."""
        self.reducer.begin()
        self.calls.clear()
        self.end()

    def end(self) -> None:
        """Backward ended: take part in the gathers of skipped units, close all windows, reduce what never landed."""
        self._go_back(None)
        self.windows.release_all()
        for unit in self.windows.flat.values() if self.discarding else ():
            unit.release_grads()
        self.reducer.finish()
        self.reset()

    def reset(self) -> None:
        self.calls.clear()
        self.begun.clear()
        self.schedule.start_backward()
        self.in_task = False

    def _join_task(self) -> None:
        """Once per backward: be told when it ends."""
        if self.in_task or self.looking:
            return
        if not self.asked and leaves_alone(p for u in self.windows.flat.values() for p in u.params):
            self.looking = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_look)
            return
        self.reducer.check_due()
        self.in_task = True
        self.reducer.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def _look(self, name: str) -> None:
        """`torch.autograd.grad` comes to a unit: it reads weights and lands nothing."""
        if torch.is_grad_enabled() and any(unit.slot is not None for unit in self.windows.own[name]):
            raise ZplanError(
                f"`create_graph=True` through `{name}`, whose weights are not there when that graph is gone through",
                f'pass `resident=["{name}"]` (or a pattern such as `layers.*`) to `zplan.initialize`, or train below '
                "stage 3",
            )
        self.windows.open(name, backward=True)

    def _end_look(self) -> None:
        """Back to whatever runs around it, which may be the forward of a unit."""
        self.looking = False
        self.windows.release_all()
        for name, _ in self.windows.running:
            self.windows.open(name)

    # --- one unit ----------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """The gradient of a call's output is there, or its recompute begins."""
        self._join_task()
        if self.looking:
            self._look(call.unit)
        if self.looking or call.begun:
            return
        name = call.unit
        self.calls.begin_backward(call)
        self._close_windows()
        self.begun.add(name)
        self._go_back(name)
        if name in self.windows.flat:
            self.windows.flat[name].landed.clear()
        self.phases.begin(f"backward.{name}")
        self.windows.open(name, backward=True)
        if name not in self.schedule.around:
            self.windows.fetch_ahead(self.schedule.next_backward(), backward=True)

    def land(self, unit: FlatUnit, index: int) -> None:
        """The gradient of one of a unit's parameters is there."""
        self._join_task()
        if unit.slot is not None and unit.placement.reads_in_backward and not unit.open:
            raise ZplanError(
                f"parameter `{unit.layout.entries[index].name}` got a gradient while its unit `{unit.name}` was not "
                "gathered: something left the unit's forward unseen, as a closure or a hook's copy of what is inside",
                f'return it from the forward of `{unit.name}`, or pass `resident=["{unit.name}"]` to '
                "`zplan.initialize`",
            )
        if self.reducer.reduced(unit):
            raise ZplanError(
                f"parameter `{unit.layout.entries[index].name}` got a gradient after its unit had been reduced: "
                "it is used outside the forward of its module",
                "call `engine.backward(loss)`, which looks for such uses in the first step, and not `loss.backward()`",
            )
        unit.landed.add(index)
        if len(unit.landed) < len(unit.params) or unit in self.uses.deferred:
            return
        if not any(self.calls.unbegun(name) for name in self.windows.users[unit.name]):
            self._close(unit)

    def _go_back(self, name: str | None) -> None:
        """Before the backward of a call (or the end): the collectives of all units on the way to it, in schedule order.

        At each unit: reduces of later ones whose backward is over, its own gather, the next one's. See `Schedule`.
        """
        for skipped, position in self.schedule.way_back(name):
            self._close_spent(position)
            self.windows.fetch(skipped, backward=True)
            self.windows.fetch_ahead(self.schedule.next_backward(), backward=True)
        if name is not None and name not in self.schedule.around:
            self._close_spent(self.schedule.back + 1)

    def _close_windows(self) -> None:
        """Release units whose calls that had begun are over by now. See [Note: time] in calls.py."""
        for name in [n for n in self.begun if not self.calls.active(n)]:
            self.begun.discard(name)
            for unit in self.windows.own[name]:
                if unit.open:
                    self.gatherer.release(unit, spent=self._over(unit) and self._retaken(unit))

    def _over(self, unit: FlatUnit) -> bool:
        return all(self.calls.over(name) for name in self.windows.users[unit.name])

    def _retaken(self, unit: FlatUnit) -> bool:
        return self.windows.retaken(unit, self.schedule.order[: self.schedule.back + 1])

    def _close_spent(self, position: int) -> None:
        """Reduce, in order, units after a position whose backward is over though some parameter got no gradient."""
        while True:
            unit = self.reducer.awaited
            if unit is None or unit in self.uses.deferred or not self._over(unit):
                return
            if self.schedule.first[unit.name] <= position:
                return
            self._close(unit)

    def _close(self, unit: FlatUnit) -> None:
        self.reducer.retire()
        self.phases.begin(f"reduce.{unit.name}")
        if unit.open:
            self.gatherer.release(unit, spent=self._retaken(unit))
        if self.discarding:
            unit.release_grads()
        self.reducer.land(unit)
