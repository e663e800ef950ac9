"""The learning-rate schedule of an engine: one position on for each optimizer step that was applied.

Whether a step was skipped is known on the device only; the host learns of it by a late read (`runtime/late.py`).
"""

from __future__ import annotations

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
            for group in self.optimizer.param_groups:
                group["betas"] = self.schedule.betas(t, self.base_betas)

    def count(self) -> None:
        """Have the device say how many steps were applied: after each step, and after a checkpoint was loaded."""
        self._applied.copy()

    def get_last_lr(self) -> list[float]:
        """The rate that the next step will run at, in a list: that of the first parameter group. Waits as above."""
        return [self.schedule.lr(self.last_batch_iteration, self.base_lr)]

    def step(self, *args: object) -> None:
        """Refused: `engine.step()` moves the schedule, and a second move would be silently wrong."""
        raise ZplanError("the engine steps the schedule by itself", "drop the call of `scheduler.step()`")
