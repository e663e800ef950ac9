"""Lines of the model states: parameters, master weights, moments, and the optimizer's scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zplan.planner.config import Choice
from zplan.planner.ledger import Kind, Line
from zplan.planner.placement import Placement, shards_states
from zplan.planner.timeline import Timeline

FP32 = 4

NUM_SCALARS = 7
"""fp32 scalars of the optimizer: step, norm, clip coefficient, gradient scale, non-finite flag, tokens, scratch."""


def by_class(line_id: str, rows: Sequence[tuple[Placement, int, tuple[int, int]]], kind: Kind) -> list[Line]:
    """One line per size class from `(placement, bytes, span)` rows; equal class means equal bytes."""
    groups: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for p, nbytes, span in rows:
        groups.setdefault(p.size_class, []).append((nbytes, span))
    return [
        Line(f"{line_id}.{name}", found[0][0], tuple(span for _, span in found), kind) for name, found in groups.items()
    ]


def state_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Everything that lives between steps. Moments and masters are there from the first step on."""
    always = time.always
    lines: list[Line] = []
    lines += frozen_lines([p for p in placements if p.frozen], choice, always)
    placements = [p for p in placements if not p.frozen]
    resident = [(p, p.buffer_bytes(choice), always) for p in placements if not p.ringed]
    lines += by_class("params.flat", resident, "states")
    lines += by_class("optim.master", [(p, p.owned_numel * FP32, always) for p in placements if p.has_master], "states")
    for name in ("exp_avg", "exp_avg_sq"):
        lines += by_class(f"optim.{name}", [(p, p.owned_numel * FP32, always) for p in placements], "states")
    lines.append(Line("optim.scalars", NUM_SCALARS * FP32, (always,), "states"))
    lines.append(Line("optim.norms", num_norms(placements, choice) * FP32, (always,), "states"))
    return lines


def frozen_lines(placements: Sequence[Placement], choice: Choice, always: tuple[int, int]) -> list[Line]:
    """Frozen parameters: shards where they are ringed, and whole buffers that every rank holds alike. See [Note: frozen]."""
    shards = [(p, p.buffer_bytes(choice) // choice.world_size, always) for p in placements if p.has_shard]
    whole = [(p, p.buffer_bytes(choice), always) for p in placements if not p.ringed]
    note = ""
    if choice.world_size > 1:
        why = "not in a ring" if choice.stage == 3 else f"stage {choice.stage} does not shard parameters"
        note = f"replicated on {choice.world_size} ranks: {why}"
    return [
        *by_class("params.frozen.shard", shards, "states"),
        *(replace(line, note=note) for line in by_class("params.frozen.whole", whole, "states")),
    ]


def num_norms(placements: Sequence[Placement], choice: Choice) -> int:
    """Partial norms that a step writes: one per `norm_chunk` of every slice that this rank updates."""
    total = 0
    for p in placements:
        if p.frozen:
            continue
        lengths = (
            [piece.numel // choice.world_size for piece in p.layout.pieces]
            if shards_states(choice)
            else [p.layout.padded_numel]
        )
        total += sum(-(-n // norm_chunk(choice, n)) for n in lengths)
    return total


def norm_chunk(choice: Choice, numel: int) -> int:
    """Elements of one partial norm.

    A GPU reduces a whole slice as a tree. The CPU kernel adds along lanes and is off by 1e-4 at 3e6 elements, so there it is given
    short stretches.
    """
    return 16384 if choice.device == "cpu" else max(1, numel)
