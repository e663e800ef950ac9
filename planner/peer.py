"""Ledgers of other runtimes: their states and buffers from their own semantics, their activations from the same tape.

Which rank: all hold the same but for DeepSpeed's stages 1 and 2, where the rank that owns the last layers copies its
gradients while most activations are still there. Without a rank the one that needs most is meant.
"""

from __future__ import annotations

from zplan.planner.activations import activation_lines
from zplan.planner.config import Choice
from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.models import ModelSpec
from zplan.planner.peer_ddp import ddp_lines
from zplan.planner.peer_fsdp2 import fsdp2_lines
from zplan.planner.peer_zero import MicroStep, stage0_lines, stage12_lines
from zplan.planner.peer_zero3 import stage3_lines
from zplan.planner.timeline import Timeline, timeline

STAGES = {"deepspeed": (0, 1, 2, 3), "fsdp2": (2, 3), "ddp": (0,)}
"""ZeRO stages that a runtime has. FSDP2's two are `reshard_after_forward` off and on."""


def peer_ledger(
    spec: ModelSpec, choice: Choice, *, overheads: tuple[Line, ...] = (), rank: int | None = None
) -> Ledger:
    """Ledger of one rank of DeepSpeed, FSDP2 or DDP over one step in steady state.

    Parameters
    ----------
    spec, choice, overheads
        As of `predict`.
    rank
        Whose; None is the one that holds most.
    """
    time = timeline(spec.units)
    activations = activation_lines(spec, choice, time.phases)
    found = [merge(time.phases, lines, activations, overheads) for lines in _alternatives(spec, choice, time, rank)]
    return max(found, key=Ledger.peak_bytes)


def _alternatives(spec: ModelSpec, choice: Choice, time: Timeline, rank: int | None) -> list[list[Line]]:
    """Lines of each rank and micro-step that may hold most."""
    if choice.runtime == "fsdp2":
        return [fsdp2_lines(spec, choice, time)]
    if choice.runtime == "ddp":
        return [ddp_lines(spec, choice, time)]
    if choice.stage == 0:
        return [stage0_lines(spec, choice, time)]
    if choice.stage == 3:
        return [stage3_lines(spec, choice, time)]
    # Owners of the last layers and of the first ones; those between need no more than either.
    ranks = sorted({0, choice.world_size - 1}) if rank is None else [rank]
    steps: list[MicroStep] = ["last"]
    if choice.stage == 1 and choice.accumulation > 2:
        steps.append("earlier")
    return [stage12_lines(spec, choice, time, r, step) for r in ranks for step in steps]
