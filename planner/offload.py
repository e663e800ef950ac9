"""Lines of zplan's runtime with states off the device: an estimate of a design, which the runtime can't execute yet.

[Note: offload] A unit is offloaded whole. Its master weights and moments lie in pinned host memory of exact size, or in
files on NVMe. Its gradient goes down as each reduce lands, piece by piece, and is added up in fp32 on the host, so
every rank keeps its slices only, at any accumulation. The host's AdamW works in place, unit by unit; new weights come
back in the compute dtype through two staging buffers. At stage 3 a ringed unit keeps a shard in the compute dtype, from
which its slot is filled: on the device, on the host, or on NVMe. States on NVMe pass through three sets of buffers: one
that is read, one that is stepped, one that is written. `ratio` offloads the first units of the schedule up to that
share of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zplan.planner.buffers import full_gradients, reduce_lines
from zplan.planner.config import Choice, Offload
from zplan.planner.layout import ceil_to
from zplan.planner.ledger import Line, Tier
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import Placement, shards_states
from zplan.planner.states import FP32, by_class
from zplan.planner.timeline import Timeline

SECTOR = 4096
"""Bytes: direct I/O reads and writes whole sectors, so files are as long as whole ones."""

STAGING, STEPPING = 2, 3
"""Buffers in flight between device and host, and sets of states between host and NVMe."""

NOTE = "as designed; zplan's runtime can't offload yet"

TIERS: dict[str, Tier] = {"cpu": "pinned", "nvme": "nvme"}


def offloaded(placements: Sequence[Placement], offload: Offload) -> list[Placement]:
    """Trained units whose optimizer states lie off the device, in the schedule's order."""
    trained = [p for p in placements if not p.frozen]
    if offload.optimizer == "none":
        return []
    room, found = offload.ratio * sum(p.layout.numel for p in trained), []
    for p in trained:
        room -= p.layout.numel
        if room < -0.5:  # the share is a float: half an element of slack
            break
        found.append(p)
    return found


