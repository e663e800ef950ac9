"""Real text to fixed-length token batches.

`prepare` runs once per machine, before any rank starts, so that a bad file is one sentence and not one traceback per
rank: it streams documents through a tokenizer into one flat file of integers. Every rank then maps that file and reads
only its own samples, through `Batches`.

[Note: data order] Sample k of the corpus is tokens `[k*seq, (k+1)*seq]`, one more than it predicts. Step s uses the
positions `s*G .. (s+1)*G - 1` of one endless order, G being the global batch, and position i of a step goes to
micro-step, rank and row by `i = (micro_step * world_size + rank) * micro_batch + row`. The order depends on seed and
corpus alone, so two world sizes with the same global batch see the same samples in every step.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zplan.planner.errors import ZplanError
from zplan.planner.reading import kind_of
from zplan.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20
"""Bytes read, tokenized and written at once."""


def find_files(path: Path) -> list[Path]:
    """A file as it is; of a folder, every .txt and .jsonl below it, sorted, hidden ones left out."""
    if path.is_file():
        if path.suffix == ".json":
            raise ZplanError(f"`{path}` is one JSON document, not text", 'use .jsonl: one {"text": "..."} per line')
        return [path]
    if not path.is_dir():
        raise ZplanError(f"there is no file or folder `{path}`", "check the path")
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error)

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [Path(folder, n) for n in names if n.endswith((".txt", ".jsonl")) and not n.startswith(".")]
    if not found:
        raise ZplanError(f"`{path}` holds no .txt or .jsonl file", "name a text file of another kind itself")
    return sorted(found)


def _not_text(where: str, byte: int) -> ZplanError:
    return ZplanError(f"{where} is not UTF-8 text: byte 0x{byte:02x}", "convert it to UTF-8, or leave the file out")


def _unreadable(path: str | Path, error: OSError) -> ZplanError:
    return ZplanError(f"`{path}` cannot be read: {error.strerror or error}", "check its permissions")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file; a bad byte is an error with its line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise _not_text(f"`{path}:{number}`", raw[error.start]) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _chunks(path: Path) -> Iterator[str]:
    """A UTF-8 file in parts of about `CHUNK` bytes, each ending at a line end where it has one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, offset = "", 0
    try:
        with path.open("rb") as file:
            while raw := file.read(CHUNK):
                before = len(decoder.getstate()[0])
                try:
                    held += decoder.decode(raw)
                except UnicodeDecodeError as error:
                    at = offset - before + error.start
                    raise _not_text(f"`{path}` at byte {at:,}", error.object[error.start]) from None
                offset += len(raw)
                cut = held.rfind("\n") + 1 or len(held)
                yield held[:cut]
                held = held[cut:]
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_text(f"the end of `{path}`", error.object[error.start]) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    yield held


def _instead(row: object) -> str:
    """What a row of the wrong kind is."""
    if not isinstance(row, dict):
        return "it is not an object"
    if "text" in row:
        return f"there it has {kind_of(row['text'])}"
    return f"its keys are {', '.join(map(str, row)) or 'none'}"


def _row_text(path: Path, number: int, line: str) -> str:
    where = f"`{path}:{number}`"
    try:
        row = json.loads(line.rstrip())
    except ValueError as error:
        raise ZplanError(f"{where} is not JSON: {error}", 'a line is {"text": "..."}') from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ZplanError(f'{where} has no string under the key "text": {_instead(row)}', 'a line is {"text": "..."}')
    text: str = row["text"]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ZplanError(
            f"{where} holds half of a surrogate pair, which is no character", "write the row again"
        ) from None
    return text


def parts(files: Iterable[Path]) -> Iterator[tuple[str, bool]]:
    """`(text, last)` for every document: a .jsonl row in one part, a whole text file in parts."""
    for path in files:
        if path.suffix == ".jsonl":
            for number, line in _lines(path):
                if line.strip():
                    yield _row_text(path, number, line), True
        else:
            for text in _chunks(path):
                yield text, False
            yield "", True


