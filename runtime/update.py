"""The update of a step: norm and clipping, then units in two parts, between which the next forward's gathers begin."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.runtime.collectives import Collectives
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.in_backward import InBackward
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.penalty import Penalty
from zplan.runtime.unit import FlatUnit
from zplan.runtime.uses import Uses
from zplan.runtime.windows import Windows

FIRST_UNITS = 2
"""Units gathered before the next forward asks: the embedding, and the first block, whose gather the embedding is too
short to hide.
"""


class Update:
    """What the steps of one engine do to its parameters."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        in_backward: InBackward | None,
        collectives: Collectives,
        gatherer: Gatherer,
        windows: Windows,
        uses: Uses,
    ) -> None:
        self.optimizer, self.in_backward, self.collectives = optimizer, in_backward, collectives
        self.gatherer, self.windows, self.uses = gatherer, windows, uses
        self.penalty = Penalty(optimizer, collectives)

    def measure(self, *, clip: float | None = None) -> None:
        """Norm and clip coefficient of the step's gradients, a penalty's among them; see `ShardedOptimizer.measure`."""
        self.penalty.apply()
        self.optimizer.measure(self.collectives, clip=clip)

    def apply(self) -> None:
        """Update everything, or tell what backward has updated already."""
        # What the next forward needs first is updated first, and gathered while the rest is updated.
        first, rest = self.windows.split_schedule(FIRST_UNITS)
        if self.in_backward is None:
            self.measure()
            self._update_units(first)
        else:
            self.in_backward.settle()
        for unit in first if self.windows.ahead != 0 else ():
            self.gatherer.prefetch(unit)
        if self.in_backward is None:
            self._update_units(rest)
        self.uses.open_early()

    def _update_units(self, units: Sequence[FlatUnit]) -> None:
        self.gatherer.let_read(units)
        self.optimizer.update(units)
        self.gatherer.invalidate(units)
