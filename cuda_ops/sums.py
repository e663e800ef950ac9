"""What every rank sent of one slice, added up in fp32 in one launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS


class _SumSlices(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slices", "own", "out")),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("count", "kind", "add", "rank")),
    ]


def sum_slices(slices: Tensor, out: Tensor, *, add: bool, own: tuple[int, Tensor] | None = None) -> None:
    """Write, or add, the sum over the first dimension, in its order, on the current stream.

    Parameters
    ----------
    slices
        (N, numel), contiguous; fp32, bf16 or fp16.
    out
        (numel,) fp32, contiguous.
    add
        Start from what `out` holds, else from zero.
    own
        `(rank, slice)` where one slice lies elsewhere: `slices` then holds the others', (N - 1, numel), and the sum has
        this one at its rank's place.
    """
    assert slices.dim() == 2 and slices.is_contiguous() and out.is_contiguous(), (slices.shape, out.shape)
    assert out.dtype == torch.float32 and out.shape == slices.shape[1:], (out.dtype, out.shape, slices.shape)
    if not compiler.usable(out.device):
        reference.sum_slices(slices, out, add=add, own=own)
        return
    if not out.numel():
        return
    rank, mine = (0, None) if own is None else own
    assert mine is None or (mine.dtype == slices.dtype and mine.is_contiguous() and mine.shape == out.shape), mine
    addresses = (slices.data_ptr(), 0 if mine is None else mine.data_ptr(), out.data_ptr())
    count = slices.shape[0] + (mine is not None)
    args = _SumSlices(*addresses, out.numel(), count, KINDS[slices.dtype], int(add), rank)
    function = compiler.kernel("sums", "sum_slices", out.get_device())
    tuned = compiler.TUNED["sums"]
    function.launch(-(-out.numel() // tuned["CHUNK"]), tuned["BLOCK"], args)
