"""Configs as people write them, with the place of every key: JSON, and the looser text that DeepSpeed reads.

DeepSpeed reads Hjson: comments, trailing or missing commas, keys and strings without quotes. Most other tools read
strict JSON, so each step away from it is kept as a `Departure` for the linter to tell about.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from zplan.planner.errors import ZplanError
from zplan.planner.reading import parse_json, read_text

Path = tuple[str | int, ...]
Place = tuple[int, int]
"""Line and column, from 1."""

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?\Z")
_WORDS = {"true": True, "false": False, "null": None}
DEEPEST = 64
"""Levels; a config has five."""


@dataclass(frozen=True)
class Departure:
    """One place where a text is not strict JSON."""

    place: Place
    what: str


@dataclass
class Document:
    """What a config file holds, and where in it."""

    value: dict[str, Any]
    syntax: Literal["json", "hjson", "yaml"]
    places: dict[Path, Place] = field(default_factory=dict)
    """Where each key, or item of a list, begins."""
    departures: list[Departure] = field(default_factory=list)
    duplicates: list[Path] = field(default_factory=list)
    """Keys given a second time; the last value counts."""


def read_document(text: str, source: str) -> Document:
    """Read a config written as JSON or Hjson.

    Parameters
    ----------
    text
        The file's text.
    source
        What it is called in errors.
    """
    if not text.strip():
        raise ZplanError(f"`{source}` is empty", "write the file again")
    return _Reader(text, source).document()


def read_config(path: str | os.PathLike[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config file as DeepSpeed reads it: strict JSON, else Hjson, which a note tells about.

    A key that is given twice is refused, as there.
    """
    name = os.fspath(path)
    text = read_text(name)
    try:
        return parse_json(text, name), ()
    except ZplanError:
        document = read_document(text, name)
    if document.duplicates:
        at = document.duplicates[0]
        line, column = document.places[at]
        message = f"key `{at[-1]}` of `{name}` is given twice in one object (line {line}, column {column})"
        raise ZplanError(message, "keep one of the two")
    if not document.departures:
        return document.value, ()
    first = document.departures[0]
    return document.value, (
        f"`{name}` is not JSON ({first.what} in line {first.place[0]}): read as Hjson, as DeepSpeed does",
    )


