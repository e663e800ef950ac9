"""Brings units' values into their buffers and takes them away again: the slot ring and the lazy gather after a step.

[Note: ring] Member i of a ring always uses slot i mod K, in forward, recompute and backward. Views that autograd saved
in forward (a transposed weight, say) therefore point at the address that the backward gather fills again. The last K
blocks of forward are still in their slots when backward starts and are not gathered a second time. A gather into a slot
waits for the event "last compute that used it"; compute waits for the event "gather done". Writes go through the slot's
own tensor, so the version counters of parameters do not move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zplan.planner.config import Choice
from zplan.planner.placement import shards_states
from zplan.runtime.collectives import Collectives
from zplan.runtime.streams import Streams
from zplan.runtime.unit import FlatUnit


class Gatherer:
    """Moves units in and out of view. Owns no memory: slots and flat buffers belong to the units."""

    def __init__(self, units: list[FlatUnit], choice: Choice, collectives: Collectives, streams: Streams) -> None:
        self.units, self.choice, self.collectives, self.streams = units, choice, collectives, streams
        self.sharded = shards_states(choice)

    def need(self, unit: FlatUnit) -> None:
        """Make a unit's values readable on the current stream."""
        if unit.summoned or (unit.open and unit.valid):
            return
        self.prefetch(unit)
        if unit.gathered is not None:
            self.streams.wait(unit.gathered)
            unit.gathered = None
        unit.show()

    @torch.no_grad()
    def prefetch(self, unit: FlatUnit) -> None:
        """Start a unit's gather unless its values are there or on their way."""
        if unit.valid or not self.sharded:
            return
        with self.streams.on(self.streams.gather):
            self.streams.wait(unit.written)
            slot = unit.slot
            if slot is not None:
                self.streams.wait(slot.free)
                slot.holder = unit
            shared = unit.shared if slot is None else slot.shared
            self.collectives.all_gather(unit.fill_own(unit.buffer), unit.name, shared)
            unit.whole = slot is None
            unit.gathered = self.streams.mark()

    def can_prefetch(self, unit: FlatUnit) -> bool:
        """Whether a gather now would not overwrite a slot that is in use."""
        return unit.slot is None or unit.slot.holder is None or not unit.slot.holder.open

    def release(self, unit: FlatUnit, *, spent: bool) -> None:
        """End a ringed unit's window. Its values stay in the slot until another unit takes it.

        Parameters
        ----------
        spent
            Nobody will ask for these values again before they are gathered anew; checked mode then fills them with NaN.
        """
        if unit.slot is None:
            return
        unit.hide()
        if spent and self.collectives.checked and unit.slot.holder is unit:
            unit.slot.buffer.fill_(float("nan"))
            unit.slot.holder = None
        unit.slot.free = self.streams.mark()

    def let_read(self, units: Sequence[FlatUnit]) -> None:
        """Before units' own slices are written: wait for gathers of them that nobody has waited for.

        A unit that this forward did not run, say: other ranks may still read it.
        """
        for unit in units:
            self.streams.wait(unit.gathered)
            unit.gathered = None

    def invalidate(self, units: Sequence[FlatUnit]) -> None:
        """After units' optimizer step: other ranks' slices are old everywhere, so nothing is shown until gathered."""
        if not self.sharded:
            return
        written = self.streams.mark()
        for unit in units:
            unit.written = written
            unit.whole = False
            unit.hide()
            if unit.slot is not None and unit.slot.holder is unit:
                unit.slot.holder = None
