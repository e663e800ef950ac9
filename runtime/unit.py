"""One flat unit on one rank: its buffers, its parameters as views, and whether they are there.

[Note: placeholder] A parameter shows its values only while they are whole. At other times (a ringed unit between uses,
any sharded unit between the optimizer step and the gather that follows) its `.data` is a NaN scalar of its own,
expanded to the true shape: a stray read is loud and is never another block's weights. Shape, dtype and identity of the
parameter never change.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from zplan.cuda_ops.grads import GradPlaces
from zplan.planner.layout import Piece
from zplan.planner.placement import Placement
from zplan.runtime.arena import Arena
from zplan.runtime.halves import Halves
from zplan.runtime.symmetric import Shared


class Slot:
    """One buffer of the ring: 1D, in the compute dtype; `shared` is how other GPUs see it, where they read it."""

    def __init__(self, buffer: Tensor, *, shared: Shared | None = None) -> None:
        self.buffer, self.shared = buffer, shared
        self.free: torch.cuda.Event | None = None
        """Last compute that used the slot; a gather waits for it."""
        self._holder: weakref.ref[FlatUnit] | None = None

    @property
    def holder(self) -> FlatUnit | None:
        """The unit whose values are in it, if any. Held weakly, as the unit holds the slot."""
        return None if self._holder is None else self._holder()

    @holder.setter
    def holder(self, unit: FlatUnit | None) -> None:
        self._holder = None if unit is None else weakref.ref(unit)


class FlatUnit:
    """Buffers and parameters of one unit. Owns memory; knows nothing of hooks or schedules."""

    def __init__(self, placement: Placement, params: list[nn.Parameter], rank: int) -> None:
        self.placement, self.layout = placement, placement.layout
        self.name, self.rank = placement.unit.name, rank
        self.params = params
        self.shapes = [p.shape for p in placement.unit.params]
        self.slot: Slot | None = None
        self.flat: Tensor | None = None  # 1D, compute dtype, padded_numel; resident units only
        self.shared: Shared | None = None  # `flat` as other GPUs see it, where they read it
        self.master: Tensor | None = None  # 1D, owned_numel; see [Note: masters] in planner/placement.py
        self.shard: Tensor | None = None  # 1D, compute dtype, owned_numel; ringed units that are frozen or split
        self.low: Tensor | None = None  # 1D int16, owned_numel: lower halves of split masters
        self.states: dict[str, Tensor] = {}
        """The optimizer's, by name: 1D, owned_numel."""
        self.grad: Tensor | None = None  # 1D, the shard or everything, while it lives; see [Note: single gradients]
        self.views: list[Tensor] = []
        self.placeholders: list[Tensor] = []
        self.whole = False
        """A resident unit's flat buffer holds every rank's newest values."""
        self.gathered: torch.cuda.Event | None = None
        self.written: torch.cuda.Event | None = None
        """Last update of master and own slices; gathers wait for it."""
        self.open = False
        self.summoned = False
        """Shown whole by `summon`, which alone ends that."""
        self.grad_places = GradPlaces([(e.offset, e.end) for e in self.layout.entries])
        self.filled = False
        """`grad` holds gradients of this step, to be added to."""
        self.summed = False
        """They have been summed over ranks (whole gradients only)."""
        self.summed_grads: dict[int, Tensor] = {}
        """Gradients that came in fp32 past autograd, by index of their parameter."""
        self.landed: set[int] = set()
        """Indices of parameters whose gradient of this backward is there."""

    # --- buffers -------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Tensor:
        """The flat buffer in the compute dtype, padded_numel: its own, or the start of its ring slot."""
        if self.slot is not None:
            return self.slot.buffer[: self.layout.padded_numel]
        assert self.flat is not None, f"unit {self.name} has neither slot nor flat buffer"
        return self.flat

    @property
    def valid(self) -> bool:
        """Whether the buffer holds this unit's newest values on this rank."""
        return self.whole if self.slot is None else self.slot.holder is self

    def own(self, full: Tensor, piece: Piece) -> Tensor:
        """This rank's slice of one piece of a full-length flat tensor."""
        start, end = self.layout.own(piece, self.rank)
        return full[start:end]

    def shard_of(self, owned: Tensor, piece: Piece) -> Tensor:
        """The part of a shard-length flat tensor that belongs to one piece."""
        return owned[piece.shard_offset : piece.shard_offset + piece.numel // self.layout.world_size]

    @property
    def weights(self) -> Tensor | Halves:
        """What the step updates, 1D: fp32 masters, whole or in halves, or what stands for them.

        Of `owned_numel` elements, or `padded_numel` where a flat buffer is its own master.
        """
        if self.low is None:
            kept = self.flat if self.master is None else self.master
            assert kept is not None, f"unit {self.name} has neither master nor flat buffer"
            return kept
        if self.shard is not None:
            return Halves([self.shard], self.low)
        assert self.flat is not None, f"unit {self.name} has neither shard nor flat buffer"
        if self.low.numel() == self.flat.numel():
            return Halves([self.flat], self.low)
        return Halves([self.own(self.flat, piece) for piece in self.layout.pieces], self.low)

    def fill_own(self, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Write this rank's slices into a full-length compute-dtype buffer; `(piece, own slice)` pairs to gather.

        A resident unit's slices were written by the step.
        """
        pairs = []
        for piece in self.layout.pieces:
            own = self.own(full, piece)
            if full is not self.flat:
                source = self.master if self.shard is None else self.shard
                assert source is not None, f"ringed unit {self.name} has no master"
                own.copy_(self.shard_of(source, piece))
            pairs.append((full[piece.offset : piece.offset + piece.numel], own))
        return pairs

    def make_views(self, dtype: torch.dtype, arena: Arena, *, closes: bool) -> None:
        """Build each parameter's view once, and its placeholder where the unit is ever closed."""
        with torch.no_grad():
            for entry, shape in zip(self.layout.entries, self.shapes, strict=True):
                self.views.append(self.buffer.detach()[entry.offset : entry.end].view(shape))
                if closes:
                    nan = arena.take("params.placeholder", 1, dtype, fill=float("nan"))
                    self.placeholders.append(nan.expand(shape) if shape else nan.view(()))

    # --- the window in which parameters can be read ----------------------------------------------------------------

    def show(self) -> None:
        """Point every parameter at its values."""
        if not self.open:
            for p, view in zip(self.params, self.views, strict=True):
                p.data = view
            self.open = True

    def hide(self) -> None:
        """Point every parameter at its NaN placeholder. See [Note: placeholder]."""
        if self.open and self.placeholders and not self.summoned:
            for p, nan in zip(self.params, self.placeholders, strict=True):
                p.data = nan
            self.open = False

    # --- gradients -------------------------------------------------------------------------------------------------

    def widen_grad(self, arena: Arena) -> None:
        """Make the gradient fp32 where it is not, before something is added to it."""
        if self.grad is not None and self.grad.dtype != torch.float32:
            wide = arena.take(f"grads.full.{self.placement.size_class}", self.grad.numel(), torch.float32)
            self.grad = wide.copy_(self.grad)

    def take_grad(self, index: int, grad: Tensor) -> None:
        """Keep the fp32 gradient of one parameter, or add it to what came before."""
        before = self.summed_grads.get(index)
        self.summed_grads[index] = grad if before is None else before.add_(grad)

    def release_grads(self) -> list[Tensor | None]:
        """Take the gradients that autograd left on the parameters off them, and those that came past it."""
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        for i, summed in self.summed_grads.items():
            left = grads[i]
            grads[i] = summed if left is None else summed.add_(left)
        self.summed_grads.clear()
        self.landed.clear()
        return grads
