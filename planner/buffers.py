"""Lines of the runtime's working buffers: ring, reduce slots, reduced gradients, placeholders.

[Note: fixed order] Sums of floats depend on their order. A deterministic run adds up each micro-step's gradients over
ranks in rank order, by the exchange, and the micro-steps one after another, at every stage. So stage 1 keeps gradient
shards and reduces at every micro-step, as stage 2 does. At stage 0 each rank adds up its own slices within the whole
gradients, and gathers the others' in fp32 in the last micro-step. The norm is that of each rank's slices, added up in
rank order, where the runtime otherwise takes that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.placement import SHARED, Placement, grad_itemsize, shards_states, shares_flat
from zplan.planner.states import by_class
from zplan.planner.timeline import Timeline
from zplan.planner.units import MIB

PAGE = 2 * MIB

SIGNAL_PAD = 9216
"""Bytes behind each buffer in symmetric memory: torch's default, 32 channels of 72 words of 32 bits."""

POINTER = 8


def shared_sizes(placements: Sequence[Placement], choice: Choice) -> list[int]:
    """Bytes of each buffer in symmetric memory: ring slots, large flat buffers, and the slot of an exchange."""
    if not choice.copies:
        return []
    rings = {p.ring: p.slot_numel * choice.itemsize for p in placements if p.ringed}
    sizes = list(rings.values()) * choice.ring_slots
    sizes += [p.buffer_bytes(choice) for p in placements if shares_flat(p, choice)]
    if choice.reduce == "exchange" and (numel := slot_numel(placements, choice)):
        sizes.append(numel * choice.itemsize)
    return sizes


def slot_numel(placements: Sequence[Placement], choice: Choice) -> int:
    """Elements of a reduce slot: the largest piece of any trained unit; 0 where there is no slot.

    For an exchange without the rank's own slice of it, which nobody is sent. As much arrives.
    """
    if not uses_reduce_slots(choice):
        return 0
    numel = max((p.layout.max_piece_numel for p in placements if not p.frozen), default=0)
    return numel - numel // choice.world_size if choice.reduce == "exchange" else numel


def table_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Two tables of all ranks' addresses that torch makes for each buffer in symmetric memory, on the device."""
    count = 2 * len(shared_sizes(placements, choice))
    return [Line("shared.tables", POINTER * choice.world_size, (time.always,) * count, "buffers", source="derived")]


def page_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """The rest of the last page of each buffer in symmetric memory.

    torch's `CUDASymmetricMemory` puts a signal pad behind the buffer and rounds both up to the driver's granularity,
    2 MiB.
    """
    sizes = shared_sizes(placements, choice)
    note = f"pages of 2 MiB of {len(sizes)} buffers in symmetric memory, with torch's signal pads"
    pages = sum(SIGNAL_PAD + -(n + SIGNAL_PAD) % PAGE for n in sizes)
    return [Line("alloc.pages", pages, (time.always,), "overhead", source="derived", note=note)]


def full_gradients(choice: Choice) -> bool:
    """Whether a rank accumulates whole gradients rather than its shard of them.

    On one rank and at stage 0 there is nothing to scatter to; at stage 1 with accumulation the reduce waits for the
    last micro-step, so every rank adds up whole gradients until then. See [Note: fixed order] for where it can't wait.
    """
    waits = choice.stage == 1 and choice.accumulation > 1 and not choice.deterministic
    return not shards_states(choice) or waits


def uses_reduce_slots(choice: Choice) -> bool:
    """Whether gradients pass through reduce slots: where a reduce ends in a separate shard, or is in rank order."""
    return not full_gradients(choice) or in_rank_order(choice)


def in_rank_order(choice: Choice) -> bool:
    """Whether sums over ranks have one order at every stage. See [Note: fixed order]."""
    return choice.deterministic and choice.world_size > 1


def buffer_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Working buffers of one rank."""
    trained = [p for p in placements if not p.frozen]
    return [
        *ring_lines(placements, choice, time),
        *reduce_lines(trained, choice, time),
        *gradient_lines(trained, choice, time),
        *placeholder_lines(placements, choice, time),
        Line("comm.handshake", 8 * handshake_numel(choice.world_size, choice.device), (time.always,), "buffers"),
        Line("comm.terms", 8 * terms_numel(choice), (time.always,), "buffers"),
        *table_lines(placements, choice, time),
        *_hash_lines(placements, choice, time),
    ]


def _hash_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    if not choice.check_replicas_every:
        return []
    from zplan.planner.replicas import replica_lines

    return replica_lines(placements, choice, time)


def handshake_numel(world_size: int, device: str) -> int:
    """64-bit words in which ranks on the CPU compare what comes next before each collective."""
    return world_size + 1 if device == "cpu" and world_size > 1 else 0


def terms_numel(choice: Choice) -> int:
    """64-bit words, one a rank, in which scalars are gathered to be added up in rank order."""
    return choice.world_size if in_rank_order(choice) else 0


def ring_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """K slots of each ring, in the compute dtype, always there."""
    classes = {p.ring: p.slot_numel * choice.itemsize for p in placements if p.ringed}
    spans = (time.always,) * choice.ring_slots
    note = SHARED if choice.copies else ""
    return [Line(f"params.ring.{name}", nbytes, spans, "buffers", note=note) for name, nbytes in classes.items()]


def reduce_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """A slot of the largest piece, from the first reduce of a backward to its end: in fp32 for a reduce-scatter, in the
    compute dtype and without the rank's own slice for an exchange, which needs another one for what arrives. A slot
    that other GPUs read is always there.
    """
    numel = slot_numel(placements, choice)
    if not numel:
        return []
    span = time.reducing(placements[-1].unit.name)
    if choice.reduce == "scatter":
        return [Line("grads.slot", numel * choice.reduce_itemsize, (span,), "buffers")]
    slot = received = Line("grads.slot", numel * choice.itemsize, (span,), "buffers")
    if choice.copies:
        slot = slot._replace(spans=(time.always,), note=SHARED)
    return [slot, received._replace(id="grads.received")]


def reduced_numel(placements: Sequence[Placement], choice: Choice) -> int:
    """Elements of what a rank keeps of the reduced gradients of the largest trained unit."""
    full = full_gradients(choice)
    sizes = (p.layout.padded_numel if full else p.layout.shard_numel for p in placements if not p.frozen)
    return max(sizes, default=0)


def gradient_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Gradients in fp32, or as autograd left them ([Note: single gradients] in `planner/placement.py`).

    Born at their unit's reduce with accumulation 1; with more they persist.

    Where backward updates, those of all units pass through one buffer ([Note: in backward] in
    `runtime/in_backward.py`).
    """
    full = full_gradients(choice)
    if choice.optimizer_in_backward:
        nbytes = reduced_numel(placements, choice) * grad_itemsize(choice)
        spans = (time.reducing(placements[-1].unit.name),) if placements else ()
        return [Line("grads.reduced", nbytes, spans, "buffers", note="one unit's at a time")]
    rows = [
        (
            p,
            (p.layout.padded_numel if full else p.layout.shard_numel) * grad_itemsize(choice),
            time.always if choice.accumulation > 1 else time.from_reduce(p.unit.name),
        )
        for p in placements
    ]
    return by_class("grads.full" if full else "grads.shard", rows, "buffers")


def placeholder_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """One NaN scalar per parameter, shown in its place while its values are not there."""
    if not shards_states(choice) and not any(p.ringed for p in placements):
        return []
    count = sum(len(p.layout.entries) for p in placements if p.closes)
    return [Line("params.placeholder", choice.itemsize, (time.always,) * count, "buffers")]
