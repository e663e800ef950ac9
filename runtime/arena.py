"""Gives out the ledger's buffers by line id: the one place where the runtime asks for memory.

The arena keeps count of what it gave, so that an out-of-memory error can lay the ledger beside it, and so that a
request larger than its line is caught where it is made. Nothing that measures reads it.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.runtime.mesh import Mesh
from zplan.runtime.symmetric import Shared


class Arena:
    """Allocator of named buffers on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._locked: list[Tensor] = []
        self._given: dict[str, list[weakref.ref[torch.UntypedStorage]]] = {}

    def take(self, line: str, numel: int, dtype: torch.dtype, *, fill: float | None = None) -> Tensor:
        """A 1D tensor of its own storage, exactly `numel` elements; uninitialised unless `fill` is given."""
        out = torch.empty(numel, dtype=dtype, device=self.device)
        if fill is not None:
            out.fill_(fill)
        self._given.setdefault(line, []).append(weakref.ref(out.untyped_storage()))
        return out

    def take_shared(self, line: str, numel: int, dtype: torch.dtype, mesh: Mesh) -> Shared:
        """A buffer on every rank that all of them read. Every rank must take it at the same point."""
        assert mesh.reduces is not None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch's allocator has cached is of no use for this
        out = Shared(numel, dtype, self.device, mesh.reduces, mesh.timeout_s)
        self._given.setdefault(line, []).append(weakref.ref(out.buffer.untyped_storage()))
        return out

    def take_host(self, line: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D tensor in host memory of exactly `numel` elements; page-locked where the device is a GPU.

        torch's own pinned allocator rounds up to a power of two, so the pages of an ordinary tensor are locked instead.
        `unlock` ends that.
        """
        out = torch.empty(numel, dtype=dtype)
        if self.device.type == "cuda" and numel:
            out.zero_()  # touched first: locking pages that are not there yet is slower
            status = torch.cuda.cudart().cudaHostRegister(out.data_ptr(), out.nbytes, 0)
            if int(status):
                raise ZplanError(
                    f"`{line}` can't lock {out.nbytes:,} bytes of host memory (CUDA error {int(status)})",
                    "raise the limit of locked memory (`ulimit -l`)",
                )
            self._locked.append(out)
        self._given.setdefault(line, []).append(weakref.ref(out.untyped_storage()))
        return out

    def unlock(self) -> None:
        """Give page-locked memory back to the system's care."""
        while self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked.pop().data_ptr())

    def held(self) -> dict[str, int]:
        """Bytes alive by line id."""
        out: dict[str, int] = {}
        for line, refs in self._given.items():
            alive = [s for s in (r() for r in refs) if s is not None]
            self._given[line] = [weakref.ref(s) for s in alive]
            if alive:
                out[line] = sum(s.nbytes() for s in alive)
        return out
