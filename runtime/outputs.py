"""The tensors that leave a module's forward, however it packs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

DEPTH = 3
"""Objects inside each other that are looked into."""


def leaving(output: Any, given: Any) -> tuple[Tensor, ...]:
    """Tensors of a module's output through which backward will come.

    Where there are none, those inside objects of the output, and last those that forward left in its own arguments.
    Leaves are none: a parameter that is returned, or what `enable_input_require_grads` makes of a frozen embedding's
    output. Backward ends there, and at once, before what was made after them has run.
    """
    for source, depth in ((output, 0), (output, DEPTH), (given, DEPTH)):
        found = tuple(t for t in _tensors(source, depth, set()) if t.grad_fn is not None)
        if found:
            return found
    return ()


def _tensors(source: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in containers and dataclasses, and in attributes of objects down to a depth."""
    if isinstance(source, Tensor):
        yield source
    elif id(source) not in seen:
        values: Any = ()
        if isinstance(source, Mapping):
            values = source.values()
        elif isinstance(source, (list, tuple)):
            values = source
        elif hasattr(source, "__dataclass_fields__"):
            values = [getattr(source, key) for key in source.__dataclass_fields__]
        elif depth and hasattr(source, "__dict__") and not isinstance(source, (nn.Module, type)):
            values, depth = vars(source).values(), depth - 1
        if values:
            seen.add(id(source))
        for value in values:
            yield from _tensors(value, depth, seen)
