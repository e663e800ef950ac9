"""Weights of a local safetensors folder, each rank reading only the bytes of what it keeps.

The format's header says where each tensor lies, so a range of elements is a range of bytes of one file. Ranges go
straight into the buffers that stay: the host holds one range (16 MiB in fp32) beside them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.runtime.checkpoint_load import write_compute_copy
from zplan.runtime.checkpoint_ranges import extents, state_tensor, states_of
from zplan.runtime.mesh import say_once

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
NAMED = 4
"""Names shown in an error."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `start` in bytes from the beginning of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class WeightFolder:
    """A model folder, opened by its headers. `bytes_read` counts what was read of tensors."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self.bytes_read = Path(folder), 0
        self.tensors: dict[str, Stored] = {}
        for file in self._files():
            self.tensors.update(_read_header(file))
        self.names: dict[str, str] = {}
        """Parameter or buffer of the model -> tensor of the folder."""

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                table = json.loads(index.read_text())["weight_map"]
            except (OSError, ValueError, KeyError) as error:
                raise ZplanError(f"`{index}` can't be read: {error}", "download the folder again") from None
            return sorted({self.folder / file for file in table.values()})
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        raise ZplanError(
            f"`{self.folder}` has neither `{SINGLE}` nor `{INDEX}`",
            "give a folder that transformers' `save_pretrained` wrote",
        )

    def bind(self, model: nn.Module) -> None:
        """Find every parameter and saved buffer of the model; refuse before anything is allocated where one is not
        there.

        A parameter that has values of its own (one of an adapter, say) may be missing and keeps them.
        """
        aliases: dict[int, list[str]] = {}
        rows: dict[str, Tensor] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(p), []).append(name)
            if len(aliases[id(p)]) == 1:
                rows[name] = p
        saved = set(model.state_dict(keep_vars=True))
        rows |= {n: b for n, b in model.named_buffers() if n in saved}
        missing = []
        for name, tensor in rows.items():
            found = next((t for n in aliases.get(id(tensor), [name]) for t in self._candidates(n)), None)
            if found is not None:
                self._check(name, tensor, self.tensors[found], found)
                self.names[name] = found
            elif tensor.is_meta:
                missing.append(name)
        if missing:
            raise ZplanError(
                f"`{self.folder}` lacks {len(missing)} of {len(rows)} tensors of the model, such as "
                + ", ".join(f"`{n}`" for n in missing[:NAMED]),
                "build the class that was saved; where the folder's tensors need a conversion, load it with "
                "`from_pretrained` and pass that model",
            )
        if extra := sorted(set(self.tensors) - set(self.names.values())):
            say_once(f"{len(extra)} tensors of `{self.folder}` are not the model's, such as `{extra[0]}`")

    def _candidates(self, name: str) -> list[str]:
        """Names under which a folder may hold it: a bare model's have no first part, and adapters wrap theirs."""
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return [n for n in (name, plain, plain.partition(".")[2]) if n in self.tensors]

    def _check(self, name: str, tensor: Tensor, stored: Stored, found: str) -> None:
        if tuple(tensor.shape) != stored.shape:
            raise ZplanError(
                f"`{found}` of `{self.folder}` is {stored.shape} and the model's `{name}` is {tuple(tensor.shape)}",
                "build the model that was saved",
            )
        if tensor.is_floating_point() != stored.dtype.is_floating_point:
            raise ZplanError(
                f"`{found}` of `{self.folder}` is {stored.dtype} and the model's `{name}` is {tensor.dtype}",
                "build the model that was saved",
            )

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Elements `[start, end)` of a parameter, flattened, in the file's dtype."""
        stored = self.tensors[self.names[name]]
        width = stored.dtype.itemsize
        values = bytearray((end - start) * width)
        view, at = memoryview(values), stored.start + start * width
        with stored.file.open("rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view], at)
                if not count:
                    raise ZplanError(f"`{stored.file}` ends before `{name}` does", "download the folder again")
                view, at = view[count:], at + count
        self.bytes_read += len(values)
        return torch.frombuffer(values, dtype=stored.dtype) if values else torch.empty(0, dtype=stored.dtype)

    def fill_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Give the model the buffers that were saved."""
        for module_name, module in model.named_modules():
            for key, b in module.named_buffers(recurse=False):
                name = f"{module_name}.{key}".lstrip(".")
                if name in self.names:
                    setattr(module, key, self.read(name, 0, b.numel()).view(b.shape).to(device, b.dtype))


@torch.no_grad()
def load_weights(engine: Engine, folder: WeightFolder) -> None:
    """Stream what this rank keeps of every unit into its buffers. What is resident and sharded is gathered in use."""
    sharded = shards_states(engine.choice)
    for u in engine.units:
        state = states_of(u)[0]
        tensor = state_tensor(u, state)
        everything = u.shard is None if u.placement.frozen else not sharded
        for extent in extents(u, state, tensor, everything=everything):
            r = extent.range
            if r.name in folder.names:
                extent.of(tensor).copy_(folder.read(r.name, r.start, r.end))
        if not u.placement.frozen:
            write_compute_copy(u, sharded=sharded)
    engine.gatherer.invalidate([u for u in engine.units if u.placement.closes])


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length))
        out = {}
        for name, row in header.items():
            if name == "__metadata__":
                continue
            if row["dtype"] not in DTYPES:
                raise ZplanError(f"`{name}` of `{file}` is {row['dtype']}", "convert the folder to bf16")
            stored = Stored(file, DTYPES[row["dtype"]], tuple(row["shape"]), 8 + length + row["data_offsets"][0])
            assert prod(stored.shape) * stored.dtype.itemsize == row["data_offsets"][1] - row["data_offsets"][0], name
            out[name] = stored
        return out
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ZplanError(f"`{file}` can't be read: {error}", "download the folder again") from None
