"""What a checkpoint folder holds: names, records and their JSON. No torch here, so that any machine can look at one.

[Note: format] A checkpoint is a folder `TAG/` with one data file and one index per rank that wrote it, and a manifest:

    latest                      the newest committed tag, and its crc32
    TAG/manifest.json           what was trained, every parameter with its shape, every file with its size
    TAG/rank00000.safetensors   ranges of one dimension in fp32, little-endian, padding left out
    TAG/rank00000.frozen.safetensors   the same of frozen parameters, in the dtype that they are kept in
    TAG/rank00000.json          every range with its place and the crc32 of its bytes; random states

Frozen values do not change, so a save links the file that the save before wrote: they lie on the disk once.

A *range* is a stretch of one state of one parameter in flattened logical elements: `weight|blocks.0.q.weight|0:4096`.
It says nothing of ranks, slices or pieces, so any world size, stage or precision reads what any other wrote. A range is
at most `RANGE_NUMEL` elements and is always read whole, so no byte is used whose crc32 was not checked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from zplan.planner.errors import ZplanError

SCHEMA_VERSION = 2
"""2 names the states of each parameter; in 1 they were those of AdamW."""
WEIGHT = "weight"
"""The first state of a trained parameter: its fp32 master value, whatever the dtype of compute. What follows are its
optimizer's own, by the names that the optimizer has for them."""
ADAMW = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a trained parameter."""
FROZEN = "frozen"
"""The one state of a frozen parameter."""

RANGE_NUMEL = 4 * 2**20
"""Elements; 16 MiB. Longest stretch under one crc32, and the memory that a read takes beside its target."""

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of one element, by the names that safetensors has for dtypes."""

MANIFEST, LATEST, LOCK = "manifest.json", "latest", ".lock"


class Damaged(ZplanError):
    """A checkpoint that can't be trusted, with the file to blame. Another one may still be good."""


@dataclass(frozen=True)
class Range:
    """Elements `[start, end)` of one state of one parameter, flattened."""

    state: str
    name: str
    start: int
    end: int
    dtype: str = "F32"

    @property
    def key(self) -> str:
        return f"{self.state}|{self.name}|{self.start}:{self.end}"

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * SIZES[self.dtype]


@dataclass(frozen=True)
class Stored:
    """A range in a rank's data file: `offset` in bytes from the start of the file."""

    range: Range
    offset: int
    crc32: int


@dataclass(frozen=True)
class DataFile:
    """A safetensors file of ranges."""

    name: str
    nbytes: int
    header_bytes: int
    header_crc32: int
    ranges: tuple[Stored, ...]

    def to_mapping(self) -> dict[str, Any]:
        rows = [[r.state, r.name, r.start, r.end, r.dtype, s.offset, s.crc32] for s in self.ranges for r in (s.range,)]
        return {**vars(self), "ranges": rows}

    @staticmethod
    def from_mapping(raw: Mapping[str, Any]) -> DataFile:
        ranges = tuple(Stored(Range(*row[:5]), *row[5:]) for row in raw["ranges"])
        return DataFile(**{**raw, "ranges": ranges})


@dataclass(frozen=True)
class RankIndex:
    """What one rank wrote: its share of the states and of frozen parameters, and its random states."""

    rank: int
    data: DataFile
    frozen: DataFile | None
    random: Mapping[str, Any]

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (self.data,) if self.frozen is None else (self.data, self.frozen)

    def to_json(self) -> bytes:
        raw = {
            "schema_version": SCHEMA_VERSION,
            "rank": self.rank,
            "data": self.data.to_mapping(),
            "frozen": self.frozen and self.frozen.to_mapping(),
            "random": self.random,
        }
        return json.dumps(raw, separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes) -> RankIndex:
        raw = json.loads(text)
        frozen = raw["frozen"] and DataFile.from_mapping(raw["frozen"])
        return RankIndex(raw["rank"], DataFile.from_mapping(raw["data"]), frozen, raw["random"])


@dataclass(frozen=True)
class FileRecord:
    """The manifest's word on what one rank wrote; `nbytes` of its data files together."""

    rank: int
    index: str
    index_bytes: int
    index_crc32: int
    nbytes: int


