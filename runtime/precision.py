"""The loss scale of fp16 training, kept and moved on the device.

See [Note: loss scale] in `planner/loss_scale.py`. That the scale can't fall any further is a late read
(`runtime/late.py`), so the error comes one step after its cause.

[Note: suspects] The error names the parameter that was first. Which rank's gradient it was is known only before the sum
over ranks, and looking costs a pass and a wait, so it is done only where the next skipped step could be the last: the
scale, known one step late, is within two halvings of its minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import NUM_SCALARS, LossScale
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.late import LateRead
from zplan.runtime.unit import FlatUnit


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
        self._late_scale = LateRead(self.scale)
        self._late_scale.copy()

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
        self._late_scale.copy()

    def near_end(self) -> bool:
        """Whether the step after next could overflow at the minimum. See [Note: suspects]."""
        return not self.settings.static and self._late_scale.read() <= 4.0 * self.settings.minimum

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
        self._late_scale.copy()

    def check(self, step: int, first: Callable[[], str] = str) -> None:
        """Raise when the step before this one overflowed at the minimum scale.

        Parameters
        ----------
        first
            Says where the first value was that is not finite; empty where nobody looked.
        """
        if self._stuck.read():
            where = first()
            raise ZplanError(
                f"gradients of optimizer step {step} overflowed at the minimum loss scale {self.settings.minimum}"
                + (f": {where}" if where else ""),
                "train in bf16, lower the learning rate, or lower `min_loss_scale`",
            )


class Suspects:
    """This rank's first gradient of each step that is not finite, as it was before the sum over ranks.

    Attributes
    ----------
    looking
        Whether gradients are looked at; each look waits for the device.
    """

    def __init__(self) -> None:
        self.looking = False
        self.micro_step = 0
        self.place = 0
        """Units looked at in this backward."""
        self.now = ""
        """First of the step that is under way: micro-step, place in the order of reduces, parameter, unit."""
        self.before = ""
        """First of the step before."""
        self.looked = False
        """Whether that step was looked at."""

    def look(self, unit: FlatUnit, grads: Sequence[Tensor | None]) -> None:
        """Note the unit's first gradient that is not finite, unless an earlier unit had one."""
        self.place += 1
        if self.now:
            return
        for grad, entry in zip(grads, unit.layout.entries, strict=True):
            if grad is not None and grad.numel() and not _finite(grad):
                self.now = f"{self.micro_step}|{self.place}|{entry.name}|{unit.name}"
                return

    def end_backward(self) -> None:
        self.micro_step, self.place = self.micro_step + 1, 0

    def end_step(self) -> None:
        self.before, self.now, self.looked = self.now, "", self.looking
        self.micro_step = self.place = 0

    def told(self, said: Sequence[str]) -> str:
        """In words, what `before` of all ranks, in rank order, comes to: the earliest, and the lowest rank of it."""
        found = []
        for rank, text in enumerate(said):
            if text:
                micro_step, place, name, unit = text.split("|")
                found.append((int(micro_step), int(place), rank, name, unit))
        if not found:
            return "every rank's own gradients were finite, their sum was not"
        micro_step, _, rank, name, unit = min(found)
        return f"first in `{name}` of unit `{unit}` on rank {rank}, micro-step {micro_step + 1}"


def check_scale(scaler: LossScaler | None, suspects: Suspects | None, collectives: Collectives, step: int) -> None:
    """Raise where the last step, `step`, overflowed at the minimum scale; look closer while that may happen."""
    if scaler is None:
        return
    assert suspects is not None, "a loss scale, and nobody looks for what overflows"

    def first() -> str:
        # Every rank has the same scale, so all ask together.
        return suspects.told(collectives.exchange(suspects.before)) if suspects.looked else ""

    scaler.check(step, first)
    suspects.looking = scaler.near_end()


def suspects_of(scaler: LossScaler | None) -> Suspects | None:
    """For fp16 training; looking already where the scale begins near its minimum."""
    if scaler is None:
        return None
    suspects = Suspects()
    suspects.looking = scaler.near_end()
    return suspects


def _finite(grad: Tensor) -> bool:
    """Without a temporary of the gradient's size: least and greatest value carry infinities and NaN along."""
    low, high = torch.aminmax(grad.detach())
    return bool((low - low == 0) & (high - high == 0))
