"""Headers of safetensors files: a little-endian length in 8 bytes, then that many bytes of JSON. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zplan.runtime.checkpoint_format import Range


def safetensors_header(ranges: list[Range], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Header of a safetensors file whose tensors are these ranges, one after the other."""
    return header_of([(r.key, r.dtype, (r.end - r.start,), r.nbytes) for r in ranges], metadata or {"format": "zplan"})


def header_of(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Header for `(name, dtype, shape, nbytes)` rows in file order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
    return len(text).to_bytes(8, "little") + text
