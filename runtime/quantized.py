"""Frozen parameters of a class of their own that keep quantized integers, such as bitsandbytes' 4-bit ones.

They are integers beside constants (scales, code tables) that hang on the parameter as attributes. Both stay whole on
every rank at every stage: the integers in the flat buffer of their unit (`params.frozen.whole`), the constants where
the quantizer put them (`params.frozen.constants`). Class and attributes of the parameter stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError

DEPTH = 3
"""Objects inside objects that are looked into: a double-quantized state holds one of its own."""


def check_class(name: str, p: nn.Parameter) -> None:
    """Refuse a parameter of a class of its own unless it is frozen integers with plain storage."""
    if type(p) is nn.Parameter:
        return
    kind = type(p).__name__
    own = type(p).__mro__[: type(p).__mro__.index(nn.Parameter)] if isinstance(p, nn.Parameter) else (type(p),)
    plain = not any("__torch_dispatch__" in vars(c) for c in own) and isinstance(p, nn.Parameter)
    if not plain or p.requires_grad or p.is_floating_point() or p.is_meta:
        raise ZplanError(
            f"parameter `{name}` is a `{kind}` ({p.dtype}{', trained' if p.requires_grad else ''}): of parameters of a "
            "class of their own only frozen quantized integers are taken",
            "freeze quantized parameters and quantize before `zplan.initialize`; run lazy modules once before it",
        )


def constants(p: nn.Parameter) -> Iterator[Tensor]:
    """Tensors that hang on a quantized parameter."""
    if type(p) is not nn.Parameter:
        yield from _tensors(vars(p), DEPTH)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from _tensors(vars(value), depth - 1)


def constant_storages(params: list[nn.Parameter]) -> dict[int, Tensor]:
    """One tensor for each storage that the constants of some parameters lie in."""
    return {t.untyped_storage()._cdata: t for p in params for t in constants(p)}


def check_device(name: str, p: nn.Parameter, device: torch.device) -> None:
    """Refuse constants that lie elsewhere than training runs."""
    for t in constants(p):
        if t.device.type != device.type:
            raise ZplanError(
                f"constants of the quantized `{name}` are on {t.device} and training runs on {device}",
                "move the model there before `zplan.initialize`; quantizers move their constants along",
            )
