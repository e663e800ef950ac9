"""Rules about keys and values as they are written: syntax, spelling, types, "auto"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from zplan.planner import dskeys
from zplan.planner.dsschema import FOREIGN, KNOWN_TOP, REMOVED, REMOVED_ZERO, STRICT, TOP, UNPREFIXED, ZERO, Key
from zplan.planner.lint import Finding, View, nearest
from zplan.planner.reading import finite, kind_of
from zplan.planner.relaxed import Path

REMOVED_SINCE = (0, 19)
PYDANTIC_SINCE = (0, 8)
"""Before it, unknown keys of a block were ignored."""
ALIASES_SINCE = (0, 15)
"""Since then a number with a fraction is refused where a count is meant."""

FILLED_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
FILLED_SCHEDULER = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")


def syntax(view: View) -> Iterator[Finding]:
    """Text that DeepSpeed reads and most other tools do not."""
    alone = view.subject.consumer == "deepspeed"
    for d in view.document.departures:
        yield Finding(
            "json-syntax",
            "warning" if alone else "error",
            f"{d.what}: not JSON. DeepSpeed reads it (as Hjson), Hugging Face and most other tools do not",
            "write strict JSON",
            place=d.place,
        )
    for path in view.document.duplicates:
        yield Finding(
            "duplicate-key",
            "error",
            f"`{path[-1]}` is given twice in one object",
            "keep one of the two",
            ".".join(map(str, path)),
            view.document.places[path],
            refused=True,
        )


def white_space(view: View) -> Iterator[Finding]:
    """Keys with blanks around them match nothing."""
    for path in _paths(view.document.value, ()):
        key = str(path[-1])
        if key != key.strip():
            yield Finding(
                "key-whitespace",
                "warning",
                f"key `{key}` has a blank at its {'end' if key != key.rstrip() else 'start'}, so nothing matches it",
                f"write `{key.strip()}`",
                ".".join(map(str, path)),
                view.document.places.get(path),
            )


def _paths(block: Mapping[str, Any], above: Path) -> Iterator[Path]:
    """Every key of a nest of objects."""
    for key, value in block.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))


def top_level(view: View) -> Iterator[Finding]:
    """DeepSpeed ignores top-level keys that it does not know, without a word."""
    for key, value in view.config.items():
        if key in REMOVED and view.subject.release >= REMOVED_SINCE:
            message = f"`{key}` was removed: DeepSpeed since 0.19 refuses the file, even where the block is off"
            yield view.find("removed-key", "error", (key,), message, f"delete it; {REMOVED[key]}", refused=True)
        elif key in KNOWN_TOP or key == "zplan":
            continue
        elif key in FOREIGN:
            yield view.find("foreign-key", "note", (key,), f"DeepSpeed ignores `{key}`; {FOREIGN[key]}")
        elif key != key.strip():
            continue  # told by `white_space`
        else:
            yield _ignored(view, key, value)


def _ignored(view: View, key: str, value: object) -> Finding:
    if key in ZERO or key in UNPREFIXED:
        return view.find(
            "ignored-key",
            "error",
            (key,),
            f"`{key}` at the top level is silently ignored",
            "move it into `zero_optimization`",
        )
    meant = f"did you mean `{dskeys.MEANT[key]}`?" if key in dskeys.MEANT else nearest(key, KNOWN_TOP)
    severity = "error" if meant else "warning"
    message = f"DeepSpeed silently ignores `{key}`, so {kind_of(value)} has no effect"
    return view.find("ignored-key", severity, (key,), message, meant or "delete it")  # type: ignore[arg-type]


def strict_blocks(view: View) -> Iterator[Finding]:
    """Unknown, too new, deprecated and removed keys of the blocks that DeepSpeed checks."""
    for path, known in STRICT.items():
        names = {**known, **{short: ZERO[long] for short, long in UNPREFIXED.items()}} if known is ZERO else known
        for key in view.block(*path):
            yield from _strict_key(view, (*path, key), names)


def _strict_key(view: View, path: tuple[str, ...], known: Mapping[str, Key]) -> Iterator[Finding]:
    key, where = path[-1], ".".join(path[:-1])
    release = ".".join(map(str, view.subject.release))
    if key not in known:
        strict = view.subject.release >= PYDANTIC_SINCE
        gone = key in REMOVED_ZERO and path[0] == "zero_optimization"
        message = f"unknown key `{key}` in `{where}`: " + (
            f"DeepSpeed {release} refuses it, releases before 0.8 ignored it" if strict else "it is ignored"
        )
        if gone:
            message = f"`{key}` of `{where}` was removed from DeepSpeed"
        fix = nearest(key, known) or "delete it"
        if path[-2] == "offload_optimizer" and key in ("buffer_size", "max_in_cpu"):
            fix = "delete it: it belongs to `offload_param`"
        yield view.find("unknown-key", "error" if strict else "warning", path, message, fix, refused=strict)
        return
    row = known[key]
    if row.since > view.subject.release:
        since = ".".join(map(str, row.since))
        message = f"`{key}` of `{where}` is unknown to DeepSpeed {release}: it came with {since}"
        yield view.find("unknown-key", "error", path, message, "delete it, or update DeepSpeed")
    if row.instead:
        message = f"`{key}` of `{where}` is deprecated"
        yield view.find("deprecated-key", "warning", path, message, f"write {row.instead}")


def types(view: View) -> Iterator[Finding]:
    """Strings for numbers and booleans, fractions, and values out of range."""
    for key, value in view.config.items():
        if key in TOP:
            yield from _typed(view, (key,), TOP[key], value, pydantic=False)
    if view.config.get("zero_optimization") is True:
        message = "`zero_optimization: true` is deprecated: it means stage 1"
        yield view.find("deprecated-key", "warning", ("zero_optimization",), message, 'write {"stage": 1}')
    for path, known in STRICT.items():
        for key, value in view.block(*path).items():
            row = known.get(key) or (ZERO[UNPREFIXED[key]] if known is ZERO and key in UNPREFIXED else None)
            if row is not None:
                yield from _typed(view, (*path, key), row, value, pydantic=True)
    stage = view.block("zero_optimization").get("stage")
    if isinstance(stage, (int, float)) and stage > 3:
        message = f"`stage` is {stage}"
        yield view.find("out-of-range", "error", ("zero_optimization", "stage"), message, "use 0 to 3", refused=True)


def _typed(view: View, path: Path, row: Key, value: Any, *, pydantic: bool) -> Iterator[Finding]:
    """One value against its row. `pydantic` blocks coerce what reads as the right type."""
    name = f"`{path[-1]}`"
    if value is None or value == "auto" or row.type == "any":
        return
    if row.type == "object":
        if not isinstance(value, dict) and not (path == ("zero_optimization",) and isinstance(value, bool)):
            yield view.find("wrong-type", "error", path, f"{name} is {kind_of(value)}", "write an object", refused=True)
    elif row.type == "bool":
        if isinstance(value, str):
            yield _string_boolean(view, path, value, pydantic=pydantic)
        elif not isinstance(value, bool):
            refused = pydantic and value not in (0, 1)
            yield view.find(
                "wrong-type", "error", path, f"{name} is {kind_of(value)}", "true or false", refused=refused
            )
    elif row.type == "text":
        if not isinstance(value, str):
            yield view.find("wrong-type", "error", path, f"{name} is {kind_of(value)}", "write a string", refused=True)
    else:
        yield from _number(view, path, row, value, pydantic=pydantic)


def _string_boolean(view: View, path: Path, value: str, *, pydantic: bool) -> Finding:
    word = value.lower()
    reads = word in ("true", "false", "on", "off", "yes", "no", "y", "n", "t", "f", "1", "0")
    message = f'`{path[-1]}` is the string "{value}": '
    message += (
        "current DeepSpeed coerces it, releases before 0.8 took any string for true"
        if pydantic and reads
        else "any string counts as true"
        if not pydantic
        else "DeepSpeed refuses it"
    )
    fix = f"write {word} without quotes" if word in ("true", "false") else "write true or false, without quotes"
    return view.find("string-boolean", "error", path, message, fix, refused=pydantic and not reads)


def _number(view: View, path: Path, row: Key, value: Any, *, pydantic: bool) -> Iterator[Finding]:
    name = f"`{path[-1]}`"
    if isinstance(value, str):
        number = _read_number(value)
        plain = number is not None and "e" not in value.lower() and (row.type == "number" or number == int(number))
        fix = f"write {number:.0f} without quotes" if number is not None else "write a number"
        if number is not None and number != int(number):
            fix = f"write {number!r} without quotes"
        message = f'{name} is the string "{value}"'
        if number is None:
            message += ", and nobody computes it"
        elif view.document.syntax == "yaml" and "e" in value.lower():
            message += ": YAML 1.1 reads a power of ten as a number only with a point and a sign"
            fix = f"write {number:.0f}, or 1.0e+8 style"
        loose = pydantic and (plain or row.type == "number")
        yield view.find("string-number", "error", path, message, fix, refused=not loose)
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not finite(value):
        yield view.find(
            "wrong-type", "error", path, f"{name} is {kind_of(value)}", "write a number", refused=not pydantic
        )
        return
    if row.type == "int" and value != int(value):
        strict = view.subject.release >= ALIASES_SINCE
        message = f"{name} is {value!r}, which is no whole number" + (
            ": DeepSpeed since 0.15 refuses it" if strict else ""
        )
        fix = f"write {int(value)}"
        yield view.find("fractional-number", "error" if strict else "warning", path, message, fix, refused=strict)
    elif row.least is not None and value < row.least:
        message = f"{name} is {value!r}, the least is {row.least:g}"
        yield view.find("out-of-range", "error", path, message, f"write {row.least:g} or more", refused=True)


def _read_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def autos(view: View) -> Iterator[Finding]:
    """Values of "auto" where nobody fills them in."""
    for path, row in _auto_rows(view):
        consumer = view.subject.consumer
        betas = consumer == "accelerate" and path[0] == "optimizer" and path[-1] in ("betas", "eps")
        if row and not betas and consumer in ("any", "hf", "accelerate"):
            continue
        key, top = path[-1], len(path) == 1 or path[0] in ("optimizer", "scheduler")
        if row and not betas:
            message = f'`{key}` is "auto", which only the Hugging Face Trainer and accelerate fill in'
        else:
            message = f'`{key}` is "auto", but no trainer fills it in'
        message += ": DeepSpeed fails on it" if top else f": DeepSpeed takes its default{_default(path)} without a word"
        refused = path[0] in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        yield view.find(
            "auto-unresolved", "error" if top else "warning", path, message, "write a value", refused=refused
        )


def _default(path: Path) -> str:
    row = STRICT.get(tuple(map(str, path[:-1])), {}).get(str(path[-1]))
    return f" {row.default}" if row is not None and row.default is not None else ""


def _auto_rows(view: View) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Every key that is "auto", and whether trainers fill it in."""
    for key, value in view.config.items():
        if value == "auto":
            yield (key,), key in TOP and TOP[key].auto
    for path, known in STRICT.items():
        for key, value in view.block(*path).items():
            if value == "auto":
                row = known.get(UNPREFIXED.get(key, key) if known is ZERO else key)
                yield (*path, key), row is not None and row.auto
    for block, filled in (("optimizer", FILLED_OPTIMIZER), ("scheduler", FILLED_SCHEDULER)):
        for key, value in view.block(block, "params").items():
            if value == "auto":
                yield (block, "params", key), key in filled


def auto_paths(view: View) -> list[tuple[str, ...]]:
    """Keys that are "auto" and that trainers fill in."""
    return [path for path, filled in _auto_rows(view) if filled]


RULES = (syntax, white_space, top_level, strict_blocks, types, autos)
