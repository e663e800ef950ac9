"""Where the gradients of a step were first not finite: kept on the device by the norms, read only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zplan.planner.layout import UnitLayout
from zplan.planner.states import norm_chunk
from zplan.runtime.norms import KernelNorms
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.unit import FlatUnit


@dataclass(frozen=True)
class NonFinite:
    """The first value that was not finite, in the order in which units are reduced: the last unit comes first.

    Attributes
    ----------
    unit
        Its name.
    params
        The parameter, or those of a short stretch where the norms know no more than that.
    rank
        Whose slice it was in.
    """

    unit: str
    params: tuple[str, ...]
    rank: int

    def __str__(self) -> str:
        return f"{' or '.join(f'`{p}`' for p in self.params)} of unit `{self.unit}` on rank {self.rank}"


def first_nonfinite(optimizer: ShardedOptimizer) -> NonFinite | None:
    """Of the last step that was measured, on this rank; None where all its slices were finite.

    Waits for the device. The gradients themselves may be gone by then.
    """
    if isinstance(optimizer.norms, KernelNorms):
        found = optimizer.norms.norm.first_nonfinite()
        if found is None:
            return None
        row, offset = found
        unit = max((u for u in optimizer.units if optimizer.first_row[u] <= row), key=optimizer.first_row.__getitem__)
        start, _ = list(optimizer.measured_ranges(unit))[row - optimizer.first_row[unit]]
        return _told(unit, start + offset, start + offset + 1)
    bad = (~torch.isfinite(optimizer.norms.norms)).tolist()
    return next((_told(*where) for where, is_bad in zip(_stretches(optimizer), bad, strict=True) if is_bad), None)


def _stretches(optimizer: ShardedOptimizer) -> Iterator[tuple[FlatUnit, int, int]]:
    """Unit and range in its flat buffer of each partial norm, in the order of `TorchNorms.norms`."""
    for unit in reversed(optimizer.units):
        for start, end in optimizer.measured_ranges(unit):
            chunk = norm_chunk(optimizer.choice.device, end - start)
            yield from ((unit, at, min(at + chunk, end)) for at in range(start, end, chunk))


def _told(unit: FlatUnit, start: int, end: int) -> NonFinite:
    return NonFinite(unit.name, tuple(params_within(unit.layout, start, end)), unit.rank)


def params_within(layout: UnitLayout, start: int, end: int) -> list[str]:
    """Names of the parameters that have elements in `[start, end)` of a unit's flat buffer."""
    return [e.name for e in layout.entries if e.offset < end and start < e.end]
