"""Watches a module run and tells gatherer and reducer what is needed next. The only place that registers hooks.

[Note: windows] A unit can be read from the pre-forward of its module to its post-forward, and in backward from the gradient
of its output, or the pre-forward of its recompute if that comes first, to its last parameter gradient. Recompute is told
from autograd's own state: a graph task is running.

[Note: schedule] The order of units is recorded on the first training forward. Later ones are held to it, and prefetch follows
it: the next unit in forward, the one before in backward. Under `no_grad` units gather on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zplan.planner.errors import ZplanError
from zplan.runtime.detect import Found
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.reducer import Reducer
from zplan.runtime.unit import FlatUnit

PhaseListener = Callable[[str], None]


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Hooks:
    """All hooks of one engine, and the schedule they follow. See [Note: windows] and [Note: schedule]."""

    def __init__(self, found: list[Found], units: list[FlatUnit], gatherer: Gatherer, reducer: Reducer) -> None:
        self.gatherer, self.reducer = gatherer, reducer
        self.found = {f.unit.name: f for f in found}
        self.flat = {u.name: u for u in units}
        self.needs = {
            name: [self.flat[n] for n in (name, *f.reads) if n in self.flat] for name, f in self.found.items()
        }
        self.order: list[str] = []
        self.position: dict[str, int] = {}
        self.recording = True
        self.at = 0
        self.entered: set[str] = set()
        self.in_task = False
        self.on_phase: PhaseListener | None = None
        self.last = found[-1].unit.name if found else ""
        self.handles: list[RemovableHandle] = []
        for f in found:
            self._register(f)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def phase(self, name: str) -> None:
        if self.on_phase is not None:
            self.on_phase(name)

    def start_forward(self) -> None:
        """A top-level forward of the engine begins."""
        self.at = 0

    def end_forward(self, *, training: bool) -> None:
        """A top-level forward ended: a training forward fixes the schedule."""
        if training and self.recording and self.order:
            self.recording = False
            self.position = {name: i for i, name in enumerate(self.order)}
            self.last = self.order[-1]
            ordered = [self.flat[n] for n in self.order if n in self.flat]
            missing = [u for u in self.gatherer.units if u not in ordered]
            self.reducer.order = [*reversed(ordered), *missing]

    def split_schedule(self, num_first: int) -> tuple[list[FlatUnit], list[FlatUnit]]:
        """The units that a forward needs first, and all others."""
        first = [self.flat[n] for n in self.order if n in self.flat][:num_first]
        return first, [u for u in self.gatherer.units if u not in first]

    # --- registration ------------------------------------------------------------------------------------------------

    def _register(self, f: Found) -> None:
        name = f.unit.name
        self.handles.append(f.module.register_forward_pre_hook(lambda *_: self._pre_forward(name)))
        self.handles.append(
            f.module.register_forward_hook(lambda _m, _a, out: self._post_forward(name, out))
        )
        if name in self.flat:
            unit = self.flat[name]
            for i, p in enumerate(unit.params):
                self.handles.append(
                    p.register_post_accumulate_grad_hook(lambda _p, u=unit, i=i: self._landed(u, i))
                )

    # --- forward -----------------------------------------------------------------------------------------------------

    def _pre_forward(self, name: str) -> None:
        if not in_backward():
            self._follow(name)
            self.phase(f"forward.{name}")
        for unit in self.needs[name]:
            self.gatherer.need(unit)
        if not in_backward() and torch.is_grad_enabled():
            self._prefetch(name, step=1)

    def _post_forward(self, name: str, output: Any) -> None:
        if in_backward():
            return
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _g: self._pre_backward(name))
        if name in self.flat:
            self.gatherer.release(self.flat[name], spent=torch.is_grad_enabled() and self._retaken(name, later=True))
        if name == self.last:
            self.phase("loss")

    def _follow(self, name: str) -> None:
        """Record the schedule, or hold a training forward to it."""
        if not torch.is_grad_enabled():
            return
        if self.recording:
            if name not in self.order:
                self.order.append(name)
            return
        if name not in self.position:
            raise ZplanError(
                f"unit `{name}` runs now but did not run in the first step, whose order is fixed: {self._told()}",
                "run every unit in every training step",
            )
        self.at = self.position[name]

    def _told(self) -> str:
        return ", ".join(self.order[:3]) + (f", ... {self.order[-1]}" if len(self.order) > 3 else "")

    def _retaken(self, name: str, *, later: bool) -> bool:
        """Whether another unit takes this one's slot later in this pass, so that its values there are spent."""
        slot = self.flat[name].slot
        if self.recording or slot is None:
            return False
        at = self.position[name]
        rest = self.order[at + 1 :] if later else self.order[:at]
        return any(self.flat[n].slot is slot for n in rest if n in self.flat)

    def _prefetch(self, name: str, *, step: int) -> None:
        if self.recording:
            return
        at = self.position[name] + step
        if 0 <= at < len(self.order):
            for unit in self.needs[self.order[at]]:
                if self.gatherer.can_prefetch(unit):
                    self.gatherer.prefetch(unit)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _pre_backward(self, name: str) -> None:
        self._join_task()
        if name in self.entered:
            return
        self.entered.add(name)
        self.phase(f"backward.{name}")
        for unit in self.needs[name]:
            self.gatherer.need(unit)
        self._prefetch(name, step=-1)

    def _landed(self, unit: FlatUnit, index: int) -> None:
        self._join_task()
        unit.landed.add(index)
        if len(unit.landed) == len(unit.params):
            self.reducer.retire()
            self.phase(f"reduce.{unit.name}")
            self.gatherer.release(unit, spent=self._retaken(unit.name, later=False))
            self.reducer.land(unit)

    def _join_task(self) -> None:
        """Once per backward: be told when it ends."""
        if not self.in_task:
            self.in_task = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in self.gatherer.units:
            if unit.slot is not None and unit.open:
                self.gatherer.release(unit, spent=False)
        self.reducer.finish()
        self.reset_backward()

    def reset_backward(self) -> None:
        self.entered.clear()
        self.in_task = False


def _tensors(output: Any) -> Iterator[Tensor]:
    """Tensors of a module's output, however it packs them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        for key in output.__dataclass_fields__:
            yield from _tensors(getattr(output, key))


