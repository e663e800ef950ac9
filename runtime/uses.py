"""Finds parameters that are used outside the forward of their unit, and has their units stay readable for that.

In the first backward the graph is walked once. A node that takes a parameter's gradient was made while the parameter
was used; the sequence numbers that autograd gives to nodes say whether a call of the parameter's unit was running then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zplan.planner.errors import ZplanError
from zplan.runtime.reducer import Reducer
from zplan.runtime.unit import FlatUnit
from zplan.runtime.windows import Windows


class Spans:
    """Intervals of autograd's sequence numbers in which units could be read."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}
        self.done: dict[str, list[tuple[int, int]]] = {}

    def enter(self, name: str) -> None:
        self.open.setdefault(name, []).append(torch.autograd._get_sequence_nr())

    def leave(self, name: str) -> None:
        if self.open.get(name):
            start = self.open[name].pop()
            self.done.setdefault(name, []).append((start, torch.autograd._get_sequence_nr()))

    def covers(self, name: str, number: int) -> bool:
        return any(start <= number < end for start, end in self.done.get(name, ()))


class Uses:
    """Units of one engine that are read outside their modules' forward."""

    def __init__(self, windows: Windows, reducer: Reducer) -> None:
        self.windows, self.reducer = windows, reducer
        self.early: set[FlatUnit] = set()
        """These: gathered right after the step."""
        self.deferred: set[FlatUnit] = set()
        """Trainable ones among them: reduced when backward has ended."""
        self.spans: Spans | None = Spans()
        """Where in the graph units could be read, until the first backward has been looked at."""

    def look(self, loss: Tensor) -> None:
        """Before the first backward: learn which units are read outside their modules; refuse where that fails."""
        spans = self.spans
        if spans is None or not loss.requires_grad:
            return
        self.spans = None
        outside = uses_outside(loss, list(self.windows.flat.values()), self.windows.users, spans)
        for param, unit in outside.items():
            if unit.slot is not None:
                raise ZplanError(
                    f"parameter `{param}` is used outside the forward of its unit `{unit.name}`, "
                    "where stage 3 has not gathered it",
                    f'pass `resident=["{unit.name}"]` (or a pattern such as `layers.*`) to `zplan.initialize`; '
                    "for an L1 or L2 term call `engine.penalty(l1=..., l2=...)`",
                )
        self.expect(outside.values())

    def expect(self, units: Iterable[FlatUnit]) -> None:
        """From now on keep these readable outside their modules, and take their gradients at any time in backward.

        They are reduced after all others, which are reduced last unit first.
        """
        flat = self.windows.flat
        self.early.update(units)
        self.deferred.update(u for u in self.early if u.name in flat)
        trained = [flat[n] for n in dict.fromkeys(self.windows.schedule.order) if n in flat]
        self.reducer.order = sorted(reversed(trained), key=lambda u: u in self.deferred)

    def open_early(self) -> None:
        """After a step: make whole again what is read outside its module, perhaps before the next forward begins."""
        for unit in self.windows.gatherer.units:
            if unit in self.early:
                self.windows.gatherer.need(unit)


def uses_outside(
    loss: Tensor, units: list[FlatUnit], readers: dict[str, list[str]], spans: Spans
) -> dict[str, FlatUnit]:
    """Parameters (by name) that the graph of `loss` uses outside every call of the modules in `readers[unit.name]`."""
    owner = {id(p): (u, i) for u in units for i, p in enumerate(u.params)}
    found: dict[str, FlatUnit] = {}
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            variable = getattr(child, "variable", None)
            if variable is None:
                stack.append(child)
            elif id(variable) in owner:
                unit, index = owner[id(variable)]
                if not any(spans.covers(name, node._sequence_nr()) for name in readers[unit.name]):
                    found[unit.layout.entries[index].name] = unit
    return found


def leaves_alone(params: Iterable[nn.Parameter]) -> bool:
    """Whether the backward that runs now gives none of these a gradient, as `torch.autograd.grad` does."""
    try:
        return not any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in params if p.requires_grad)
    except RuntimeError:  # what is asked for are parameters' own gradients, which are returned and not kept
        return True
