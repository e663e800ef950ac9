"""Bytes that one rank moves per optimizer step, exact for zplan's runtime, and as textbooks count them.

A ring gather or reduce-scatter of S bytes over N ranks sends S (N - 1) / N from each; an all-reduce is both. Flat units
are padded to a multiple of N, so the division is exact. Every rank receives as much as it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zplan.planner.config import Choice
from zplan.planner.models import ModelSpec
from zplan.planner.placement import Placement, place, shards_states


@dataclass(frozen=True)
class Traffic:
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

    Stage 0 all-reduces whole gradients at the last micro-step; stage 1 reduce-scatters them there, stages 2 and 3 at
    every micro-step. Stages 1 and 2 gather every unit once, after the step. At stage 3 so do resident units; the others
    are gathered as `ring_gathers` says. Frozen units have no gradients, and where they are resident they never change.
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
        return replace(beside, gather_bytes=0, reduce_bytes=0)
    trained = [p for p in placements if not p.frozen]
    sent = sum(p.layout.padded_numel for p in trained) // n * (n - 1) * choice.reduce_itemsize
    if not shards_states(choice):
        return replace(beside, reduce_bytes=2 * sent)
    gathered += sum(p.buffer_bytes(choice) for p in trained if not p.ringed)
    reduces = 1 if choice.stage == 1 else k
    return replace(beside, gather_bytes=gathered // n * (n - 1), reduce_bytes=reduces * sent)


def ring_bytes(placements: Sequence[Placement], choice: Choice) -> int:
    """Whole bytes of all units that are gathered into a ring in one step, as often as they are."""
    every = choice.checkpoint_every if choice.checkpointing == "full" else 1
    count = Counter(p.size_class for p in placements if p.ringed)
    nbytes = {p.size_class: p.buffer_bytes(choice) for p in placements if p.ringed}
    return sum(
        nbytes[name] * ring_gathers(blocks, choice.ring_slots, accumulation=choice.accumulation, every=every)
        for name, blocks in count.items()
    )


def _beside(spec: ModelSpec, choice: Choice, placements: Sequence[Placement], gathered: int) -> Traffic:
    """What goes to the host and to disk; `gathered`: whole bytes gathered into a ring in a step."""
    if choice.offload.optimizer == "none" and not choice.checkpoint_offload:
        return Traffic(0, 0)
    from zplan.planner.offload_work import offload_work

    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    trained = [p for p in placements if not p.frozen]
    total = sum(p.layout.padded_numel for p in trained)
    block = sum(p.layout.padded_numel for p in trained if p.ringed) / arch.layers
    off = offload_work(choice, total, block, layers=arch.layers, hidden=arch.hidden)
    inputs = choice.accumulation * off.layers * off.input_bytes
    fetched = 0 if choice.offload.params == "none" else gathered // choice.world_size
    return Traffic(
        0, 0, off.down_bytes + inputs, off.up_bytes + inputs + fetched, off.disk_read_bytes, off.disk_written_bytes
    )


def ring_gathers(blocks: int, slots: int, *, accumulation: int, every: int = 1) -> int:
    """Gathers per optimizer step of `blocks` equal blocks that share `slots` slots.

    Each micro-step runs the blocks up and down. The last ones up are still in their slots on the way down, and the last
    ones down at the next micro-step: every turn but the one at the step, where all values change, saves `slots`.
    `every`: blocks of one checkpointed segment, which are all run again before the way down through them: where there
    are more than slots, that is a third gather.

    Examples
    --------
    >>> ring_gathers(32, 2, accumulation=1), ring_gathers(32, 2, accumulation=4)
    (62, 242)
    >>> ring_gathers(32, 2, accumulation=1, every=2), ring_gathers(32, 2, accumulation=1, every=8)
    (62, 88)
    """
    if every <= 1:
        passes = 2 * accumulation
        return passes * blocks - (passes - 1) * slots
    once, twice = _misses(blocks, slots, every, 1), _misses(blocks, slots, every, 2)
    return once + (accumulation - 1) * (twice - once)  # All micro-steps but the first are alike.


def _misses(blocks: int, slots: int, every: int, micro_steps: int) -> int:
    """Walk the blocks up and down, segment by segment, and count what is not in its slot."""
    down: list[int] = []
    for first in reversed(range(0, blocks, every)):
        segment = range(first, min(first + every, blocks))
        down += [*segment, *reversed(segment)]
    held = [-1] * slots
    misses = 0
    for _ in range(micro_steps):
        for i in (*range(blocks), *down):
            if held[i % slots] != i:
                misses, held[i % slots] = misses + 1, i
    return misses


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