@dataclass(frozen=True)
class Corpus:
    """A flat file of tokens: documents one after the other, each closed by the end-of-text token."""

    path: Path
    dtype: str
    num_tokens: int
    num_documents: int
    num_files: int

    def num_samples(self, seq: int) -> int:
        return max(0, (self.num_tokens - 1) // seq)


def prepare(files: list[Path], tokenizer: Tokenizer, folder: Path) -> Corpus:
    """Tokenize `files` into `folder/tokens.<dtype>`; costs 2 or 4 bytes of disk per token and `CHUNK` of memory.

    The file appears under its name only when it is complete.
    """
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    itemsize = np.dtype(dtype).itemsize
    text_bytes = sum(f.stat().st_size for f in files)
    free = shutil.disk_usage(folder).free
    if text_bytes * itemsize > free:
        raise ZplanError(
            f"tokens of {text_bytes:,} bytes of text can take {text_bytes * itemsize:,} bytes "
            f"and `{folder}` has {free:,} free",
            "set TMPDIR to a folder on a larger disk",
        )
    target = folder / f"tokens.{dtype}"
    partial = target.with_suffix(".part")
    eos = np.asarray([tokenizer.eos], dtype=dtype).tobytes()
    tokens = documents = 0
    try:
        with partial.open("wb") as out:
            open_document = False
            for text, last in parts(files):
                ids = tokenizer.encode(text).astype(dtype)
                out.write(ids.tobytes())
                tokens += ids.size
                open_document = open_document or ids.size > 0
                if last and open_document:
                    out.write(eos)
                    tokens += 1
                    documents += 1
                    open_document = False
        partial.replace(target)
    except OSError as error:
        raise ZplanError(f"`{partial}` cannot be written: {error.strerror}", "set TMPDIR to another folder") from None
    finally:
        partial.unlink(missing_ok=True)
    if not tokens:
        names = f"{', '.join(f'`{f}`' for f in files[:3])}{' ...' if files[3:] else ''}"
        raise ZplanError(f"there is no text in {names}", "name files that hold some")
    return Corpus(target, dtype, tokens, documents, len(files))


def check_enough(corpus: Corpus, source: Path, *, seq: int, global_batch: int) -> None:
    """Refuse a corpus in which one step would have to use a sample twice."""
    have = corpus.num_samples(seq)
    if have < global_batch:
        raise ZplanError(
            f"`{source}` is {corpus.num_tokens:,} tokens, {have:,} sequences of {seq:,}; "
            f"one step takes {global_batch:,} sequences",
            f"give at least {global_batch * seq + 1:,} tokens, or plan a smaller global batch or a shorter --seq",
        )


def shuffled(position: int, num_samples: int, seed: int) -> int:
    """Which sample stands at a position of the endless order: every epoch is a permutation of its own.

    A Feistel network over the next power of four, walked until it lands inside: constant memory however large the
    corpus, and the same numbers on every machine.
    """
    epoch, at = divmod(position, num_samples)
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            key = (right * 0x9E3779B97F4A7C15 + (seed * 0x100000001B3 + epoch * 4 + turn) * 0xBF58476D1CE4E5B9) % 2**64
            key = ((key ^ (key >> 31)) * 0x94D049BB133111EB) % 2**64
            left, right = right, left ^ ((key >> 33) & mask)
        at = left << half | right
        if at < num_samples:
            return at


@dataclass(frozen=True)
class Batches:
    """One rank's samples of a corpus. See [Note: data order]."""

    corpus: Corpus
    seq: int
    micro_batch: int
    accumulation: int
    world_size: int
    rank: int
    seed: int = 0
    origin: int = 0
    """Position of step 0: where steps were counted with another global batch before, it is not 0."""

    def samples(self, step: int, micro_step: int) -> list[int]:
        """Sample numbers of one micro-step, one per row."""
        per_step = self.micro_batch * self.accumulation * self.world_size
        first = self.origin + step * per_step + (micro_step * self.world_size + self.rank) * self.micro_batch
        count = self.corpus.num_samples(self.seq)
        return [shuffled(first + row, count, self.seed) for row in range(self.micro_batch)]

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 (micro_batch, seq) on the CPU, each a storage of its own."""
        import torch

        tokens = np.memmap(self.corpus.path, dtype=self.corpus.dtype, mode="r")
        ids = torch.empty(self.micro_batch, self.seq, dtype=torch.int64)
        labels = torch.empty_like(ids)
        for row, sample in enumerate(self.samples(step, micro_step)):
            start = sample * self.seq
            ids[row].numpy()[:] = tokens[start : start + self.seq]
            labels[row].numpy()[:] = tokens[start + 1 : start + self.seq + 1]
        return ids, labels
