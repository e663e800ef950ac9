"""The sharded step: one pass of AdamW over the slices that this rank owns.

[Note: averaging] Gradients reach the step as plain sums over ranks and micro-steps. Their mean, and the clipping, are one factor
that the fused kernel divides by as it reads them (`grad_scale`), so neither costs a pass. Norm, clip coefficient and
the non-finite flag stay on the device; the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zplan.planner.config import Choice
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.planner.states import NUM_SCALARS, norm_chunk, num_norms
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.unit import FlatUnit


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) as in `torch.optim.AdamW`, on flat fp32 slices.

    `param_groups` has the one group that learning-rate schedulers read and write. Scalars are 0-dim fp32 tensors on
    the device: `norm` is the gradient norm after averaging and before clipping, as `clip_grad_norm_` returns it.
    """

    def __init__(self, units: list[FlatUnit], choice: Choice, training: TrainingConfig, arena: Arena) -> None:
        self.units, self.choice, self.training = units, choice, training
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": [p for u in units for p in u.params],
                "lr": training.lr,
                "betas": training.betas,
                "eps": training.eps,
                "weight_decay": training.weight_decay,
            }
        ]
        self.scalars = arena.take("optim.scalars", NUM_SCALARS, torch.float32, fill=0.0)
        self.applied, self.norm, self.coefficient, self.scale, self.skip, self.tokens, self.scratch = (
            self.scalars.unbind()
        )
        self.weighted: bool | None = None
        """Whether gradients of this step are weighted by tokens; None before its first backward."""
        self.measured = False
        self.norms = arena.take("optim.norms", num_norms([u.placement for u in units], choice), torch.float32, fill=0.0)

    def weigh(self, num_tokens: int | None, *, again: bool) -> None:
        """Note what a backward's loss is the mean of: tokens, or (None) one micro-batch like any other.

        `again` is a further loss of the same forward, whose tokens are counted.
        """
        if self.weighted is None:
            self.weighted = num_tokens is not None
            self.tokens.zero_()
        if self.weighted != (num_tokens is not None):
            raise ZplanError(
                "`num_tokens` was given to some backward calls of this step and not to others",
                "give it to all of them, or to none",
            )
        if num_tokens is not None and not again:
            self.tokens.add_(num_tokens)

    @torch.no_grad()
    def measure(self, collectives: Collectives, *, clip: float | None = None) -> None:
        """Global norm, clip coefficient, the factor that gradients are divided by, and the skip flag. See [Note: averaging].

        `clip` stands for the config's `gradient_clipping` in this step; a second call in a step changes nothing else.
        """
        if not self.measured:
            self._measure([grad for u in self.units for _, grad, _, _ in self._rows(u)], collectives)
            self.applied.add_(1.0).sub_(self.skip)
        if not self.measured or clip is not None:
            self._clip(self.training.clip if clip is None else clip)
        self.measured = True

    def finish(self) -> None:
        """The step is over."""
        self.measured, self.weighted = False, None

    @torch.no_grad()
    def update(self, units: Sequence[FlatUnit]) -> None:
        """Update some units' slices, and write the compute dtype where a resident buffer exists. `measure` comes first."""
        rows = [row for u in units for row in self._rows(u)]
        if not rows:
            return
        group = self.param_groups[0]
        masters, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*rows, strict=True))
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [self.applied] * len(rows),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.scale,
            found_inf=self.skip,
        )
        for u in units:
            self._publish(u)

    def _measure(self, grads: list[Tensor], collectives: Collectives) -> None:
        if self.weighted and self.choice.world_size > 1:
            collectives.all_reduce(self.tokens, "tokens")
        parts = [part for grad in grads for part in grad.split(norm_chunk(self.choice, grad.numel()))]
        for out, part in zip(self.norms.unbind(), parts, strict=True):
            torch.linalg.vector_norm(part, out=out)
        torch.linalg.vector_norm(self.norms, out=self.norm)
        if shards_states(self.choice):
            self.norm.square_()
            collectives.all_reduce(self.norm, "gradient norm")
            self.norm.sqrt_()
        self.norm.mul_(self._mean())
        # x - x is 0 for a finite x and NaN otherwise, and only NaN differs from 0.
        torch.sub(self.norm, self.norm, out=self.skip)
        self.skip.ne_(0.0)

    def _clip(self, limit: float) -> None:
        self.coefficient.fill_(1.0)
        if limit > 0:
            torch.add(self.norm, 1e-6, out=self.scratch)
            torch.div(self.coefficient.fill_(limit), self.scratch, out=self.coefficient)
            self.coefficient.clamp_(max=1.0)
        torch.reciprocal(self.coefficient, out=self.scale)
        self.scale.div_(self._mean())

    def _mean(self) -> float | Tensor:
        """What turns the sums over ranks and micro-steps into a mean."""
        if not self.weighted:
            return 1.0 / (self.choice.world_size * self.choice.accumulation)
        return torch.reciprocal(self.tokens, out=self.scratch)

    def _rows(self, u: FlatUnit) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(master, gradient, exp_avg, exp_avg_sq) of every contiguous slice that this rank updates."""
        assert u.grad is not None and u.exp_avg is not None and u.exp_avg_sq is not None, (
            f"unit {u.name} has no gradient"
        )
        if not shards_states(self.choice):
            return [(u.buffer if u.master is None else u.master, u.grad, u.exp_avg, u.exp_avg_sq)]
        whole_grad = u.grad.numel() == u.layout.padded_numel
        return [
            (
                u.own(u.buffer, piece) if u.master is None else u.shard_of(u.master, piece),
                u.own(u.grad, piece) if whole_grad else u.shard_of(u.grad, piece),
                u.shard_of(u.exp_avg, piece),
                u.shard_of(u.exp_avg_sq, piece),
            )
            for piece in u.layout.pieces
        ]

    def _publish(self, u: FlatUnit) -> None:
        """Write this rank's new values into the resident flat buffer."""
        if u.flat is None or u.master is None:
            return
        if not shards_states(self.choice):
            u.flat.copy_(u.master)
            return
        for piece in u.layout.pieces:
            u.own(u.flat, piece).copy_(u.shard_of(u.master, piece))

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        """Nothing to do: gradients are consumed by the step."""
