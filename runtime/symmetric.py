"""Buffers that the GPUs of one host read from each other: gathers and exchanges by copy engines.

[Note: copies] A rank writes its part into its own buffer; the others pull it. So a collective is: all ranks have
written (a barrier), copies, all ranks have read (a barrier), whereupon everybody may write again. Barriers run on the
device, on the stream of the collective; the copies need no SM, which compute keeps to itself. The memory lies outside
torch's allocator, so the allocator's statistics do not show it (`outside_bytes` does).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_live: list[weakref.ref[torch.UntypedStorage]] = []


def outside_bytes() -> int:
    """Bytes of all shared buffers of this process that are alive."""
    alive = [s for s in (ref() for ref in _live) if s is not None]
    _live[:] = [weakref.ref(s) for s in alive]
    return sum(s.nbytes() for s in alive)


def reachable(device: torch.device, world_size: int) -> bool:
    """Whether this GPU can read the memory of the first `world_size` GPUs of this host."""
    if device.type != "cuda" or torch.cuda.device_count() < world_size:
        return False
    others = [i for i in range(world_size) if i != device.index]
    return all(torch.cuda.can_device_access_peer(device.index, i) for i in others)


class Shared:
    """One buffer on every rank, seen by all. Making one is a collective.

    Parameters
    ----------
    numel, dtype, device
        Of each rank's buffer.
    group
        The ranks, all on one host.
    timeout_s
        How long a rank waits on the device for the others before it traps, which ends the process.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, timeout_s: float
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Gathers are copies here, and multicast needs a fabric manager that many machines lack.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Not `symm_mem.empty`: since torch 2.12 it would put the buffer into a pool of the caching allocator.
        self.buffer: Tensor = _SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device)
        self._memory = _SymmetricMemory.rendezvous(self.buffer, group.group_name)
        self.rank, self.world_size = self._memory.rank, self._memory.world_size
        self._peers = [self._memory.get_buffer(r, (numel,), dtype) for r in range(self.world_size)]
        self._timeout_ms = int(timeout_s * 1000)
        _live.append(weakref.ref(self.buffer.untyped_storage()))

    def gather(self, pieces: Sequence[Tensor]) -> None:
        """Fill every piece, a view of the buffer whose own slice is written, with the other ranks' slices of it."""
        self._barrier()
        for peer in self._others():
            for full in pieces:
                first, last = self._slice(full, peer)
                at = full.storage_offset()
                full[first:last].copy_(self._peers[peer][at + first : at + last])
        self._barrier()

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Collect what each other rank has for this one. `sent` is a view of the buffer.

        Both hold a slice for, or from, every other rank, in rank order.
        """
        at, share = sent.storage_offset(), sent.numel() // (self.world_size - 1)
        self._barrier()
        for peer in self._others():
            first = at + (self.rank - (self.rank > peer)) * share
            received[(peer - (peer > self.rank)) * share :][:share].copy_(self._peers[peer][first : first + share])
        self._barrier()

    def _others(self) -> Sequence[int]:
        """The other ranks, each rank beginning with another one, so that no link is everybody's first."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _slice(self, full: Tensor, rank: int) -> tuple[int, int]:
        share = full.numel() // self.world_size
        return rank * share, (rank + 1) * share

    def _barrier(self) -> None:
        self._memory.barrier(0, self._timeout_ms)
