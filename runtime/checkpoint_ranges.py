"""Which logical ranges a rank's buffers hold, and where: the bridge between flat slices and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from zplan.runtime.checkpoint_format import FROZEN, RANGE_NUMEL, WEIGHT, Range
from zplan.runtime.halves import Halves
from zplan.runtime.unit import FlatUnit

Kept = TypeVar("Kept", Tensor, Halves)


@dataclass(frozen=True)
class Extent:
    """A logical range, and the element of the rank's tensor at which it starts."""

    range: Range
    at: int

    def of(self, tensor: Kept) -> Kept:
        """The stretch of a 1D tensor that holds the range."""
        return tensor[self.at : self.at + self.range.end - self.range.start]


NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""dtypes by their names in safetensors."""


def states_of(unit: FlatUnit) -> tuple[str, ...]:
    """What is saved of a unit's parameters."""
    return (FROZEN,) if unit.placement.frozen else (WEIGHT, *unit.states)


def state_tensor(unit: FlatUnit, state: str) -> Any:
    """The tensor that keeps a state, or the halves that stand for it.

    See [Note: masters] and [Note: frozen] in planner/placement.py.
    """
    if state == FROZEN:
        tensor = unit.flat if unit.shard is None else unit.shard
    elif state == WEIGHT:
        return unit.weights
    else:
        tensor = unit.states.get(state)
    assert tensor is not None, f"unit {unit.name} has no {state}"
    return tensor


def extents(unit: FlatUnit, state: str, tensor: Tensor | Halves, *, everything: bool) -> Iterator[Extent]:
    """What this rank keeps of a unit's state, in address order and in parts of at most `RANGE_NUMEL`.

    Parameters
    ----------
    tensor
        What holds the state: the unit's own tensor, or a copy of this rank's slices.
    everything
        The whole unit, which a rank must hold; otherwise the rank's slices, which is all where states are sharded, and
        this rank's share of the work where they are replicated.
    """
    layout = unit.layout
    whole, dtype = tensor.numel() == layout.padded_numel, NAMES[tensor.dtype]
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
                range_ = Range(state, entry.name, cut - entry.offset, stop - entry.offset, dtype)
                yield Extent(range_, at + cut - start)
