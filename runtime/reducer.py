"""Takes a unit's gradients as they land, sums them over ranks and keeps what this rank needs.

[Note: late gradients] With accumulation 1 a unit's fp32 gradient exists only from its reduce to the step, while activations shrink.
With more it persists, and the first micro-step overwrites what the last step left. Reduces are issued strictly in the
order of the units (last unit first), whatever order gradients land in, so that ranks can't disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zplan.planner.buffers import full_gradients, uses_reduce_slots
from zplan.planner.config import Choice
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives
from zplan.runtime.streams import Streams
from zplan.runtime.unit import FlatUnit


class Reducer:
    """Gradient accumulation and reduction of one engine. Owns the reduce slots and, through the units, the gradients."""

    def __init__(
        self, units: list[FlatUnit], choice: Choice, arena: Arena, collectives: Collectives, streams: Streams
    ) -> None:
        self.units, self.choice, self.arena, self.collectives, self.streams = units, choice, arena, collectives, streams
        self.full = full_gradients(choice)
        self.slotted = uses_reduce_slots(choice)
        self.order = list(reversed(units))
        self.next = 0
        self.ready: set[FlatUnit] = set()
        self.slots: list[Tensor] = []
        self.slot_free: list[torch.cuda.Event | None] = []
        self.turn = 0
        self.num_slots = min(choice.reduce_slots, sum(len(u.layout.pieces) for u in units))
        self.slot_numel = max((u.layout.max_piece_numel for u in units), default=0)
        self.micro_step = 0
        if choice.accumulation > 1:
            for u in units:
                self._take_grad(u)

    @property
    def first_micro_step(self) -> bool:
        return self.micro_step == 0

    @property
    def last_micro_step(self) -> bool:
        return self.micro_step == self.choice.accumulation - 1

    @torch.no_grad()
    def land(self, unit: FlatUnit) -> None:
        """All of a unit's gradients are there; reduce it as soon as those before it in the order have been."""
        self.ready.add(unit)
        while self.next < len(self.order) and self.order[self.next] in self.ready:
            self._reduce(self.order[self.next])
            self.next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """End of a backward: reduce what never landed, as zeros, and free the slots."""
        while self.next < len(self.order):
            self._reduce(self.order[self.next])
            self.next += 1
        for event in self.slot_free:
            self.streams.wait(event)
        self.slots, self.slot_free = [], []
        if self.streams.reduce is not None:
            with self.streams.on(self.streams.reduce):
                done = self.streams.mark()
            self.streams.wait(done)
        self.next, self.turn = 0, 0
        self.ready.clear()
        self.micro_step += 1

    def drop(self) -> None:
        """After the optimizer step: late gradients go, persistent ones stay to be overwritten."""
        self.micro_step = 0
        if self.choice.accumulation == 1:
            for u in self.units:
                u.grad = None

    def abandon(self) -> None:
        """Forget a backward that did not end."""
        for u in self.units:
            u.drop_grads()
        self.slots, self.slot_free, self.next, self.turn = [], [], 0, 0
        self.ready.clear()
        self.drop()

    def _take_grad(self, unit: FlatUnit) -> None:
        numel = unit.layout.padded_numel if self.full else unit.layout.shard_numel
        line = "grads.full" if self.full else "grads.shard"
        unit.grad = self.arena.take(f"{line}.{unit.placement.size_class}", numel, torch.float32)

    def _reduce(self, unit: FlatUnit) -> None:
        if self.slotted:
            self._reduce_through_slots(unit)
        else:
            self._reduce_in_place(unit)
        unit.drop_grads()

    def _reduce_in_place(self, unit: FlatUnit) -> None:
        """Accumulate whole gradients; at the last micro-step sum them over ranks where there are any."""
        if unit.grad is None:
            self._take_grad(unit)
        assert unit.grad is not None
        unit.copy_grads(unit.grad, 0, unit.layout.padded_numel, add=not self.first_micro_step)
        if self.choice.world_size == 1 or not self.last_micro_step:
            return
        copied = self.streams.mark()
        with self.streams.on(self.streams.reduce):
            self.streams.wait(copied)
            for piece in unit.layout.pieces:
                part = unit.grad[piece.offset : piece.offset + piece.numel]
                if self.choice.stage == 0:
                    self.collectives.all_reduce(part, unit.name)
                else:
                    self.collectives.reduce_scatter(unit.own(unit.grad, piece), part, unit.name)

    def _reduce_through_slots(self, unit: FlatUnit) -> None:
        """Copy piece by piece into a slot and reduce-scatter it into the gradient shard."""
        if not self.slots:
            self.slots = [
                self.arena.take("grads.slot", self.slot_numel, torch.float32) for _ in range(self.num_slots)
            ]
            self.slot_free = [None] * self.num_slots
        if unit.grad is None:
            self._take_grad(unit)
        assert unit.grad is not None
        for piece in unit.layout.pieces:
            turn = self.turn
            self.turn = (turn + 1) % self.num_slots
            self.streams.wait(self.slot_free[turn])
            slot = self.slots[turn][: piece.numel]
            unit.copy_grads(slot, piece.offset, piece.offset + piece.numel, add=False)
            copied = self.streams.mark()
            with self.streams.on(self.streams.reduce):
                self.streams.wait(copied)
                self._scatter(unit, piece.shard_offset, slot)
                self.slot_free[turn] = self.streams.mark()

    def _scatter(self, unit: FlatUnit, shard_offset: int, slot: Tensor) -> None:
        assert unit.grad is not None
        per_rank = slot.numel() // self.choice.world_size
        shard = unit.grad[shard_offset : shard_offset + per_rank]
        if self.first_micro_step:
            self.collectives.reduce_scatter(shard, slot, unit.name)
            return
        own = slot[unit.rank * per_rank : (unit.rank + 1) * per_rank]
        self.collectives.reduce_scatter(own, slot, unit.name)
        shard.add_(own)
