"""AdamW over a list of flat slices in one launch: moments, master and the 16-bit copy in one pass over memory.

The master is an fp32 array, or split: the bf16 weights and an array of what they lack. See [Note: halves] in
`halves.py`.

[Note: table] The launch reads the slices' addresses from a table on the device, written when an address changes.
Those of buffers that live from step to step never do; gradients that are born late come back at the same addresses in
the steady state. The copy to the device goes through pinned memory on the current stream: the host waits for nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from zplan.cuda_ops import compiler
from zplan.cuda_ops.halves import merge, split

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WORDS = 8
"""64-bit words of the table that one slice takes."""


@dataclass(frozen=True, eq=False)
class Slice:
    """What one contiguous slice of the optimizer's state is made of: 1D tensors of equal length."""

    master: Tensor | None  # fp32; None where `low` is given
    exp_avg: Tensor  # fp32
    exp_avg_sq: Tensor  # fp32
    half_copy: Tensor | None = None  # bf16 or fp16; receives the new values
    lr_scale: float = 1.0
    weight_decay_scale: float = 1.0
    low: Tensor | None = None  # int16: the lower halves of masters whose upper halves are the bf16 `half_copy`


class _Row(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("master", "grad", "exp_avg", "exp_avg_sq", "half_copy")),
        ("numel", ctypes.c_int64),
        ("first_chunk", ctypes.c_int64),
        ("lr_scale", ctypes.c_float),
        ("weight_decay_scale", ctypes.c_float),
    ]


class _AdamW(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slices", "applied", "scale", "skip")),
        *(
            (name, ctypes.c_double)
            for name in ("lr", "beta1", "beta2", "log_beta1", "log_beta2", "eps", "weight_decay")
        ),
        ("num_chunks", ctypes.c_int64),
        ("num_slices", ctypes.c_int),
        ("kind", ctypes.c_int),
    ]


