"""How one unit's parameters lie in a flat buffer, and which part of it each rank owns.

Pure integer arithmetic, in elements. The planner multiplies by dtype sizes to predict; the runtime cuts its
buffers with the very same numbers, so the two cannot drift apart.

[Note: pieces] A unit is one flat address space: every tensor starts on a multiple of `ALIGN` elements, and the whole is
padded to a multiple of `ALIGN * world_size`. It is cut into *pieces* of at most `piece_numel` elements. Rank r owns
slice r of every piece. A tensor may cross pieces and still be one contiguous view, because pieces carry no padding of
their own (only the last one's tail does). A piece is what one reduce moves, so it caps the reduce slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGN = 64
"""Elements. Keeps every tensor on a 128-byte boundary in 16 bits and 256 in fp32, at the same offset in both."""


def ceil_to(numel: int, multiple: int) -> int:
    """`numel` rounded up to a multiple.

    Examples
    --------
    >>> ceil_to(10, 4), ceil_to(8, 4), ceil_to(0, 4)
    (12, 8, 0)
    """
    return -(-numel // multiple) * multiple


class Entry(NamedTuple):
    """Where one parameter lies in its unit's flat buffer: `offset` and `numel` in elements."""

    name: str
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Piece(NamedTuple):
    """One reduce's worth of a unit: `[offset, offset + numel)` of the flat buffer, in elements.

    `shard_offset` is where this piece's slice starts in the rank's shard of the unit; the slice itself has
    `numel // world_size` elements.
    """

    offset: int
    numel: int
    shard_offset: int


class UnitLayout(NamedTuple):
    """Flat layout of one unit for `world_size` ranks. All sizes in elements."""

    name: str
    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...]
    numel: int
    padded_numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns; equal on all ranks, padding included."""
        return self.padded_numel // self.world_size

    @property
    def max_piece_numel(self) -> int:
        return self.pieces[0].numel if self.pieces else 0  # Only the last one may be shorter.

    def renamed(self, name: str, params: Sequence[str]) -> UnitLayout:
        """The same layout for another unit of the same shape."""
        entries = tuple(Entry(p, e.offset, e.numel) for e, p in zip(self.entries, params, strict=True))
        return self._replace(name=name, entries=entries)

    def own(self, piece: Piece, rank: int) -> tuple[int, int]:
        """`(start, end)` in the flat buffer of the slice of `piece` that `rank` owns."""
        per_rank = piece.numel // self.world_size
        start = piece.offset + rank * per_rank
        return start, start + per_rank


def piece_length(piece_numel: int, world_size: int) -> int:
    """Largest legal piece, in elements: `piece_numel` down to a multiple of `ALIGN * world_size`, one at least."""
    step = ALIGN * world_size
    return max(step, piece_numel // step * step)


def lay_out(name: str, params: Sequence[tuple[str, int]], *, world_size: int, piece_numel: int) -> UnitLayout:
    """Lay a unit's parameters (`(name, numel)` in order) into one flat buffer. See [Note: pieces].

    Examples
    --------
    >>> u = lay_out("u", [("w", 100), ("b", 10)], world_size=2, piece_numel=128)
    >>> [(e.name, e.offset) for e in u.entries], u.padded_numel, u.shard_numel
    ([('w', 0), ('b', 128)], 256, 128)
    >>> [(p.offset, p.numel, p.shard_offset) for p in u.pieces]
    [(0, 128, 0), (128, 128, 64)]
    """
    entries, at = [], 0
    for pname, numel in params:
        at = ceil_to(at, ALIGN)
        entries.append(Entry(pname, at, numel))
        at += numel
    padded = ceil_to(at, ALIGN * world_size)
    length = piece_length(piece_numel, world_size)
    pieces = tuple(Piece(start, min(length, padded - start), start // world_size) for start in range(0, padded, length))
    return UnitLayout(name, tuple(entries), pieces, sum(n for _, n in params), padded, world_size)
