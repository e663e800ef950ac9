"""Rank, world, device and process groups. The only place that makes groups.

[Note: communicators] NCCL makes a communicator when a group is first used, and on NVLink each takes half a GiB of the
card that no allocator shows. So no group is bound to a device, which would make them at once: the job's own group,
which nothing here uses, never gets one. Groups are made while all ranks join, before any of them can be refused its
model or config: one that waited for the others in `new_group` would do so for half an hour and not say for whom.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zplan.planner.errors import ZplanError

_starts = itertools.count()
"""Of process groups, in the same order on all ranks."""


@dataclass(frozen=True)
class Mesh:
    """Where this process stands. Gathers would wait for reduces in one group, so they have another."""

    rank: int
    world_size: int
    device: torch.device
    gathers: dist.ProcessGroup | None
    reduces: dist.ProcessGroup | None
    started_here: bool
    """Whether `close` should end the process group."""
    one_host: bool = True
    """Whether all ranks are on this host."""
    pretended: bool = False
    """Rank 0 of a job that is not there."""
    timeout_s: float = 600.0
    """How long a collective may wait for a missing rank."""

    def with_one_group(self) -> Mesh:
        """Without the group for gathers, where the few that are left may wait for reduces."""
        if self.gathers is None:
            return self
        dist.destroy_process_group(self.gathers)
        return replace(self, gathers=self.reduces)

    def reads_peers(self) -> bool:
        """Whether the GPUs of all ranks can read each other's memory. Every rank must ask."""
        if self.world_size == 1 or self.pretended or not self.one_host or self.reduces is None:
            return False
        if dist.get_backend(self.reduces) != "nccl":
            return False
        from zplan.runtime.symmetric import reachable

        mine = torch.tensor([int(reachable(self.device, self.world_size))], device=self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=self.reduces)
        return bool(mine.item())

    @property
    def closed(self) -> bool:
        """Whether its groups have ended."""
        return self.reduces is not None and self.reduces not in dist.distributed_c10d._world.pg_map

    def close(self) -> None:
        """End the groups, and with them their communicators' memory; the job's own too if it was started here."""
        if self.started_here and dist.is_initialized():
            dist.destroy_process_group()
        for group in (self.gathers, self.reduces):  # in the same order on all ranks
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def join(*, pretend_world: int | None = None, timeout_s: float = 600.0) -> Mesh:
    """Join the job that torchrun (or anything that sets the same variables) started, or stand alone.

    Parameters
    ----------
    pretend_world
        Be rank 0 of this many over a process group whose collectives move nothing: memory is that of a real rank,
        numbers are not.
    timeout_s
        How long a collective may wait for a missing rank.
    """
    started = False
    if pretend_world is not None:
        started = _pretend(pretend_world)
    elif not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _start(timeout_s)
        started = True
    device = own_device()
    if not dist.is_initialized():
        return Mesh(0, 1, device, None, None, started_here=False)
    world = dist.get_world_size()
    if device.type == "cuda" and dist.get_backend() == "gloo":
        device = torch.device("cpu")
    if world == 1:
        return Mesh(0, 1, device, None, None, started_here=started)
    gathers, reduces = dist.new_group(), dist.new_group()
    if dist.get_backend(reduces) == "gloo":
        dist.barrier(reduces)  # or one that is refused at once would close its end while others still connect
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    one_host = pretend_world is not None or here == world
    return Mesh(
        dist.get_rank(),
        world,
        device,
        gathers,
        reduces,
        started_here=started,
        one_host=one_host,
        pretended=pretend_world is not None,
        timeout_s=timeout_s,
    )


def say_once(text: str) -> None:
    """A line on stderr, by rank 0 or by a process that stands alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stderr.write(f"zplan: {text}\n")


def own_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none or `ZPLAN_DEVICE=cpu` asks for it."""
    if os.environ.get("ZPLAN_DEVICE") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ZplanError(
            f"rank with LOCAL_RANK {local} has no GPU: this machine has {torch.cuda.device_count()}",
            "start as many ranks as there are GPUs",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _start(timeout_s: float) -> None:
    """Start the job's process group. The launcher's store outlives it, and so would the addresses in it: each has keys
    of its own.
    """
    device, timeout = own_device(), timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"zplan/start/{next(_starts)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _pretend(world_size: int) -> bool:
    if dist.is_initialized():
        raise ZplanError(
            "`world` pretends to be one rank of many and can't run inside a real process group",
            "start it as a single process",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    return True
