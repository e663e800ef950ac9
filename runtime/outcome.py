"""What a run leaves behind: the steps it took, and measured bytes beside predicted ones, of every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zplan.runtime.verify import Comparison


@dataclass(frozen=True)
class Line:
    """Predicted and measured bytes of one line, or of one phase's peak, on one rank."""

    name: str
    where: str
    predicted: int
    measured: int
    bound: bool = False
    """`predicted` is an upper bound, as with compiled blocks."""

    def outside(self, tolerance: float) -> bool:
        """Whether they differ by more than a fraction of the larger; under a bound, whether more was measured."""
        if self.bound and self.measured <= self.predicted:
            return False
        return abs(self.measured - self.predicted) > tolerance * max(self.predicted, self.measured)

    def cells(self) -> tuple[str, str, str, str]:
        difference = self.measured - self.predicted
        return self.name, f"{self.predicted:,}", f"{self.measured:,}", f"{difference:+,}" if difference else "0"


@dataclass(frozen=True)
class Measured:
    """One rank's comparison. `stray` are bytes that no line claims."""

    rank: int
    device: str
    lines: tuple[Line, ...]
    peaks: tuple[Line, ...]
    stray: tuple[Line, ...]

    def outside(self, tolerance: float) -> list[Line]:
        return [x for x in (*self.lines, *self.peaks) if x.outside(tolerance)] + list(self.stray)

    @property
    def peak(self) -> Line:
        return max(self.peaks, key=lambda x: x.predicted)


def write_measured(folder: Path, rank: int, device: str, comparison: Comparison) -> None:
    """Called by each rank; `read_measured` finds it."""
    parts = {"lines": comparison.lines, "peaks": comparison.peaks, "stray": comparison.unattributed}
    raw: dict[str, Any] = {
        name: [(r.name, r.where, r.predicted, r.measured, r.bound) for r in rows] for name, rows in parts.items()
    }
    (folder / f"rank{rank}.measured").write_text(json.dumps({"rank": rank, "device": device, **raw}))


def read_measured(folder: Path) -> list[Measured]:
    """All ranks' comparisons, in rank order."""
    found = []
    for path in folder.glob("rank*.measured"):
        raw = json.loads(path.read_text())
        for name in ("lines", "peaks", "stray"):
            raw[name] = tuple(Line(*row) for row in raw[name])
        found.append(Measured(**raw))
    return sorted(found, key=lambda m: m.rank)


@dataclass(frozen=True)
class Outcome:
    """All of a run that outlives it."""

    steps: tuple[dict[str, Any], ...]
    """Records of `runtime/progress.py`, one per step."""
    measured: tuple[Measured, ...]

    def worst(self, tolerance: float) -> Measured:
        """The rank with the most rows outside the tolerance; rank 0 where all agree."""
        return max(self.measured, key=lambda m: (len(m.outside(tolerance)), -m.rank))

    def good(self, tolerance: float) -> bool:
        return not any(m.outside(tolerance) for m in self.measured)

    def to_json(self, tolerance: float) -> str:
        return json.dumps(
            {"ok": self.good(tolerance), "steps": self.steps, "ranks": [asdict(m) for m in self.measured]}, indent=2
        )

    def table(self, tolerance: float) -> str:
        """Lines of the worst rank, then peaks: the highest, and every phase that is outside the tolerance."""
        from tabulate import tabulate

        if not self.measured:
            return "bytes were not measured: that takes two steps, and this run had fewer"
        shown = self.worst(tolerance)
        rows = [x.cells() for x in sorted(shown.lines, key=_order)]
        rows += _first([(f"not in the plan: {x.name}", *x.cells()[1:]) for x in shown.stray])
        off = [x for x in shown.peaks if x != shown.peak and x.outside(tolerance)]
        rows += [_peak_row(shown.peak), *_first([_peak_row(x) for x in off])]
        body = tabulate(
            rows,
            headers=("rank " + str(shown.rank), "predicted B", "measured B", "difference"),
            colalign=("left", "right", "right", "right"),
            disable_numparse=True,
            tablefmt="simple",
        )
        return f"{body}\n\n{self.verdict(tolerance)}"

    def verdict(self, tolerance: float) -> str:
        """One sentence over all ranks, lines and phases."""
        ranks, lines, phases = len(self.measured), len(self.measured[0].lines), len(self.measured[0].peaks)
        what = f"{ranks} rank{'s' if ranks > 1 else ''}, {lines} lines, {phases} phases"
        within = "to the byte" if tolerance == 0 else f"within {tolerance:.3%}"
        if self.good(tolerance):
            return f"{what}: measured equals predicted {within}"
        count = sum(len(m.outside(tolerance)) for m in self.measured)
        ranks_off = [m.rank for m in self.measured if m.outside(tolerance)]
        return f"{what}: {count} not equal {within}, on ranks {', '.join(map(str, ranks_off))}"


Cells = tuple[str, str, str, str]

SHOWN = 8
"""Rows of one kind of difference that a table shows; `--json` has all."""


def _first(rows: list[Cells]) -> list[Cells]:
    more = len(rows) - SHOWN
    return rows[:SHOWN] + ([(f"... and {more} more such rows", "", "", "")] if more > 0 else [])


def _peak_row(x: Line) -> Cells:
    return (f"peak of `{x.where}`", *x.cells()[1:])


KINDS = ("params", "optim", "grads", "data", "act")


def _order(x: Line) -> tuple[int, str]:
    """States first, then buffers, data, activations."""
    kind = x.name.partition(".")[0]
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), x.name)
