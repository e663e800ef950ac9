"""Text of JSON files, one row a line, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from zplan.planner.errors import ZplanError


def render(value: Any, depth: int = 0) -> str:
    """JSON with one row a line: objects inside lists, and lists of plain values, stay on one."""
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    pad, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        inner = [f"{json.dumps(k, ensure_ascii=False)}: {render(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(pad + x for x in inner) + f"\n{end}}}"
    if all(isinstance(x, dict) for x in value):
        return "[\n" + ",\n".join(pad + json.dumps(x, ensure_ascii=False) for x in value) + f"\n{end}]"
    return json.dumps(value, ensure_ascii=False)


def write_files(texts: Mapping[str, str]) -> None:
    """Write files so that each is replaced only by its whole new text, and none if one can't be written in full.

    A device or a pipe (`/dev/null`, `/dev/stdout`) is written into: replacing it would take it from everybody else.
    """
    temporary: dict[str, str] = {}
    try:
        for name, text in texts.items():
            if os.path.exists(name) and not os.path.isfile(name):
                with open(name, "w", encoding="utf-8") as f:
                    f.write(text)
                continue
            temporary[name] = f"{name}.{os.getpid()}.tmp"
            with open(temporary[name], "x", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
        for name, temp in temporary.items():
            os.replace(temp, name)
        for folder in {os.path.dirname(os.path.abspath(name)) for name in temporary}:
            fd = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as e:
        raise ZplanError(
            f"`{name}` cannot be written: {(e.strerror or str(e)).lower()}", "check the folder and the free space"
        ) from None
    finally:
        for temp in temporary.values():
            if os.path.exists(temp):
                os.unlink(temp)
