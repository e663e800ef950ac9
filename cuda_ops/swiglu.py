"""silu(gate) * up, keeping gate and up alone, whose places their gradients take."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS
from zplan.cuda_ops.autograd import refuse_second_derivative


class _SwiGlu(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "grad", "out")),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("kind", "whole")),
    ]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of equal shapes, computed in fp32 and rounded once.

    Backward writes the gradients over `gate` and `up` and can run once. So they must be results that nobody else reads
    after the forward, like those of two linear layers.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype, (gate.shape, up.shape, gate.dtype, up.dtype)
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.spent = False
        return forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative("swiglu")
        if ctx.spent:
            raise RuntimeError("backward through swiglu a second time: the first one wrote over gate and up")
        ctx.spent = True
        gate, up = ctx.saved_tensors
        backward_(grad.contiguous(), gate, up)
        return gate, up


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """The product; both contiguous."""
    if not compiler.usable(gate.device):
        return reference.swiglu(gate, up)
    out = torch.empty_like(gate)
    _launch("swiglu", gate, up, None, out)
    return out


def backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Write the gradients of `gate` and `up` over them; all contiguous."""
    if not compiler.usable(gate.device):
        reference.swiglu_backward_(grad, gate, up)
        return
    _launch("swiglu_backward", gate, up, grad, None)


def _launch(function: str, gate: Tensor, up: Tensor, grad: Tensor | None, out: Tensor | None) -> None:
    macros, numel = compiler.TUNED["swiglu"], gate.numel()
    if not numel:
        return
    addresses = [0 if t is None else t.data_ptr() for t in (gate, up, grad, out)]
    params = _SwiGlu(*addresses, numel, KINDS[gate.dtype], all(a % 16 == 0 for a in addresses))
    kernel = compiler.kernel("swiglu", function, gate.get_device())
    kernel.launch(-(-numel // macros["CHUNK"]), macros["BLOCK"], params)