class FusedAdamW:
    """The update of all slices that one rank owns.

    Parameters
    ----------
    slices
        On one device; half copies all of one dtype, and masters split in all of them or in none. Empty slices are
        allowed.
    table
        1D int64 on that device, `table_words(len(slices))` elements, kept by the caller. See [Note: table].
    defines
        Macros that differ from `compiler.TUNED`.
    max_blocks
        Largest grid; 0: one block a chunk.
    """

    def __init__(
        self, slices: Sequence[Slice], table: Tensor, *, defines: Mapping[str, int] | None = None, max_blocks: int = 0
    ) -> None:
        self.slices, self.table = list(slices), table
        assert table.dtype == torch.int64 and table.numel() == table_words(len(slices)), (table.dtype, table.shape)
        for s in slices:
            _check(s)
        kinds = {s.half_copy.dtype for s in slices if s.half_copy is not None}
        assert len(kinds) <= 1, f"half copies of several dtypes: {kinds}"
        self._kind = KINDS[kinds.pop()] if kinds else 0
        self._defines, self._max_blocks = dict(defines or {}), max_blocks
        if any(s.low is not None for s in slices):
            assert all(s.low is not None for s in slices), "some masters are split and some are not"
            self._defines = {**compiler.TUNED_SPLIT, **self._defines, "SPLIT": 1}
        self._macros = {**compiler.TUNED["adamw"], **self._defines}
        self._addresses: list[int] = []
        self._grad_dtype: torch.dtype | None = None
        self._params = _AdamW()

    def step(  # noqa: PLR0913  an optimizer's numbers, all of them named
        self,
        grads: Sequence[Tensor],
        *,
        applied: Tensor,
        scale: Tensor,
        skip: Tensor,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Update every slice from its gradient, on the current stream.

        Parameters
        ----------
        grads
            One 1D tensor a slice, of the slice's length; not changed. All fp32, or all bf16 or fp16.
        applied
            fp32 scalar on the device: steps applied, this one included. Bias correction is computed from it there.
        scale
            fp32 scalar on the device: gradients are divided by it.
        skip
            fp32 scalar on the device: not 0 leaves everything as it is, half copies too.
        lr, betas, eps, weight_decay
            As in `torch.optim.AdamW`; `lr` and `weight_decay` times the slice's factors.
        """
        if not self.slices:
            return
        if not compiler.usable(self.table.device):
            self._step_in_torch(grads, applied, scale, skip, (lr, betas, eps, weight_decay))
            return
        self._point(grads)
        p = self._params
        p.slices, p.applied, p.scale, p.skip = (t.data_ptr() for t in (self.table, applied, scale, skip))
        p.lr, (p.beta1, p.beta2), p.eps, p.weight_decay = lr, betas, eps, weight_decay
        p.log_beta1, p.log_beta2 = (math.log(b) if b > 0 else -math.inf for b in betas)
        if p.num_chunks:
            grid = min(p.num_chunks, self._max_blocks or p.num_chunks)
            defines = {**self._defines, "GRAD": KINDS[grads[0].dtype]}
            function = compiler.kernel("adamw", "adamw", self.table.get_device(), defines)
            function.launch(grid, self._macros["BLOCK"], p)

    def _point(self, grads: Sequence[Tensor]) -> None:
        """Bring the table up to date with where gradients are now."""
        addresses = [g.data_ptr() for g in grads]
        if addresses == self._addresses and grads[0].dtype == self._grad_dtype:
            return
        self._grad_dtype = grads[0].dtype
        for s, g in zip(self.slices, grads, strict=True):
            assert g.dtype == self._grad_dtype and g.is_contiguous() and g.numel() == s.exp_avg.numel(), (
                g.dtype,
                g.shape,
            )
        rows, chunk = (_Row * len(self.slices))(), 0
        for row, s, address in zip(rows, self.slices, addresses, strict=True):
            half = 0 if s.half_copy is None else s.half_copy.data_ptr()
            master = s.low if s.master is None else s.master
            assert master is not None
            row.master, row.grad, row.half_copy = master.data_ptr(), address, half
            row.exp_avg, row.exp_avg_sq = s.exp_avg.data_ptr(), s.exp_avg_sq.data_ptr()
            row.numel, row.first_chunk = s.exp_avg.numel(), chunk
            row.lr_scale, row.weight_decay_scale = s.lr_scale, s.weight_decay_scale
            chunk += -(-s.exp_avg.numel() // self._macros["CHUNK"])
        pinned = torch.empty(self.table.numel(), dtype=torch.int64, pin_memory=True)
        ctypes.memmove(pinned.data_ptr(), rows, ctypes.sizeof(rows))
        # torch keeps the pinned memory back until the copy is done, however soon the tensor goes.
        self.table.copy_(pinned, non_blocking=True)
        self._addresses = addresses
        self._params.num_chunks, self._params.num_slices, self._params.kind = chunk, len(self.slices), self._kind

    @torch.no_grad()
    def _step_in_torch(
        self,
        grads: Sequence[Tensor],
        applied: Tensor,
        scale: Tensor,
        skip: Tensor,
        numbers: tuple[float, tuple[float, float], float, float],
    ) -> None:
        """The same with torch's fused kernel, a call for each pair of factors; gradients come out divided."""
        lr, betas, eps, weight_decay = numbers
        order = sorted(zip(self.slices, grads, strict=True), key=lambda row: _factors(row[0]))
        for (lr_scale, decay_scale), found in groupby(order, key=lambda row: _factors(row[0])):
            rows = list(found)
            masters = [_whole(s) for s, _ in rows]
            torch._fused_adamw_(
                masters,
                [g.float() for _, g in rows],
                [s.exp_avg for s, _ in rows],
                [s.exp_avg_sq for s, _ in rows],
                [],
                [applied] * len(rows),
                lr=lr * lr_scale,
                beta1=betas[0],
                beta2=betas[1],
                weight_decay=weight_decay * decay_scale,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=skip,
            )
            for (s, _), master in zip(rows, masters, strict=True):
                if s.low is not None and s.half_copy is not None:
                    split(master, s.half_copy, s.low, torch.empty_like(master, dtype=torch.int32))
                elif s.half_copy is not None:
                    s.half_copy.copy_(master)


def load(device: torch.device, *, split: bool, grads: Sequence[torch.dtype]) -> None:
    """Load the kernels for split masters or whole ones and gradients of these dtypes, before a step needs them."""
    if compiler.usable(device):
        for dtype in grads:
            defines = {**(compiler.TUNED_SPLIT if split else {}), "GRAD": KINDS[dtype]}
            compiler.kernel("adamw", "adamw", device.index or 0, defines)


def table_words(num_slices: int) -> int:
    """Elements of the int64 table for so many slices."""
    assert ctypes.sizeof(_Row) == 8 * WORDS
    return WORDS * num_slices


def _factors(s: Slice) -> tuple[float, float]:
    return s.lr_scale, s.weight_decay_scale


def _whole(s: Slice) -> Tensor:
    """The fp32 master: the slice's own, or put together."""
    if s.master is not None:
        return s.master
    assert s.half_copy is not None and s.low is not None
    whole = torch.empty_like(s.exp_avg)
    return merge(s.half_copy, s.low, whole, torch.empty_like(whole, dtype=torch.int32))


def _check(s: Slice) -> None:
    for t in (s.master, s.exp_avg, s.exp_avg_sq, s.half_copy, s.low):
        assert t is None or (t.dim() == 1 and t.is_contiguous() and t.numel() == s.exp_avg.numel()), t.shape
    assert s.exp_avg.dtype == s.exp_avg_sq.dtype == torch.float32
    assert s.half_copy is None or s.half_copy.dtype in (torch.bfloat16, torch.float16), s.half_copy.dtype
    if s.low is None:
        assert s.master is not None and s.master.dtype == torch.float32
    else:
        assert s.master is None and s.half_copy is not None, "a split master has bf16 weights and no fp32 array"
        assert s.low.dtype == torch.int16 and s.half_copy.dtype == torch.bfloat16, (s.low.dtype, s.half_copy.dtype)
