"""A unit's fp32 master weights where no fp32 tensor holds them. See [Note: halves] in `cuda_ops/halves.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zplan.cuda_ops.halves import merge, split
from zplan.planner.saving import PART_NUMEL


class Halves:
    """Looks like the 1D fp32 tensor that it stands for, as far as those who save, load and read it need.

    Parameters
    ----------
    high
        bf16, in stretches that follow one another in `low`: slices of a flat buffer, or one shard.
    low
        1D int16, as long as all of `high`.
    """

    dtype = torch.float32

    def __init__(self, high: Sequence[Tensor], low: Tensor) -> None:
        assert sum(h.numel() for h in high) == low.numel(), (len(high), low.shape)
        self.high, self.low = tuple(high), low

    @property
    def nbytes(self) -> int:
        """Of the values that it stands for."""
        return 4 * self.low.numel()

    @property
    def is_cuda(self) -> bool:
        return self.low.is_cuda

    def numel(self) -> int:
        return self.low.numel()

    def __getitem__(self, cut: slice) -> Halves:
        """Part of it, over the same memory."""
        start, stop, _ = cut.indices(self.numel())
        parts, at = [], 0
        for h in self.high:
            lo, hi = max(start - at, 0), min(stop - at, h.numel())
            if lo < hi:
                parts.append(h[lo:hi])
            at += h.numel()
        return Halves(parts, self.low[start:stop])

    def whole(self) -> Tensor:
        """The fp32 values, in new memory, with work space as in `copy_` meanwhile."""
        out = torch.empty(self.numel(), dtype=torch.float32, device=self.low.device)
        work = torch.empty(min(PART_NUMEL, self.numel()), dtype=torch.int32, device=self.low.device)
        for h, low, part in self._rows(out):
            for row in zip(*(t.split(PART_NUMEL) for t in (h, low, part)), strict=True):
                merge(*row, work[: row[2].numel()])
        return out

    def copy_(self, values: Tensor) -> None:
        """Keep other values, of any dtype and device. `PART_NUMEL` elements at a time have 4 bytes of work space."""
        for h, low, part in self._rows(values):
            for row in zip(*(t.split(PART_NUMEL) for t in (part, h, low)), strict=True):
                new = row[0].to(low.device, torch.float32)
                split(new, row[1], row[2], torch.empty_like(new, dtype=torch.int32))

    def _rows(self, values: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        sizes = [h.numel() for h in self.high]
        return list(zip(self.high, self.low.split(sizes), values.split(sizes), strict=True)) if sizes else []


def round_whole(values: Tensor, high: Tensor) -> None:
    """Write fp32 values into bf16 as upper halves are rounded: what other ranks keep the lower halves of."""
    for part, h in zip(values.split(PART_NUMEL), high.split(PART_NUMEL), strict=True):
        split(part, h, torch.empty_like(h, dtype=torch.int16), torch.empty_like(part, dtype=torch.int32))


def values_of(kept: Tensor | Halves) -> Tensor:
    """The values of what keeps a state: itself, or new memory."""
    return kept.whole() if isinstance(kept, Halves) else kept