def move_lines(lines: Sequence[Line], placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """A rank's lines of states and buffers with what is offloaded moved, and what that takes added."""
    moved = offloaded(placements, choice.offload)
    if not moved:
        return list(lines)
    kept: list[Line] = []
    for line in lines:
        kept += _without(line, placements, moved, choice)
    return [
        *kept,
        *_weights(moved, choice, time),
        *_gradients(moved, choice, time),
        *_shards(moved, choice, time),
        *_buffers(placements, moved, lines, choice, time),
    ]


def _class_of(line: Line, placements: Sequence[Placement]) -> list[Placement]:
    """The trained units that a line has one instance of each for; none where it is no such line."""
    found = [p for p in placements if not p.frozen and line.id.endswith(f".{p.size_class}")]
    if line.id.startswith("params.shard."):
        found = [p for p in found if p.ringed]
    return found if len(found) == line.instances else []


def _without(line: Line, placements: Sequence[Placement], moved: Sequence[Placement], choice: Choice) -> list[Line]:
    """A line as it is, or divided into what stays on the device and what lies elsewhere."""
    names = {p.unit.name for p in moved}
    if line.id.startswith("params.frozen.shard.") and choice.offload.params != "none":
        return [_away(line, TIERS[choice.offload.params])]
    if not line.id.startswith(("optim.", "grads.shard.", "grads.full.", "params.shard.")):
        return [line]
    if line.id.startswith("params.") and choice.offload.params == "none":
        return [line]
    units = _class_of(line, placements)
    if not units:
        return [line]
    here: list[tuple[int, int]] = []
    there: list[tuple[int, int]] = []
    for p, span in zip(units, line.spans, strict=True):
        (there if p.unit.name in names else here).append(span)
    stays = [line._replace(spans=tuple(here))] if here else []
    if not there or line.id.startswith(("grads.", "params.")):
        return stays
    return [*stays, _away(line._replace(spans=tuple(there)), TIERS[choice.offload.optimizer])]


def _away(line: Line, tier: Tier) -> Line:
    """Exact size by design; in whole sectors on NVMe."""
    nbytes = ceil_to(line.nbytes, SECTOR) if tier == "nvme" else line.nbytes
    return line._replace(tier=tier, nbytes=nbytes, source="estimate", note=NOTE, low=nbytes, high=nbytes)


def _weights(moved: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """What the host steps on where nothing else there is it: masters of units whose flat buffer was their own master.

    Without fp32 masters it steps on the shards in the compute dtype; where these lie in another memory, on copies.
    """
    tier = TIERS[choice.offload.optimizer]
    if kind_of(choice.optimizer).master:
        rows = [(p, p.owned_numel * FP32, time.always) for p in moved if not p.has_master]
        return [_away(line, tier) for line in by_class("optim.master", rows, "states")]
    copied = [p for p in moved if not p.ringed or choice.offload.params != choice.offload.optimizer]
    rows = [(p, p.owned_numel * choice.itemsize, time.always) for p in copied]
    return [_away(line, tier) for line in by_class("optim.weights", rows, "states")]


def _gradients(moved: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Accumulators on the host, from start to end: pinned memory is not taken step by step."""
    rows = [(p, p.owned_numel * choice.reduce_itemsize, time.always) for p in moved]
    return [_away(line, "pinned") for line in by_class("grads.host", rows, "buffers")]


def _shards(moved: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Shards in the compute dtype that slots are filled from; without fp32 masters they are on the device anyway."""
    rows = [(p, p.owned_numel * choice.itemsize, time.always) for p in moved if p.ringed]
    lines = by_class("params.shard", rows, "states")
    if choice.offload.params == "none":
        if not kind_of(choice.optimizer).master:
            return []
        return [line._replace(source="estimate", note=NOTE, low=line.nbytes, high=line.nbytes) for line in lines]
    return [_away(line, TIERS[choice.offload.params]) for line in lines]


def _buffers(
    placements: Sequence[Placement], moved: Sequence[Placement], lines: Sequence[Line], choice: Choice, time: Timeline
) -> list[Line]:
    """What passes between the memories."""
    share = choice.world_size if shards_states(choice) else 1
    piece = max(p.layout.max_piece_numel for p in moved)
    first = max(placements.index(p) for p in moved)
    reducing = (time.at(f"reduce.{placements[first].unit.name}"), time.last_backward)
    largest = max(p.owned_numel for p in moved)
    found = [
        _buffer("offload.grads", piece // share * choice.reduce_itemsize, (reducing,) * STAGING, "device"),
        _buffer("offload.params", largest * choice.itemsize, (time.always,) * STAGING, "pinned"),
    ]
    if share > 1 and full_gradients(choice):
        # Whole gradients are reduced in every micro-step then, which takes the slots that shards take.
        slots = reduce_lines(moved, replace(choice, accumulation=1), time)
        found += [line._replace(source="estimate", note=NOTE, low=line.nbytes, high=line.nbytes) for line in slots]
    if choice.offload.optimizer == "nvme":
        states = _largest_states(moved, lines, choice)
        found.append(_buffer("offload.nvme.states", states, (time.always,) * STEPPING, "pinned"))
    ringed = [p for p in moved if p.ringed]
    if choice.offload.params == "nvme" and ringed:
        shard = ceil_to(max(p.owned_numel for p in ringed) * choice.itemsize, SECTOR)
        found.append(_buffer("offload.nvme.params", shard, (time.always,) * (choice.ring_slots + 1), "pinned"))
    return found


def _largest_states(moved: Sequence[Placement], lines: Sequence[Line], choice: Choice) -> int:
    """Bytes of all states of the unit that has most, with the weights that are stepped on, in whole sectors each."""
    weight = FP32 if kind_of(choice.optimizer).master else choice.itemsize
    return max(
        sum(ceil_to(x.nbytes, SECTOR) for x in lines if x.id.startswith("optim.") and x.id.endswith(f".{p.size_class}"))
        + (0 if p.has_master else ceil_to(p.owned_numel * weight, SECTOR))
        for p in moved
    )


def _buffer(line_id: str, nbytes: int, spans: tuple[tuple[int, int], ...], tier: Tier) -> Line:
    """A buffer between memories: as designed, or up to half as much again."""
    return Line(line_id, nbytes, spans, "buffers", tier, "estimate", NOTE, nbytes, nbytes * 3 // 2)
