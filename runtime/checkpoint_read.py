"""Reading a checkpoint: what is in it, whether all of it is there, and any stretch of any parameter.

Every element must be there exactly once before the first byte is used, and each range's crc32 is checked as it is read.
Needs no torch.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zplan.runtime.checkpoint_folder import read_manifest
from zplan.runtime.checkpoint_format import OTHER, Damaged, FileRecord, Manifest, Parameter, Range, RankIndex, Stored

Values = NDArray[Any]
"""Elements as stored; bf16 as the 16-bit integers of its bits, which NumPy has no name for."""

NUMPY = {
    "F64": "<f8",
    "I64": "<i8",
    "F32": "<f4",
    "I32": "<i4",
    "BF16": "<i2",
    "F16": "<f2",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
NAMED = 4
"""Missing stretches that an error spells out."""


def coverage_faults(parameters: Sequence[Parameter], ranges: Iterable[Range]) -> list[str]:
    """Stretches that are missing or there twice, and ranges of no parameter; empty when every element is there once."""
    found: dict[tuple[str, str], list[Range]] = {}
    for r in ranges:
        found.setdefault((r.state, r.name), []).append(r)
    wrong = []
    for p in parameters:
        for state in p.states:
            at = 0
            for r in sorted(found.pop((state, p.name), ()), key=lambda r: r.start):
                if r.start != at:
                    what = "twice" if r.start < at else "missing"
                    wrong.append(f"`{state}|{p.name}|{min(at, r.start)}:{max(at, r.start)}` {what}")
                at = max(at, r.end)
            if at != p.numel:
                wrong.append(f"`{state}|{p.name}|{at}:{p.numel}` missing")
    return wrong + [f"`{state}|{name}` of no parameter" for state, name in found]


@dataclass(frozen=True)
class Place:
    """A stored range and the file that holds it."""

    stored: Stored
    file: str


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
        self.files: dict[str, int] = {}
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

    # --- opening -----------------------------------------------------------------------------------------------------

    def _index(self, record: FileRecord) -> RankIndex:
        path = self.folder / record.index
        try:
            text = path.read_bytes()
            if len(text) != record.index_bytes or zlib.crc32(text) != record.index_crc32:
                raise Damaged(f"`{path}` is damaged: its crc32 is not the manifest's", OTHER)
            index = RankIndex.from_json(text)
            sizes = [(f, (self.folder / f.name).stat().st_size) for f in index.files]
        except FileNotFoundError as error:
            raise Damaged(
                f"`{error.filename}` is missing: rank {record.rank}'s part of the checkpoint", OTHER
            ) from None
        except OSError as error:
            raise Damaged(f"`{error.filename}` can't be read: {error.strerror}", OTHER) from None
        for file, size in sizes:
            if size != file.nbytes:
                raise Damaged(
                    f"`{self.folder / file.name}` has {size:,} bytes and its index says {file.nbytes:,}", OTHER
                )
        return index

    def _places(self) -> dict[tuple[str, str], list[Place]]:
        found: dict[tuple[str, str], list[Place]] = {}
        for index in self.indices:
            for file in index.files:
                for stored in file.ranges:
                    found.setdefault((stored.range.state, stored.range.name), []).append(Place(stored, file.name))
        for places in found.values():
            places.sort(key=lambda p: p.stored.range.start)
        return found

    def _check_coverage(self) -> None:
        """Every element of every state of every parameter, once."""
        wrong = coverage_faults(self.manifest.parameters, [p.stored.range for row in self.places.values() for p in row])
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise Damaged(f"`{self.folder}` does not cover its parameters: {', '.join(wrong[:NAMED])}{more}", OTHER)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, state: str, name: str, start: int, end: int) -> Iterator[tuple[int, Values]]:
        """Elements `[start, end)` in parts: (first element, values). A part is valid until the next is asked for."""
        places = self.places.get((state, name), [])
        first = bisect_right(places, start, key=lambda p: p.stored.range.start) - 1
        for place in places[max(0, first) :]:
            r = place.stored.range
            if r.start >= end:
                return
            values = self._values(place)
            lo, hi = max(start, r.start), min(end, r.end)
            if lo < hi:
                yield lo, values[lo - r.start : hi - r.start]

    def dtype(self, state: str, name: str) -> str:
        """How a state of a parameter is stored, as safetensors calls it."""
        places = self.places.get((state, name), [])
        return places[0].stored.range.dtype if places else "F32"

    def whole(self, state: str, name: str, numel: int) -> Values:
        """All elements of one state of one parameter, 1D."""
        out = np.empty(numel, dtype=NUMPY[self.dtype(state, name)])
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
            self._read_into(place.file, view, place.stored.offset)
            if zlib.crc32(view) != place.stored.crc32:
                raise Damaged(
                    f"`{self.folder / place.file}` is damaged: the crc32 of `{r.key}` is not its index's", OTHER
                )
            self._buffered = place
        return np.frombuffer(self._buffer, dtype=NUMPY[r.dtype], count=r.end - r.start)

    def _read_into(self, file: str, view: memoryview, offset: int) -> None:
        path = self.folder / file
        try:
            if file not in self.files:
                self.files[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while view:
                count = os.preadv(self.files[file], [view], offset)
                if not count:
                    raise Damaged(f"`{path}` ends at byte {offset:,}", OTHER)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise Damaged(f"`{path}` can't be read: {error.strerror}", OTHER) from None

    def verify(self) -> Iterator[Damaged]:
        """Read every byte of every file; yields what is wrong."""
        for file in (f for index in self.indices for f in index.files):
            header = bytearray(file.header_bytes)
            try:
                self._read_into(file.name, memoryview(header), 0)
            except Damaged as error:
                yield error
                continue
            if zlib.crc32(header) != file.header_crc32:
                path = self.folder / file.name
                yield Damaged(f"`{path}` is damaged: the crc32 of its header is not its index's", OTHER)
            for stored in file.ranges:
                try:
                    self._values(Place(stored, file.name))
                except Damaged as error:
                    yield error
