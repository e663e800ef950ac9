"""Which logical ranges a rank's buffers hold, and where: the bridge between flat slices and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zplan.runtime.checkpoint_format import RANGE_NUMEL, Range
from zplan.runtime.unit import FlatUnit


@dataclass(frozen=True)
class Extent:
    """A logical range, and the element of the rank's tensor at which it starts."""

    range: Range
    at: int

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch of a 1D tensor that holds the range."""
        return tensor[self.at : self.at + self.range.end - self.range.start]


def state_tensor(unit: FlatUnit, state: str) -> Tensor:
    """The fp32 tensor that keeps a state. See [Note: masters] in planner/placement.py."""
    if state == "weight":
        tensor = unit.flat if unit.master is None else unit.master
    else:
        tensor = unit.exp_avg if state == "exp_avg" else unit.exp_avg_sq
    assert tensor is not None, f"unit {unit.name} has no {state}"
    return tensor


def extents(unit: FlatUnit, state: str, *, everything: bool) -> Iterator[Extent]:
    """What this rank keeps of a unit's state, in address order and in parts of at most `RANGE_NUMEL`.

    Parameters
    ----------
    everything
        The whole unit, which a rank must hold; otherwise the rank's slices, which is all where states are sharded, and
        this rank's share of the work where they are replicated.
    """
    layout = unit.layout
    whole = state_tensor(unit, state).numel() == layout.padded_numel
    if everything:
        assert whole, f"this rank holds a slice of unit {unit.name}"
        stretches = [(0, layout.padded_numel, 0)]
    else:
        stretches = []
        for piece in layout.pieces:
            start, end = layout.own(piece, unit.rank)
            stretches.append((start, end, start if whole else piece.shard_offset))
    for start, end, at in stretches:
        for entry in layout.entries:
            lo, hi = max(start, entry.offset), min(end, entry.end)
            for cut in range(lo, hi, RANGE_NUMEL):
                stop = min(cut + RANGE_NUMEL, hi)
                yield Extent(Range(state, entry.name, cut - entry.offset, stop - entry.offset), at + cut - start)
