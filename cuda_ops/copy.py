"""A unit's gradients into a flat buffer, converted, written or added, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS


class _Entry(ctypes.Structure):
    _fields_ = [("grad", ctypes.c_void_p), ("start", ctypes.c_int64), ("end", ctypes.c_int64), ("kind", ctypes.c_int)]


NUM_ENTRIES = compiler.TUNED["copy"]["NUM_ENTRIES"]
"""Gradients of one launch: the list is the kernel's argument, of at most 4 KiB."""


class _CopyGrads(ctypes.Structure):
    _fields_ = [
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("start", "end", "low", "high")),
        ("num_entries", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("add", "kind", "unused")),
        ("entries", _Entry * NUM_ENTRIES),
    ]


class GradCopy:
    """Copies gradients of one unit, whose places never change.

    Parameters
    ----------
    spans
        `(start, end)` of each gradient in the unit's flat address space, in elements, in order and without overlap.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], *, defines: Mapping[str, int] | None = None) -> None:
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "spans overlap or are out of order"
        self.spans = list(spans)
        self._macros = {**compiler.TUNED["copy"], **(defines or {})}
        self._defines = defines
        self._groups = [_CopyGrads() for _ in range(0, max(1, len(spans)), NUM_ENTRIES)]
        for i, (start, end) in enumerate(spans):
            entry = self._groups[i // NUM_ENTRIES].entries[i % NUM_ENTRIES]
            entry.start, entry.end = start, end
        for i, group in enumerate(self._groups):
            group.num_entries = min(NUM_ENTRIES, len(spans) - i * NUM_ENTRIES)

    def __call__(self, grads: Sequence[Tensor | None], target: Tensor, start: int, *, add: bool) -> None:
        """Write or add what lies in `[start, start + target.numel())` of the flat address space, on the current stream.

        Parameters
        ----------
        grads
            One a span: fp32, bf16 or fp16 of any shape; None counts as zeros. To be kept until the stream has passed.
        target
            1D, contiguous; fp32, or bf16 or fp16 without `add`.
        add
            If false, everything is overwritten; what no gradient fills becomes 0.
        """
        assert target.dim() == 1 and target.is_contiguous(), target.shape
        assert target.dtype == torch.float32 or (target.dtype in KINDS and not add), target.dtype
        for grad, (low, high) in zip(grads, self.spans, strict=True):
            assert grad is None or grad.numel() == high - low, (grad.shape, low, high)
        # A gradient that is laid out in another order than its parameter is rare, and torch converts it well.
        strided = any(g is not None and not g.is_contiguous() for g in grads)
        if strided or not compiler.usable(target.device):
            reference.copy_grads(grads, self.spans, target, start, add=add)
            return
        end = start + target.numel()
        for i, group in enumerate(self._groups):
            # Launches share the target at the starts of their first entries.
            first = i * NUM_ENTRIES
            low = start if i == 0 else max(start, self.spans[first][0])
            last = i + 1 == len(self._groups)
            high = end if last else min(end, self.spans[first + NUM_ENTRIES][0])
            if low < high:
                self._launch(group, grads[first : first + NUM_ENTRIES], target, (start, end, low, high), add=add)

    def _launch(
        self,
        group: _CopyGrads,
        grads: Sequence[Tensor | None],
        target: Tensor,
        bounds: tuple[int, int, int, int],
        *,
        add: bool,
    ) -> None:
        for entry, grad in zip(group.entries, grads, strict=False):
            entry.grad = 0 if grad is None else grad.data_ptr()
            entry.kind = 0 if grad is None else KINDS[grad.dtype]
        group.target, group.add, group.kind = target.data_ptr(), int(add), KINDS[target.dtype]
        group.start, group.end, group.low, group.high = bounds
        function = compiler.kernel("copy", "copy_grads", target.get_device(), self._defines)
        function.launch(-(-(group.high - group.low) // self._macros["CHUNK"]), self._macros["BLOCK"], group)
