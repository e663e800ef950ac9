"""What the ledgers of other runtimes share: parameters in order, and lines that differ from phase to phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zplan.planner.ledger import Kind, Line, Source, Tier
from zplan.planner.models import Param, Unit
from zplan.planner.timeline import Timeline

FP32, FP64 = 4, 8
MOMENTS = ("optim.exp_avg", "optim.exp_avg_sq")

Span = tuple[int, int]


def kind_of(unit: Unit) -> str:
    """`block`, or the unit's own name: the last part of a line's id."""
    return "block" if unit.kind == "block" else unit.name


def trained(units: Iterable[Unit]) -> list[Unit]:
    """Units with parameters that have gradients."""
    return [u for u in units if u.params and not u.frozen]


def numel_of(units: Iterable[Unit]) -> int:
    return sum(u.numel for u in units)


def per_rank(numel: int, world_size: int) -> int:
    """Elements of one of `world_size` equal parts, the last one padded."""
    return -(-numel // world_size)


def ceil_multiple(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class Arrival:
    """A parameter's gradient, when it has been computed."""

    param: Param
    unit: Unit


def arrivals(units: Sequence[Unit]) -> Iterator[Arrival]:
    """Gradients in the order of backward: the last unit's last parameter first."""
    for u in reversed(trained(units)):
        for p in reversed(u.params):
            yield Arrival(p, u)


def line(  # noqa: PLR0913 - a line's fields
    line_id: str,
    nbytes: int,
    spans: Iterable[Span],
    kind: Kind,
    note: str,
    *,
    tier: Tier = "device",
    source: Source = "derived",
) -> Line:
    """A line; its note cites where it follows from."""
    return Line(line_id, nbytes, tuple(spans), kind, tier, source, note)


def by_phase(line_id: str, levels: Mapping[int, int], kind: Kind, note: str) -> list[Line]:
    """Lines for something whose bytes differ from phase to phase, as `{phase index: bytes}`.

    Neighbouring phases of one size are one instance; sizes beyond the most frequent one are lines of their own.
    """
    sizes: dict[int, list[list[int]]] = {}
    for phase in sorted(levels):
        spans = sizes.setdefault(levels[phase], [])
        if spans and spans[-1][1] == phase - 1:
            spans[-1][1] = phase
        else:
            spans.append([phase, phase])
    sizes.pop(0, None)
    ordered = sorted(sizes.items(), key=lambda item: (-len(item[1]), -item[0]))
    return [
        line(line_id if not n else f"{line_id}.other{n}", nbytes, [(a, b) for a, b in spans], kind, note)
        for n, (nbytes, spans) in enumerate(ordered)
    ]


def first_backward(units: Sequence[Unit], time: Timeline) -> int:
    """Phase in which the first gradient of a parameter is there."""
    return time.at(f"backward.{trained(units)[-1].name}")


def after(unit: Unit, units: Sequence[Unit], time: Timeline) -> int:
    """The phase that follows a unit's backward."""
    return time.at(f"reduce.{unit.name}") + 1
