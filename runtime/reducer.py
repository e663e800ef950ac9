"""Takes a unit's gradients as they land, sums them over ranks and keeps what this rank needs.

[Note: late gradients] With accumulation 1 a unit's reduced gradient exists only from its reduce to the step, while
activations shrink. With more it persists, and the first micro-step overwrites what the last step left. Reduces are
issued strictly in the order of the units (last unit first), whatever order gradients land in, so that ranks can't
disagree. Where backward updates (`runtime/in_backward.py`), one unit's exists at a time.

[Note: retained gradients] Copying into the slot and reducing both happen on the reduce stream, so compute never waits
for a slot and one slot is enough. The compute-dtype gradients that they read are therefore held until the next unit's
land, when compute waits for what is done by then, but after a large unit before a small one, and they are freed.

[Note: exchange] Gradients come in the compute dtype, so on one host they travel in it: every rank gets its slices of
all others and adds them up in fp32, in rank order, its own from where autograd left it. The sum is that of an fp32
reduce-scatter, with half the bytes on the links, and its order never depends on timing. What a fused head gives in fp32
is rounded for others only. Over several hosts a reduce-scatter in fp32 is used, whose algorithms know the network.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zplan.cuda_ops.grads import UnitGrads
from zplan.planner.buffers import full_gradients, reduced_numel, slot_numel, uses_reduce_slots
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.placement import single_gradients
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.in_backward import InBackward
from zplan.runtime.materialize import COMPUTE_DTYPE
from zplan.runtime.optimizer import OTHER_LOOPS, ShardedOptimizer
from zplan.runtime.precision import Suspects, suspects_of
from zplan.runtime.streams import Streams
from zplan.runtime.symmetric import Shared
from zplan.runtime.unit import FlatUnit


class Reducer:
    """Gradient accumulation and reduction of one engine. Owns reduce slots and, through the units, gradients."""

    def __init__(
        self, units: list[FlatUnit], choice: Choice, arena: Arena, collectives: Collectives, streams: Streams
    ) -> None:
        self.units, self.choice, self.arena, self.collectives, self.streams = units, choice, arena, collectives, streams
        self.full = full_gradients(choice)
        self.slotted = uses_reduce_slots(choice)
        self.order = list(reversed(units))
        self.next = 0
        self.ready: set[FlatUnit] = set()
        self.slot: Tensor | None = None
        self.shared: Shared | None = None
        """The slot as other GPUs see it, where they read it; then it is always there."""
        self.received: Tensor | None = None
        """What the other ranks sent of this one's slices, as long as the slot. See [Note: exchange]."""
        self.reduced_grads: Tensor | None = None
        """For any unit's reduced gradients in turn, where backward updates. See [Note: in backward]."""
        self.retained: list[tuple[str, Tensor]] = []
        """(size class, gradient) of the unit that was reduced last."""
        self.copied: torch.cuda.Event | None = None
        placements = [u.placement for u in units]
        self.slot_numel, self.reduced_numel = slot_numel(placements, choice), reduced_numel(placements, choice)
        self.micro_step = 0
        """Micro-steps that have ended in this step."""
        self.fresh = False
        """A forward has run since the last micro-step ended: the next backward is that of another micro-step."""
        self.forwarded = False
        """A forward has run since the last backward."""
        self.suspects: Suspects | None = None
        """Looks at gradients before the sum over ranks; None outside fp16."""
        self.held = False
        """More backward calls of this micro-step follow (`no_sync`): whole gradients wait for the sum over ranks."""
        self.grad_dtype = COMPUTE_DTYPE[choice.precision] if single_gradients(choice) else torch.float32
        self.exchanges = choice.reduce == "exchange"
        self.slot_dtype = COMPUTE_DTYPE[choice.precision] if self.exchanges else torch.float32
        if choice.copies and self.slotted and self.exchanges and units:
            self.shared = arena.take_shared("grads.slot", self.slot_numel, self.slot_dtype, collectives.mesh)
        if choice.accumulation > 1:
            for u in units:
                self._take_grad(u)

    def feed(self, optimizer: ShardedOptimizer, in_backward: InBackward | None) -> None:
        """Before the first backward: who takes norms of what is reduced, and who updates with it at once, if anybody.

        Both are called on the reduce stream.
        """
        self.optimizer, self.in_backward = optimizer, in_backward
        self.suspects = suspects_of(optimizer.scaler)

    @property
    def awaited(self) -> FlatUnit | None:
        """The unit whose reduce comes next in this backward."""
        return self.order[self.next] if self.next < len(self.order) else None

    def reduced(self, unit: FlatUnit) -> bool:
        """Whether this backward has reduced a unit, so that further gradients of it come too late."""
        return unit in self.ready and unit not in self.order[self.next :]

    def check_due(self) -> None:
        """Raise where a backward of yet another micro-step begins while a step is due."""
        if self.micro_step >= self.choice.accumulation and self.fresh:
            raise ZplanError(
                f"`backward` was called {self.micro_step + 1} times for gradient_accumulation_steps "
                f"{self.choice.accumulation}",
                "call `engine.step()` after each backward, which acts at the boundary only, or put all backward calls "
                "of a micro-step but the last in `with engine.no_sync():`; `engine.reset_step()` forgets gradients "
                f"that no step is to use; {OTHER_LOOPS}",
            )

    def begin(self) -> None:
        """A backward begins. After a step, whatever comes first opens a micro-step."""
        if self.micro_step == 0:
            self.fresh = True

    @property
    def sums_ranks(self) -> bool:
        """Whether whole gradients are summed over ranks in this backward: it ends the last micro-step."""
        return self.choice.world_size > 1 and not self.held and self.in_last_micro_step

    @property
    def in_last_micro_step(self) -> bool:
        """Whether the step follows, after this backward or one that adds to it."""
        index = self.micro_step if self.fresh else self.micro_step - 1
        return index >= self.choice.accumulation - 1

    @torch.no_grad()
    def land(self, unit: FlatUnit) -> None:
        """All of a unit's gradients are there; reduce it as soon as those before it in the order have been."""
        self.ready.add(unit)
        while self.next < len(self.order) and self.order[self.next] in self.ready:
            self._reduce(self.order[self.next])
            self.next += 1

    def retire(self) -> None:
        """Free the gradients of the unit that was reduced last. See [Note: retained gradients]."""
        self.streams.wait(self.copied)
        self.retained, self.copied = [], None

    @torch.no_grad()
    def finish(self) -> None:
        """End of a backward: reduce what never landed, as zeros, and free slot and gradients."""
        while self.next < len(self.order):
            self._reduce(self.order[self.next])
            self.next += 1
        self._end_pass()
        if self.suspects is not None:
            self.suspects.end_backward()
        self.forwarded = False
        if self.fresh and not self.held:
            self.micro_step += 1
            self.fresh = False

    def drop(self) -> None:
        """After the optimizer step: late gradients go, persistent ones stay to be overwritten."""
        if self.suspects is not None:
            self.suspects.end_step()
        self.micro_step = 0
        for u in self.units:
            u.filled = u.summed = False
            if self.choice.accumulation == 1 and u.grad is not None:
                storage = weakref.ref(u.grad.untyped_storage())
                u.grad = None
                self.collectives.until_released(storage)

    def abandon(self) -> None:
        """Forget a backward that did not end."""
        for u in self.units:
            u.release_grads()
        self._end_pass()
        self.drop()

    def _end_pass(self) -> None:
        """Wait for the reduce stream, free slot and gradients, and start anew at the first unit."""
        with self.streams.on(self.streams.reduce):
            done = self.streams.mark()
        self.streams.wait(done)
        self.retire()
        self.next = 0
        self.ready.clear()
        for name in ("slot", "received", "reduced_grads"):
            buffer: Tensor | None = getattr(self, name)
            setattr(self, name, None)
            if buffer is not None and (self.shared is None or buffer is not self.shared.buffer):
                storage = weakref.ref(buffer.untyped_storage())
                del buffer
                self.collectives.until_released(storage)

    def _take_grad(self, unit: FlatUnit) -> Tensor:
        numel = unit.layout.padded_numel if self.full else unit.layout.shard_numel
        if self.choice.optimizer_in_backward:
            if self.reduced_grads is None:
                self.reduced_grads = self.arena.take("grads.reduced", self.reduced_numel, self.grad_dtype)
            unit.grad = self.reduced_grads[:numel]
        elif unit.grad is None:
            line = "grads.full" if self.full else "grads.shard"
            unit.grad = self.arena.take(f"{line}.{unit.placement.size_class}", numel, self.grad_dtype)
        elif unit.filled:
            unit.widen_grad(self.arena)
        return unit.grad

    def _reduce(self, unit: FlatUnit) -> None:
        """Copy a unit's gradients and reduce them, on the reduce stream."""
        self.retire()
        grad = self._take_grad(unit)
        if self.slotted and self.slot is None:
            size = (self.slot_numel, self.slot_dtype)
            self.slot = self.arena.take("grads.slot", *size) if self.shared is None else self.shared.buffer
            if self.exchanges:
                self.received = self.arena.take("grads.received", self.slot_numel, self.slot_dtype)
        left = unit.release_grads()
        if self.suspects is not None and self.suspects.looking:
            self.suspects.look(unit, left)
        landed = unit.grad_places.of(left)
        here, measured = self.streams.mark(), False
        with self.streams.on(self.streams.reduce):
            self.streams.wait(here)
            if self.slot is not None and self.received is not None:
                measured = self._exchange(unit, landed, grad, self.slot, self.received)
            elif self.slot is not None:
                self._reduce_through_slot(unit, landed, grad, self.slot)
            else:
                self._reduce_in_place(unit, landed, grad)
            if self.in_last_micro_step and not measured:
                self.optimizer.landed(unit)  # the last call for a unit counts
            if self.in_backward is not None:
                self.in_backward.landed(unit)
            if self.choice.optimizer_in_backward:
                unit.grad, unit.filled, unit.summed = None, False, False
        self.retained = [(unit.placement.size_class, g) for g in left if g is not None]

    def _reduce_in_place(self, unit: FlatUnit, landed: UnitGrads, grad: Tensor) -> None:
        """Accumulate whole gradients; in the last micro-step sum them over ranks where there are any.

        Gradients that come after that sum are added to it on the rank that owns a slice (rank 0 at stage 0), and summed
        again.
        """
        if unit.summed:
            self._keep_one_copy(unit, grad)
        landed.copy(grad, 0, add=unit.filled)
        unit.filled, unit.summed = True, self.sums_ranks
        self.copied = self.streams.mark()
        if not self.sums_ranks:
            return
        for piece in unit.layout.pieces:
            part = grad[piece.offset : piece.offset + piece.numel]
            if self.choice.stage == 0:
                self.collectives.all_reduce(part, unit.name)
            else:
                self.collectives.reduce_scatter(unit.own(grad, piece), part, unit.name)

    def _keep_one_copy(self, unit: FlatUnit, grad: Tensor) -> None:
        """Zero what another rank holds as well, so that the next sum over ranks counts it once."""
        for piece in unit.layout.pieces:
            start, end = unit.layout.own(piece, unit.rank)
            if self.choice.stage == 0:
                start, end = (
                    (piece.offset, piece.offset + piece.numel) if unit.rank == 0 else (piece.offset, piece.offset)
                )
            grad[piece.offset : start].zero_()
            grad[end : piece.offset + piece.numel].zero_()

    def _exchange(self, unit: FlatUnit, landed: UnitGrads, grad: Tensor, slot: Tensor, received: Tensor) -> bool:
        """Piece by piece: copy the others' slices into the slot, exchange, sum into the gradient shard.

        Of whole gradients it is this rank's slices that are summed; in the last micro-step the others' are gathered.
        True if the norms of what came out are taken.
        """
        norms = self.optimizer.norm_rows(unit) if self.in_last_micro_step else None
        for i, piece in enumerate(unit.layout.pieces):
            start, end = unit.layout.own(piece, unit.rank)
            before, numel = start - piece.offset, piece.numel - (end - start)
            landed.copy(slot[:before], piece.offset, add=False)
            landed.copy(slot[before:numel], end, add=False)
            self.collectives.exchange_slices(received[:numel], slot[:numel], unit.name, self.shared)
            own = grad[start:end] if self.full else unit.shard_of(grad, piece)
            norm = None if norms is None else (norms[0], norms[1] + i)
            others = received[:numel].view(-1, end - start)
            landed.sum(others, unit.rank, own, start, add=unit.filled, norm=norm)
        self.copied = self.streams.mark()
        unit.filled = True
        if self.full and self.sums_ranks:
            pairs = [(grad[p.offset : p.offset + p.numel], unit.own(grad, p)) for p in unit.layout.pieces]
            self.collectives.all_gather(pairs, unit.name)
        return norms is not None

    def _reduce_through_slot(self, unit: FlatUnit, landed: UnitGrads, grad: Tensor, slot: Tensor) -> None:
        """Piece by piece: copy into the slot, reduce-scatter into the gradient shard."""
        for piece in unit.layout.pieces:
            part = slot[: piece.numel]
            landed.copy(part, piece.offset, add=False)
            self.copied = self.streams.mark()
            shard = unit.shard_of(grad, piece)
            if not unit.filled:
                self.collectives.reduce_scatter(shard, part, unit.name)
            else:
                per_rank = piece.numel // self.choice.world_size
                own = part[unit.rank * per_rank : (unit.rank + 1) * per_rank]
                self.collectives.reduce_scatter(own, part, unit.name)
                shard.add_(own)
        unit.filled = True
