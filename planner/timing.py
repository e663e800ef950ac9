"""Step times of an estimate's rows beside each other, what they cost, and how they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zplan.planner.config import Choice, Runtime
from zplan.planner.cost import Cost, Goal, cost
from zplan.planner.errors import ZplanError
from zplan.planner.peer_rules import STAGES
from zplan.planner.speeds import GB
from zplan.planner.step_time import StepTime

if TYPE_CHECKING:
    from zplan.planner.answer import Estimate
    from zplan.planner.evaluation import Row
    from zplan.planner.search import Search


DDP: dict[Runtime, Runtime] = {"fsdp2": "ddp"}
"""Whose stage 0 stands for replicas, where a runtime has none."""


@dataclass(frozen=True)
class Timing:
    """One row's step in time."""

    choice: Choice
    time: StepTime
    below: float | None
    """Its time over that of the same choice at the stage below; None where the runtime has none."""
    ddp: float
    """Its time over that of the same choice at stage 0, whether that fits or not; FSDP2's over that of DDP."""
    cost: Cost | None


def timings(search: Search, rows: Sequence[Row]) -> tuple[Timing, ...]:
    """A timing for each row, of which all can be timed."""
    found = []
    for row in rows:
        c = row.choice
        time = search.time(c)
        assert time is not None, search.why_untimed(c)
        found.append(
            Timing(
                c,
                time,
                _ratio(time, search.time(replace(c, stage=c.stage - 1))) if c.stage - 1 in STAGES[c.runtime] else None,
                _ratio(time, search.time(replace(c, stage=0, runtime=DDP.get(c.runtime, c.runtime)))),
                cost_of(search, c),
            )
        )
    return tuple(found)


def cost_of(search: Search, choice: Choice) -> Cost | None:
    """What the training that was asked for takes with a choice; None where none was.

    Raises
    ------
    ZplanError
        Where no time can be told.
    """
    goal = search.request.goal
    if not goal.asked:
        return None
    time = search.time(choice)
    if time is None:
        raise ZplanError(
            f"no hours can be told: {search.why_untimed(choice)}",
            "name a card of `zplan gpus` with --gpu, and use --precision bf16 and --runtime zplan",
        )
    return cost(goal, time, seq=choice.seq, world_size=choice.world_size)


def cost_head(goal: Goal) -> list[str]:
    """Titles of `cost_cells`."""
    return [*(["hours", "GPU hours"] if goal.asked else []), *(["cost"] if goal.price is not None else [])]


def cost_cells(found: Cost | None) -> list[str]:
    """One training in a table."""
    if found is None:
        return []
    price = [] if found.price is None else [f"{found.price:,.0f}"]
    return [f"{found.hours:,.1f}", f"{found.gpu_hours:,.0f}", *price]


def cost_json(found: Cost | None) -> dict[str, Any]:
    """One training, unrounded."""
    if found is None:
        return {}
    price = {} if found.price is None else {"price": found.price}
    return {"steps": found.steps, "hours": found.hours, "gpu_hours": found.gpu_hours, **price}


def _ratio(time: StepTime, other: StepTime | None) -> float:
    assert other is not None, "a stage is timed and another is not"
    return time.total / other.total


def time_json(time: StepTime) -> dict[str, Any]:
    """Seconds, unrounded."""
    return {
        "step_s": time.total,
        "tokens_per_s": time.tokens_per_second,
        "mfu": time.mfu,
        "bounds_s": time.bounds(),
        "hidden_s": time.hidden,
        "offload_bound": time.offload_bound,
    }


def timing_json(t: Timing) -> dict[str, Any]:
    """A row's time, its ratios and what the training takes."""
    return {
        **time_json(t.time),
        "over_ddp": t.ddp,
        "over_stage_below": t.below,
        **cost_json(t.cost),
    }


BOUNDS = ("compute", "recompute", "gathers", "reduces", "optimizer", "offload")


def timing_rows(e: Estimate) -> Iterator[list[str]]:
    """Title cells, then a row of cells for each timing."""
    shown = [b for b in BOUNDS if any(t.time.bounds()[b] for t in e.timings)]
    head = ["stage", "step s", "tokens/s", "MFU", "to DDP", "to below", *shown]
    yield [*head, *cost_head(e.request.goal)]
    for t, row in zip(e.timings, e.rows, strict=True):
        time = t.time
        cells = [f"{t.choice.stage}{' *' if row is e.row else ''}", told(time.total), f"{time.tokens_per_second:,.0f}"]
        cells += [f"{100 * time.mfu:.1f} %", f"x {t.ddp:.2f}", "" if t.below is None else f"x {t.below:.2f}"]
        cells += [f"{100 * time.bounds()[b] / time.total:.1f} %" for b in shown]
        yield [*cells, *cost_cells(t.cost)]


def told(seconds: float) -> str:
    """Three digits that count.

    Examples
    --------
    >>> told(0.40361), told(12.0), told(0.0123)
    ('0.404', '12.0', '0.0123')
    """
    return f"{seconds:#.3g}".rstrip(".") if seconds < 100 else f"{seconds:,.0f}"


def assumptions(e: Estimate) -> str:
    """What the times rest on, in one sentence."""
    from zplan.planner.clock import Clock

    at = Clock(e.hardware, e.request.efficiency, e.request.network).speeds(e.row.choice.precision)
    assert at is not None, "timed without speeds"
    parts = [
        f"matrix products at {at.efficiency:g} of {at.peak_flops / 1e12:,.0f} TFLOP/s (--efficiency)",
        f"attention at {at.attention:g}",
        f"memory at {at.hbm / GB:,.0f} GB/s",
    ]
    if e.hardware.world_size > 1:
        parts.append(f"{at.intra / GB:,.0f} GB/s between GPUs of a node")
    if e.hardware.nodes > 1:
        parts.append(f"{at.network / GB:,.0f} GB/s a node between nodes (--network)")
    assumed = f" Assumed: {'; '.join(at.assumed)}." if at.assumed else ""
    return f"Predicted: {', '.join(parts)}.{assumed}{_break_even(e)}"


def _break_even(e: Estimate) -> str:
    """At which rate of the links the picked row's transfers would take as long as computing."""
    at = e.rows.index(e.row)
    sent, time = e.traffic[at].total_bytes, e.timings[at].time
    if not sent:
        return ""
    rate = sent / (time.compute + time.recompute)
    return (
        f" At {rate / GB:,.3g} GB/s a GPU the transfers of stage {e.row.choice.stage} would take as long as computing."
    )
