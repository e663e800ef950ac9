"""The tensors that leave a module's forward, however it packs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def leaving(output: Any, given: Any) -> tuple[Tensor, ...]:
    """Tensors of a module's output through which backward will come.

    Where there are none, those inside objects of the output, and last those that forward left in its own arguments.
    Leaves are none: a parameter that is returned, or what `enable_input_require_grads` makes of a frozen embedding's
    output. Backward ends there, and at once, before what was made after them has run.
    """
    for source, deep in ((output, False), (output, True), (given, True)):
        found = tuple(t for t in _tensors(source, deep=deep, seen=set()) if t.grad_fn is not None)
        if found:
            return found
    return ()


def _tensors(source: Any, *, deep: bool, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in containers and dataclasses; `deep`, in attributes of any object."""
    if isinstance(source, Tensor):
        yield source
        return
    for value in _parts(source, deep=deep, seen=seen):
        yield from _tensors(value, deep=deep, seen=seen)


def _parts(source: Any, *, deep: bool, seen: set[int]) -> Iterator[Any]:
    if isinstance(source, Mapping):
        yield from source.values()
    elif isinstance(source, (list, tuple)):
        yield from source
    elif hasattr(source, "__dataclass_fields__"):
        yield from (getattr(source, key) for key in source.__dataclass_fields__)
    elif deep and hasattr(source, "__dict__") and not isinstance(source, (nn.Module, type)) and id(source) not in seen:
        seen.add(id(source))
        yield from vars(source).values()
