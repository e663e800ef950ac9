"""One thing that a rank does outside the training step: a small ledger of its own over its own phases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.placement import Placement

BF16 = 2


class Activity(NamedTuple):
    """One thing that a run does beside its steps."""

    name: str
    ledger: Ledger
    """Of one rank."""
    every_rank: bool = True
    """False: one process does it alone, so a node holds it once."""
    note: str = ""
    plain: bool = True
    """Whether `zplan run` itself comes to it; otherwise only a script of the user's own does."""

    @property
    def device_bytes(self) -> int:
        return self.ledger.peak_bytes()

    @property
    def host_bytes(self) -> int:
        """Of one rank, pinned or not."""
        return host_peak(self.ledger)

    @property
    def phase(self) -> str:
        """Where the device holds most."""
        return self.ledger.peak_phase()


def host_peak(ledger: Ledger) -> int:
    """Most host memory of one rank in one phase, pinned or not."""
    both = zip(ledger.per_phase("host"), ledger.per_phase("pinned"), strict=True)
    return max((a + b for a, b in both), default=0)


Kept = Sequence[tuple[Line, int]]
"""`(line, instances)` of what is alive between two steps."""


def activity_of(
    name: str, phases: Sequence[str], kept: Kept, own: Iterable[Line], note: str, *, plain: bool = True
) -> Activity:
    always = (0, len(phases) - 1)
    base = [line._replace(spans=(always,) * n) for line, n in kept]
    return Activity(name, merge(phases, base, own), note=note, plain=plain)


def largest(placements: Sequence[Placement]) -> int:
    """Elements of the largest parameter."""
    return max((e.numel for p in one_of_each(placements) for e in p.layout.entries), default=0)


def one_of_each(placements: Sequence[Placement]) -> list[Placement]:
    """The first unit of each size class; its like have equal sizes."""
    return list({p.size_class: p for p in reversed(placements)}.values())
