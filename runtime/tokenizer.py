"""Text to integers: bytes, or the tokenizer of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from zplan.planner.errors import ZplanError

BYTES_VOCAB = 257
"""256 bytes and the end of a document."""


class Tokenizer(Protocol):
    """Text to integers. `vocab` is one more than the largest id it can give."""

    name: str
    vocab: int
    eos: int

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """UTF-8 bytes as they are: needs no files and loses nothing."""

    name, vocab, eos = "bytes", BYTES_VOCAB, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class FolderTokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise ZplanError(
                f"`{folder}` has a tokenizer, and the package `tokenizers` that reads it is not installed",
                "pip install 'zplan[hf]', or train on bytes with --tokenizer bytes",
            ) from None
        self.name = str(folder)
        try:
            self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the binding raises bare Exception
            raise ZplanError(f"`{folder / 'tokenizer.json'}` is not a tokenizer: {error}") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = self._find_eos(folder)

    def _find_eos(self, folder: Path) -> int:
        for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
            path = folder / name
            if not path.is_file():
                continue
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ZplanError(f"`{path}` cannot be read as JSON: {error}") from None
            token = known.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            ident = self._fast.token_to_id(token) if isinstance(token, str) else known.get("eos_token_id")
            ident = ident[0] if isinstance(ident, list) and ident else ident
            if isinstance(ident, int):
                return ident
        raise ZplanError(
            f"the tokenizer of `{folder}` names no end-of-text token",
            'add `"eos_token"` to its tokenizer_config.json, or use --tokenizer bytes',
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def find_tokenizer(folder: Path | None, *, vocab: int) -> Tokenizer:
    """The tokenizer of a model folder, or bytes for None; refused when the model has fewer than its `vocab` rows."""
    tokenizer: Tokenizer = ByteTokenizer()
    if folder is not None:
        if not (folder / "tokenizer.json").is_file():
            raise ZplanError(f"`{folder}` has no tokenizer.json", "use --tokenizer bytes, or a folder that has one")
        tokenizer = FolderTokenizer(folder)
    if tokenizer.vocab > vocab:
        raise ZplanError(
            f"the tokenizer `{tokenizer.name}` gives ids up to {tokenizer.vocab - 1} "
            f"and the model has only {vocab} rows",
            f"plan a model with a vocabulary of at least {tokenizer.vocab}",
        )
    return tokenizer
