"""A unit's gradients into a flat buffer, or with what other ranks sent into one slice, each in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS
from zplan.cuda_ops.compiler import NUM_ENTRIES
from zplan.cuda_ops.norm import MAX_BLOCKS, GradNorm, Squares


class _Entry(ctypes.Structure):
    _fields_ = [("grad", ctypes.c_void_p), ("start", ctypes.c_int64), ("end", ctypes.c_int64), ("kind", ctypes.c_int)]


class _Entries(ctypes.Structure):
    _fields_ = [
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("num", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("of", _Entry * NUM_ENTRIES),
    ]


class _CopyGrads(ctypes.Structure):
    _fields_ = [
        ("target", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("add", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("entries", _Entries),
    ]


class _SumGrads(ctypes.Structure):
    _fields_ = [
        ("others", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("count", "rank", "kind", "add")),
        ("squares", Squares),
        ("entries", _Entries),
    ]


class GradPlaces:
    """Where the gradients of one unit lie in its flat address space.

    Parameters
    ----------
    spans
        `(start, end)` of each gradient, in elements, in order and without overlap.
    defines
        Macros that differ from `compiler.TUNED`.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], *, defines: Mapping[str, int] | None = None) -> None:
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "spans overlap or are out of order"
        self.spans, self.defines = list(spans), dict(defines or {})
        self._groups: list[_Entries] = []
        for first in range(0, max(1, len(spans)), NUM_ENTRIES):
            group = _Entries()
            group.num = min(NUM_ENTRIES, len(spans) - first)
            for entry, (start, end) in zip(group.of, spans[first:], strict=False):
                entry.start, entry.end = start, end
            self._groups.append(group)

    def of(self, grads: Sequence[Tensor | None]) -> UnitGrads:
        """One a span: fp32, bf16 or fp16 of any shape; None counts as zeros. To be kept until launches are over."""
        for grad, (low, high) in zip(grads, self.spans, strict=True):
            assert grad is None or grad.numel() == high - low, (grad.shape, low, high)
        # A gradient that is laid out otherwise than its parameter is rare, and torch does it well.
        if any(g is not None and not g.is_contiguous() for g in grads):
            return UnitGrads(self, grads, [])
        groups = [_Entries.from_buffer_copy(group) for group in self._groups]
        for i, grad in enumerate(grads):
            if grad is not None:
                entry = groups[i // NUM_ENTRIES].of[i % NUM_ENTRIES]
                entry.grad, entry.kind = grad.data_ptr(), KINDS[grad.dtype]
        return UnitGrads(self, grads, groups)


class UnitGrads:
    """The gradients of one backward of one unit, each where autograd left it. Made by `GradPlaces.of`."""

    def __init__(self, places: GradPlaces, grads: Sequence[Tensor | None], groups: Sequence[_Entries]) -> None:
        self._places, self._grads, self._groups = places, grads, groups

    def copy(self, target: Tensor, start: int, *, add: bool) -> None:
        """Write or add what lies in `[start, start + target.numel())` of the flat address space, on the current stream.

        Parameters
        ----------
        target
            1D, contiguous; fp32, or bf16 or fp16 without `add`.
        add
            If false, everything is overwritten; what no gradient fills becomes 0.
        """
        assert target.dim() == 1 and target.is_contiguous(), target.shape
        assert target.dtype == torch.float32 or (target.dtype in KINDS and not add), target.dtype
        if not self._groups or not compiler.usable(target.device):
            reference.copy_grads(self._grads, self._places.spans, target, start, add=add)
            return
        for entries in self._launches(start, start + target.numel()):
            args = _CopyGrads(target.data_ptr(), start, int(add), KINDS[target.dtype], entries)
            self._launch("copy", "copy_grads", target, entries, args)

    def sum(  # noqa: PLR0913  one launch
        self,
        others: Tensor,
        rank: int,
        target: Tensor,
        start: int,
        *,
        add: bool,
        norm: tuple[GradNorm, int] | None = None,
    ) -> None:
        """Write, or add, the sum over ranks of one slice, in rank order, on the current stream.

        Parameters
        ----------
        others
            (N - 1, numel), contiguous, fp32, bf16 or fp16: what every other rank sent, in rank order.
        rank
            The place of this one among them.
        target
            (numel,) fp32, contiguous: elements `[start, start + numel)` of the flat address space.
        add
            Start from what `target` holds, else from zero.
        norm
            Takes the sum of squares of what `target` then holds, in that row.
        """
        assert others.dim() == 2 and others.is_contiguous() and target.is_contiguous(), (others.shape, target.shape)
        assert target.dtype == torch.float32 and target.shape == others.shape[1:], (target.dtype, target.shape)
        launches: list[_Entries] = []
        if self._groups and compiler.usable(target.device):
            launches = list(self._launches(start, start + target.numel()))
        else:
            reference.sum_grads(self._grads, self._places.spans, others, rank, target, start, add=add)
        alone = norm is not None and len(launches) == 1
        for entries in launches:
            args = _SumGrads(others.data_ptr(), target.data_ptr(), start, target.numel())
            args.count, args.rank, args.kind, args.add = len(others) + 1, rank, KINDS[others.dtype], int(add)
            args.entries = entries
            if norm is not None and alone:
                args.squares = norm[0].squares(norm[1])
            self._launch("sums", "sum_grads", target, entries, args)
        if norm is not None and not alone:
            norm[0].add(norm[1], target)

    def _launches(self, start: int, end: int) -> Iterator[_Entries]:
        """The lists of the launches that together go over `[start, end)`, which they share at their first entries."""
        spans = self._places.spans
        for i, group in enumerate(self._groups):
            first = i * NUM_ENTRIES
            group.low = start if i == 0 else max(start, spans[first][0])
            last = i + 1 == len(self._groups)
            group.high = end if last else min(end, spans[first + NUM_ENTRIES][0])
            if group.low < group.high:
                yield group

    def _launch(self, name: str, function: str, target: Tensor, entries: _Entries, args: ctypes.Structure) -> None:
        defines = self._places.defines
        macros = {**compiler.TUNED[name], **defines}
        grid = -(-(entries.high - entries.low) // macros["CHUNK"])
        if name == "sums":
            grid = min(grid, MAX_BLOCKS)
        compiler.kernel(name, function, target.get_device(), defines).launch(grid, macros["BLOCK"], args)
