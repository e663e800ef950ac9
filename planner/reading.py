"""Strict reads of JSON: the type checks and the did-you-mean that every file we read shares."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from zplan.planner.errors import ZplanError, did_you_mean


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [k for k, _ in pairs]
        twice = next(k for k in keys if keys.count(k) > 1)
        raise ZplanError(f"key `{twice}` is given twice in one object", "keep one of the two")
    return found


def _no_constant(text: str) -> Any:
    raise ZplanError(f"`{text}` is not a number", "write a finite number")


def parse_json(text: str, source: str) -> dict[str, Any]:
    """One JSON object; duplicate keys, NaN and infinity are refused.

    Parameters
    ----------
    text
        The document.
    source
        What it is called in errors, such as its path.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        if not text.strip():
            raise ZplanError(f"`{source}` is empty", "write the file again") from None
        cut = text.lstrip().startswith("{") and (e.pos >= len(text.rstrip()) or not text.rstrip().endswith("}"))
        what = "ends in the middle, so it was cut short" if cut else f"is not valid JSON: {e.msg}"
        raise ZplanError(
            f"`{source}` {what} (line {e.lineno}, column {e.colno})",
            "copy the file again" if cut else "JSON has no comments and no trailing commas",
        ) from None
    except RecursionError:
        raise ZplanError(f"`{source}` nests too deeply to be a config", "check that it is the right file") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits.
        raise ZplanError(
            f"`{source}` holds a number of thousands of digits", "check that it is the right file"
        ) from None
    except ZplanError as e:
        raise ZplanError(f"`{source}`: {e.message}", e.hint) from None
    if not isinstance(value, dict):
        raise ZplanError(
            f"`{source}` holds {kind_of(value)} where an object is needed", "check that it is the right file"
        )
    return value


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file, or a one-sentence error."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        raise ZplanError(f"`{name}` does not exist", "check the path") from None
    except IsADirectoryError:
        raise ZplanError(f"`{name}` is a folder", "name the file in it") from None
    except UnicodeDecodeError:
        raise ZplanError(f"`{name}` is not a text file", "check that it is the right file") from None
    except OSError as e:
        raise ZplanError(
            f"`{name}` cannot be read: {(e.strerror or str(e)).lower()}", "check its permissions"
        ) from None


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """One JSON object from a file."""
    return parse_json(read_text(path), os.fspath(path))


def kind_of(value: object) -> str:
    """What a JSON value is, in words, with the value where it is short.

    Examples
    --------
    >>> kind_of(None), kind_of("on"), kind_of(True), kind_of([1])
    ('null', 'the string "on"', 'true', 'a list')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'the string "{value}"' if len(value) <= 40 else "a string"
    if isinstance(value, (int, float)):
        return f"the number {value!r}" if finite(value) else "a number beyond all sizes"
    return "a list" if isinstance(value, (list, tuple)) else "an object" if isinstance(value, Mapping) else repr(value)


MOST_LISTED = 20
"""Known keys that an error lists where a page of the documentation lists them too."""


def check_keys(given: Iterable[str], known: Iterable[str], where: str, *, page: str | None = None) -> None:
    """Refuse the first key that is not known, naming the nearest ones, else all, or the page that lists them."""
    known = list(known)
    for key in given:
        if key not in known:
            listed = f"known keys: {', '.join(sorted(known))}"
            if page is not None and len(known) > MOST_LISTED:
                listed = f"`{page}` lists the {len(known)} keys that are known"
            hint = did_you_mean(str(key), known, most=3) or f"remove it; {listed}"
            raise ZplanError(f"unknown key `{key}` in {where}", hint)


def refuse_type(name: str, where: str, value: object, need: str) -> ZplanError:
    if value == "auto":
        hint = f'"auto" is filled in by a trainer, not here: write {need}, or leave `{name}` out'
        return ZplanError(f'`{name}` of {where} is "auto"', hint)
    return ZplanError(f"`{name}` of {where} is {kind_of(value)}", f"write {need}")


def want_bool(name: str, where: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse_type(name, where, value, "true or false, without quotes")


MOST = 10**15
"""Largest whole number of a file; beyond it no size, count or number of bytes means anything."""


def want_int(name: str, where: str, value: object, *, least: int = 1) -> int:
    """A whole number from `least` to `MOST`. `5e8` is one: configs of this field write counts that way."""
    ok = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value == int(value))
    if isinstance(value, bool) or not ok or not isinstance(value, (int, float)) or value < least:
        raise refuse_type(name, where, value, f"a whole number of at least {least}")
    if value > MOST:
        raise ZplanError(f"`{name}` of {where} is beyond anything zplan plans for", f"write {MOST:,} or less")
    return int(value)


def finite(value: float) -> bool:
    """Whether a number is finite as a float; whole numbers beyond every float are not.

    Examples
    --------
    >>> finite(10**300), finite(10**400), finite(float("nan"))
    (True, False, False)
    """
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def want_number(name: str, where: str, value: object, *, least: float = 0.0) -> float:
    """A finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not finite(value) or value < least:
        raise refuse_type(name, where, value, f"a number of at least {least:g}")
    return float(value)


def want_str(name: str, where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise refuse_type(name, where, value, "a string")


def want_one_of(name: str, where: str, value: object, options: Iterable[str]) -> str:
    """One of a few strings."""
    options = list(options)
    if isinstance(value, str) and value in options:
        return value
    near = did_you_mean(value, options) if isinstance(value, str) else None
    raise ZplanError(f"`{name}` of {where} is {kind_of(value)}", near or f"use one of {', '.join(options)}")


def want_object(name: str, where: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise refuse_type(name, where, value, "an object")


def want_list(name: str, where: str, value: object) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise refuse_type(name, where, value, "a list")
