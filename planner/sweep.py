"""Peaks and step times over a range of one thing or two (`--sweep seq,micro-batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zplan.planner.cost import Cost, Goal
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.evaluation import Row
from zplan.planner.extremes import PER_NODE, Open
from zplan.planner.peer_rules import check_request
from zplan.planner.request import Request
from zplan.planner.search import Search
from zplan.planner.step_time import StepTime
from zplan.planner.units import format_gib

AXES = ("seq", "micro-batch", "gpus", "stage")
MOST_POINTS = 400
MOST_REASONS = 3
LONGEST = 131072


@dataclass(frozen=True)
class Axis:
    """What changes, and the values it takes."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """One cell: the values of the axes, and the best row there; None where they do not go together."""

    at: tuple[int, ...]
    row: Row | None
    time: StepTime | None
    cost: Cost | None = None
    """Of the training that was asked for."""
    why: str = ""
    """What forbids the point, where there is no row."""


@dataclass(frozen=True)
class Sweep:
    """The answer of `--sweep`."""

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    where: str
    goal: Goal

    @property
    def fits(self) -> bool:
        return any(p.row is not None and p.row.fits for p in self.points)

    def text(self) -> str:
        from zplan.planner.report import table
        from zplan.planner.timing import cost_head

        if len(self.axes) == 1:
            costs = cost_head(self.goal)
            head = [self.axes[0].name, "stage", "checkpt", "batch", "peak GiB", "at most", "step s", "tokens/s"]
            rows = [_cells(p, 2 + len(costs)) for p in self.points]
            align = "rllrrrrr" + "r" * len(costs) + "l"
            if head[0] == "stage":
                del head[1]
                rows, align = [[row[0], *row[2:]] for row in rows], align[1:]
            body = table([*head, *costs, "fits"], rows, align)
            return "\n".join([self.where, *body]) + "\n"
        down, across = self.axes
        cells = {p.at: _cell(p) for p in self.points}
        rows = [[f"{d:,}", *(cells[d, a] for a in across.values)] for d in down.values]
        head = [f"{down.name} \\ {across.name}", *(f"{a:,}" for a in across.values)]
        title = f"{self.where}: peak GiB, in brackets where it does not fit"
        title += "; --json tells hours" if self.goal.asked else ""
        whys = [f"  -: {why}" for why in dict.fromkeys(p.why for p in self.points if p.row is None)]
        if len(whys) > MOST_REASONS:
            whys[MOST_REASONS:] = [f"  -: {len(whys) - MOST_REASONS} more, told by --json"]
        return "\n".join([title, *table(head, rows, "r" * len(head)), *whys]) + "\n"

    def json(self) -> dict[str, Any]:
        return {"fits": self.fits, "axes": [a.name for a in self.axes], "points": [self._point(p) for p in self.points]}

    def _point(self, p: Point) -> dict[str, Any]:
        from zplan.planner.answer_json import row_json
        from zplan.planner.timing import cost_json, time_json

        return {
            "at": dict(zip((a.name for a in self.axes), p.at, strict=True)),
            "row": None if p.row is None else row_json(p.row),
            **({"why": p.why} if p.row is None else {}),
            "time": None if p.time is None else {**time_json(p.time), **cost_json(p.cost)},
        }


def _cell(p: Point) -> str:
    if p.row is None:
        return "-"
    peak = format_gib(p.row.peak_bytes)
    return peak if p.row.fits else f"({peak})"


def _cells(p: Point, speeds: int) -> list[str]:
    """One row, with so many cells about time."""
    from zplan.planner.timing import cost_cells, told

    row, time = p.row, p.time
    if row is None:
        return [f"{p.at[0]:,}", *[""] * (5 + speeds), f"no: {p.why}"]
    c = row.choice
    speed = [told(time.total), f"{time.tokens_per_second:,.0f}", *cost_cells(p.cost)] if time else [""] * speeds
    sizes = [format_gib(row.peak_bytes), format_gib(row.high_bytes)]
    fits = "yes" if row.fits else "no"
    return [f"{p.at[0]:,}", str(c.stage), c.checkpointing, f"{c.micro_batch} x {c.accumulation}", *sizes, *speed, fits]


def read_axes(text: str, search: Search) -> tuple[Axis, ...]:
    """Axes as written: `seq,micro-batch`, or with a range that doubles, `seq=1024:16384`.

    Raises
    ------
    ZplanError
        For an unknown or repeated axis, more than two, or a range that is none.
    """
    axes = []
    for part in text.split(","):
        name, equals, span = part.strip().partition("=")
        if name not in AXES:
            raise ZplanError(f"`--sweep {name}` is unknown", did_you_mean(name, AXES) or f"use {', '.join(AXES)}")
        axes.append(Axis(name, _range(name, span) if equals else _usual(name, search)))
    if len(axes) > 2 or len({a.name for a in axes}) < len(axes):
        raise ZplanError(f"`--sweep {text}` is not one thing or two different ones", "such as --sweep seq,micro-batch")
    return tuple(axes)


def _range(name: str, span: str) -> tuple[int, ...]:
    first, _, last = span.partition(":")
    if not (first.isdigit() and (last or first).isdigit()) or not 0 < int(first) <= int(last or first) < 10**9:
        if not (name == "stage" and first == "0" and last.isdigit() and int(last) < 4):
            raise ZplanError(f"`--sweep {name}={span}` is no range", f"write it as {name}=1:16")
    low, high = int(first), int(last or first)
    if name == "stage":
        return tuple(range(low, min(high, 3) + 1))
    values: list[int] = []
    while low <= high and len(values) <= MOST_POINTS:
        values.append(low)
        low *= 2
    return tuple(values)


def _usual(name: str, search: Search) -> tuple[int, ...]:
    if name == "stage":
        return search.stages
    first, last = {"seq": (512, min(search.seq_limit, LONGEST)), "micro-batch": (1, 32), "gpus": (1, 256)}[name]
    return _range(name, f"{min(first, last)}:{last}")


def sweep(request: Request, open_: Open, text: str) -> Sweep:
    """Evaluate the best row at every point."""
    search = open_(request)
    axes = read_axes(text, search)
    for axis in axes:
        name = axis.name.replace("-", "_")
        given = request.gpus if axis.name == "gpus" else request.get(name)
        if given is not None:
            by = request.fixed_by.get(name, f"--{axis.name}")
            raise ZplanError(f"--sweep {axis.name} changes what {by} gives", f"drop {by}")
    machine = search.hardware.told()
    if any(axis.name == "gpus" for axis in axes):
        machine = f"{search.hardware.gpu or 'GPUs'}, {format_gib(search.hardware.mem_bytes)} GiB each"
    where = f"{search.model.spec.name} on {machine}"
    return Sweep(axes, _points(request, open_, search, axes), where, request.goal)


def _points(request: Request, open_: Open, search: Search, axes: tuple[Axis, ...]) -> tuple[Point, ...]:
    """One point each. What forbids every point has nothing to do with the axes, and is raised."""
    refused: list[ZplanError] = []
    points = []
    for at in product(*(a.values for a in axes)):
        try:
            points.append(_best(request, open_, search, at, [a.name for a in axes]))
        except ZplanError as e:
            # A batch that does not split over these GPUs, or nodes that they do not fill.
            refused.append(e)
            points.append(Point(at, None, None, why=e.message))
    if len(refused) == len(points):
        raise refused[0]
    return tuple(points)


def _best(request: Request, open_: Open, search: Search, at: tuple[int, ...], names: Sequence[str]) -> Point:
    """The best row at one point, and its step time where one is told."""
    from zplan.planner.timing import cost_of

    for name, value in zip(names, at, strict=True):
        if name == "gpus":
            nodes = request.nodes if request.nodes > 1 else -(-value // PER_NODE)
            search = open_(replace(request, gpus=value, nodes=nodes))
    for name, value in zip(names, at, strict=True):
        if name != "gpus":
            search = search.at(name.replace("-", "_"), value)
    check_request(search.request.fixed)
    row = search.pick(search.rows())
    return Point(at, row, search.time(row.choice), cost_of(search, row.choice))
