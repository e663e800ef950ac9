"""One rank's part of a save: its ranges into a safetensors file and an index, both on the disk when done.

crc32 and writing overlap: one thread writes what the other has just summed. Memory beside the states is two ranges
when they lie on a GPU, and nothing on the CPU.
"""

from __future__ import annotations

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
    safetensors_header,
)

Source = tuple[Range, Tensor]
"""A range and its values: 1D, contiguous, on any device."""

AHEAD = 2
"""Ranges on their way to the disk at once."""


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
    """Stream ranges after the header; returns their places and sums."""
    stored: list[Stored] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with ThreadPoolExecutor(1) as writer:
            write_all(fd, memoryview(header))
            at = len(header)
            pending: list[Future[None]] = []
            for range_, tensor in sources:
                values = host_bytes(tensor)
                pending.append(writer.submit(write_all, fd, values))
                stored.append(Stored(range_, at, zlib.crc32(values)))
                at += range_.nbytes
                if len(pending) > AHEAD:
                    pending.pop(0).result()
            for p in pending:
                p.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return tuple(stored)


def host_bytes(tensor: Tensor) -> memoryview:
    """A 1D tensor's bytes on the host; no copy where it already lies there."""
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    assert sys.byteorder == "little", "checkpoints are little-endian and this machine is not"
    return memoryview(values)


def write_all(fd: int, view: memoryview) -> None:
    """Write every byte; a short write is not the end."""
    while view:
        view = view[_write(fd, view) :]


_write: Callable[[int, memoryview], int] = os.write
"""Where tests put a disk that fails."""
