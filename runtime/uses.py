"""Finds parameters that are used outside the forward of their unit, where nothing gathers them.

In the first backward the graph is walked once. A node that takes a parameter's gradient was made while the parameter
was used; the sequence numbers that autograd gives to nodes say whether a call of the parameter's unit was running then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zplan.runtime.unit import FlatUnit


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
