"""Updates each unit as its gradient lands, where nothing needs the gradients of all units at once.

[Note: in backward] Reduce, norm and update of a unit follow each other on the reduce stream, so the next unit's
gradient goes into the very buffer that this one's has left. A unit is reduced when its own backward is over, so nobody
reads the weights that are overwritten; other ranks' slices of it are gathered before the next forward, as after any
step. The learning rate is written before backward. What the update can't know yet, the norm over all ranks, is told
after the step.

[Note: halfway] A backward that breaks off leaves some units a step ahead of the others, and no second backward can tell
which. The engine then refuses everything but to load a checkpoint. So it does where gradients are not finite: a rank
leaves the unit that has them, and all after it, as they are, but others may have been updated before. The flag is a
late read (`runtime/late.py`), so that error comes one step later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zplan.planner.errors import ZplanError
from zplan.runtime.collectives import Collectives
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.late import LateRead
from zplan.runtime.nonfinite import first_nonfinite
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.unit import FlatUnit

WAY_OUT = "load the last checkpoint with `engine.load_checkpoint(folder)`"
OFF = 'train with `"optimizer_in_backward": false`'


class InBackward:
    """The updates of one engine's backward passes. See [Note: in backward]."""

    def __init__(self, optimizer: ShardedOptimizer, gatherer: Gatherer, collectives: Collectives) -> None:
        self.optimizer, self.gatherer, self.collectives = optimizer, gatherer, collectives
        self.running = False
        """`engine.backward` is at work."""
        self.begun = False
        """Units have been updated since the last step."""
        self.broken = ""
        """Why parameters are of no one step; empty while they are."""
        self._skipped = LateRead(optimizer.scalars.skip)

    # --- backward and step -------------------------------------------------------------------------------------------

    def landed(self, unit: FlatUnit) -> None:
        """Update a unit whose gradients are reduced and measured; called on the stream that reduced them."""
        if not self.running:
            raise ZplanError(
                "`loss.backward()` with `optimizer_in_backward`, which needs the learning rate first",
                "call `engine.backward(loss)`",
            )
        if not self.begun:
            self.optimizer.begin(self.collectives)
            self.begun = True
        self.optimizer.guard(unit)
        self.gatherer.let_read([unit])
        self.optimizer.update([unit])
        self.gatherer.invalidate([unit])

    @contextmanager
    def backward(self, *, retain_graph: bool) -> Iterator[None]:
        """Around the one backward of a step. What breaks off in it after the first update can't be undone."""
        if self.begun:
            raise ZplanError(
                "a second `backward` in one step, but with `optimizer_in_backward` the first has updated the "
                "parameters",
                f"call `engine.step()` after each, or add the losses up and call `backward` once, or {OFF}",
            )
        if retain_graph:
            raise self.refusal("`backward(retain_graph=True)`", "keeps a graph of weights that are overwritten")
        self.running = True
        try:
            yield
        except BaseException as error:
            if self.begun:
                self.broken = f"backward broke off ({type(error).__name__}) after part of the parameters was updated"
            raise
        finally:
            self.running = False

    def settle(self) -> None:
        """In the step: norm and count of what backward has updated."""
        if self.begun:
            self.optimizer.applied.sub_(1.0)
        weighted, s = self.optimizer.weighted, self.optimizer.scalars
        self.optimizer.measure(self.collectives)
        self.begun = False
        if weighted:
            s.skip.mul_(s.tokens.ne(0.0))  # without tokens nothing was updated, so nothing is spoilt
        self._skipped.copy()

    # --- refusals ----------------------------------------------------------------------------------------------------

    def refusal(self, what: str, why: str) -> ZplanError:
        """The error for what needs gradients of all units at once."""
        return ZplanError(f"{what} {why} with `optimizer_in_backward`", OFF)

    def check(self) -> None:
        """Raise where parameters are of no one step."""
        if self.broken:
            raise ZplanError(f"with `optimizer_in_backward`, {self.broken}", WAY_OUT)

    def check_last_step(self, step: int) -> None:
        """Raise where the last step's gradients were not finite."""
        if not self.broken and self._skipped.read():
            where = f" (first in {self._first()})"
            self.broken = f"gradients of step {step} were not finite{where}, and part of the parameters was updated"
        self.check()

    def _first(self) -> str:
        """Where the first value was, in the order of reduces. Every rank had the flag, so all ask together."""
        found = first_nonfinite(self.optimizer)
        rows = {u.name: row for u, row in self.optimizer.first_row.items()}
        said = self.collectives.exchange("" if found is None else f"{rows[found.unit]:9}|{found}")
        # Sums of slices that are finite may overflow.
        return min((text for text in said if text), default="|the sum of their squares").partition("|")[2]

    # --- after an error ----------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Learn whether any rank has updated something since the last step; raise where all have updated everything.

        Every rank must call it.
        """
        states = set(self.collectives.exchange("broken" if self.broken else "updated" if self.begun else ""))
        if states == {"updated"}:
            raise ZplanError(
                "`reset_step` after a backward that has updated the parameters",
                "call `engine.step()`: with `optimizer_in_backward` there are no gradients left to drop",
            )
        if states != {""}:
            self.broken = self.broken or "backward broke off on another rank after part of the parameters was updated"

    def mend(self) -> None:
        """All states come from a checkpoint."""
        self.broken, self.begun = "", False
        self.optimizer.scalars.skip.zero_()
        self._skipped.copy()
