"""Lines, phases and their sums. The only code that adds bytes up.

A line is a named number of bytes with a tier and, for each of its instances, a lifetime: the phases it lives
through. The peak is the maximum over phases of the live lines, never a sum of maxima.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

Tier = Literal["device", "host", "pinned", "nvme"]
Kind = Literal["states", "buffers", "activations", "overhead"]
Source = Literal["allocated", "derived", "measured", "estimate"]
"""allocated: zplan allocates it, exact. derived: follows from torch's own ops, exact on the device named in the plan.
measured: a machine constant with its source in `note`. estimate: stated, not exact. How far the last two may be off is
`Line.bounds`."""

SPREAD_PERCENT: dict[Source, int] = {"allocated": 0, "derived": 0, "measured": 5, "estimate": 10}
"""Per cent by which a line without bounds of its own may be off, either way. See [Note: intervals] in interval.py."""

_EXACT = tuple(source for source, percent in SPREAD_PERCENT.items() if not percent)


class Line(NamedTuple):
    """`nbytes` of one storage (or of one set of storages that are born and die together), and where it lives when.

    Attributes
    ----------
    id
        Dotted, stable: `optim.exp_avg`, `act.block.saved`.
    nbytes
        Bytes of one instance.
    spans
        One `(first, last)` pair of phase indices (inclusive) per instance.
    low, high
        Bounds of `nbytes` where it is not exact and the usual spread of its source is not the one to state.
    """

    id: str
    nbytes: int
    spans: tuple[tuple[int, int], ...]
    kind: Kind
    tier: Tier = "device"
    source: Source = "allocated"
    note: str = ""
    low: int | None = None
    high: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most that one instance may be."""
        off = self.nbytes * SPREAD_PERCENT[self.source] // 100
        low, high = self.low, self.high
        return self.nbytes - off if low is None else low, self.nbytes + off if high is None else high

    @property
    def exact(self) -> bool:
        """Whether nothing is said about how far it may be off."""
        return self.source in _EXACT and self.low is None and self.high is None

    @property
    def instances(self) -> int:
        return len(self.spans)

    @property
    def total_bytes(self) -> int:
        """Bytes of all instances together, alive at once or not."""
        return self.nbytes * self.instances


@dataclass(frozen=True)
class Ledger:
    """All lines of one rank over the phases of one training step."""

    phases: tuple[str, ...]
    lines: tuple[Line, ...]

    @cached_property
    def by_tier(self) -> dict[Tier, list[Line]]:
        """The lines of each tier that has any."""
        found: dict[Tier, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.tier, []).append(line)
        return found

    @cached_property
    def _sums(self) -> dict[tuple[Tier, Kind | None], tuple[int, ...]]:
        """What `per_phase` has added up so far."""
        return {}

    def per_phase(self, tier: Tier = "device", kind: Kind | None = None) -> tuple[int, ...]:
        """Live bytes in each phase, in phase order."""
        if (tier, kind) not in self._sums:
            delta = [0] * (len(self.phases) + 1)
            for line in self.by_tier.get(tier, ()):
                if kind is not None and line.kind != kind:
                    continue
                for first, last in line.spans:
                    delta[first] += line.nbytes
                    delta[last + 1] -= line.nbytes
            self._sums[tier, kind] = tuple(accumulate(delta[:-1]))
        return self._sums[tier, kind]

    def offsets(self, tier: Tier = "device") -> tuple[list[int], list[int]]:
        """By how much the live bytes of each phase may be less, as numbers below zero, and more."""
        less, more = ([0] * (len(self.phases) + 1) for _ in range(2))
        for line in self.by_tier.get(tier, ()):
            if line.exact:
                continue
            low, high = line.bounds
            for first, last in line.spans:
                for delta, off in ((less, low - line.nbytes), (more, high - line.nbytes)):
                    delta[first] += off
                    delta[last + 1] -= off
        return list(accumulate(less[:-1])), list(accumulate(more[:-1]))

    def at_most(self, tier: Tier) -> list[int]:
        """Live bytes in each phase with every line at its most."""
        return [n + off for n, off in zip(self.per_phase(tier), self.offsets(tier)[1], strict=True)]

    def interval(self, tier: Tier = "device") -> tuple[int, int]:
        """Between which bytes the peak lies: the largest phase with every line at its least, and at its most."""
        low, high = (
            max((n + off for n, off in zip(self.per_phase(tier), offsets, strict=True)), default=0)
            for offsets in self.offsets(tier)
        )
        return low, high

    def peak_bytes(self, tier: Tier = "device") -> int:
        return max(self.per_phase(tier), default=0)

    def peak_phase(self, tier: Tier = "device") -> str:
        """Name of the first phase that reaches the peak."""
        per = self.per_phase(tier)
        return self.phases[per.index(max(per))]

    def live(self, phase: str, tier: Tier = "device") -> tuple[tuple[Line, int], ...]:
        """`(line, instances alive)` in one phase, for lines with at least one."""
        at = self.phases.index(phase)
        found = []
        for line in self.by_tier.get(tier, ()):
            n = sum(first <= at <= last for first, last in line.spans)
            if n:
                found.append((line, n))
        return tuple(found)

    def line(self, line_id: str) -> Line:
        return next(x for x in self.lines if x.id == line_id)


def merge(phases: Iterable[str], *groups: Iterable[Line]) -> Ledger:
    """One ledger from groups of lines; empty lines are left out, ids must be unique."""
    lines = tuple(x for group in groups for x in group if x.nbytes and x.spans)
    seen: set[tuple[str, str]] = set()
    for x in lines:
        assert (x.id, x.tier) not in seen, f"line {x.id} on {x.tier} given twice"
        seen.add((x.id, x.tier))
    return Ledger(tuple(phases), lines)
