"""Ledgers of other runtimes: their states and buffers from their own semantics, their activations from the same tape.

Which rank: all hold the same but for DeepSpeed's stages 1 and 2, where the rank that owns the last layers copies its
gradients while most activations are still there. Without a rank the one that needs most is meant.
"""

from __future__ import annotations

from dataclasses import replace

from zplan.planner.activations import activation_lines
from zplan.planner.config import Choice
from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.models import ModelSpec
from zplan.planner.peer_ddp import ddp_lines
from zplan.planner.peer_fsdp2 import fsdp2_lines
from zplan.planner.peer_host import host_lines
from zplan.planner.peer_parallel import Share, over, shared_activations, shares
from zplan.planner.peer_zero import MicroStep, stage0_lines, stage12_lines
from zplan.planner.peer_zero3 import stage3_lines
from zplan.planner.timeline import Timeline, timeline


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
    found = [
        ledger for share in shares(spec, choice) for ledger in _ledgers(share, choice, overheads=overheads, rank=rank)
    ]
    return max(found, key=Ledger.peak_bytes)


def _ledgers(share: Share, whole: Choice, *, overheads: tuple[Line, ...], rank: int | None) -> list[Ledger]:
    """Ledgers of one share of the model, for every rank and micro-step that may hold most."""
    spec, choice = share.spec, share.choice
    time = timeline(spec.units)
    activations = list(shared_activations(share, whole, activation_lines(spec, choice, time.phases), time))
    held = replace(spec, units=share.units)
    return [
        merge(time.phases, lines, host_lines(held, choice, time), activations, over(overheads, time))
        for lines in _alternatives(held, choice, time, rank)
    ]


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
    ranks = _ranks(choice.world_size) if rank is None else [rank]
    steps: list[MicroStep] = ["last"]
    if choice.stage == 1 and choice.accumulation > 2:
        steps.append("earlier")
    return [stage12_lines(spec, choice, time, r, step) for r in ranks for step in steps]


MOST_RANKS = 8


def _ranks(world_size: int) -> list[int]:
    """Ranks that may hold most: each of a few, else two at either end of the parameters.

    Parts of many ranks are small, so which whole parameters they touch matters little.
    """
    if world_size <= MOST_RANKS:
        return list(range(world_size))
    return [0, 1, world_size - 2, world_size - 1]
