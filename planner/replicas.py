"""Lines of the hashes by which ranks find out that they have drifted apart (`check_replicas_every`)."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.placement import Placement
from zplan.planner.timeline import Timeline

OF_ALL = 2
"""Hashes that belong to no unit: the optimizer's numbers on the host, and its scalars on the device."""

INT64 = 8


def num_hashes(placements: Sequence[Placement], choice: Choice) -> int:
    """Hashes that one rank makes: two, and one for each unit that is whole on every rank between its uses."""
    if not choice.check_replicas_every or choice.world_size == 1:
        return 0
    return OF_ALL + sum(not p.ringed and not p.unit.quantized for p in placements)


def replica_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Everybody's hashes, on the device and, where that is a GPU, in the page-locked memory that the host reads."""
    nbytes = INT64 * choice.world_size * num_hashes(placements, choice)
    lines = [Line("comm.replicas", nbytes, (time.always,), "buffers")]
    if choice.device == "cuda":
        lines.append(Line("comm.replicas.host", nbytes, (time.always,), "buffers", "pinned"))
    return lines
