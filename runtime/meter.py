"""An independent count of live tensor storages, by phase.

The registry watches every ATen op of its thread and notes each storage that it sees in arguments or results. It knows
nothing of ledgers or arenas: what it lists is what torch holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class StorageRecord:
    """One live storage.

    Attributes
    ----------
    nbytes
        Size when last read.
    phase
        Phase in which it was first seen.
    op
        The op that it was first seen in: as a result, or, when it is older than the registry, as an argument.
    device
        Where it lies.
    ref
        Weak reference to the `UntypedStorage`.
    """

    nbytes: int
    phase: str
    op: str
    device: torch.device
    ref: weakref.ref[torch.UntypedStorage]


class StorageRegistry(TorchDispatchMode):
    """Live bytes of all storages, and the peak of each phase.

    The peak of a phase is the largest live total at any moment from `enter(phase)` on, its first moment included.
    A storage dies when its last reference dies, in Python or in C++.

    [Note: observer effect] Under a dispatch mode torch's autograd treats every tensor like a subclass and never adds
    up gradients in place, so a fan-in of two gradients costs a third buffer for a moment. The CPU op table of the
    planner knows this; without the registry that moment is smaller by one gradient.

    A storage that is resized is counted with its new size from the next op that touches it on; `storages()` reads all
    sizes again.

    Parameters
    ----------
    phase
        Name of the phase that is current until the first `enter`.
    record_events
        Keep `events`, a list of `(phase, op, new bytes, live bytes)`, one entry per op.
    """

    def __init__(self, phase: str = "idle", *, record_events: bool = False) -> None:
        super().__init__()
        self.phase = phase
        self.live_bytes = 0
        self.peaks: dict[str, int] = {phase: 0}
        self.events: list[tuple[str, str, int, int]] = []
        self._record_events = record_events
        # Keyed by the address of the StorageImpl, which can't be used again before the weak reference has died.
        self._live: dict[int, StorageRecord] = {}

    def enter(self, phase: str) -> None:
        """Make `phase` current. Coming back to a phase goes on with its old peak."""
        self.phase = phase
        self._note_peak()

    def adopt(self, *tensors: Tensor, op: str = "adopt") -> None:
        """Register the storages of tensors that no op has shown yet."""
        for t in tensors:
            self._see(t, op)

    def storages(self) -> list[StorageRecord]:
        """All live storages, with sizes read again."""
        for key, record in list(self._live.items()):
            storage = record.ref()
            if storage is not None and storage.nbytes() != record.nbytes:
                self._resize(key, storage.nbytes())
        return list(self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for t in _tensors((args, kwargs)):
            self._see(t, name)
        out = func(*args, **(kwargs or {}))
        before = self.live_bytes
        for t in _tensors(out):
            self._see(t, name)
        if self._record_events:
            self.events.append((self.phase, name, self.live_bytes - before, self.live_bytes))
        return out

    def _see(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None:
            # A callback that held the registry would keep it alive as long as any tensor.
            gone = _Gone(weakref.ref(self), key)
            self._live[key] = StorageRecord(nbytes, self.phase, op, storage.device, weakref.ref(storage, gone))
            self.live_bytes += nbytes
        elif known.nbytes != nbytes:
            self._resize(key, nbytes)
        self._note_peak()

    def _resize(self, key: int, nbytes: int) -> None:
        old = self._live[key]
        self.live_bytes += nbytes - old.nbytes
        self._live[key] = StorageRecord(nbytes, old.phase, old.op, old.device, old.ref)
        self._note_peak()

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key).nbytes

    def _note_peak(self) -> None:
        if self.live_bytes > self.peaks.get(self.phase, -1):
            self.peaks[self.phase] = self.live_bytes


@dataclass(frozen=True)
class _Gone:
    """Callback of a dying storage."""

    registry: weakref.ref[StorageRegistry]
    key: int

    def __call__(self, _: object) -> None:
        registry = self.registry()
        if registry is not None:
            registry._forget(self.key)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))
