"""The rules of fp16's loss scale in plain Python, written from DeepSpeed's documentation and not from our code."""

from __future__ import annotations

from zplan.planner.loss_scale import LossScale


class Model:
    """What scale, tolerance and applied steps must be after each step."""

    def __init__(self, s: LossScale) -> None:
        self.s, self.scale, self.left, self.step, self.last = s, 2.0**s.power, s.hysteresis, 0, -1
        self.applied = 0

    def update(self, overflow: bool) -> bool:  # noqa: FBT001 - one fact a step
        """Move on by one step; returns whether it overflowed at the minimum."""
        failed = False
        if overflow:
            if self.s.hysteresis == 1 or self.left == 1:
                failed = self.scale == self.s.minimum
                self.scale = max(self.scale / 2, float(self.s.minimum))
            else:
                self.left -= 1
            self.last = self.step
        else:
            self.applied += 1
            if self.s.consecutive:
                self.left = self.s.hysteresis
            stable = self.step - self.last - 1
            if stable > 0 and stable % self.s.window == 0:
                self.scale *= 2
                if not self.s.consecutive:
                    self.left = self.s.hysteresis
        self.step += 1
        return failed
