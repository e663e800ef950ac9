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
from zplan.planner.layout import Piece
from zplan.planner.placement import shards_states
from zplan.planner.states import NUM_SCALARS, norm_bytes, num_slices, table_bytes
from zplan.runtime.adamw import Hyper, KernelAdamW, Row, Scalars, TorchAdamW
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
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

    @property
    def norm(self) -> Tensor:
        return self.scalars.norm

    def landed(self, unit: FlatUnit) -> None:
        """A unit's gradients are reduced for the last time; called on the stream that reduced them."""
        self.math.landed(self.first_row[unit], [self._grad(unit, piece) for piece in self._pieces(unit)])

    @torch.no_grad()
    def measure(self, collectives: Collectives) -> None:
        """Global norm, clip coefficient, divisor and skip flag. See [Note: averaging] in `runtime/adamw.py`."""
        grads = [self._grad(u, piece) for u in self.units for piece in self._pieces(u)]
        total = self.math.square_sum(grads, self.scalars, device=self.choice.device)
        if shards_states(self.choice):
            collectives.all_reduce(total, "gradient norm")
        mean = 1.0 / (self.choice.world_size * self.choice.accumulation)
        self.math.settle(total, self.scalars, mean=mean, clip=self.training.clip)

    @torch.no_grad()
    def update(self, units: Sequence[FlatUnit]) -> None:
        """Update some units' slices and their resident compute-dtype buffers. `measure` comes first."""
        rows = [self._row(u, piece) for u in units for piece in self._pieces(u)]
        if rows:
            group = self.param_groups[0]
            hyper = Hyper(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])
            self.math.update(rows, self.scalars, hyper)

    def _pieces(self, u: FlatUnit) -> Sequence[Piece | None]:
        """Slices of a unit that this rank updates: its slice of each piece, or the whole (None) where nothing is sharded."""
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
