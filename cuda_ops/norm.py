"""The gradients' norm, slice by slice as reduces land, and where the first value lies that is not finite.

Sums are kept in float64 and added in a fixed order: the result depends on values and lengths alone, never on timing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS

MAX_BLOCKS = 1024
"""Partial sums of one slice. More than that many blocks no GPU runs at once."""

BLOCK_SHARE = 16384
"""Elements below which a slice is not given another block."""

NONE = 2**63 - 1


class Squares(ctypes.Structure):
    """Where the blocks of a launch leave the sum of squares of what they read or wrote; null: nowhere."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("partials", "ticket", "out")]


class _SquareSum(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("squares", Squares),
        ("kind", ctypes.c_int),
        ("unused", ctypes.c_int),
    ]


class _TotalSum(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("total", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
    ]


class _Settle(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("total", "applied", "norm", "coefficient", "scale", "skip")),
        ("mean", ctypes.c_double),
        ("clip", ctypes.c_double),
    ]


def norm_words(num_rows: int) -> int:
    """Elements of the int64 buffer in which `GradNorm` keeps partials, ticket, total, first, and a pair a row."""
    return 2 * MAX_BLOCKS + 4 + 2 * num_rows


class GradNorm:
    """Norm of the gradients of one step over `num_rows` slices.

    Per step: `add` once a row, in any order and on any one stream; `finish`; sum `total` over the ranks; `settle`.

    Parameters
    ----------
    words
        1D int64 on the gradients' device, `norm_words(num_rows)` elements, kept by the caller. Overwritten.
    """

    def __init__(self, words: Tensor, num_rows: int, *, defines: Mapping[str, int] | None = None) -> None:
        assert words.dtype == torch.int64 and words.numel() == norm_words(num_rows), (words.dtype, words.shape)
        words.zero_()
        self.num_rows, self.device = num_rows, words.device
        self._partials, self._ticket, total, self._first, self._rows = words.split(
            [2 * MAX_BLOCKS, 1, 1, 2, 2 * num_rows]
        )
        self.total = total.view(torch.float64)[0]
        """0-dim float64 on the device: the sum of squares of this rank's rows, after `finish`."""
        self._block = {**compiler.TUNED["norm"], **(defines or {})}["BLOCK"]
        self._defines = defines

    def add(self, row: int, grad: Tensor) -> None:
        """Take the sum of squares of one slice; replaces what the row held.

        `grad` is 1D and contiguous, of any length, in fp32, bf16 or fp16.
        """
        assert 0 <= row < self.num_rows, (row, self.num_rows)
        assert grad.dtype in KINDS and grad.is_contiguous(), (grad.dtype, grad.stride())
        out = self._rows[2 * row : 2 * row + 2]
        if not compiler.usable(self.device):
            total, bad = reference.square_sum(grad.reshape(-1))
            out[:1].view(torch.float64).fill_(total)
            out[1:].fill_(NONE if bad < 0 else bad)
            return
        grid = min(MAX_BLOCKS, max(1, -(-grad.numel() // BLOCK_SHARE)))
        params = _SquareSum(grad.data_ptr(), grad.numel(), self.squares(row), KINDS[grad.dtype])
        self._launch("square_sum", grid, self._block, params)

    def squares(self, row: int) -> Squares:
        """For a kernel of up to `MAX_BLOCKS` blocks on the stream of `add`: the row gets what it wrote."""
        assert 0 <= row < self.num_rows, (row, self.num_rows)
        return Squares(self._partials.data_ptr(), self._ticket.data_ptr(), self._rows[2 * row :].data_ptr())

    def square_sum(self, row: int) -> Tensor:
        """0-dim float64 on the device: what `add` found of a slice."""
        return self._rows[2 * row].view(torch.float64)

    def finish(self) -> None:
        """Add up the rows: writes `total` and which row went non-finite first."""
        if not compiler.usable(self.device):
            sums, bad = self._rows[0::2].view(torch.float64), self._rows[1::2]
            self.total.copy_(sums.sum())
            rows = (bad != NONE).nonzero()
            self._first.copy_(torch.stack([rows[0, 0], bad[rows[0, 0]]]) if len(rows) else torch.tensor([-1, -1]))
            return
        params = _TotalSum(self._rows.data_ptr(), self.num_rows, self.total.data_ptr(), self._first.data_ptr())
        self._launch("total_sum", 1, self._block, params)

    def settle(
        self,
        *,
        applied: Tensor,
        norm: Tensor,
        coefficient: Tensor,
        scale: Tensor,
        skip: Tensor,
        mean: float,
        clip: float,
    ) -> None:
        """Write the step's scalars (0-dim fp32 on the device) from `total`.

        Parameters
        ----------
        applied
            Incremented, unless the step is skipped.
        norm
            Of the averaged gradients, before clipping.
        coefficient
            What clipping multiplies gradients by, at most 1.
        scale
            What the update divides gradients by: averages and clips.
        skip
            1 if the norm is not finite, else 0.
        mean
            Factor that turns the sums that gradients are into means.
        clip
            Largest norm; 0: none.
        """
        if not compiler.usable(self.device):
            values = reference.settle(float(self.total), mean=mean, clip=clip)
            for into, value in zip((norm, coefficient, scale, skip), values, strict=True):
                into.fill_(value)
            applied.add_(1.0 - values[3])
            return
        scalars = (t.data_ptr() for t in (self.total, applied, norm, coefficient, scale, skip))
        self._launch("settle", 1, 1, _Settle(*scalars, mean, clip))

    def first_nonfinite(self) -> tuple[int, int] | None:
        """`(row, offset in its slice)` of this rank's first non-finite value, after `finish`. Waits for the device."""
        row, offset = self._first.tolist()
        return None if row < 0 else (row, offset)

    def _launch(self, function: str, grid: int, block: int, params: ctypes.Structure) -> None:
        index = self._rows.get_device()
        compiler.kernel("norm", function, index, self._defines).launch(grid, block, params)
