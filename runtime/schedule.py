"""The learning-rate schedule of an engine: one position on for each optimizer step that was applied.

[Note: skipped steps] Whether a step was skipped is known on the device only. Its count of applied steps is copied to
pinned memory after each step, and read before the next one is put in the queue: by then a whole forward and backward
are queued behind it, so the host learns of it without leaving the device idle.
"""

from __future__ import annotations

import torch

from zplan.planner.errors import ZplanError
from zplan.planner.schedules import Schedule
from zplan.runtime.optimizer import ShardedAdamW


class Scheduler:
    """What `initialize` returns fourth where the config has a `scheduler`. The engine moves it; nobody else need.

    It writes `lr` (and, for OneCycle, `betas`) into the optimizer's one parameter group.
    """

    def __init__(self, schedule: Schedule, optimizer: ShardedAdamW) -> None:
        self.schedule, self.optimizer = schedule, optimizer
        group = optimizer.param_groups[0]
        self.base_lr: float = group["lr"]
        self.base_betas: tuple[float, float] = group["betas"]
        cuda = optimizer.applied.is_cuda
        self._applied = torch.zeros((), dtype=torch.float32, pin_memory=cuda)  # on the host: no line of the ledger
        self._copied = torch.cuda.Event() if cuda else None
        self.before_step()

    @property
    def last_batch_iteration(self) -> int:
        """Applied steps less one. Waits for the last step's outcome."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._applied) - 1

    def before_step(self) -> None:
        """Write the rate of the step that comes. See [Note: skipped steps]."""
        t = self.last_batch_iteration
        group = self.optimizer.param_groups[0]
        group["lr"] = self.schedule.lr(t, self.base_lr)
        group["betas"] = self.schedule.betas(t, self.base_betas)

    @torch.no_grad()
    def count(self) -> None:
        """Have the device say how many steps were applied: after each step, and after a checkpoint was loaded."""
        self._applied.copy_(self.optimizer.applied, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def get_last_lr(self) -> list[float]:
        """The rate that the next step will run at, in a list for the one parameter group. Waits as above."""
        return [self.schedule.lr(self.last_batch_iteration, self.base_lr)]

    def step(self, *args: object) -> None:
        """Refused: `engine.step()` moves the schedule, and a second move would be silently wrong."""
        raise ZplanError("the engine steps the schedule by itself", "drop the call of `scheduler.step()`")
