"""Rotary embedding in one pass, which keeps nothing but its tables.

Shapes: B sequences, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS
from zplan.cuda_ops.autograd import refuse_second_derivative


class _Rotary(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        ("groups", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("per_half", "heads", "seq")),
        ("sign", ctypes.c_float),
    ]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of (B, T, H, D) by tables (T, D/2), computed in fp32 and rounded once.

    The tables get no gradient.
    """
    assert x.dim() == 4 and cos.shape == sin.shape == (x.shape[1], x.shape[3] // 2), (x.shape, cos.shape, sin.shape)
    assert cos.dtype == sin.dtype == x.dtype and x.shape[3] % 2 == 0, (cos.dtype, x.dtype, x.shape)
    out: Tensor = _RotaryEmbedding.apply(x, cos, sin)
    return out


class _RotaryEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return turn(x.contiguous(), cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("rotary")
        return turn(grad.contiguous(), *ctx.saved_tensors, sign=-1), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """`x` turned forwards (1) or back (-1); all contiguous."""
    if not compiler.usable(x.device):
        return reference.rotary(x, cos, sin, sign=sign)
    out = torch.empty_like(x)
    half, itemsize = x.shape[3] // 2, x.element_size()
    if x.numel():
        lanes = 16 // itemsize
        while half % lanes or any(t.data_ptr() % (lanes * itemsize) for t in (x, cos, sin, out)):
            lanes //= 2
        defines = {"LANES": lanes, "DTYPE": KINDS[x.dtype]}
        groups, addresses = x.numel() // (2 * lanes), (t.data_ptr() for t in (x, cos, sin, out))
        params = _Rotary(*addresses, groups, half // lanes, x.shape[2], x.shape[1], sign)
        block = compiler.TUNED["rotary"]["BLOCK"]
        compiler.kernel("rotary", "rotary", x.get_device(), defines).launch(-(-groups // block), block, params)
    return out
