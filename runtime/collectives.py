"""In-place collectives over flat buffers. Stateless but for the sequence that checked mode compares.

Gathers write straight into the buffer that compute reads; reduces read the buffer that gradients were copied into.
"""

from __future__ import annotations

import itertools
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zplan.planner.buffers import handshake_numel
from zplan.planner.errors import ZplanError
from zplan.planner.saving import CHECKSUM_NUMEL
from zplan.runtime.arena import Arena
from zplan.runtime.mesh import Mesh
from zplan.runtime.symmetric import Shared
from zplan.runtime.watchdog import Watchdog

# torch 2.13 renamed both and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Watch = Callable[[Literal["gather", "reduce"]], AbstractContextManager[None]]
"""Called around a collective."""

_instances = itertools.count()
"""Engines of one process, which all ranks make in the same order: their store keys must not meet."""


class Collectives:
    """The collectives of one engine.

    Parameters
    ----------
    mesh
        Groups and rank.
    arena
        Gives the handshake's buffer, on the CPU.
    checked
        Compare `(sequence, kind, unit)` across ranks before each collective, through the store, so that a rank that
        runs another order gets an error instead of a hang.
    num_terms
        Ranks, where scalars are to be added up in their order; else 0.
    """

    def __init__(self, mesh: Mesh, arena: Arena, *, checked: bool, num_terms: int = 0) -> None:
        self.mesh, self.checked = mesh, checked and mesh.world_size > 1 and not _is_fake()
        self.watch: Watch | None = None
        """Times gathers and reduces; None for nobody."""
        self.sequence = 0
        self.meetings = 0
        self.instance = next(_instances)
        self.on_gloo = mesh.reduces is not None and dist.get_backend(mesh.reduces) == "gloo"
        self.watchdog = Watchdog(mesh, self.instance)
        self.handshake: Tensor | None = None
        """1D int64: this rank's code, then everybody's."""
        if numel := handshake_numel(mesh.world_size, mesh.device.type):
            self.handshake = arena.take("comm.handshake", numel, torch.int64, fill=0)
        self.terms = arena.take("comm.terms", num_terms, torch.int64, fill=0) if num_terms else None
        """1D int64: one word a rank."""

    def all_gather(self, pieces: Sequence[tuple[Tensor, Tensor]], unit: str, shared: Shared | None = None) -> None:
        """Fill each `full` (1D) with every rank's `own`, which is this rank's slice of it; all `(full, own)` as one
        group. Where they are views of a `shared` buffer, by copies.
        """
        self._announce("all_gather", unit)
        if shared is not None:
            with self._timed("gather"):
                shared.gather([full for full, _ in pieces])
            return
        if self.on_gloo:
            with self._timed("gather"):
                for full, own in pieces:
                    self.watchdog.wait(_all_gather(full, own, group=self.mesh.gathers, async_op=True))
            return
        with self._timed("gather"), nullcontext() if len(pieces) == 1 else self._one_launch():
            for full, own in pieces:
                _all_gather(full, own, group=self.mesh.gathers)

    def _one_launch(self) -> AbstractContextManager[object]:
        """NCCL runs the gathers of a group in one kernel; each alone would start and drain the links again."""
        return dist.distributed_c10d._coalescing_manager(group=self.mesh.gathers)

    def reduce_scatter(self, own: Tensor, full: Tensor, unit: str) -> None:
        """Sum `full` over ranks and leave this rank's slice in `own`, which may be that slice of `full` itself."""
        self._announce("reduce_scatter", unit)
        if not self.on_gloo:
            with self._timed("reduce"):
                _reduce_scatter(own, full, group=self.mesh.reduces)
            return
        # gloo has no reduce-scatter: torch all-reduces a copy of `full`. The same without the copy.
        with self._timed("reduce"):
            self.watchdog.wait(dist.all_reduce(full, group=self.mesh.reduces, async_op=True))
        mine = full[self.mesh.rank * own.numel() : (self.mesh.rank + 1) * own.numel()]
        if mine.data_ptr() != own.data_ptr():
            own.copy_(mine)

    def exchange_slices(self, received: Tensor, sent: Tensor, unit: str, shared: Shared | None = None) -> None:
        """Send every other rank its slice of `sent`; `received` gets one from each of them. Both in rank order.

        Both 1D, as long as each other. Where `sent` is a view of a `shared` buffer, by copies. What a reduce-scatter
        moves, but in the dtype of the values rather than of their sum, which the receiver takes in fp32 and in rank
        order.
        """
        self._announce("exchange", unit)
        if shared is not None:
            with self._timed("reduce"):
                shared.exchange(received, sent)
            return
        if self.on_gloo:  # bytes are bytes; gloo's exchange has no 16-bit floats
            received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        share = sent.numel() // (self.mesh.world_size - 1)
        splits = [0 if rank == self.mesh.rank else share for rank in range(self.mesh.world_size)]
        with self._timed("reduce"):
            work = dist.all_to_all_single(
                received, sent, splits, splits, group=self.mesh.reduces, async_op=self.on_gloo
            )
            if work is not None:
                self.watchdog.wait(work)

    def all_reduce(self, tensor: Tensor, unit: str) -> None:
        """Sum over ranks, in place."""
        self._announce("all_reduce", unit)
        with self._timed("reduce"):
            if self.on_gloo:
                self.watchdog.wait(dist.all_reduce(tensor, group=self.mesh.reduces, async_op=True))
            else:
                dist.all_reduce(tensor, group=self.mesh.reduces)

    def sum_scalar(self, value: Tensor, what: str) -> None:
        """Sum a 0-dim fp32 or fp64 tensor over ranks, in place; in rank order where there is room for all terms."""
        if self.terms is None:
            self.all_reduce(value, what)
            return
        terms = self.terms.view(value.dtype)[: self.mesh.world_size]
        own = terms[self.mesh.rank : self.mesh.rank + 1]
        own.copy_(value)
        self.all_gather([(terms, own)], what)
        torch.sum(terms, 0, out=value)

    def _timed(self, part: Literal["gather", "reduce"]) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch(part)

    def until_released(self, storage: weakref.ref[torch.UntypedStorage], *, limit_s: float = 1.0) -> None:
        """Wait until nobody holds a buffer that was just dropped.

        gloo's worker thread lets go of a tensor a moment after the wait for it has returned.
        """
        end = time.monotonic() + limit_s
        while self.on_gloo and storage() is not None and time.monotonic() < end:
            time.sleep(0)

    def same_everywhere(self, value: int, what: str) -> None:
        """Checked mode: raise where a number that must be equal on all ranks isn't."""
        if not self.checked:
            return
        seen = self._exchange(f"{value}")
        if len(set(seen)) > 1:
            odd = [r for r, v in enumerate(seen) if v != seen[0]]
            raise ZplanError(
                f"{what} differs between ranks: ranks {odd} hold another value than rank 0",
                "ranks drifted apart; look for code that changes parameters on one rank only",
            )

    def _announce(self, kind: str, unit: str) -> None:
        self.watchdog.note(kind, unit)
        if self.checked:
            self._agree(kind, unit)
        elif self.on_gloo and self.handshake is not None:
            # gloo ends the process where sizes differ, and goes on with wrong values where they happen to agree.
            mine, everybody = self.handshake[:1], self.handshake[1:]
            mine.fill_(zlib.crc32(f"{kind} of {unit}".encode()))
            self.watchdog.wait(_all_gather(everybody, mine, group=self.mesh.reduces, async_op=True))
            if len(set(everybody.tolist())) > 1:
                self._agree(kind, unit)

    def _agree(self, kind: str, unit: str) -> None:
        """Tell each other what comes next, through the store."""
        seen = self._exchange(f"{kind} of {unit}")
        if len(set(seen)) > 1:
            said = "; ".join(f"rank {r}: {v}" for r, v in enumerate(seen))
            raise ZplanError(
                f"ranks run different collectives: {said}",
                "every rank must run the same modules in the same order",
            )

    def exchange(self, text: str) -> list[str]:
        """What every rank says, in rank order, through the store. Every rank must call it at the same point."""
        return self._exchange(text) if self.mesh.world_size > 1 and not _is_fake() else [text] * self.mesh.world_size

    def meet(self, text: str, what: str, *, timeout_s: float) -> None:
        """Wait until every rank is here with the same `text`; an error names those who are not.

        Nobody sends anything before, so a missing rank is an error and not a hang.
        """
        if self.mesh.world_size == 1 or _is_fake():
            return
        store = dist.distributed_c10d._get_default_store()
        self.meetings += 1
        keys = [f"zplan/meet/{self.instance}/{self.meetings}/{r}" for r in range(self.mesh.world_size)]
        store.set(keys[self.mesh.rank], text)
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # torch's DistStoreError among them
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise ZplanError(
                f"ranks {missing} did not enter `{what}` within {timeout_s:g} s", f"every rank must enter `{what}`"
            ) from None
        said = [store.get(key).decode() for key in keys]
        if len(set(said)) > 1:
            raise ZplanError(
                f"ranks entered `{what}` with different arguments: "
                + "; ".join(f"rank {r}: {v}" for r, v in enumerate(said)),
                f"every rank must enter `{what}` for the same module with the same arguments",
            )
        if self.meetings > 2:
            store.delete_key(f"zplan/meet/{self.instance}/{self.meetings - 2}/{self.mesh.rank}")

    def _exchange(self, text: str) -> list[str]:
        """What every rank says at this point, in rank order."""
        store = dist.distributed_c10d._get_default_store()
        self.sequence += 1
        store.set(self._key(self.sequence, self.mesh.rank), text)
        seen = [store.get(self._key(self.sequence, r)).decode() for r in range(self.mesh.world_size)]
        # Who has written the last one has read the one before, so nobody reads the one before that again.
        if self.sequence > 2:
            store.delete_key(self._key(self.sequence - 2, self.mesh.rank))
        return seen

    def _key(self, sequence: int, rank: int) -> str:
        return f"zplan/check/{self.instance}/{sequence}/{rank}"


def _is_fake() -> bool:
    return dist.is_initialized() and dist.get_backend() == "fake"


def checksum(tensor: Tensor) -> int:
    """Order-independent sum of a tensor's bits, to compare replicas. Torch sums a copy in 64 bits, so part by part."""
    raw = tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = raw.new_zeros((), dtype=torch.int64)
    for part in raw.reshape(-1).split(CHECKSUM_NUMEL):
        total += part.sum(dtype=torch.int64)
    return int(total.item())
