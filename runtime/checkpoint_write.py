"""One rank's part of a save: its ranges into a safetensors file and an index, both on the disk when done.

[Note: write path] A file is written in blocks, past the page cache (O_DIRECT): filling the cache costs the processor as
much as everything else together, and writing it back competes with whatever trains. Three things happen at once: this
thread copies ranges to blocks, from a GPU or from host memory; others sum what was copied, since one sums no faster
than some disks write; one writes what is full. That takes `BLOCKS` blocks of host memory, whatever is saved, and one
range where the ranges are of masters in halves. What a
file system does not take past its cache (the last bytes of a file; all of it on some) goes through the cache: the same
bytes, only slower.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.saving import ALIGN_BYTES, BLOCK_BYTES, BLOCKS
from zplan.runtime.checkpoint_folder import PROBE, sync_folder, unwritable, write_synced
from zplan.runtime.checkpoint_format import (
    DataFile,
    FileRecord,
    Range,
    RankIndex,
    Stored,
    rank_files,
)
from zplan.runtime.checkpoint_header import safetensors_header
from zplan.runtime.halves import Halves, values_of

Source = tuple[Range, Tensor | Halves]
"""A range and its values: 1D, contiguous, on any device."""

SUMMERS = BLOCKS - 1
"""Threads that sum: one block is on its way to the disk."""

DIRECT = getattr(os, "O_DIRECT", 0)
"""Past the page cache; no system but Linux has it under this name."""


def check_shared(partial: Path, needed_bytes: int) -> None:
    """Refuse before a byte is written: a folder that rank 0 does not share, or a disk too small for all."""
    try:
        shared = (partial / PROBE).read_text() == partial.name
    except OSError:
        shared = False
    if not shared:
        raise ZplanError(
            f"rank 0 made `{partial}` and this rank does not see it",
            "save to a file system that all nodes share",
        )
    stat = os.statvfs(partial)
    free = stat.f_bavail * stat.f_frsize
    if needed_bytes > free:
        raise ZplanError(
            f"the checkpoint takes {needed_bytes:,} bytes and `{partial.parent}` has {free:,} free",
            "free some space, keep fewer checkpoints, or save elsewhere; earlier checkpoints are untouched",
        )


def write_rank(
    partial: Path,
    rank: int,
    sources: Sequence[Source],
    frozen: Sequence[Source] | Written | None,
    random: Mapping[str, Any],
) -> tuple[FileRecord, DataFile | None]:
    """Write and sync one rank's files. Returns what the manifest needs, and the file of frozen parameters.

    Parameters
    ----------
    frozen
        Its share of the frozen parameters, the file in which they lie already, or None where nothing is frozen.

    Raises
    ------
    ZplanError
        When the file system refuses, with the file named.
    """
    data, frozen_name, index_name = rank_files(rank)
    path = partial / data
    try:
        files = [write_data(path, sources)]
        path = partial / frozen_name
        if isinstance(frozen, Written):
            files.append(link_or_copy(frozen, path))
        elif frozen is not None:
            files.append(write_data(path, frozen))
        path = partial / index_name
        index = RankIndex(rank, files[0], files[1] if len(files) > 1 else None, random).to_json()
        write_synced(path, index)
        sync_folder(partial)
    except OSError as error:
        raise unwritable(path, error) from None
    nbytes = sum(f.nbytes for f in files)
    return FileRecord(rank, index_name, len(index), zlib.crc32(index), nbytes), files[1] if len(files) > 1 else None


@dataclass(frozen=True)
class Written:
    """A file of frozen parameters that an earlier save left, and what is in it."""

    path: Path
    file: DataFile


def link_or_copy(written: Written, path: Path) -> DataFile:
    """The same file under another name; copied where the file system has no links."""
    try:
        os.link(written.path, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(written.path, path)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return replace(written.file, name=path.name)


def write_data(path: Path, sources: Sequence[Source]) -> DataFile:
    """Write and sync one file of ranges. See [Note: write path]."""
    header = safetensors_header([r for r, _ in sources])
    fd = _create(path)
    try:
        with ThreadPoolExecutor(SUMMERS) as summers, ThreadPoolExecutor(1) as writer:
            pipe = Pipe(path, fd, summers, writer, on_gpu=any(kept.is_cuda for _, kept in sources))
            pipe.put(header, "")
            for range_, kept in sources:
                pipe.put(values_of(kept).detach().view(torch.uint8), range_.key)
            sums = pipe.finish()
        os.fsync(fd)
    finally:
        os.close(fd)
    stored, at = [], len(header)
    for (range_, _), crc in zip(sources, sums[1:], strict=True):
        stored.append(Stored(range_, at, crc))
        at += range_.nbytes
    return DataFile(path.name, at, len(header), sums[0], tuple(stored))


def _create(path: Path) -> int:
    """A new file, past the page cache where that is possible."""
    try:
        return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The kernel has made the file before it refused.
    return _open(path, os.O_WRONLY | os.O_CREAT, 0o644)


class Pipe:
    """Bytes of a file in, crc32 of each stretch out; blocks go to the disk as they fill.

    Parameters
    ----------
    summers, writer
        Threads that begin in the order of what they are given; a single one writes.
    on_gpu
        Blocks are pinned, so that copies from a GPU are the copy engine's.
    """

    def __init__(
        self, path: Path, fd: int, summers: ThreadPoolExecutor, writer: ThreadPoolExecutor, *, on_gpu: bool
    ) -> None:
        self.path, self.fd, self.summers, self.writer = path, fd, summers, writer
        # Pinned memory begins with a page.
        whole = torch.empty(BLOCKS * BLOCK_BYTES + (0 if on_gpu else ALIGN_BYTES), dtype=torch.uint8, pin_memory=on_gpu)
        start = -whole.data_ptr() % ALIGN_BYTES
        self.blocks = whole[start : start + BLOCKS * BLOCK_BYTES].split(BLOCK_BYTES)
        self.turn, self.filled = 0, 0
        self.busy: list[list[Future[Any]]] = [[] for _ in range(BLOCKS)]
        """Of each block, what must be done before it is filled again."""
        self.first_key = ""
        """Of the first stretch with a name in the block, for errors."""
        self.sums: list[Future[int]] = []

    def put(self, raw: bytes | Tensor, key: str) -> None:
        """Add a stretch: bytes, or 1D uint8 on any device."""
        summed, at, size = self.summers.submit(int), 0, len(raw)
        while at < size:
            if not self.filled:
                self._settle(self.turn)
                self.first_key = ""
            self.first_key = self.first_key or key
            part = self.blocks[self.turn][self.filled : self.filled + size - at]
            view, more = memoryview(part.numpy()), raw[at : at + len(part)]
            if isinstance(more, Tensor):
                part.copy_(more)
            else:
                view[:] = more
            summed = self.summers.submit(_add_to_sum, view, summed)
            self.busy[self.turn].append(summed)
            self.filled, at = self.filled + len(part), at + len(part)
            if self.filled == BLOCK_BYTES:
                self._flush()
        self.sums.append(summed)

    def finish(self) -> list[int]:
        """Until all is written; the crc32 of each stretch."""
        if self.filled:
            self._flush()
        for turn in range(BLOCKS):
            self._settle(turn)
        return [s.result() for s in self.sums]

    def _flush(self) -> None:
        view = memoryview(self.blocks[self.turn][: self.filled].numpy())
        self.busy[self.turn].append(self.writer.submit(self._write, view, self.first_key))
        self.turn, self.filled = (self.turn + 1) % BLOCKS, 0

    def _settle(self, turn: int) -> None:
        waited, self.busy[turn] = self.busy[turn], []
        for done in waited:
            done.result()

    def _write(self, view: memoryview, key: str) -> None:
        try:
            write_all(self.fd, view)
        except OSError as error:
            raise unwritable(self.path, error, at=key) from None


def _add_to_sum(view: memoryview, before: Future[int]) -> int:
    """crc32 of a stretch that goes on in another block. What came before was begun earlier, so it will end."""
    return zlib.crc32(view, before.result())


def host_bytes(tensor: Tensor) -> memoryview:
    """A 1D tensor's bytes on the host; no copy where it already lies there."""
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    assert sys.byteorder == "little", "checkpoints are little-endian and this machine is not"
    return memoryview(values)


def write_all(fd: int, view: memoryview) -> None:
    """Write every byte; a short write is not the end, and a refusal to write past the page cache neither."""
    while view:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT)
        if direct and len(view) % ALIGN_BYTES:
            direct = _through_cache(fd)
        try:
            view = view[_write(fd, view) :]
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            _through_cache(fd)


def _through_cache(fd: int) -> bool:
    """Turn O_DIRECT off for the rest of a file. Returns whether it is still on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT)
    return False


_open: Callable[[Path, int, int], int] = os.open
_write: Callable[[int, memoryview], int] = os.write
"""Where tests put a disk that fails, or a file system with less."""
