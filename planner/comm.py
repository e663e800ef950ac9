"""Bytes that one rank moves per optimizer step, exact for zplan's runtime, and as textbooks count them.

A ring gather or reduce-scatter of S bytes over N ranks sends S (N - 1) / N from each; an all-reduce is both. Flat units
are padded to a multiple of N, so the division is exact. Every rank receives as much as it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zplan.planner.buffers import in_rank_order, uses_reduce_slots
from zplan.planner.config import Choice
from zplan.planner.models import ModelSpec
from zplan.planner.placement import Placement, place, shards_states


class Traffic(NamedTuple):
    """Bytes of one rank in one optimizer step, all micro-steps included."""

    gather_bytes: int
    """Sent to other ranks: parameters, in the compute dtype."""
    reduce_bytes: int
    """Sent to other ranks: gradients, in the reduce dtype."""
    down_bytes: int = 0
    """Over PCIe to the host: offloaded gradients, and inputs of checkpointed blocks."""
    up_bytes: int = 0
    """Back: updated or gathered parameters, and those inputs."""
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sent to other ranks."""
        return self.gather_bytes + self.reduce_bytes


def traffic(spec: ModelSpec, choice: Choice, placements: Sequence[Placement] | None = None) -> Traffic:
    """What the runtime moves for a choice.

    Stage 0 all-reduces whole fp32 gradients at the last micro-step, or where sums are in rank order exchanges them at
    every one and gathers the sums at the last; stage 1 reduces them to shards there, stages 2 and
    3 at every micro-step: in the compute dtype by an exchange, in fp32 by a reduce-scatter. Stages 1 and 2 gather every
    unit once, after the step. At stage 3 so do resident units; the others are gathered as `ring_gathers` says. Frozen
    units have no gradients, and where they are resident they never change.
    """
    if choice.runtime != "zplan":
        from zplan.planner.peer_rate import peer_traffic

        return peer_traffic(spec, choice)
    n, k = choice.world_size, choice.accumulation
    if placements is None:
        placements = place(spec, choice)
    gathered = ring_bytes(placements, choice)
    beside = _beside(spec, choice, placements, gathered)
    if n == 1:
        return beside._replace(gather_bytes=0, reduce_bytes=0)
    trained = [p for p in placements if not p.frozen]
    sent = sum(p.layout.padded_numel for p in trained) // n * (n - 1)
    if not shards_states(choice):
        summed = k * sent * wire_itemsize(choice) if in_rank_order(choice) else sent * choice.reduce_itemsize
        return beside._replace(reduce_bytes=summed + sent * choice.reduce_itemsize)
    gathered += sum(p.buffer_bytes(choice) for p in trained if not p.ringed)
    reduced = num_reduces(choice) * sent * wire_itemsize(choice)
    return beside._replace(gather_bytes=gathered // n * (n - 1), reduce_bytes=reduced)


def num_reduces(choice: Choice) -> int:
    """Times a step that a unit's gradients are sent: stages 0 and 1 wait for the last micro-step where they may."""
    return 1 if choice.stage < 2 and not in_rank_order(choice) else choice.accumulation


def wire_itemsize(choice: Choice) -> int:
    """Bytes of one gradient element on its way: an exchange carries the compute dtype, a sum in place its own."""
    exchanges = choice.reduce == "exchange" and uses_reduce_slots(choice)
    return choice.itemsize if exchanges else choice.reduce_itemsize


def ring_bytes(placements: Sequence[Placement], choice: Choice) -> int:
    """Whole bytes of all units that are gathered into a ring in one step, as often as they are."""
    return sum(_ring(placements, ring, choice) for ring in dict.fromkeys(p.ring for p in placements if p.ring))


def _ring(placements: Sequence[Placement], ring: str, choice: Choice) -> int:
    members = [p for p in placements if p.ring == ring]
    blocks = [i for i, p in enumerate(members) if p.unit.kind == "block"]
    return ring_gathers(
        tuple((p.buffer_bytes(choice), p.reads_in_backward) for p in members),
        choice.ring_slots,
        accumulation=choice.accumulation,
        every=choice.checkpoint_every if choice.checkpointing == "full" else 1,
        blocks=(blocks[0], blocks[-1] + 1) if blocks else (0, 0),
    )


def _beside(spec: ModelSpec, choice: Choice, placements: Sequence[Placement], gathered: int) -> Traffic:
    """What goes to the host and to disk; `gathered`: whole bytes gathered into rings in a step."""
    if choice.offload.optimizer == "none" and not choice.checkpoint_offload:
        return Traffic(0, 0)
    from zplan.planner.offload_work import offload_work

    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    trained = [p for p in placements if not p.frozen]
    total = sum(p.layout.padded_numel for p in trained)
    block = sum(p.layout.padded_numel for p in trained if p.ringed and p.unit.kind == "block") / arch.layers
    guests = sum(p.layout.padded_numel for p in trained if p.ringed and p.unit.kind != "block")
    off = offload_work(choice, total, block, layers=arch.layers, hidden=arch.hidden, guests=guests)
    inputs = choice.accumulation * off.layers * off.input_bytes
    fetched = 0 if choice.offload.params == "none" else gathered // choice.world_size
    return Traffic(
        0, 0, off.down_bytes + inputs, off.up_bytes + inputs + fetched, off.disk_read_bytes, off.disk_written_bytes
    )


@lru_cache(maxsize=64)
def ring_gathers(
    members: tuple[tuple[int, bool], ...],
    slots: int,
    *,
    accumulation: int,
    every: int = 1,
    blocks: tuple[int, int] | None = None,
) -> int:
    """What is gathered per optimizer step by the members of one ring, which take its `slots` slots in turn.

    Each micro-step runs them up and down. The last ones up are still in their slots on the way down, and the last ones
    down at the next micro-step, which therefore gathers less than the first: after the step all values are new.

    Parameters
    ----------
    members
        `(elements or bytes, whether backward reads them)` in forward order.
    every
        Blocks of one checkpointed segment, which are all run again before the way down through them: where there are
        more than slots, that is a third gather.
    blocks
        First member that is a block, and one past the last; by default all are.

    Examples
    --------
    >>> [ring_gathers(((1, True),) * 32, 2, accumulation=k) for k in (1, 4)]
    [62, 242]
    >>> [ring_gathers(((1, True),) * 32, 2, accumulation=1, every=n) for n in (2, 8)]
    [62, 88]
    """
    first, end = blocks or (0, len(members))
    up = list(range(len(members)))
    segments = [[i] for i in up[:first]]
    segments += [up[i : min(i + every, end)] for i in range(first, end, every)] + [[i] for i in up[end:]]
    down = [i for s in reversed(segments) for i in ([*s, *reversed(s)] if len(s) > 1 else s)]
    held: dict[int, int] = {}
    totals = []
    for _ in range(min(accumulation, 2)):
        total = 0
        for i in [*up, *(i for i in down if members[i][1])]:
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
