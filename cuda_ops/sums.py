"""What every rank sent of one slice, added up in fp32 in one launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS


class _SumSlices(ctypes.Structure):
    _fields_ = [
        ("slices", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("count", "kind", "add", "unused")),
    ]


def sum_slices(slices: Tensor, out: Tensor, *, add: bool) -> None:
    """Write, or add, the sum over the first dimension, in its order, on the current stream.

    Parameters
    ----------
    slices
        (N, numel), contiguous; fp32, bf16 or fp16.
    out
        (numel,) fp32, contiguous.
    add
        Start from what `out` holds, else from zero.
    """
    assert slices.dim() == 2 and slices.is_contiguous() and out.is_contiguous(), (slices.shape, out.shape)
    assert out.dtype == torch.float32 and out.shape == slices.shape[1:], (out.dtype, out.shape, slices.shape)
    if not compiler.usable(out.device):
        reference.sum_slices(slices, out, add=add)
        return
    if not out.numel():
        return
    args = _SumSlices(slices.data_ptr(), out.data_ptr(), out.numel(), slices.shape[0], KINDS[slices.dtype], int(add), 0)
    function = compiler.kernel("sums", "sum_slices", out.get_device())
    tuned = compiler.TUNED["sums"]
    function.launch(-(-out.numel() // tuned["CHUNK"]), tuned["BLOCK"], args)
