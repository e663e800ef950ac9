"""RMSNorm that keeps its input and one fp32 number a row, and reads every tensor once in each direction.

Shapes: R rows (all leading dims together), C width.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS
from zplan.cuda_ops.autograd import refuse_second_derivative

PARTS = 256
"""Blocks of the backward, each with an fp32 row of its part of the weight's gradient. On every GPU the same, so that
sums are added in the same order everywhere, and the buffer's size is known."""

SHARE = 16
"""Elements of a row that a thread holds, where there are threads enough."""

MAX_WIDTH = 2**15
"""Elements of a row that a block holds in registers. No model has longer ones."""


class _RmsNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "rstd")),
        ("width", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


class _RmsNormBackward(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("grad", "x", "weight", "rstd", "grad_x", "parts")),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int),
    ]


class _RmsNormWeight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parts", "grad_weight")),
        *((name, ctypes.c_int) for name in ("num_parts", "width")),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim, computed in fp32 and rounded once.

    Parameters
    ----------
    x, weight
        (..., C) and (C,), of one dtype: bf16, fp16 or fp32 (float64 too on a CPU). Backward keeps `x`, and four bytes a
        row.
    """
    assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, (x.shape, weight.shape, x.dtype, weight.dtype)
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("rms_norm")
        return (*backward(grad.contiguous(), *ctx.saved_tensors), None)


def usable(x: Tensor) -> bool:
    """Whether the kernels take a tensor."""
    if x.shape[-1] > MAX_WIDTH:
        assert not x.is_cuda, f"RMSNorm kernels take rows of at most {MAX_WIDTH} elements, not {x.shape[-1]}"
        return False
    return compiler.usable(x.device)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / root mean square of each in fp32 (..., 1)."""
    if not usable(x):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if x.numel():
        defines = _defines(x.shape[-1], SHARE, KINDS[x.dtype], _lanes(x, weight, out))
        params = _RmsNorm(*(t.data_ptr() for t in (x, weight, out, rstd)), x.shape[-1], eps)
        function = compiler.kernel("rms_norm", "rms_norm", x.get_device(), defines)
        function.launch(rstd.numel(), defines["BLOCK"], params)
    return out, rstd


def backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight`, each in its dtype."""
    if not usable(x):
        return reference.rms_norm_backward(grad, x, weight, rstd)
    width, index = x.shape[-1], x.get_device()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    if not x.numel():
        return grad_x, grad_weight.zero_()
    parts = x.new_empty((PARTS, width), dtype=torch.float32)
    defines = _defines(width, SHARE, KINDS[x.dtype], _lanes(grad, x, weight, grad_x))
    pointers = (t.data_ptr() for t in (grad, x, weight, rstd, grad_x, parts))
    function = compiler.kernel("rms_norm", "rms_norm_backward", index, defines)
    function.launch(PARTS, defines["BLOCK"], _RmsNormBackward(*pointers, rstd.numel(), width))
    defines = {"DTYPE": KINDS[x.dtype], "BLOCK": 512}
    function = compiler.kernel("rms_norm", "rms_norm_weight", index, defines)
    params = _RmsNormWeight(parts.data_ptr(), grad_weight.data_ptr(), PARTS, width)
    function.launch(-(-width // 32), defines["BLOCK"], params)
    return grad_x, grad_weight


def _lanes(*tensors: Tensor) -> int:
    """Elements that all of them can read at once: a power of two, at most 16 bytes, that divides rows and addresses."""
    width, itemsize = tensors[0].shape[-1], tensors[0].element_size()
    lanes = 16 // itemsize
    while width % lanes or any(t.data_ptr() % (lanes * itemsize) for t in tensors):
        lanes //= 2
    return lanes


@lru_cache(maxsize=64)
def _defines(width: int, per_thread: int, kind: int, lanes: int) -> dict[str, int]:
    """Shape of the threads of one row: about `per_thread` elements each, more where 1024 threads are too few."""
    block = min(1024, 32 * -(-width // (32 * per_thread)))
    return {"BLOCK": block, "VECTORS": -(-width // (lanes * block)), "LANES": lanes, "DTYPE": kind}
