"""All ways to run a training beside each other: the fastest at each size, and why every other is left out (`--top`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zplan.planner.batch import Batch
from zplan.planner.config import Choice, Offload
from zplan.planner.cost import Cost
from zplan.planner.errors import ZplanError
from zplan.planner.evaluation import Row
from zplan.planner.placement import single_gradients
from zplan.planner.runnable import limits
from zplan.planner.search import TIE, Search
from zplan.planner.step_time import StepTime
from zplan.planner.timing import cost_cells, cost_head, cost_of, told
from zplan.planner.units import format_gib
from zplan.planner.verdict import short_by


@dataclass(frozen=True)
class Run:
    """A way that fits, and how long its step takes."""

    row: Row
    time: StepTime
    estimate_only: bool
    """Counted, but zplan's runtime can't do it."""
    cost: Cost | None = None
    """Of the training that was asked for."""


@dataclass(frozen=True)
class Rejected:
    """A way of running that does not fit, at the smallest micro-batch at which it does not."""

    row: Row
    reason: str
    """By how much, in which phase, and the line that holds most in it."""


@dataclass(frozen=True)
class Front:
    """The answer of `--top`.

    Attributes
    ----------
    runs
        Of those that fit, the ones that no other beats in both time and memory; the fastest first.
    rejected
        The others that do not fit, one for each stage, checkpointing and offload.
    beaten
        How many fit, but another one is as fast and smaller.
    """

    search: Search
    runs: tuple[Run, ...]
    rejected: tuple[Rejected, ...]
    beaten: int
    most: int

    @property
    def fits(self) -> bool:
        return bool(self.runs)

    def text(self) -> str:
        from zplan.planner.report import table

        hardware, spec = self.search.hardware, self.search.model.spec
        if not self.runs:
            out = [f"Nothing fits: {spec.name} on {hardware.told()}"]
        else:
            shown = self.runs[: self.most]
            out = [f"{spec.name} on {hardware.told()}: the fastest ways that fit, each smaller than all above it"]
            costs = cost_head(self.search.request.goal)
            cells = [_cells(i, run) for i, run in enumerate(shown, 1)]
            out += table([*_HEAD, *costs, ""], cells, "rllllrrrrr" + "r" * len(costs) + "l")
            left = len(self.runs) - len(shown)
            out += [f"  {left} more: --top {len(self.runs)} shows them"] if left else []
            out += [f"  {self.beaten} others fit too, but one above is as fast and smaller"] if self.beaten else []
        if self.rejected:
            out += ["", "Does not fit (smallest micro-batch at which that is so)"]
            rows = [[*_way(r.row.choice), f"{r.row.choice.micro_batch}", r.reason] for r in self.rejected]
            out += table(["stage", "checkpt", "offload", "micro", "why"], rows, "lllrl")
        return "\n".join(out) + "\n"

    def json(self) -> dict[str, Any]:
        from zplan.planner.answer_json import row_json
        from zplan.planner.timing import cost_json, time_json

        return {
            "fits": self.fits,
            "runs": [
                {
                    **row_json(r.row),
                    "offload": r.row.choice.offload.told(),
                    "estimate_only": r.estimate_only,
                    "time": {**time_json(r.time), **cost_json(r.cost)},
                }
                for r in self.runs[: self.most]
            ],
            "rejected": [
                {**row_json(r.row), "offload": r.row.choice.offload.told(), "reason": r.reason} for r in self.rejected
            ],
            "beaten": self.beaten,
        }


_HEAD = ["", "stage", "checkpt", "offload", "batch", "peak GiB", "at most", "step s", "tokens/s", "MFU"]


def _way(c: Choice) -> list[str]:
    return [str(c.stage), c.checkpointing, c.offload.told()]


def _cells(place: int, run: Run) -> list[str]:
    row, time = run.row, run.time
    return [
        str(place),
        *_way(row.choice),
        f"{row.choice.micro_batch} x {row.choice.accumulation}",
        format_gib(row.peak_bytes),
        format_gib(row.high_bytes),
        told(time.total),
        f"{time.tokens_per_second:,.0f}",
        f"{100 * time.mfu:.1f} %",
        *cost_cells(run.cost),
        "estimate only" if run.estimate_only else "",
    ]


def ways(search: Search, batches: Sequence[Batch]) -> Iterator[list[Choice]]:
    """Choices of one stage, checkpointing and offload each, by rising micro-batch."""
    asked = search.request.get("stage")
    for stage in search.stages if asked is None else (asked,):
        for checkpointing in search.checkpointings:
            for offload in _offloads(search, stage):
                yield [search.choice(stage, b, checkpointing, offload=offload) for b in batches]


def _offloads(search: Search, stage: int) -> list[Offload]:
    fixed: Offload | None = search.request.get("offload")
    if fixed is not None:
        return [fixed]
    return [Offload(), Offload("cpu"), *([Offload("cpu", "cpu")] if stage == 3 else [])]


def front(search: Search, most: int) -> Front:
    """Evaluate every stage, checkpointing, offload, micro-batch and accumulation.

    Raises
    ------
    ZplanError
        Where no time can be told.
    """
    fitting: list[Run] = []
    rejected: list[Rejected] = []
    spec = search.model.spec
    for choices in ways(search, search.batches(search.ranks)):
        for choice in _worth_a_look(search, choices):
            row = search.row(choice)
            if not row.fits:
                rejected.append(Rejected(row, short_by(row)))
                continue
            time = search.time(choice)
            if time is None:
                raise ZplanError(
                    f"--top compares step times: {search.why_untimed(choice)}",
                    "name a card of `zplan gpus` with --gpu, and use --precision bf16",
                )
            only = bool(limits(choice, spec))
            fitting.append(Run(row, time, only, cost_of(search, choice)))
    runs = pareto(fitting)
    return Front(search, runs, tuple(rejected), len(fitting) - len(runs), most)


def _worth_a_look(search: Search, choices: Sequence[Choice]) -> Iterator[Choice]:
    """Choices by rising micro-batch up to the first that does not fit, since no larger one would.

    Except the last: one rank that need not accumulate keeps no fp32 gradients. See [Note: single gradients] in
    `planner/placement.py`.
    """
    for i, choice in enumerate(choices):
        yield choice
        if not search.row(choice).fits:
            if i + 1 < len(choices) and single_gradients(choices[-1]) and search.row(choices[-1]).fits:
                yield choices[-1]
            return


def pareto(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Those that are faster by a hundredth than everything that is as small; the fastest first."""
    kept: list[Run] = []
    for run in sorted(runs, key=lambda r: (r.row.high_bytes, r.time.total)):
        if not kept or run.time.total * (1 + TIE) < kept[-1].time.total:
            kept.append(run)
    return tuple(reversed(kept))
