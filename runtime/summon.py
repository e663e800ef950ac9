"""Whole parameters, gradients and moments for reading or writing, outside the windows that hooks open.

Ringed units share slots, so they are gathered into buffers of their own here, which live as long as the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.runtime.collectives import checksum
from zplan.runtime.halves import Halves
from zplan.runtime.unit import FlatUnit
from zplan.runtime.windows import in_backward

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine


@dataclass(frozen=True)
class Whole:
    """What `summon` gives beside the parameters: full fp32 tensors by parameter name, of trained parameters only."""

    grads: dict[str, Tensor] = field(default_factory=dict)
    """Mean gradients of the step, before clipping. Filled with `grads=True`."""
    optim: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """States of each parameter by name: `exp_avg` and `exp_avg_sq` for AdamW. Filled with `optim=True`."""


class Summoned:
    """Context in which a module's parameters are whole.

    Costs one compute-dtype copy of each ringed unit touched, and an fp32 copy of every unit for gradients and for each
    moment. Writing to gradients makes those fp32 that one rank keeps in bf16. Where masters are in halves, `write`
    costs a bf16 copy of this rank's slices of each resident unit.
    """

    def __init__(
        self, engine: Engine, module: nn.Module, *, grads: bool, optim: bool, write: bool, timeout_s: float
    ) -> None:
        self.engine, self.write, self.timeout_s = engine, write, timeout_s
        mine = set(module.parameters())
        # Inside another summon of the same unit the outer one keeps it whole.
        self.units = [u for u in engine.units if mine & set(u.params) and not u.summoned]
        self.asked = (*(("grad",) if grads else ()), *(engine.optimizer.states if optim else ()))
        self.copies: list[Tensor | None] = []
        self.sums: list[int] = []
        self.before: dict[str, Tensor] = {}
        """Own bf16 weights as they were, where what is written lies over the upper halves of masters."""
        self.full: list[tuple[FlatUnit, str, Tensor]] = []
        """(unit, state, full fp32 values) of what was asked for beside parameters."""

    @torch.no_grad()
    def __enter__(self) -> Whole:
        engine = self.engine
        if in_backward():
            raise ZplanError("`summon` inside backward", "summon between steps")
        if "grad" in self.asked and not engine.is_gradient_accumulation_boundary():
            raise ZplanError(
                f"`summon(grads=True)` after {engine.reducer.micro_step} of {engine.choice.accumulation} micro-steps: "
                "there are no whole gradients",
                "enter it between the last backward of a step and `engine.step()`",
            )
        names = ", ".join(u.name for u in self.units)
        engine.collectives.meet(f"summon {names} {self.asked} write={self.write}", "summon", timeout_s=self.timeout_s)
        for u in self.units:
            if u.slot is None:
                engine.gatherer.need(u)
                self.copies.append(None)
                if self.write and isinstance(u.weights, Halves):
                    self.before[u.name] = torch.cat(u.weights.high)
            else:
                self.copies.append(self._copy_out(u))
            u.open = u.summoned = True
            if not self.write:
                self.sums.append(checksum(self._values(len(self.copies) - 1)))
        return self._states()

    def _states(self) -> Whole:
        """Gather what was asked for beside parameters."""
        whole, optimizer = Whole(), self.engine.optimizer
        for u in self.units if self.asked else ():
            if u.placement.frozen:
                continue
            for state in self.asked:
                full = self._gather(u, optimizer.slices(u, state))
                if state == "grad":
                    full.mul_(optimizer.mean(self.engine.collectives))
                self.full.append((u, state, full))
                for entry, shape in zip(u.layout.entries, u.shapes, strict=True):
                    view = full[entry.offset : entry.end].view(shape)
                    if state == "grad":
                        whole.grads[entry.name] = view
                    else:
                        whole.optim.setdefault(entry.name, {})[state] = view
        return whole

    def _gather(self, u: FlatUnit, slices: list[Tensor]) -> Tensor:
        """Every rank's slices of one state, in one full-length fp32 buffer."""
        if not shards_states(self.engine.choice):
            return slices[0].to(torch.float32, copy=True)
        full = torch.empty(u.layout.padded_numel, dtype=torch.float32, device=self.engine.device)
        pairs = []
        for piece, mine in zip(u.layout.pieces, slices, strict=True):
            own = u.own(full, piece)
            own.copy_(mine)
            pairs.append((full[piece.offset : piece.offset + piece.numel], own))
        self.engine.collectives.all_gather(pairs, u.name)
        return full

    def _take_in_states(self) -> None:
        """Keep what was written to gradients and moments."""
        optimizer = self.engine.optimizer
        if "grad" in self.asked:
            optimizer.widen_grads()
        for u, state, full in self.full:
            if state == "grad":
                full.div_(optimizer.mean(self.engine.collectives))
            slices = optimizer.slices(u, state)
            parts = [u.own(full, p) for p in u.layout.pieces] if shards_states(self.engine.choice) else [full]
            for mine, written in zip(slices, parts, strict=True):
                mine.copy_(written)
        if "grad" in self.asked:
            optimizer.measure_again()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        touched = [
            u.name for i, u in enumerate(self.units) if not self.write and checksum(self._values(i)) != self.sums[i]
        ]
        with torch.no_grad():
            for i, u in enumerate(self.units):
                if self.write:
                    self._take_in(i)
                u.summoned = False
                if self.copies[i] is not None and not self.engine.closed:
                    u.hide()
            if self.write:
                self._take_in_states()
        self.copies.clear()
        self.before.clear()
        self.full.clear()
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

        An element that nobody wrote keeps its full fp32 master: only where the compute-dtype value changed is the
        master replaced.
        """
        u, engine = self.units[i], self.engine
        values = self._values(i)
        if isinstance(u.weights, Halves):
            self._take_in_halves(u, u.weights, values)
        elif u.master is not None:
            pairs = (
                [(u.shard_of(u.master, p), u.own(values, p)) for p in u.layout.pieces]
                if shards_states(engine.choice)
                else [(u.master, values)]
            )
            for master, written in pairs:
                same = master.to(written.dtype) == written
                master.copy_(torch.where(same, master, written.float()))
        elif u.shard is not None:
            for piece in u.layout.pieces:
                u.shard_of(u.shard, piece).copy_(u.own(values, piece))
        if u.slot is not None and u.slot.holder is u:
            u.slot.holder = None
        u.written = engine.streams.mark()  # a gather that is asked for early waits for it

    def _take_in_halves(self, u: FlatUnit, kept: Halves, values: Tensor) -> None:
        at = 0
        own = [u.own(values, p) for p in u.layout.pieces] if shards_states(self.engine.choice) else [values]
        for written in own:
            cut = slice(at, at + written.numel())
            # A resident unit's weights are what was written to; a ringed one's shard is still as it was.
            before = self.before[u.name] if u.shard is None else u.shard
            kept.low[cut].mul_(before[cut] == written)
            if u.shard is not None:
                u.shard[cut].copy_(written)
            at += written.numel()
