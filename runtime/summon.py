"""Whole parameters for reading or writing, outside the windows that hooks open.

Ringed units share slots, so they are gathered into buffers of their own here, which live as long as the context.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.runtime.collectives import checksum
from zplan.runtime.hooks import in_backward
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine


class Summoned:
    """Context in which a module's parameters are whole. Costs one compute-dtype copy of each ringed unit touched."""

    def __init__(self, engine: Engine, module: nn.Module, *, write: bool) -> None:
        self.engine, self.write = engine, write
        mine = set(module.parameters())
        # Inside another summon of the same unit the outer one keeps it whole.
        self.units = [u for u in engine.units if mine & set(u.params) and not u.summoned]
        self.copies: list[Tensor | None] = []
        self.sums: list[int] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        engine = self.engine
        if in_backward():
            raise ZplanError("`summon` inside backward", "summon between steps")
        for u in self.units:
            if u.slot is None:
                engine.gatherer.need(u)
                self.copies.append(None)
            else:
                self.copies.append(self._copy_out(u))
            u.open = u.summoned = True
            if not self.write:
                self.sums.append(checksum(self._values(len(self.copies) - 1)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        touched = [u.name for i, u in enumerate(self.units) if not self.write and checksum(self._values(i)) != self.sums[i]]
        with torch.no_grad():
            for i, u in enumerate(self.units):
                if self.write:
                    self._take_in(i)
                u.summoned = False
                if self.copies[i] is not None:
                    u.hide()
        self.copies.clear()
        if touched and error is None:
            raise ZplanError(
                f"parameters of `{touched[0]}` were changed inside `summon`, and the change is lost or half-kept",
                "use `summon(..., write=True)` and write the same values on every rank",
            )

    def _values(self, i: int) -> Tensor:
        copy = self.copies[i]
        return self.units[i].buffer if copy is None else copy

    def _copy_out(self, u: FlatUnit) -> Tensor:
        """Gather a ringed unit beside the ring."""
        engine = self.engine
        full = torch.empty_like(u.buffer)
        engine.collectives.all_gather(u.fill_own(full), u.name)
        for p, entry, shape in zip(u.params, u.layout.entries, u.shapes, strict=True):
            p.data = full[entry.offset : entry.end].view(shape)
        return full

    def _take_in(self, i: int) -> None:
        """Make what was written the truth: masters where they are apart, and stale slots forgotten.

        An element that nobody wrote keeps its full fp32 master: only where the compute-dtype value changed is the master replaced.
        """
        u, engine = self.units[i], self.engine
        values = self._values(i)
        if u.master is not None:
            pairs = (
                [(u.shard_of(u.master, p), u.own(values, p)) for p in u.layout.pieces]
                if shards_states(engine.choice)
                else [(u.master, values)]
            )
            for master, written in pairs:
                same = master.to(written.dtype) == written
                master.copy_(torch.where(same, master, written.float()))
        if u.slot is not None and u.slot.holder is u:
            u.slot.holder = None
