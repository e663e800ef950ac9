"""The sharded step: which slices this rank updates, in which group, and when.

The arithmetic is in `norms.py` (averaging, clipping, skipping) and in the rules of `adamw.py`, `elementwise.py` and
`foreign.py`. Units are updated in two parts, so that what the next forward needs first can be gathered while the rest
is updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zplan.cuda_ops import compiler
from zplan.cuda_ops.adamw import load
from zplan.cuda_ops.norm import GradNorm
from zplan.planner.config import Choice
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.layout import Piece
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import shards_states, single_gradients, splits_masters
from zplan.planner.states import (
    NUM_SCALARS,
    group_runs,
    measures_slices,
    norm_bytes,
    scratch_numel,
    table_bytes,
)
from zplan.runtime.adamw import KernelAdamW, Row, Rule, TorchFused, TorchHalves
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.elementwise import Adagrad, AdamWBf16, Lion
from zplan.runtime.groups import Wanted, numbers
from zplan.runtime.halves import Halves
from zplan.runtime.norms import KernelNorms, Scalars, TorchNorms, clip_scalars
from zplan.runtime.precision import LossScaler
from zplan.runtime.unit import FlatUnit

CHUNKED = {"lion": Lion, "adagrad": Adagrad, "adamw-bf16": AdamWBf16, "adamw-bf16-states": AdamWBf16}

OTHER_LOOPS = "transformers' Trainer and accelerate can't drive an engine: give them the plan as config (`zplan emit`)"


@dataclass(frozen=True, eq=False)
class Stretch:
    """What a rank updates in one go: part of its slice of a piece, all of one group. The gradient comes and goes."""

    piece: Piece | None
    cut: slice
    """Of the slice."""
    group: int
    key: int
    master: Tensor | None
    states: tuple[Tensor, ...]
    half: Tensor | None
    low: Tensor | None
    shape: torch.Size | None
    """Of the parameter, for optimizers that look at whole tensors."""


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine, on flat slices of the states.

    `param_groups` are the user's: whoever writes a group's `lr` or `weight_decay` (a torch scheduler, say) changes the
    next step. `norm` is a 0-dim fp32 tensor on the device: the gradient norm after averaging and before clipping, as
    `clip_grad_norm_` returns it.
    """

    def __init__(
        self, units: list[FlatUnit], choice: Choice, training: TrainingConfig, wanted: Wanted, arena: Arena
    ) -> None:
        super().__init__(wanted.groups, {})
        self.units, self.choice, self.training, self.wanted = units, choice, training, wanted
        self.arena = arena
        self.base_lrs = [float(g["lr"]) for g in self.param_groups]
        self.made = [numbers(g) for g in self.param_groups]
        """What of the groups is numbers, as they were made: a checkpoint's count where its groups began alike."""
        self.scalars = Scalars(arena.take("optim.scalars", NUM_SCALARS, torch.float32, fill=0.0))
        self.scaler = LossScaler(training.loss_scale, arena) if choice.precision == "fp16" else None
        placements = [u.placement for u in units]
        self.partial = arena.take("optim.norms", norm_bytes(placements, choice) // 4, torch.float32, fill=0.0)
        self.norms: TorchNorms | KernelNorms
        # Last unit first, the order in which reduces land: the first row that went non-finite is the first in time.
        lengths = [end - start for u in reversed(units) for start, end in self.measured_ranges(u)]
        if choice.device == "cuda" and compiler.usable(arena.device):
            self.norms = KernelNorms(self.partial.view(torch.int64), len(lengths))
        else:
            self.norms = TorchNorms(self.partial, lengths, device=choice.device)
        self.table: Tensor | None = None
        if nbytes := table_bytes(placements, choice):
            self.table = arena.take("optim.table", nbytes // 8, torch.int64, fill=0)
        self.scratch: Tensor | None = None
        if numel := scratch_numel(placements, choice):
            self.scratch = arena.take("optim.scratch", numel, torch.float32)
        self.rule = self._rule(arena)
        self.stretches: dict[FlatUnit, list[Stretch]] = {}
        self.count = 0
        self.first_row: dict[FlatUnit, int] = {}
        at = 0
        for u in reversed(units):
            self.first_row[u] = at
            at += len(self._measured(u))
        self.weighted: bool | None = None
        """Whether gradients of this step are weighted by tokens; None before its first backward."""
        self.measured = False
        self.counted = False
        """`tokens` has been summed over ranks."""

    def _rule(self, arena: Arena) -> Rule:
        name = self.choice.optimizer
        if self.wanted.foreign is not None:
            return self.wanted.foreign
        if name in CHUNKED:
            assert self.scratch is not None
            return CHUNKED[name](self.scratch)
        if self.table is not None and compiler.usable(arena.device):
            split, single = splits_masters(self.choice), single_gradients(self.choice)
            load(self.table.device, split=split, grads=(torch.float32, *((torch.bfloat16,) if single else ())))
            return KernelAdamW(self.table)
        if not splits_masters(self.choice):
            return TorchFused(name)
        if self.scratch is None:  # kernels were planned and can't be compiled here
            numel = scratch_numel([u.placement for u in self.units], replace(self.choice, device="cpu"))
            self.scratch = arena.take("optim.scratch", numel, torch.float32)
        return TorchHalves(self.scratch, bf16_grads=single_gradients(self.choice))

    @property
    def norm(self) -> Tensor:
        return self.scalars.norm

    @property
    def applied(self) -> Tensor:
        """0-dim fp32 tensor: steps applied, those skipped not counted."""
        return self.scalars.applied

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the flat states beside the weights."""
        return tuple(s.name for s in kind_of(self.choice.optimizer).states)

    @property
    def _share(self) -> float:
        """What one micro-batch weighs in a step that does not count tokens."""
        return 1.0 / (self.choice.world_size * self.choice.accumulation)

    # --- before the update -------------------------------------------------------------------------------------------

    def norm_rows(self, unit: FlatUnit) -> tuple[GradNorm, int] | None:
        """Where to take the norms of a unit's slices as they are summed over ranks: from that row on, one a piece."""
        return (self.norms.norm, self.first_row[unit]) if isinstance(self.norms, KernelNorms) else None

    def landed(self, unit: FlatUnit) -> None:
        """A unit's gradients are reduced for the last time; called on the stream that reduced them."""
        self.norms.landed(self.first_row[unit], [self._grad(unit, piece) for piece in self._measured(unit)])

    def begin(self, collectives: Collectives) -> None:
        """Scalars of updates that do not wait for the norm: nothing is clipped, and the step counts as applied."""
        s = self.scalars
        clip_scalars(s, mean=1.0 if self.weighted else self._share, clip=0.0)
        if self.weighted:
            self.count_tokens(collectives)
            s.scale.mul_(s.tokens)
        s.skip.zero_()
        if self.weighted:
            torch.eq(s.tokens, 0.0, out=s.skip)  # nothing to take a mean of: as in any step, all stays as it is
        s.applied.add_(1.0)

    def guard(self, unit: FlatUnit) -> None:
        """Skip this unit and all that follow in this step where its gradients on this rank are not finite."""
        for i in range(len(self._measured(unit))):
            self.norms.guard(self.first_row[unit] + i, self.scalars)

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
        """Global norm, clip coefficient, divisor and skip flag. See [Note: averaging] in `runtime/norms.py`.

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
        total = self.norms.square_sum(s)
        if measures_slices(self.choice):
            collectives.sum_scalar(total, "gradient norm")
        if self.weighted:
            self.count_tokens(collectives)
            total.div_(s.tokens).div_(s.tokens)
        if self.scaler is not None:
            total.div_(self.scaler.scale).div_(self.scaler.scale)
        self.norms.settle(total, s, mean=mean, clip=clip)

    def widen_grads(self) -> None:
        """Before gradients are changed: make them fp32 for the rest of the step."""
        for u in self.units:
            u.widen_grad(self.arena)

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
            self.count_tokens(collectives)
            mean = self.scalars.tokens.reciprocal()
        return mean if self.scaler is None else mean / self.scaler.scale

    def count_tokens(self, collectives: Collectives) -> None:
        """Sum the tokens over ranks, once in a step."""
        if self.choice.world_size > 1 and not self.counted:
            collectives.sum_scalar(self.scalars.tokens, "tokens")
        self.counted = True

    # --- the update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, units: Sequence[FlatUnit]) -> None:
        """Update some units' slices and their resident compute-dtype buffers. `measure` comes first."""
        rows: list[list[Row]] = [[] for _ in self.param_groups]
        for u in units:
            if u not in self.stretches:
                self.stretches[u] = self._stretches(u)
            for x in self.stretches[u]:
                grad = self._grad(u, x.piece)[x.cut]
                rows[x.group].append(
                    Row(x.master, grad if x.shape is None else grad.view(x.shape), x.states, x.key, x.half, x.low)
                )
        for found, group in zip(rows, self.param_groups, strict=True):
            if found:
                self.rule.update(found, self.scalars, group)

    def finish(self) -> None:
        """The step is over."""
        self.measured, self.counted, self.weighted = False, False, None

    def _stretches(self, u: FlatUnit) -> list[Stretch]:
        """What this rank updates of a unit. See [Note: groups] in `planner/states.py`."""
        foreign = self.wanted.foreign
        master = u.weights if isinstance(u.weights, Tensor) else None
        half = u.shard if u.flat is None else None if master is u.flat else u.flat
        out = []
        for piece in self._pieces(u):
            start, end = (0, u.layout.padded_numel) if piece is None else u.layout.own(piece, u.rank)
            kept = [None if t is None else self._slice(u, t, piece) for t in (master, half, u.low)]
            states = [self._slice(u, t, piece) for t in u.states.values()]
            runs = self._tensors(u) if foreign is not None and foreign.whole_tensors else group_runs(u.placement)
            for i, (low, high, group) in enumerate(runs):
                cut = slice(max(low, start) - start, max(min(high, end), start) - start)
                if cut.start >= cut.stop and foreign is None:
                    continue
                shape = u.shapes[i] if foreign is not None and foreign.whole_tensors else None
                mine = [None if t is None else t[cut] for t in kept]
                if shape is not None:
                    mine = [None if t is None else t.view(shape) for t in mine]
                self.count += 1
                out.append(
                    Stretch(piece, cut, group, self.count, mine[0], tuple(t[cut] for t in states), *mine[1:], shape)
                )
        return out

    def _tensors(self, u: FlatUnit) -> list[tuple[int, int, int]]:
        """`(start, end, group)` of each parameter, without padding."""
        rows = zip(u.layout.entries, u.placement.unit.params, strict=True)
        return [(entry.offset, entry.end, param.group) for entry, param in rows]

    def _pieces(self, u: FlatUnit) -> Sequence[Piece | None]:
        """Slices of a unit that this rank updates: its slice of each piece, or the whole (None) where nothing is
        sharded.
        """
        return u.layout.pieces if shards_states(self.choice) else (None,)

    def _measured(self, u: FlatUnit) -> Sequence[Piece | None]:
        """Slices of a unit's gradient whose norms this rank takes, as `_pieces`."""
        return u.layout.pieces if measures_slices(self.choice) else (None,)

    def measured_ranges(self, u: FlatUnit) -> list[tuple[int, int]]:
        """`(start, end)` in a unit's flat buffer of each slice whose norm this rank takes."""
        return [(0, u.layout.padded_numel) if p is None else u.layout.own(p, u.rank) for p in self._measured(u)]

    def _slice(self, u: FlatUnit, tensor: Any, piece: Piece | None) -> Any:
        """A rank's slice of one piece in a tensor of full length or of the shard's."""
        if piece is None:
            return tensor
        whole = tensor.numel() == u.layout.padded_numel
        return u.own(tensor, piece) if whole else u.shard_of(tensor, piece)

    def _grad(self, u: FlatUnit, piece: Piece | None) -> Tensor:
        assert u.grad is not None, f"unit {u.name} has no gradient"
        return self._slice(u, u.grad, piece)

    # --- states ------------------------------------------------------------------------------------------------------

    def slices(self, u: FlatUnit, state: str) -> list[Tensor]:
        """This rank's slices of `grad` or of a state, one for each of `_pieces`."""
        pieces = self._pieces(u)
        if state == "grad":
            return [self._grad(u, piece) for piece in pieces]
        return [self._slice(u, u.states[state], piece) for piece in pieces]

    @property
    def sharded(self) -> bool:
        """Whether a rank keeps slices only."""
        return shards_states(self.choice)

    def weights(self, u: FlatUnit) -> list[Tensor | Halves]:
        """This rank's slices of a unit's weights, as the step updates them."""
        return [self._slice(u, u.weights, piece) for piece in self._pieces(u)]

    def set_lr(self, lr: float) -> None:
        """Set the first group's rate, and the others' in the proportions that they had at the start."""
        first = self.base_lrs[0]
        for group, base in zip(self.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr if base == first or not first else lr * base / first

    def scalars_to_save(self) -> Mapping[str, Any]:
        """What a user's optimizer keeps of every slice alike, as numbers."""
        return {} if self.wanted.foreign is None else self.wanted.foreign.scalars()

    def restore_scalars(self, saved: Mapping[str, Any]) -> None:
        if self.wanted.foreign is not None:
            self.wanted.foreign.restore(saved)

    # --- what torch's optimizers have --------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: the engine's step also gathers and keeps count."""
        raise ZplanError("`optimizer.step()` on the engine's optimizer", "call `engine.step()`")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the engine is there: what comes later has no states."""
        if "units" in vars(self):
            raise ZplanError(
                "`optimizer.add_param_group()` on the engine's optimizer, which has no states for what comes later",
                "give all groups to `zplan.initialize(model_parameters=...)`, with an `lr` of 0 for later ones",
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        """Nothing to do: gradients are consumed by the step."""

    def state_dict(self) -> dict[str, Any]:
        """Refused: states lie in slices over all ranks."""
        raise ZplanError(
            "`optimizer.state_dict()` on sharded states",
            "save with `engine.save_checkpoint(folder)`; read them in `with zplan.summon(model, optim=True) as whole:`;"
            f" {OTHER_LOOPS}",
        )
