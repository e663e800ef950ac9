"""The loss scale of fp16 training, kept and moved on the device.

See [Note: loss scale] in `planner/loss_scale.py`. That the scale can't fall any further is a late read
(`runtime/late.py`), so the error comes one step after its cause.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import NUM_SCALARS, LossScale
from zplan.runtime.arena import Arena
from zplan.runtime.late import LateRead


class LossScaler:
    """DeepSpeed's state machine over 0-dim fp32 tensors. No operation allocates; on a GPU none waits for the device.

    Attributes
    ----------
    scale
        What losses are multiplied by.
    """

    def __init__(self, settings: LossScale, arena: Arena) -> None:
        self.settings = settings
        self.buffer = arena.take("optim.loss_scale", NUM_SCALARS, torch.float32, fill=0.0)
        self.scale, self._left, self._age, self._failed, *scratch = self.buffer.unbind()
        self._shrink, self._good, self._grow, self._spare = scratch
        self.scale.fill_(settings.start)
        self._left.fill_(float(settings.hysteresis))
        # Steps since the last overflow, which counts as step -1 at the start.
        self._age.fill_(1.0)
        self._stuck = LateRead(self._failed)

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move on by one step. `skip` is 1 where its gradients were not finite, else 0."""
        if self.settings.static:
            return
        s, spare = self.settings, self._spare
        self._good.copy_(skip).neg_().add_(1.0)
        # A skipped step with no tolerance left shrinks the scale; at its minimum that is the end.
        self._shrink.copy_(self._left).le_(1.0).mul_(skip)
        spare.copy_(self.scale).eq_(float(s.minimum)).mul_(self._shrink)
        torch.maximum(self._failed, spare, out=self._failed)
        # A skipped step with tolerance left uses some up.
        self._left.sub_(skip).add_(self._shrink)
        self.scale.mul_(spare.copy_(self._shrink).mul_(-0.5).add_(1.0)).clamp_(min=float(s.minimum))
        # A good step that ends a window doubles it. The very first good step ends none.
        stable = spare.copy_(self._age).sub_(1.0)
        self._grow.copy_(stable).gt_(0.0).mul_(self._good)
        self._grow.mul_(stable.remainder_(float(s.window)).eq_(0.0))
        self.scale.mul_(spare.copy_(self._grow).add_(1.0))
        refill = self._good if s.consecutive else self._grow
        self._left.add_(spare.copy_(self._left).neg_().add_(float(s.hysteresis)).mul_(refill))
        self._age.mul_(self._good).add_(1.0)
        self._stuck.copy()

    def state(self) -> list[float]:
        """What a checkpoint keeps: scale, tolerance left, age. Waits for the device."""
        values: list[float] = torch.stack((self.scale, self._left, self._age)).tolist()
        return values

    @torch.no_grad()
    def restore(self, values: list[float]) -> None:
        """Go on from `state`."""
        for tensor, value in zip((self.scale, self._left, self._age), values, strict=True):
            tensor.fill_(value)
        self._failed.zero_()
        self._stuck.copy()

    def check(self, step: int) -> None:
        """Raise when the step before this one overflowed at the minimum scale."""
        if self._stuck.read():
            raise ZplanError(
                f"gradients of optimizer step {step} overflowed at the minimum loss scale {self.settings.minimum}",
                "train in bf16, lower the learning rate, or lower `min_loss_scale`",
            )
