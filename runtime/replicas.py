"""Every so many steps ranks compare hashes of what all of them must hold alike, without waiting for the device.

[Note: hashes] A hash is the sum of a buffer's 64-bit words: its order does not matter, and no copy is made. Hashes are
made right before a step's update, when units that are gathered once a step are whole, and gathered as one message. A
GPU's are copied to page-locked memory beside training and read when the next step begins, which is where the error
comes; on a CPU it comes at once.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.planner.replicas import OF_ALL, num_hashes
from zplan.runtime.arena import Arena
from zplan.runtime.collectives import Collectives, checksum
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.unit import FlatUnit


class Replicas:
    """One engine's hashes: this rank's, and everybody's. See [Note: hashes].

    Parameters
    ----------
    every
        Optimizer steps from one comparison to the next.
    """

    def __init__(
        self, units: list[FlatUnit], optimizer: ShardedOptimizer, collectives: Collectives, arena: Arena, every: int
    ) -> None:
        self.optimizer, self.collectives, self.every = optimizer, collectives, every
        self.units = [u for u in units if u.flat is not None]
        self.names = ["a learning rate or another number of the optimizer", "the optimizer's step, norm or scale"]
        self.names += [f"unit `{u.name}`" for u in self.units]
        mesh, numel = collectives.mesh, len(self.names)
        assert numel == num_hashes([u.placement for u in units], optimizer.choice), (numel, [u.name for u in units])
        self.all = arena.take("comm.replicas", numel * mesh.world_size, torch.int64, fill=0)
        self.own = self.all[mesh.rank * numel : (mesh.rank + 1) * numel]
        self.host: Tensor | None = None
        if mesh.device.type == "cuda":
            self.host = arena.take_host("comm.replicas.host", self.all.numel(), torch.int64)
        self.term = self.all[(mesh.rank + 1) % mesh.world_size * numel]
        """Where a sum of several buffers takes its terms; another rank's hash is written over it."""
        self.copied: torch.cuda.Event | None = None
        self.step = 0
        """Whose hashes are on their way."""

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """In step `step`, counted from 1, before its update: hash where it is time to. Every rank must call it.

        Raises what the last comparison found, if nobody has heard yet.
        """
        self.look_back()
        if step % self.every:
            return
        self.step = step
        if self.optimizer.weighted:
            self.optimizer.count_tokens(self.collectives)  # until then each rank has its own
        self.own[0].fill_(_numbers(self.optimizer, step))
        _hash(self.optimizer.scalars.buffer[:-1], self.own[1])
        for unit, out in zip(self.units, self.own[OF_ALL:], strict=True):
            self._hash_unit(unit, out)
        self.collectives.all_gather([(self.all, self.own)], "replicas")
        if self.host is None:
            self._look(self.all)
            return
        self.host.copy_(self.all, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def look_back(self) -> None:
        """Raise if the last comparison on a GPU found a difference."""
        if self.copied is not None:
            assert self.host is not None
            self.copied.synchronize()
            self.copied = None
            self._look(self.host)

    def _hash_unit(self, unit: FlatUnit, out: Tensor) -> None:
        """Weights in the compute dtype while they are whole, and at stage 0 master weights and states too."""
        assert unit.flat is not None
        out.zero_()
        if unit.whole:
            _hash(unit.flat, out)
        if not shards_states(self.optimizer.choice):
            for tensor in (unit.master, unit.low, *unit.states.values()):
                if tensor is not None:
                    _hash(tensor, self.term)
                    out.add_(self.term)

    def _look(self, hashes: Tensor) -> None:
        rows = hashes.view(self.collectives.mesh.world_size, -1).tolist()
        for name, seen in zip(self.names, zip(*rows, strict=True), strict=True):
            most, count = Counter(seen).most_common(1)[0]
            if count < len(seen):
                odd = [rank for rank, value in enumerate(seen) if value != most]
                raise ZplanError(
                    f"{name} differs between ranks in step {self.step}: ranks {odd} hold another value than "
                    f"rank {seen.index(most)}",
                    "ranks drifted apart; look for code that changes parameters or rates on some ranks only",
                )


def check_alike(units: list[FlatUnit], optimizer: ShardedOptimizer, collectives: Collectives) -> None:
    """Checked mode, after every step: what every rank must hold alike is alike. Waits for the device."""
    # The last scalar is scratch, the norms before reduction differ by rank.
    collectives.same_everywhere(checksum(optimizer.scalars.buffer[:-1]), "the optimizer's step, norm or scale")
    if optimizer.choice.stage == 0:
        for u in units:
            for kept in (u.buffer, u.low):
                if kept is not None:
                    collectives.same_everywhere(checksum(kept), f"unit `{u.name}`")


def _hash(tensor: Tensor, out: Tensor) -> None:
    torch.sum(tensor.detach().view(torch.int64), 0, out=out)


def _numbers(optimizer: ShardedOptimizer, step: int) -> int:
    """Of the host: what each parameter group is updated with, and how far this rank has come."""
    groups = [{k: str(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return zlib.crc32(json.dumps([step, groups], sort_keys=True).encode())