class _Reader:
    """One pass over the text; `at` is the next character."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source, self.at, self.depth = text, source, 0, 0
        self.lines = [0, *(m.end() for m in re.finditer("\n", text))]
        self.found = Document({}, "json")

    def document(self) -> Document:
        if self.text.startswith("\ufeff"):
            self.depart(0, "a byte order mark")
            self.at = 1
        self.skip()
        if self.peek() == "{":
            self.found.value = self.object(())
        elif self.peek() == "[":
            raise ZplanError(
                f"`{self.source}` holds a list where an object is needed", "check that it is the right file"
            )
        elif re.match(r"[^\s:{}\[\],]+\s*:", self.text[self.at :]):
            self.depart(self.at, "no braces around the whole")
            self.found.value = self.members((), closed=False)
        else:
            self.fail(self.at, "no object begins here")
        self.skip()
        if self.at < len(self.text):
            self.fail(self.at, "more text after the end of the object")
        self._check_strict()
        if self.found.departures:
            self.found.syntax = "hjson"
        return self.found

    def _check_strict(self) -> None:
        """What this reader takes without remark must be JSON to the standard library too."""
        if self.found.departures:
            return
        try:
            json.loads(self.text)
        except json.JSONDecodeError as e:
            self.depart(e.pos, e.msg.lower())

    def place(self, at: int) -> Place:
        line = bisect_right(self.lines, at)
        return line, at - self.lines[line - 1] + 1

    def depart(self, at: int, what: str) -> None:
        departure = Departure(self.place(at), what)
        if departure not in self.found.departures:  # a comment behind a value is passed twice
            self.found.departures.append(departure)

    def fail(self, at: int, what: str) -> NoReturn:
        line, column = self.place(min(at, len(self.text)))
        raise ZplanError(
            f"`{self.source}` cannot be read: {what} (line {line}, column {column})", "neither JSON nor Hjson reads it"
        )

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self) -> None:
        """White space and comments."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at)
                if end < 0:
                    self.fail(self.at, "a comment is not closed")
                self.depart(self.at, "a comment")
                self.at = end + 2
            elif self.text.startswith("//", self.at) or self.peek() == "#":
                self.depart(self.at, "a comment")
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def nested(self, read: Callable[[], Any]) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ZplanError(f"`{self.source}` nests too deeply to be a config", "check that it is the right file")
        value = read()
        self.depth -= 1
        return value

    def object(self, path: Path) -> dict[str, Any]:
        self.at += 1
        value: dict[str, Any] = self.nested(lambda: self.members(path, closed=True))
        return value

    def members(self, path: Path, *, closed: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        comma = -1
        while True:
            end = self.at
            self.skip()
            if self.at >= len(self.text):
                if closed:
                    self.fail(self.at, "it ends inside an object")
                return found
            if closed and self.peek() == "}":
                if comma >= 0:
                    self.depart(comma, "a comma before a closing brace")
                self.at += 1
                return found
            if found and comma < 0:
                self.depart(max(end - 1, 0), "a comma is missing")
            at = self.at
            key = self.key()
            here = (*path, key)
            if key in found:
                self.found.duplicates.append(here)
            self.found.places[here] = self.place(at)
            self.skip()
            if self.peek() != ":":
                self.fail(self.at, f"a colon is missing after `{key}`")
            self.at += 1
            found[key] = self.value(here)
            comma = self.comma()

    def comma(self) -> int:
        """Where the comma after a value is, or -1; the text goes on behind it."""
        before = self.at
        self.skip()
        if self.peek() == ",":
            self.at += 1
            return self.at - 1
        self.at = before
        return -1

    def array(self, path: Path) -> list[Any]:
        self.at += 1
        value: list[Any] = self.nested(lambda: self.items(path))
        return value

    def items(self, path: Path) -> list[Any]:
        found: list[Any] = []
        comma = -1
        while True:
            end = self.at
            self.skip()
            if self.at >= len(self.text):
                self.fail(self.at, "it ends inside a list")
            if self.peek() == "]":
                if comma >= 0:
                    self.depart(comma, "a comma before a closing bracket")
                self.at += 1
                return found
            if found and comma < 0:
                self.depart(max(end - 1, 0), "a comma is missing")
            here = (*path, len(found))
            self.found.places[here] = self.place(self.at)
            found.append(self.value(here))
            comma = self.comma()

    def key(self) -> str:
        if self.peek() in ('"', "'"):
            return self.string()
        match = re.compile(r"[^\s:{}\[\],]+").match(self.text, self.at)
        if not match:
            self.fail(self.at, f"a key is missing before `{self.peek()}`")
        self.depart(self.at, "a key without quotes")
        self.at = match.end()
        return match.group()

    def value(self, path: Path) -> Any:
        self.skip()
        first = self.peek()
        if first == "{":
            return self.object(path)
        if first == "[":
            return self.array(path)
        if first in ('"', "'") and first:
            return self.string()
        if first in ("", "}", "]", ",", ":"):
            self.fail(self.at, "a value is missing")
        return self.bare()

    def string(self) -> str:
        quote, start = self.peek(), self.at
        if quote == "'":
            self.depart(start, "single quotes")
            if self.text.startswith("'''", start):
                end = self.text.find("'''", start + 3)
                if end < 0:
                    self.fail(start, "a string is not closed")
                self.at = end + 3
                return self.text[start + 3 : end].strip("\n")
        match = re.compile(rf"{quote}((?:[^{quote}\\\n]|\\.)*){quote}").match(self.text, start)
        if not match:
            self.fail(start, "a string is not closed on its line")
        self.at = match.end()
        inner = match.group(1)
        if quote == "'":
            inner = re.sub(r'(?<!\\)"', r"\"", inner).replace(r"\'", "'")
        try:
            return str(json.loads(f'"{inner}"', strict=False))
        except json.JSONDecodeError:
            self.fail(start, "a string has a backslash that escapes nothing")

    def bare(self) -> Any:
        """A number or word up to what ends it, else a string without quotes up to the end of the line."""
        start = self.at
        line_end = self.text.find("\n", start)
        line_end = len(self.text) if line_end < 0 else line_end
        for stop in range(start + 1, line_end + 1):
            if stop < line_end and self.text[stop] not in ",]}#" and self.text[stop : stop + 2] not in ("//", "/*"):
                continue
            word = self.text[start:stop].strip()
            if word in _WORDS or _NUMBER.match(word):
                self.at = stop
                return _WORDS[word] if word in _WORDS else json.loads(word)
            break  # a word that something else follows is part of a longer string
        self.depart(start, "a string without quotes")
        self.at = line_end
        return self.text[start:line_end].strip()
