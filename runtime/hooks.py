"""Watches a module run and tells gatherer and reducer what is needed next. Nobody else hooks into forward and backward.

[Note: windows] A unit can be read from the pre-forward of its module to its post-forward, and in backward from the
gradient of its output, or the pre-forward of its recompute if that comes first. Its gradients are reduced when the last
of them has landed, or, where some parameter got none, when the backward of its module is over (see [Note: time] in
calls.py). Frozen parameters, which backward needs for the gradient of the input alone, stay until then too. Recompute
is told from autograd's own state: a graph task is running. One recompute may run several units, of which a later one
may take an earlier one's slot, so the gradient of each one's recomputed output opens it again. A backward that gives
parameters no gradients (`torch.autograd.grad`) opens units and is no part of a step.

[Note: schedule] The order of units is fixed by the first training forward. Later ones are held to it, and prefetch
follows it: the next units in forward, those before in backward. Under `no_grad` units gather on demand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zplan.cuda_ops.linear_cross_entropy import give_gradient_to
from zplan.planner.errors import ZplanError
from zplan.runtime.calls import Call, Calls, Schedule
from zplan.runtime.detect import Found
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.outputs import leaving
from zplan.runtime.reducer import Reducer
from zplan.runtime.unit import FlatUnit, Slot
from zplan.runtime.uses import Spans, leaves_alone, uses_outside

PhaseListener = Callable[[str], None]

LIGHT = 2**20
"""Elements of a unit, such as a final norm, whose compute is over before the next unit's gather has begun."""


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Hooks:
    """All hooks of one engine, and the schedule they follow. See [Note: windows] and [Note: schedule]."""

    def __init__(
        self, model: nn.Module, found: list[Found], units: list[FlatUnit], gatherer: Gatherer, reducer: Reducer
    ) -> None:
        self.gatherer, self.reducer = gatherer, reducer
        flat = {u.name: u for u in units}
        self.flat = {u.name: u for u in units if not u.placement.frozen}
        self.own = {f.unit.name: [flat[unit.name] for unit, _ in f.segments()] for f in found}
        self.needs = {f.unit.name: [*self.own[f.unit.name], *(flat[n] for n in f.reads)] for f in found}
        self.users = {u.name: [name for name, needed in self.needs.items() if u in needed] for u in units}
        lowest = next((f.unit.name for f in found if any(u.name in self.flat for u in self.needs[f.unit.name])), "")
        modules = {f.module for f in found}
        around = frozenset(f.unit.name for f in found if any(m in modules for m in list(f.module.modules())[1:]))
        self.calls, self.schedule = Calls(), Schedule([f.unit.name for f in found], around, lowest)
        self.running: list[tuple[str, Call | None]] = []
        self.ahead: int | None = None
        """Elements to gather ahead (`stage3_prefetch_bucket_size`); 0 for none, None for one unit."""
        self.depth = 0
        self.training = False
        """In a forward of the whole model that backward will follow."""
        self.in_task = False
        self.asked = False
        """In `engine.backward`."""
        self.looking = False
        """In a backward that gives parameters no gradients."""
        self.discarding = False
        """In a backward whose gradients count as zeros."""
        self.begun: set[str] = set()
        self.early: set[FlatUnit] = set()
        """Units that are used outside their modules' forward: gathered right after the step."""
        self.deferred: set[FlatUnit] = set()
        """Trainable ones among them: reduced when backward has ended."""
        self.spans: Spans | None = Spans()
        """Where in the graph units could be read, until the first backward has been looked at."""
        self.on_phase: PhaseListener | None = None
        self.last = found[-1].unit.name if found else ""
        self.handles: list[RemovableHandle] = []
        # Before the users' own, which may read weights, and so the last to be registered is the first to run. `m is`:
        # `copy.deepcopy` copies hooks along, and the copy is nobody's.
        for f in reversed(found):
            self._register(f)
        self.handles.append(
            model.register_forward_pre_hook(lambda m, _: self._start_forward() if m is model else None, prepend=True)
        )
        self.handles.append(
            model.register_forward_hook(
                lambda m, _, out: self._end_forward(failed=out is None) if m is model else None, always_call=True
            )
        )

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for unit in self.flat.values():
            for p in unit.params:
                give_gradient_to(p, None)

    @contextmanager
    def asking(self, *, discarding: bool) -> Iterator[None]:
        """Around what is a backward of the loss for certain."""
        self.asked, self.discarding = True, discarding
        try:
            yield
        finally:
            self.asked = self.discarding = False

    def phase(self, name: str) -> None:
        if self.on_phase is not None:
            self.on_phase(name)

    def split_schedule(self, num_first: int) -> tuple[list[FlatUnit], list[FlatUnit]]:
        """The trainable units that a forward needs first, and all others."""
        first = [self.flat[n] for n in dict.fromkeys(self.schedule.order) if n in self.flat][:num_first]
        return first, [u for u in self.flat.values() if u not in first]

    # --- registration ------------------------------------------------------------------------------------------------

    def _register(self, f: Found) -> None:
        name, module = f.unit.name, f.module

        def pre_forward(m: nn.Module, _args: Any) -> None:
            if m is module:
                self._pre_forward(name)

        def post_forward(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if m is module:
                self._post_forward(name, out, (args, kwargs))

        self.handles.append(module.register_forward_pre_hook(pre_forward, prepend=True))
        self.handles.append(module.register_forward_hook(post_forward, with_kwargs=True))
        if name in self.flat:
            unit = self.flat[name]
            for i, p in enumerate(unit.params):
                self.handles.append(p.register_post_accumulate_grad_hook(lambda _p, u=unit, i=i: self._landed(u, i)))
                if len(self.users[name]) == 1:
                    # A tied weight's gradients are left to autograd, which adds them up. Of one that is taken here it
                    # still says when it has landed. Weakly, as the unit holds the parameter that is the key.
                    give_gradient_to(p, partial(_take, weakref.ref(unit), i))

    # --- forward -----------------------------------------------------------------------------------------------------

    def _start_forward(self) -> None:
        """A forward of the whole model begins."""
        if in_backward():
            return
        self.depth += 1
        if self.depth > 1:
            return
        self.running.clear()
        if torch.is_grad_enabled():
            self.training = True
            self.schedule.start_forward()
            self.calls.start_forward()

    def _end_forward(self, *, failed: bool) -> None:
        """It ended: a training forward takes part in the gathers of units it did not run, and fixes the schedule."""
        if in_backward() or self.depth == 0:
            return
        self.depth = 0 if failed else self.depth - 1
        if self.depth:
            return
        training, self.training = self.training, False
        if failed:
            self._release_all()
        if failed or not training:
            return
        for name in self.schedule.rest_of_forward():
            self._fetch(name)
        if self.schedule.recording:
            collectives = self.gatherer.collectives
            seen = [text.split("\n") if text else [] for text in collectives.exchange("\n".join(self.schedule.ran))]
            self.schedule.settle(seen, collectives.mesh.rank)
            self.last = next((n for n in reversed(self.schedule.order) if n in self.schedule.ran), self.last)
            # What no rank has run may be read by hand where the graph does not show it, in a reentrant checkpoint.
            ran = {name for names in seen for name in names}
            resident = (u for u in self.gatherer.units if u.slot is None)
            self._expect_anywhere(u for u in resident if ran.isdisjoint(self.users[u.name]))
        self.schedule.start_backward()

    def stop_forward(self) -> None:
        """A forward broke off: end it, also where torch called no hook (it does not for a KeyboardInterrupt)."""
        if in_backward():
            return  # a recompute ends early by an exception
        self.depth, self.training = 0, False
        self.running.clear()
        self._release_all()

    def order_reduces(self) -> None:
        """Reduce last units first, and those that are used outside their modules after all others."""
        units = [self.flat[n] for n in dict.fromkeys(self.schedule.order) if n in self.flat]
        self.reducer.order = sorted(reversed(units), key=lambda u: u in self.deferred)

    def _expect_anywhere(self, units: Iterable[FlatUnit]) -> None:
        """From now on keep these readable outside their modules, and take their gradients at any time in backward."""
        self.early.update(units)
        self.deferred.update(u for u in self.early if u.name in self.flat)
        self.order_reduces()

    def open_early(self) -> None:
        """After a step: make whole again what is read outside its module, perhaps before the next forward begins."""
        for unit in self.gatherer.units:
            if unit in self.early:
                self.gatherer.need(unit)

    def look_for_uses(self, loss: Tensor) -> None:
        """Before the first backward: learn which units are read outside their modules; refuse where that fails."""
        spans = self.spans
        if spans is None or not loss.requires_grad:
            return
        self.spans = None
        outside = uses_outside(loss, list(self.flat.values()), self.users, spans)
        for param, unit in outside.items():
            if unit.slot is not None:
                raise ZplanError(
                    f"parameter `{param}` is used outside the forward of its unit `{unit.name}`, "
                    "where stage 3 has not gathered it",
                    f'pass `resident=["{unit.name}"]` (or a pattern such as `layers.*`) to `zplan.initialize`; '
                    "for an L1 or L2 term call `engine.penalty(l1=..., l2=...)`",
                )
        self._expect_anywhere(outside.values())

    def _pre_forward(self, name: str) -> None:
        if in_backward():
            call = self.calls.recomputed(name)
            if call is not None:
                self._begin_backward(call)
            self._open(name)
            return
        training = self.training or torch.is_grad_enabled()
        if training:
            self.reducer.fresh = self.reducer.forwarded = True
        if self.training:
            self._follow(name)
        self.phase(f"forward.{name}")
        self._open(name)
        self.running.append((name, self._waiting_call(name) if training else None))
        if self.spans is not None:
            self.spans.enter(name)
        if self.training:
            self._prefetch_ahead(self.schedule.next_forward(), backward=False)

    def _prefetch_ahead(self, names: Iterable[str], *, backward: bool) -> None:
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

    def _can_gather(self, unit: FlatUnit) -> bool:
        return unit.valid or self.gatherer.can_prefetch(unit)

    def _follow(self, name: str) -> None:
        """Hold a training forward to the schedule: take part in the gathers of units that were skipped."""
        skipped = self.schedule.forward_to(name)
        if skipped is None and not self.schedule.recording and self.gatherer.sharded:
            late = next((u for u in self.needs[name] if not u.valid), None)
            if late is not None:
                raise ZplanError(
                    f"unit `{late.name}` runs in another order than in the first step, which is fixed: {self._told()}",
                    f'run units in one order in every step, or pass `resident=["{late.name}"]` to `zplan.initialize`',
                )
        for other in skipped or ():
            self._fetch(other)

    def _told(self) -> str:
        order = self.schedule.order
        return ", ".join(order[:3]) + (f", ... {order[-1]}" if len(order) > 3 else "")

    def _waiting_call(self, name: str) -> Call:
        return self.calls.begin(name, hidden=not torch.is_grad_enabled())

    def _post_forward(self, name: str, output: Any, given: Any) -> None:
        if in_backward():
            self._reopen_for(name, output, given)
            return
        if self.spans is not None:
            self.spans.leave(name)
        call = None
        while self.running and call is None:
            last, call = self.running.pop()
            if last == name:
                break
        if call is not None:
            tensors = () if call.hidden else leaving(output, given)
            if tensors or call.hidden:
                self.calls.end(call)
            for tensor in tensors:
                tensor.register_hook(lambda _g, c=call: self._begin_backward(c))
        for unit in self.own[name]:
            self.gatherer.release(
                unit, spent=self.training and self._retaken(unit, self.schedule.order[self.schedule.at :])
            )
        if name == self.last:
            self.phase("loss")

    def _reopen_for(self, name: str, output: Any, given: Any) -> None:
        """After a recompute: where one recompute runs several units, a later one may take this one's slot."""
        if torch.is_grad_enabled() and any(unit.slot is not None for unit in self.own[name]):
            for tensor in leaving(output, given):
                tensor.register_hook(lambda _g: self._open(name, backward=True))

    def _read(self, name: str | None, *, backward: bool) -> Iterator[FlatUnit]:
        """Units whose values a module's forward or backward reads."""
        for unit in self.needs[name] if name is not None else ():
            if not backward or unit.placement.reads_in_backward:
                yield unit

    def _open(self, name: str, *, backward: bool = False) -> None:
        """Make everything that a unit's module reads readable now."""
        for unit in self._read(name, backward=backward):
            self._make_room(unit)
            self.gatherer.need(unit)

    def _fetch(self, name: str, *, backward: bool = False) -> None:
        """Take part in a unit's gather without showing it."""
        for unit in self._read(name, backward=backward):
            self._make_room(unit)
            self.gatherer.prefetch(unit)

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

    def _retaken(self, unit: FlatUnit, rest: Sequence[str]) -> bool:
        """Whether another unit takes this one's slot later in this pass, so that its values there are spent."""
        if self.schedule.recording or unit.slot is None:
            return False
        return any(other is not unit and other.slot is unit.slot for n in rest for other in self.own[n])

    # --- backward ----------------------------------------------------------------------------------------------------

    def _begin_backward(self, call: Call) -> None:
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
        if name in self.flat:
            self.flat[name].landed.clear()
        self.phase(f"backward.{name}")
        self._open(name, backward=True)
        if name not in self.schedule.around:
            self._prefetch_ahead(self.schedule.next_backward(), backward=True)

    def _go_back(self, name: str | None) -> None:
        """Before the backward of a call (or the end): the collectives of all units on the way to it, in schedule order.

        At each unit: reduces of later ones whose backward is over, its own gather, the next one's. See `Schedule`.
        """
        for skipped, position in self.schedule.way_back(name):
            self._close_spent(position)
            self._fetch(skipped, backward=True)
            self._prefetch_ahead(self.schedule.next_backward(), backward=True)
        if name is not None and name not in self.schedule.around:
            self._close_spent(self.schedule.back + 1)

    def _close_windows(self) -> None:
        """Release units whose calls that had begun are over by now. See [Note: time]."""
        for name in [n for n in self.begun if not self.calls.active(n)]:
            self.begun.discard(name)
            for unit in self.own[name]:
                if unit.open:
                    spent = self._over(unit) and self._retaken(unit, self.schedule.order[: self.schedule.back + 1])
                    self.gatherer.release(unit, spent=spent)

    def _over(self, unit: FlatUnit) -> bool:
        return all(self.calls.over(name) for name in self.users[unit.name])

    def _close_spent(self, position: int) -> None:
        """Reduce, in order, units after a position whose backward is over though some parameter got no gradient."""
        while True:
            unit = self.reducer.awaited
            if unit is None or unit in self.deferred or not self._over(unit):
                return
            if self.schedule.first[unit.name] <= position:
                return
            self._close(unit)

    def _landed(self, unit: FlatUnit, index: int) -> None:
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
        if len(unit.landed) < len(unit.params) or unit in self.deferred:
            return
        if not any(self.calls.unbegun(name) for name in self.users[unit.name]):
            self._close(unit)

    def _close(self, unit: FlatUnit) -> None:
        self.reducer.retire()
        self.phase(f"reduce.{unit.name}")
        if unit.open:
            spent = self._retaken(unit, self.schedule.order[: self.schedule.back + 1])
            self.gatherer.release(unit, spent=spent)
        if self.discarding:
            unit.release_grads()
        self.reducer.land(unit)

    def _join_task(self) -> None:
        """Once per backward: be told when it ends."""
        if self.in_task or self.looking:
            return
        if not self.asked and leaves_alone(p for u in self.flat.values() for p in u.params):
            self.looking = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_look)
            return
        self.reducer.check_due()
        self.in_task = True
        self.reducer.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _look(self, name: str) -> None:
        """`torch.autograd.grad` comes to a unit: it reads weights and lands nothing."""
        if torch.is_grad_enabled() and any(unit.slot is not None for unit in self.own[name]):
            raise ZplanError(
                f"`create_graph=True` through `{name}`, whose weights are not there when that graph is gone through",
                f'pass `resident=["{name}"]` (or a pattern such as `layers.*`) to `zplan.initialize`, or train below '
                "stage 3",
            )
        self._open(name, backward=True)

    def _end_look(self) -> None:
        """Back to whatever runs around it, which may be the forward of a unit."""
        self.looking = False
        self._release_all()
        for name, _ in self.running:
            self._open(name)

    def empty_backward(self) -> None:
        """A backward of nothing: take part in what the other ranks do in theirs."""
        self.reducer.begin()
        self.calls.clear()
        self.end_backward()

    def end_backward(self) -> None:
        """Backward ended: take part in the gathers of skipped units, close all windows, reduce what never landed."""
        self._go_back(None)
        self._release_all()
        for unit in self.flat.values() if self.discarding else ():
            unit.release_grads()
        self.reducer.finish()
        self.reset_backward()

    def _release_all(self) -> None:
        for unit in self.gatherer.units:
            if unit.slot is not None and unit.open:
                self.gatherer.release(unit, spent=False)

    def reset_backward(self) -> None:
        self.calls.clear()
        self.begun.clear()
        self.schedule.start_backward()
        self.in_task = False


def _take(unit: weakref.ref[FlatUnit], index: int, grad: Tensor) -> None:
    owner = unit()
    assert owner is not None, "a gradient without a unit"
    owner.take_grad(index, grad)
