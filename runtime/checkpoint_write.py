"""One rank's part of a save: its ranges into a safetensors file and an index, both on the disk when done.

[Note: write path] Three things happen at once: this thread brings ranges to the host (a copy only where they lie on a
GPU), one sums them, one hands them to the kernel and tells it every `FLUSH_BYTES` to start on the disk already, so that
the one fsync at the end finds little left to do. Memory beside the states is `AHEAD + 1` ranges when they lie on a GPU,
and nothing on the CPU; but masters in halves are put together on the way, a range at a time, which takes that range
on the GPU, or `AHEAD + 1` ranges on the CPU.
"""

from __future__ import annotations

import ctypes
import errno
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

AHEAD = 2
"""Ranges on their way to the disk while the next one is brought to the host."""

FLUSH_BYTES = 32 * 2**20
"""How much is left to the page cache before the kernel is asked to write it."""


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
    """Write and sync one file of ranges."""
    header = safetensors_header([r for r, _ in sources])
    stored = _write_data(path, header, sources)
    nbytes = len(header) + sum(r.nbytes for r, _ in sources)
    return DataFile(path.name, nbytes, len(header), zlib.crc32(header), stored)


def _write_data(path: Path, header: bytes, sources: Sequence[Source]) -> tuple[Stored, ...]:
    """Stream ranges after the header; returns their places and sums. See [Note: write path]."""
    pending: list[tuple[Range, Future[int], Future[None]]] = []
    stored: list[Stored] = []
    at = len(header)

    def settle() -> None:
        nonlocal at
        range_, crc, written = pending.pop(0)
        try:
            written.result()
        except OSError as error:
            raise unwritable(path, error, at=range_.key) from None
        stored.append(Stored(range_, at, crc.result()))
        at += range_.nbytes

    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with ThreadPoolExecutor(1) as summer, ThreadPoolExecutor(1) as writer:
            stream = Stream(fd)
            staging = Staging(max((r.nbytes for r, kept in sources if not in_place(kept)), default=0))
            pending_header = writer.submit(stream.write, memoryview(header))
            for range_, tensor in sources:
                values = staging.host_bytes(tensor)
                pending.append((range_, summer.submit(zlib.crc32, values), writer.submit(stream.write, values)))
                if len(pending) > AHEAD:
                    settle()
            pending_header.result()
            while pending:
                settle()
        os.fsync(fd)
    finally:
        os.close(fd)
    return tuple(stored)


class Staging:
    """Host memory that ranges pass through which can't be written from where they are: `AHEAD + 1` buffers in turn.

    Parameters
    ----------
    nbytes
        Of the largest such range.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(AHEAD + 1 if nbytes else 0)]
        self.turn = 0

    def host_bytes(self, kept: Tensor | Halves) -> memoryview:
        """A 1D range's bytes on the host, valid for the next `AHEAD` calls; no copy where they lie there."""
        if isinstance(kept, Tensor) and in_place(kept):
            return host_bytes(kept)
        buffer, self.turn = self.buffers[self.turn], (self.turn + 1) % (AHEAD + 1)
        if isinstance(kept, Halves) and kept.low.device.type == "cpu":
            kept.whole(out=buffer.view(torch.float32)[: kept.numel()])
            return memoryview(buffer[: kept.nbytes].numpy())
        raw = values_of(kept).detach().view(torch.uint8)
        copy = buffer[: raw.numel()]
        copy.copy_(raw)
        return memoryview(copy.numpy())


def in_place(kept: Tensor | Halves) -> bool:
    """Whether a range's bytes can be written from where they are."""
    return isinstance(kept, Tensor) and kept.device.type == "cpu"


def host_bytes(tensor: Tensor) -> memoryview:
    """A 1D tensor's bytes on the host; no copy where it already lies there."""
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    assert sys.byteorder == "little", "checkpoints are little-endian and this machine is not"
    return memoryview(values)


class Stream:
    """Writes to a file from its start, and keeps the disk busy meanwhile."""

    def __init__(self, fd: int) -> None:
        self.fd, self.written, self.flushed = fd, 0, 0

    def write(self, view: memoryview) -> None:
        write_all(self.fd, view)
        self.written += len(view)
        if self.written - self.flushed >= FLUSH_BYTES:
            start_on_disk(self.fd, self.flushed, self.written - self.flushed)
            self.flushed = self.written


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
SYNC_FILE_RANGE_WRITE = 2


def start_on_disk(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing a stretch of a file. A wish: only the fsync that follows counts, so what a file
    system or another system than Linux answers does not matter.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), SYNC_FILE_RANGE_WRITE)


def write_all(fd: int, view: memoryview) -> None:
    """Write every byte; a short write is not the end."""
    while view:
        view = view[_write(fd, view) :]


_write: Callable[[int, memoryview], int] = os.write
"""Where tests put a disk that fails."""
