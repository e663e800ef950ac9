"""Follows the forward of a model through its units: opens each, holds the order to the schedule, notes the calls.

[Note: schedule] The order of units is fixed by the first training forward. Later ones are held to it, and prefetch
follows it: the next units in forward, those before in backward. Under `no_grad` units gather on demand.
"""

from __future__ import annotations

from typing import Any

import torch

from zplan.planner.errors import ZplanError
from zplan.runtime.backward import Backward
from zplan.runtime.calls import Calls
from zplan.runtime.outputs import leaving
from zplan.runtime.phases import Phases
from zplan.runtime.reducer import Reducer
from zplan.runtime.uses import Uses
from zplan.runtime.windows import Windows, in_backward


class Forward:
    """Where one engine's model is in its forward. See [Note: schedule], and [Note: windows] in windows.py."""

    def __init__(
        self, windows: Windows, calls: Calls, uses: Uses, backward: Backward, reducer: Reducer, phases: Phases
    ) -> None:
        self.windows, self.schedule, self.calls, self.uses = windows, windows.schedule, calls, uses
        self.backward, self.reducer, self.phases = backward, reducer, phases
        self.depth = 0
        self.training = False
        """In a forward of the whole model that backward will follow."""
        self.last = next(reversed(windows.own), "")

    # --- the whole model ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A forward of the whole model begins."""
        if in_backward():
            return
        self.depth += 1
        if self.depth > 1:
            return
        self.windows.running.clear()
        if torch.is_grad_enabled():
            self.training = True
            self.schedule.start_forward()
            self.calls.start_forward()

    def end(self, *, failed: bool) -> None:
        """It ended: a training forward takes part in the gathers of units it did not run, and fixes the schedule."""
        if in_backward() or self.depth == 0:
            return
        self.depth = 0 if failed else self.depth - 1
        if self.depth:
            return
        training, self.training = self.training, False
        if failed:
            self.windows.release_all()
        if failed or not training:
            return
        for name in self.schedule.rest_of_forward():
            self.windows.fetch(name)
        if self.schedule.recording:
            self._settle()
        self.schedule.start_backward()

    def stop(self) -> None:
        """A forward broke off: end it, also where torch called no hook (it does not for a KeyboardInterrupt)."""
        if in_backward():
            return  # a recompute ends early by an exception
        self.depth, self.training = 0, False
        self.windows.running.clear()
        self.windows.release_all()

    def _settle(self) -> None:
        """After the first training forward."""
        gatherer = self.windows.gatherer
        said = gatherer.collectives.exchange("\n".join(self.schedule.ran))
        seen = [text.split("\n") if text else [] for text in said]
        self.schedule.settle(seen, gatherer.collectives.mesh.rank)
        self.last = next((n for n in reversed(self.schedule.order) if n in self.schedule.ran), self.last)
        # What no rank has run may be read by hand where the graph does not show it, in a reentrant checkpoint.
        ran = {name for names in seen for name in names}
        resident = (u for u in gatherer.units if u.slot is None)
        self.uses.expect(u for u in resident if ran.isdisjoint(self.windows.users[u.name]))

    # --- one unit ----------------------------------------------------------------------------------------------------

    def enter(self, name: str) -> None:
        """The forward of a unit's module begins, or its recompute in backward."""
        if in_backward():
            call = self.calls.recomputed(name)
            if call is not None:
                self.backward.begin(call)
            self.windows.open(name)
            return
        training = self.training or torch.is_grad_enabled()
        if training:
            self.reducer.fresh = self.reducer.forwarded = True
        if self.training:
            self._follow(name)
        self.phases.begin(f"forward.{name}")
        self.windows.open(name)
        call = self.calls.begin(name, hidden=not torch.is_grad_enabled()) if training else None
        self.windows.running.append((name, call))
        if self.uses.spans is not None:
            self.uses.spans.enter(name)
        if self.training:
            self.windows.fetch_ahead(self.schedule.next_forward(), backward=False)

    def leave(self, name: str, output: Any, given: Any) -> None:
        """It ended."""
        if in_backward():
            self._reopen_for(name, output, given)
            return
        if self.uses.spans is not None:
            self.uses.spans.leave(name)
        call = None
        while self.windows.running and call is None:
            last, call = self.windows.running.pop()
            if last == name:
                break
        if call is not None:
            tensors = () if call.hidden else leaving(output, given)
            if tensors or call.hidden:
                self.calls.end(call)
            for tensor in tensors:
                tensor.register_hook(lambda _g, c=call: self.backward.begin(c))
        for unit in self.windows.own[name]:
            spent = self.training and self.windows.retaken(unit, self.schedule.order[self.schedule.at :])
            self.windows.gatherer.release(unit, spent=spent)
        if name == self.last:
            self.phases.begin("loss")

    def _follow(self, name: str) -> None:
        """Hold a training forward to the schedule: take part in the gathers of units that were skipped."""
        skipped = self.schedule.forward_to(name)
        if skipped is None and not self.schedule.recording and self.windows.gatherer.sharded:
            late = next((u for u in self.windows.needs[name] if not u.valid), None)
            if late is not None:
                raise ZplanError(
                    f"unit `{late.name}` runs in another order than in the first step, which is fixed: {self._told()}",
                    f'run units in one order in every step, or pass `resident=["{late.name}"]` to `zplan.initialize`',
                )
        for other in skipped or ():
            self.windows.fetch(other)

    def _told(self) -> str:
        order = self.schedule.order
        return ", ".join(order[:3]) + (f", ... {order[-1]}" if len(order) > 3 else "")

    def _reopen_for(self, name: str, output: Any, given: Any) -> None:
        """After a recompute: where one recompute runs several units, a later one may take this one's slot."""
        if torch.is_grad_enabled() and any(unit.slot is not None for unit in self.windows.own[name]):
            for tensor in leaving(output, given):
                tensor.register_hook(lambda _g: self.windows.open(name, backward=True))
