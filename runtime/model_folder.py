"""Writes a model folder as `transformers` reads it: sharded safetensors, index, `config.json`. Whole or not at all.

Tensors are streamed in a known order, so that memory is that of one tensor, and the folder appears under its name when
all of them are on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_folder import sync_folder, unwritable, write_synced
from zplan.runtime.checkpoint_header import header_of
from zplan.runtime.checkpoint_write import host_bytes, write_all

Dtype = Literal["bf16", "fp32"]
DTYPES: dict[str, tuple[str, str, torch.dtype]] = {
    "bf16": ("BF16", "bfloat16", torch.bfloat16),
    "fp32": ("F32", "float32", torch.float32),
}
"""Our name -> in safetensors, in `config.json`, in torch."""

SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Row:
    """One tensor of the folder. `transposed`: it is given as its transpose, and `shape` is what is written."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


class ModelFolder:
    """A folder being written. Call `write` for each row in order; leaving the context without an error commits it."""

    def __init__(
        self,
        out: Path,
        config: Mapping[str, Any],
        rows: Sequence[Row],
        *,
        dtype: Dtype,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.out, self.rows = out, list(rows)
        self.type_name, config_name, self.dtype = DTYPES[dtype]
        self.config = {**config, "torch_dtype": config_name}
        self.shards = _shards(self.rows, self.dtype.itemsize, shard_bytes)
        self.at = 0
        self.fd = -1
        self.partial = out.parent / f".partial.{out.name}.{secrets.token_hex(4)}"

    def __enter__(self) -> ModelFolder:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.commit()
        finally:
            self.abandon()

    def begin(self) -> None:
        """Make the hidden folder that is written into."""
        if self.out.exists():
            raise ZplanError(f"`{self.out}` exists", "name a folder that does not exist yet")
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise unwritable(self.out, error) from None

    def abandon(self) -> None:
        """Remove what was not committed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        shutil.rmtree(self.partial, ignore_errors=True)

    def write(self, values: Tensor) -> None:
        """The next row's values, of any shape and device; cast on the way."""
        row = self.rows[self.at]
        assert values.numel() == prod(row.shape), f"{row.name}: {values.numel()} elements for {row.shape}"
        if not values.is_floating_point():
            raise ZplanError(
                f"`{row.name}` has dtype {values.dtype}, which a folder of {self.config['torch_dtype']} can't hold",
                "export the model without quantised parameters",
            )
        if row.transposed:
            values = values.reshape(row.shape[::-1]).t()
        try:
            if self.at in self.shards:
                self._next_file()
            write_all(self.fd, host_bytes(values.detach().to(self.dtype).contiguous().reshape(-1)))
        except OSError as error:
            raise unwritable(self.out, error) from None
        self.at += 1

    def _next_file(self) -> None:
        self._close_file()
        starts = [*self.shards, len(self.rows)]
        number = self.shards.index(self.at)
        rows = self.rows[starts[number] : starts[number + 1]]
        table = [(r.name, self.type_name, r.shape, prod(r.shape) * self.dtype.itemsize) for r in rows]
        path = self.partial / self._file(number)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        write_all(self.fd, memoryview(header_of(table, {"format": "pt"})))

    def _close_file(self) -> None:
        if self.fd >= 0:
            os.fsync(self.fd)
            os.close(self.fd)
            self.fd = -1

    def _file(self, number: int) -> str:
        count = len(self.shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def commit(self) -> None:
        """Everything on the disk, then the name."""
        assert self.at == len(self.rows), f"{self.at} of {len(self.rows)} tensors were written"
        try:
            self._close_file()
            write_synced(self.partial / "config.json", _json(self.config))
            if len(self.shards) > 1:
                write_synced(self.partial / "model.safetensors.index.json", _json(self._index()))
            sync_folder(self.partial)
            self.partial.rename(self.out)
            sync_folder(self.out.parent)
        except OSError as error:
            raise unwritable(self.out, error) from None

    def _index(self) -> dict[str, Any]:
        starts = [*self.shards, len(self.rows)]
        files = {r.name: self._file(n) for n in range(len(self.shards)) for r in self.rows[starts[n] : starts[n + 1]]}
        total = sum(prod(r.shape) for r in self.rows) * self.dtype.itemsize
        return {"metadata": {"total_size": total}, "weight_map": files}


def _shards(rows: Sequence[Row], itemsize: int, limit: int) -> list[int]:
    """Index of each file's first row. A tensor larger than the limit has a file of its own."""
    starts, size = [0], 0
    for i, row in enumerate(rows):
        nbytes = prod(row.shape) * itemsize
        if size and size + nbytes > limit:
            starts.append(i)
            size = 0
        size += nbytes
    return starts


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
