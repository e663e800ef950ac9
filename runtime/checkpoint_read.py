"""Reading a checkpoint: what is in it, whether all of it is there, and any stretch of any parameter.

Every element must be there exactly once before the first byte is used, and each range's crc32 is checked as it is read.
Needs no torch.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from zplan.runtime.checkpoint_folder import read_manifest
from zplan.runtime.checkpoint_format import (
    ITEMSIZE,
    OTHER,
    STATES,
    Damaged,
    FileRecord,
    Manifest,
    RankIndex,
    Stored,
)

Values = NDArray[np.float32]
NAMED = 4
"""Missing stretches that an error spells out."""


@dataclass(frozen=True)
class Place:
    """A stored range and the rank whose file holds it."""

    stored: Stored
    rank: int


class Checkpoint:
    """An open checkpoint folder. Holds one file descriptor per rank that wrote it, and one range's bytes.

    Raises
    ------
    Damaged
        On opening, when a file is missing, short or not what its crc32 says, or when an element is missing or there
        twice. On reading, when a range's bytes are not what its crc32 says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.indices = [self._index(record) for record in self.manifest.files]
        self.places = self._places()
        self.files: dict[int, int] = {}
        self._buffer = bytearray()
        self._buffered: Place | None = None
        self._check_coverage()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()

    # --- opening -------------------------------------------------------------------------------------------------------

    def _index(self, record: FileRecord) -> RankIndex:
        path = self.folder / record.index
        try:
            text = path.read_bytes()
            size = (self.folder / record.data).stat().st_size
        except FileNotFoundError as error:
            raise Damaged(
                f"`{error.filename}` is missing: rank {record.rank}'s part of the checkpoint", OTHER
            ) from None
        except OSError as error:
            raise Damaged(f"`{error.filename}` can't be read: {error.strerror}", OTHER) from None
        if len(text) != record.index_bytes or zlib.crc32(text) != record.index_crc32:
            raise Damaged(f"`{path}` is damaged: its crc32 is not the manifest's", OTHER)
        if size != record.data_bytes:
            raise Damaged(
                f"`{self.folder / record.data}` has {size:,} bytes and the manifest says {record.data_bytes:,}", OTHER
            )
        return RankIndex.from_json(text)

    def _places(self) -> dict[tuple[str, str], list[Place]]:
        found: dict[tuple[str, str], list[Place]] = {}
        for index in self.indices:
            for stored in index.ranges:
                found.setdefault((stored.range.state, stored.range.name), []).append(Place(stored, index.rank))
        for places in found.values():
            places.sort(key=lambda p: p.stored.range.start)
        return found

    def _check_coverage(self) -> None:
        """Every element of every state of every parameter, once."""
        wrong = []
        for name, shape in self.manifest.parameters:
            for state in STATES:
                at = 0
                for place in self.places.get((state, name), ()):
                    r = place.stored.range
                    if r.start != at:
                        what = "twice" if r.start < at else "missing"
                        wrong.append(f"`{state}|{name}|{min(at, r.start)}:{max(at, r.start)}` {what}")
                    at = max(at, r.end)
                if at != prod(shape):
                    wrong.append(f"`{state}|{name}|{at}:{prod(shape)}` missing")
        known = {name for name, _ in self.manifest.parameters}
        wrong += [f"`{state}|{name}` of no parameter" for state, name in self.places if name not in known]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise Damaged(f"`{self.folder}` does not cover its parameters: {', '.join(wrong[:NAMED])}{more}", OTHER)

    # --- reading ---------------------------------------------------------------------------------------------------------

    def read(self, state: str, name: str, start: int, end: int) -> Iterator[tuple[int, Values]]:
        """Elements `[start, end)` in parts: (first element, values). A part is valid until the next is asked for."""
        places = self.places[state, name]
        first = bisect_right(places, start, key=lambda p: p.stored.range.start) - 1
        for place in places[first:]:
            r = place.stored.range
            if r.start >= end:
                return
            values = self._values(place)
            lo, hi = max(start, r.start), min(end, r.end)
            if lo < hi:
                yield lo, values[lo - r.start : hi - r.start]

    def whole(self, state: str, name: str, numel: int) -> Values:
        """All elements of one state of one parameter, 1D."""
        out = np.empty(numel, dtype=np.float32)
        for at, values in self.read(state, name, 0, numel):
            out[at : at + values.size] = values
        return out

    def _values(self, place: Place) -> Values:
        """A stored range, whole and checked; the last one read is kept."""
        r = place.stored.range
        if place is not self._buffered:
            self._buffered = None
            if len(self._buffer) < r.nbytes:
                self._buffer = bytearray(r.nbytes)
            view = memoryview(self._buffer)[: r.nbytes]
            self._read_into(place.rank, view, place.stored.offset)
            if zlib.crc32(view) != place.stored.crc32:
                raise Damaged(
                    f"`{self._path(place.rank)}` is damaged: the crc32 of `{r.key}` is not its index's", OTHER
                )
            self._buffered = place
        return np.frombuffer(self._buffer, dtype="<f4", count=r.nbytes // ITEMSIZE)

    def _path(self, rank: int) -> Path:
        return self.folder / next(i.data for i in self.indices if i.rank == rank)

    def _read_into(self, rank: int, view: memoryview, offset: int) -> None:
        path = self._path(rank)
        try:
            if rank not in self.files:
                self.files[rank] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while view:
                count = os.preadv(self.files[rank], [view], offset)
                if not count:
                    raise Damaged(f"`{path}` ends at byte {offset:,}", OTHER)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise Damaged(f"`{path}` can't be read: {error.strerror}", OTHER) from None

    def verify(self) -> Iterator[Damaged]:
        """Read every byte of every file; yields what is wrong."""
        for index in self.indices:
            header = bytearray(index.header_bytes)
            try:
                self._read_into(index.rank, memoryview(header), 0)
            except Damaged as error:
                yield error
                continue
            if zlib.crc32(header) != index.header_crc32:
                yield Damaged(
                    f"`{self._path(index.rank)}` is damaged: the crc32 of its header is not its index's", OTHER
                )
            for stored in index.ranges:
                try:
                    self._values(Place(stored, index.rank))
                except Damaged as error:
                    yield error
