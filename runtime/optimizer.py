"""The sharded step: which slices this rank updates, and when.

The arithmetic is in `runtime/adamw.py`. Units are updated in groups, so that what the next forward needs first can be
gathered while the rest is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zplan.cuda_ops import compiler
from zplan.planner.config import Choice
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.layout import Piece
from zplan.planner.placement import shards_states
from zplan.planner.states import NUM_SCALARS, norm_bytes, num_slices, table_bytes
from zplan.runtime.adamw import Hyper, KernelAdamW, Row, Scalars, TorchAdamW, clip_scalars
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.precision import LossScaler
from zplan.runtime.unit import FlatUnit


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) as in `torch.optim.AdamW`, on flat fp32 slices.

    `param_groups` has the one group that learning-rate schedulers read and write. `norm` is a 0-dim fp32 tensor on the
    device: the gradient norm after averaging and before clipping, as `clip_grad_norm_` returns it.
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
        self.scalars = Scalars(arena.take("optim.scalars", NUM_SCALARS, torch.float32, fill=0.0))
        self.scaler = LossScaler(training.loss_scale, arena) if choice.precision == "fp16" else None
        placements = [u.placement for u in units]
        self.norms = arena.take("optim.norms", norm_bytes(placements, choice) // 4, torch.float32, fill=0.0)
        self.table: Tensor | None = None
        if nbytes := table_bytes(placements, choice):
            self.table = arena.take("optim.table", nbytes // 8, torch.int64, fill=0)
        self.math: TorchAdamW | KernelAdamW
        if self.table is not None and compiler.usable(arena.device):
            self.math = KernelAdamW(self.norms.view(torch.int64), self.table, num_slices(placements, choice))
        else:
            count = num_slices(placements, choice) if choice.device == "cuda" else self.norms.numel()
            self.math = TorchAdamW(self.norms[:count])
        # Last unit first, the order in which reduces land: the first row that went non-finite is the first in time.
        self.first_row: dict[FlatUnit, int] = {}
        at = 0
        for u in reversed(units):
            self.first_row[u] = at
            at += len(self._pieces(u))
        self.weighted: bool | None = None
        """Whether gradients of this step are weighted by tokens; None before its first backward."""
        self.measured = False
        self.counted = False
        """`tokens` has been summed over ranks."""

    @property
    def norm(self) -> Tensor:
        return self.scalars.norm

    @property
    def applied(self) -> Tensor:
        """0-dim fp32 tensor: steps applied, those skipped not counted."""
        return self.scalars.applied

    @property
    def _share(self) -> float:
        """What one micro-batch weighs in a step that does not count tokens."""
        return 1.0 / (self.choice.world_size * self.choice.accumulation)

    def landed(self, unit: FlatUnit) -> None:
        """A unit's gradients are reduced for the last time; called on the stream that reduced them."""
        self.math.landed(self.first_row[unit], [self._grad(unit, piece) for piece in self._pieces(unit)])

    def weigh(self, num_tokens: int | None, *, again: bool) -> None:
        """Note what a backward's loss is the mean of: tokens, or (None) one micro-batch like any other.

        `again` is a further loss of the same forward, whose tokens are counted.
        """
        if self.weighted is None:
            self.weighted = num_tokens is not None
            self.scalars.tokens.zero_()
        if self.weighted != (num_tokens is not None):
            raise ZplanError(
                "`num_tokens` was given to some backward calls of this step and not to others",
                "give it to all of them, or to none",
            )
        if num_tokens is not None and not again:
            self.scalars.tokens.add_(num_tokens)

    @torch.no_grad()
    def measure(self, collectives: Collectives, *, clip: float | None = None) -> None:
        """Global norm, clip coefficient, divisor and skip flag. See [Note: averaging] in `runtime/adamw.py`.

        `clip` stands for the config's `gradient_clipping` in this step; a second call in a step changes nothing else.
        """
        s, limit = self.scalars, self.training.clip if clip is None else clip
        mean = 1.0 if self.weighted else self._share
        if self.measured and clip is None:
            return
        if self.measured:
            clip_scalars(s, mean=mean, clip=limit)
        else:
            self._settle(collectives, mean, limit)
        if self.weighted:
            s.scale.mul_(s.tokens)
        if self.scaler is not None:
            s.scale.mul_(self.scaler.scale)
        self.measured = True

    def _settle(self, collectives: Collectives, mean: float, clip: float) -> None:
        s = self.scalars
        grads = [self._grad(u, piece) for u in self.units for piece in self._pieces(u)]
        total = self.math.square_sum(grads, s, device=self.choice.device)
        if shards_states(self.choice):
            collectives.all_reduce(total, "gradient norm")
        if self.weighted:
            self._count(collectives)
            total.div_(s.tokens).div_(s.tokens)
        if self.scaler is not None:
            total.div_(self.scaler.scale).div_(self.scaler.scale)
        self.math.settle(total, s, mean=mean, clip=clip)

    def measure_again(self) -> None:
        """Gradients were changed between backward and step: their norm is taken anew in the step."""
        for u in self.units:
            self.landed(u)
        if self.measured:
            self.applied.sub_(1.0).add_(self.scalars.skip)
            self.measured = False

    def mean(self, collectives: Collectives) -> float | Tensor:
        """What turns sums over ranks and micro-steps into a mean of the true loss: a number, or a 0-dim tensor."""
        mean: float | Tensor = self._share
        if self.weighted:
            self._count(collectives)
            mean = self.scalars.tokens.reciprocal()
        return mean if self.scaler is None else mean / self.scaler.scale

    def _count(self, collectives: Collectives) -> None:
        """Sum the tokens over ranks, once in a step."""
        if self.choice.world_size > 1 and not self.counted:
            collectives.all_reduce(self.scalars.tokens, "tokens")
        self.counted = True

    def slices(self, u: FlatUnit, state: str) -> list[Tensor]:
        """This rank's slices of `grad`, `exp_avg` or `exp_avg_sq`, one for each of `_pieces`."""
        pieces = self._pieces(u)
        if state == "grad":
            return [self._grad(u, piece) for piece in pieces]
        owned = {"exp_avg": u.exp_avg, "exp_avg_sq": u.exp_avg_sq}[state]
        assert owned is not None, f"unit {u.name} has no {state}"
        return [owned if piece is None else u.shard_of(owned, piece) for piece in pieces]

    def finish(self) -> None:
        """The step is over."""
        self.measured, self.counted, self.weighted = False, False, None

    @torch.no_grad()
    def update(self, units: Sequence[FlatUnit]) -> None:
        """Update some units' slices and their resident compute-dtype buffers. `measure` comes first."""
        rows = [self._row(u, piece) for u in units for piece in self._pieces(u)]
        if rows:
            group = self.param_groups[0]
            hyper = Hyper(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])
            self.math.update(rows, self.scalars, hyper)

    def _pieces(self, u: FlatUnit) -> Sequence[Piece | None]:
        """Slices of a unit that this rank updates: its slice of each piece, or the whole (None) where nothing is
        sharded.
        """
        return u.layout.pieces if shards_states(self.choice) else (None,)

    def _grad(self, u: FlatUnit, piece: Piece | None) -> Tensor:
        assert u.grad is not None, f"unit {u.name} has no gradient"
        if piece is None:
            return u.grad
        whole = u.grad.numel() == u.layout.padded_numel
        return u.own(u.grad, piece) if whole else u.shard_of(u.grad, piece)

    def _row(self, u: FlatUnit, piece: Piece | None) -> Row:
        assert u.exp_avg is not None and u.exp_avg_sq is not None
        owned = [u.exp_avg, u.exp_avg_sq] if u.master is None else [u.master, u.exp_avg, u.exp_avg_sq]
        states = owned if piece is None else [u.shard_of(t, piece) for t in owned]
        flat = None if u.flat is None else u.flat if piece is None else u.own(u.flat, piece)
        if u.master is None:
            assert flat is not None, f"unit {u.name} has neither master nor flat buffer"
            return Row(flat, self._grad(u, piece), states[0], states[1], None)
        return Row(states[0], self._grad(u, piece), states[1], states[2], flat)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        """Nothing to do: gradients are consumed by the step."""
