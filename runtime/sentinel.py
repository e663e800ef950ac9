"""What a parameter shows as its gradient once the real one has been reduced: something that refuses to be read.

Without it torch's own `clip_grad_norm_` would find no gradients, return 0 and clip nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError


class ReducedGradient(Tensor):
    """Shape, dtype and device of a gradient, without its values. Takes no memory; every op on it is an error."""

    @staticmethod
    def __new__(cls, like: Tensor) -> ReducedGradient:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ReducedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ZplanError(
            "`p.grad` was read after backward: gradients are summed over ranks and kept flat, each rank its part",
            "clip with `engine.clip_grad_norm_(max_norm)`; read them in `with zplan.summon(model, grads=True) as whole: "
            "whole.grads[name]`",
        )


class Sentinels:
    """One for each trained parameter; shown between a backward and whatever comes next."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.rows = [(p, ReducedGradient(p)) for p in params]
        self.shown = False

    def show(self) -> None:
        for p, sentinel in self.rows:
            p.grad = sentinel
        self.shown = True

    def hide(self) -> None:
        if self.shown:
            self.shown = False
            for p, sentinel in self.rows:
                if p.grad is sentinel:
                    p.grad = None
