"""The learning-rate schedule of an engine: one position on for each optimizer step that was applied.

From a config (`Scheduler`), or one of torch's own (`TorchScheduler`).

Whether a step was skipped is known on the device only; the host learns of it by a late read (`runtime/late.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zplan.planner.errors import ZplanError
from zplan.planner.schedules import Schedule
from zplan.runtime.late import LateRead
from zplan.runtime.optimizer import ShardedOptimizer


class Scheduler:
    """What `initialize` returns fourth where the config has a `scheduler`. The engine moves it; nobody else need.

    It writes `lr` (and, for OneCycle, `betas`) into the optimizer's groups, whose rates keep their proportions.
    """

    def __init__(self, schedule: Schedule, optimizer: ShardedOptimizer) -> None:
        self.schedule, self.optimizer = schedule, optimizer
        group = optimizer.param_groups[0]
        self.base_lr: float = group["lr"]
        self.base_betas: tuple[float, float] | None = group.get("betas")
        self._applied = LateRead(optimizer.applied)
        self.before_step()

    @property
    def last_batch_iteration(self) -> int:
        """Applied steps less one. Waits for the last step's outcome."""
        return int(self._applied.read()) - 1

    def before_step(self) -> None:
        """Write the rate of the step that comes."""
        t = self.last_batch_iteration
        self.optimizer.set_lr(self.schedule.lr(t, self.base_lr))
        if self.base_betas is not None:
            betas = self.schedule.betas(t, self.base_betas)
            for group in self.optimizer.param_groups if betas is not self.base_betas else ():
                group["betas"] = betas

    def count(self) -> None:
        """Have the device say how many steps were applied: after each step, and after a checkpoint was loaded."""
        self._applied.copy()

    def get_last_lr(self) -> list[float]:
        """The rate that the next step will run at, in a list: that of the first parameter group. Waits as above."""
        return [self.schedule.lr(self.last_batch_iteration, self.base_lr)]

    def step(self, *args: object) -> None:
        """Refused: `engine.step()` moves the schedule, and a second move would be silently wrong."""
        raise ZplanError("the engine steps the schedule by itself", "drop the call of `scheduler.step()`")


def scheduler_of(schedule: Schedule | None, optimizer: ShardedOptimizer) -> Scheduler | None:
    """The schedule of a config, if it has one."""
    return None if schedule is None else Scheduler(schedule, optimizer)


Given = LRScheduler | Callable[[Optimizer], LRScheduler]
"""What users pass: a scheduler, or what makes one of an optimizer."""


class TorchScheduler:
    """Any torch scheduler. The engine moves it by the steps that were applied, and nobody else must.

    Rates are read from the scheduler's optimizer and written into the engine's. A step that was skipped is known to
    the host before the next step's rate is needed, so the scheduler is never a step too far.

    Attributes
    ----------
    torch
        The scheduler, for `get_last_lr` and the like.
    """

    def __init__(self, given: Given, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.torch: LRScheduler = given if isinstance(given, LRScheduler) else given(_Rates(optimizer.param_groups))
        if isinstance(self.torch, ReduceLROnPlateau):
            raise ZplanError(
                "ReduceLROnPlateau needs a measured value at each step, which the engine does not have",
                "set `optimizer.param_groups[0]['lr']` from your own loop",
            )
        if not isinstance(self.torch, LRScheduler):
            raise ZplanError(
                f"`lr_scheduler` made a {type(self.torch).__name__}", "give a torch scheduler, or a function that does"
            )
        groups = self.torch.optimizer.param_groups
        if len(groups) != len(optimizer.param_groups):
            raise ZplanError(
                f"the scheduler's optimizer has {len(groups)} parameter groups, the engine's "
                f"{len(optimizer.param_groups)}",
                "pass a function: `lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 1000)`",
            )
        self.moved = 0
        """Steps that the scheduler was moved by."""
        self._written: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._applied = LateRead(optimizer.applied)
        self.before_step()

    def before_step(self) -> None:
        """Move by the steps applied since, and write the rates of the step that comes."""
        applied = int(self._applied.read())
        if applied < self.moved:
            raise ZplanError(
                f"the checkpoint is at step {applied}, but the torch scheduler has been moved to {self.moved} and "
                "can't go back",
                "load the checkpoint before training, with a scheduler that was just made",
            )
        pairs = list(zip(self.torch.optimizer.param_groups, self.optimizer.param_groups, self._written, strict=True))
        for source, group, written in pairs:
            # What the user has changed since goes on from there, as with a plain optimizer.
            source.update({name: group[name] for name, value in written.items() if group[name] != value})
        with warnings.catch_warnings():
            # The engine's step is the optimizer's, which torch can't see.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            while self.moved < applied:
                self.torch.step()
                self.moved += 1
        for source, group, written in pairs:
            for name in ("lr", "betas", "momentum"):
                if name in source and source is not group:
                    group[name] = source[name]
            group["lr"] = float(group["lr"])
            written.update({name: group[name] for name in ("lr", "betas", "momentum") if name in source})

    def count(self) -> None:
        """Have the device say how many steps were applied: after each step, and after a checkpoint was loaded."""
        self._applied.copy()

    def get_last_lr(self) -> list[float]:
        """The rates of the last move, one a parameter group."""
        return [float(lr) for lr in self.torch.get_last_lr()]

    def step(self, *args: object) -> None:
        """Refused, as for `Scheduler`."""
        raise ZplanError("the engine steps the schedule by itself", "drop the call of `scheduler.step()`")


class _Rates(Optimizer):
    """The engine's parameter groups as torch's schedulers want them: in an `Optimizer`. It never steps."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        defaults = {name: value for name, value in groups[0].items() if name != "params"}
        super().__init__([{**group, "params": list(group["params"])} for group in groups], defaults)
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})

    def step(self, closure: Any = None) -> None:
        raise ZplanError("this optimizer only carries rates", "call `engine.step()`")
