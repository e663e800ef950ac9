"""The line of a save behind training: a copy of the states in host memory, which is written while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import Placement
from zplan.planner.states import FP32
from zplan.planner.timeline import Timeline

RANGE_NUMEL = 4 * 2**20
"""Most elements of one range of a checkpoint."""

BLOCKS, BLOCK_BYTES = 4, 16 * 2**20
"""Host memory of one rank that a save passes through: blocks that are filled, summed, or on their way to the disk."""

ALIGN_BYTES = 4096
"""What a block begins with a multiple of in memory; pageable memory needs as much room to begin later."""

PART_NUMEL = 2**18
"""Most fp32 elements that are taken apart into halves at once (`runtime/halves.py`)."""

CHECKSUM_NUMEL = 2**22
"""Elements that are summed at once to compare replicas; each takes 8 bytes for a moment."""


def snapshot_numel(placements: Sequence[Placement], choice: Choice) -> int:
    """fp32 elements of the copy: what this rank writes, one slice of each piece even where it holds all.

    Weights and the optimizer's states, those too that are kept in 16 bits.
    """
    return (1 + len(kind_of(choice.optimizer).states)) * sum(p.layout.shard_numel for p in placements if not p.frozen)


def saving_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """One pinned buffer from start to end, so that no save is the first to find that there is no room."""
    if choice.saving == "foreground":
        return []
    note = "copy that a checkpoint is written from"
    return [
        Line("save.snapshot", snapshot_numel(placements, choice) * FP32, (time.always,), "buffers", "pinned", note=note)
    ]
