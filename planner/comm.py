"""Bytes that one rank sends per optimizer step, exact for zplan's runtime, and as textbooks count them.

A ring gather or reduce-scatter of S bytes over N ranks sends S (N - 1) / N from each; an all-reduce is both. Flat units
are padded to a multiple of N, so the division is exact. Every rank receives as much as it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zplan.planner.buffers import uses_reduce_slots
from zplan.planner.config import REDUCE_ITEMSIZE, Choice
from zplan.planner.models import ModelSpec
from zplan.planner.placement import Placement, place, shards_states


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank in one optimizer step, all micro-steps included."""

    gather_bytes: int
    """Parameters, in the compute dtype."""
    reduce_bytes: int
    """Gradients."""

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes


def traffic(spec: ModelSpec, choice: Choice, placements: Sequence[Placement] | None = None) -> Traffic:
    """What the runtime moves for a choice.

    Stage 0 all-reduces whole fp32 gradients at the last micro-step; stage 1 reduces them to shards there, stages 2 and
    3 at every micro-step: in the compute dtype by an exchange, in fp32 by a reduce-scatter. Stages 1 and 2 gather every
    unit once, after the step. At stage 3 so do resident units; the others are gathered as `ring_gathers` says.
    """
    n, k = choice.world_size, choice.accumulation
    if n == 1:
        return Traffic(0, 0)
    if placements is None:
        placements = place(spec, choice)
    sent = sum(p.layout.padded_numel for p in placements) // n * (n - 1)
    if not shards_states(choice):
        return Traffic(0, 2 * sent * REDUCE_ITEMSIZE)
    gathered = sum(p.layout.padded_numel for p in placements if not p.ringed)
    for ring in dict.fromkeys(p.ring for p in placements if p.ringed):
        members = [(p.layout.padded_numel, p.reads_in_backward) for p in placements if p.ring == ring]
        gathered += ring_gathers(tuple(members), choice.ring_slots, accumulation=k)
    reduces = 1 if choice.stage == 1 else k
    exchanges = choice.reduce == "exchange" and uses_reduce_slots(choice)
    itemsize = choice.itemsize if exchanges else REDUCE_ITEMSIZE
    return Traffic(gathered // n * (n - 1) * choice.itemsize, reduces * sent * itemsize)


@lru_cache(maxsize=64)
def ring_gathers(members: tuple[tuple[int, bool], ...], slots: int, *, accumulation: int) -> int:
    """Elements gathered per optimizer step by the members of one ring, which take its `slots` slots in turn.

    Each micro-step runs them up and down. The last ones up are still in their slots on the way down, and the last ones
    down at the next micro-step, which therefore gathers less than the first: after the step all values are new.

    Parameters
    ----------
    members
        `(elements, whether backward reads them)` in forward order.

    Examples
    --------
    >>> [ring_gathers(((1, True),) * 32, 2, accumulation=k) for k in (1, 4)]
    [62, 242]
    """
    held: dict[int, int] = {}
    totals = []
    up = list(range(len(members)))
    for _ in range(min(accumulation, 2)):
        total = 0
        for i in [*up, *(i for i in reversed(up) if members[i][1])]:
            if held.get(i % slots) != i:
                held[i % slots] = i
                total += members[i][0]
        totals.append(total)
    return totals[0] + (accumulation - 1) * totals[-1]


def textbook_volume(stage: int, accumulation: int) -> int:
    """Volume per optimizer step in units of P (N - 1) / N elements, as the ZeRO paper counts, with accumulation.

    Examples
    --------
    >>> [textbook_volume(s, 1) for s in range(4)], [textbook_volume(s, 4) for s in range(4)]
    ([2, 2, 2, 3], [2, 2, 5, 12])
    """
    return (2, 2, accumulation + 1, 3 * accumulation)[stage]


def textbook_traffic(num_params: int, stage: int, *, world_size: int, accumulation: int = 1, itemsize: int = 2) -> int:
    """Bytes that textbooks count as sent by one rank: `textbook_volume` with everything in 16 bits."""
    elements = textbook_volume(stage, accumulation) * num_params * (world_size - 1)
    return -(-elements * itemsize // world_size)
