"""Frozen parameters in checkpoints: written once, then linked from one checkpoint to the next.

A save compares a sum of the bits of what this rank holds with the one at the last write, so that values which
somebody did change (`summon(write=True)`, a load) are written anew.
"""

from __future__ import annotations

from pathlib import Path

import torch

from zplan.runtime.checkpoint_format import FROZEN, DataFile, RankIndex
from zplan.runtime.checkpoint_ranges import extents, state_tensor
from zplan.runtime.checkpoint_write import Source, Written
from zplan.runtime.unit import FlatUnit


class FrozenFiles:
    """Where one rank's share of the frozen parameters was written last."""

    def __init__(self, units: list[FlatUnit]) -> None:
        self.units = units
        self.written: Written | None = None
        self.stamp: Stamp | None = None
        """Of its file as it was committed: one that somebody wrote to since is not linked on."""
        self.sums: list[int] = []

    def share(self, root: Path, *, copied: bool = False) -> list[Source] | Written | None:
        """What this rank writes: values, the file beside it that has them already, or None where nothing is frozen.

        Parameters
        ----------
        copied
            Give copies on the host, which nobody changes while they are written behind training.
        """
        if not self.units:
            return None
        sums = [bit_sum(state_tensor(u, FROZEN)) for u in self.units]
        last = self.written
        if last is not None and sums == self.sums and last.path.parent.parent == root and self._untouched(last.path):
            return last
        self.written, self.sums = None, sums
        sources = [
            (e.range, e.of(state_tensor(u, FROZEN)))
            for u in self.units
            for e in extents(u, FROZEN, state_tensor(u, FROZEN), everything=False)
        ]
        return [(r, t.detach().to("cpu", copy=True)) for r, t in sources] if copied else sources

    def _untouched(self, path: Path) -> bool:
        return self.stamp is not None and self.stamp == stamp_of(path)

    def adopt(self, folder: Path, index: RankIndex) -> None:
        """Values were loaded from this checkpoint: link its file too, where it holds what this rank would write."""
        mine = [e.range for u in self.units for e in extents(u, FROZEN, state_tensor(u, FROZEN), everything=False)]
        if index.frozen is not None and [s.range for s in index.frozen.ranges] == mine:
            self.remember(folder, index.frozen)
            self.sums = [bit_sum(state_tensor(u, FROZEN)) for u in self.units]

    def remember(self, folder: Path, file: DataFile | None) -> None:
        """A checkpoint with this file was committed."""
        self.written = None if file is None else Written(folder / file.name, file)
        self.stamp = None if self.written is None else stamp_of(self.written.path)


Stamp = tuple[int, int, int]
"""inode, bytes, time of the last write."""


def stamp_of(path: Path) -> Stamp | None:
    """What changes with a file's content; None where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@torch.no_grad()
def bit_sum(tensor: torch.Tensor) -> int:
    """Sum over a tensor's bytes, each weighted by its place modulo a prime, so that elements which move show."""
    raw = tensor.detach().contiguous().view(torch.uint8)
    total = 0
    for at, part in enumerate(raw.split(2**24)):
        weights = torch.arange(part.numel(), device=part.device, dtype=torch.int64).remainder_(8191).add_(1 + at)
        total += int((part.to(torch.int64) * weights).sum().item())
    return total