@dataclass(frozen=True)
class Parameter:
    """One unique parameter. `moments` are the states that its optimizer keeps of it."""

    name: str
    shape: tuple[int, ...]
    frozen: bool = False
    moments: tuple[str, ...] = ()

    @property
    def states(self) -> tuple[str, ...]:
        return (FROZEN,) if self.frozen else (WEIGHT, *self.moments)

    @property
    def value(self) -> str:
        """The state that is the parameter itself."""
        return self.states[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of.

    Attributes
    ----------
    global_step
        Optimizer steps taken, skipped ones included; `applied_steps` leaves those out.
    global_samples
        Sequences consumed: the index of the next one in the endless order of the data.
    lr, loss_scale
        As the last step left them; the loss scaler's state in fp16, else None.
    training
        The config that was trained under.
    model
        `kind` and, where known, what a `config.json` can be made from.
    parameters
        In the order of the model.
    aliases
        Further names of tied parameters, each with the name it stands for.
    """

    tag: str
    global_step: int
    global_samples: int
    applied_steps: int
    world_size: int
    lr: float
    loss_scale: tuple[float, ...] | None
    training: Mapping[str, Any]
    model: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    aliases: Mapping[str, str]
    files: tuple[FileRecord, ...]
    client_state: Mapping[str, Any]
    zplan_version: str
    torch_version: str
    written_at: str
    schema_version: int = SCHEMA_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of the data files."""
        return sum(f.nbytes for f in self.files)

    def to_json(self) -> bytes:
        raw = json.loads(json.dumps(asdict(self)))  # once through JSON, so that the crc32 is of what a reader will see
        return (json.dumps({"crc32": crc_of(raw), **raw}, indent=1) + "\n").encode()

    @staticmethod
    def from_json(text: bytes, path: str) -> Manifest:
        """Read a manifest; `path` is for messages.

        Raises
        ------
        Damaged
            When its crc32 does not fit what it says.
        ZplanError
            When it was written by a newer zplan.
        """
        raw = parse_object(text, path)
        crc = raw.pop("crc32", None)
        if crc != crc_of(raw):
            raise Damaged(f"`{path}` is damaged: its crc32 is not that of its content", OTHER)
        migrate(raw, path)
        parameters = tuple(
            Parameter(p["name"], tuple(p["shape"]), p["frozen"], tuple(p["moments"])) for p in raw.pop("parameters")
        )
        files = tuple(FileRecord(**f) for f in raw.pop("files"))
        scale = raw.pop("loss_scale")
        return Manifest(parameters=parameters, files=files, loss_scale=None if scale is None else tuple(scale), **raw)


def migrate(raw: dict[str, Any], path: str) -> None:
    """Bring a manifest of an older schema to this one, in place.

    Raises
    ------
    ZplanError
        When the schema is not one that this zplan knows.
    """
    version = raw["schema_version"]
    if version not in range(1, SCHEMA_VERSION + 1):
        newer = not isinstance(version, int) or version > SCHEMA_VERSION
        raise ZplanError(
            f"`{path}` has schema version {version} (zplan {raw.get('zplan_version')}), "
            f"and this zplan reads versions 1 to {SCHEMA_VERSION}",
            "upgrade zplan on this machine" if newer else "load it with the zplan that wrote it, and save it again",
        )
    if version < 2:
        for p in raw["parameters"]:
            p["moments"] = [] if p["frozen"] else list(ADAMW)
    raw["schema_version"] = SCHEMA_VERSION


OTHER = "`zplan checkpoint list` shows the others; `--resume auto` takes the newest that is whole"


def parse_object(text: bytes, path: str) -> dict[str, Any]:
    """A JSON object, or `Damaged`."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise Damaged(f"`{path}` is damaged: {error}", OTHER) from None
    if not isinstance(raw, dict):
        raise Damaged(f"`{path}` is damaged: not a JSON object", OTHER)
    return raw


def crc_of(raw: Mapping[str, Any]) -> int:
    """crc32 of a JSON object, whatever its order and spacing in the file."""
    return zlib.crc32(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def rank_files(rank: int) -> tuple[str, str, str]:
    """(data, frozen, index) names of one rank.

    Examples
    --------
    >>> rank_files(3)
    ('rank00003.safetensors', 'rank00003.frozen.safetensors', 'rank00003.json')
    """
    return f"rank{rank:05d}.safetensors", f"rank{rank:05d}.frozen.safetensors", f"rank{rank:05d}.json"


def latest_text(tag: str) -> bytes:
    """Content of `latest`: the tag on a line of its own, then its crc32."""
    return f"{tag}\ncrc32 {zlib.crc32(tag.encode()):08x}\n".encode()


def read_latest(text: bytes, path: str) -> str:
    """The tag that `latest` names."""
    tag = text.split(b"\n", 1)[0].decode("utf-8", "replace")
    if text != latest_text(tag):
        raise Damaged(
            f"`{path}` is damaged: its crc32 is not that of its content", "name a tag, or use `--resume auto`"
        )
    return tag
