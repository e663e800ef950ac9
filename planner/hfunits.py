"""Units of the Hugging Face classes: every parameter's name and shape, made of the rows of `planner/hfrows.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zplan.planner.hfrows import TABLES
from zplan.planner.models import Architecture, Param, Unit, UnitKind

_KINDS: dict[str, UnitKind] = {"embed": "embed", "positions": "embed", "norm": "norm", "head": "head"}


def units_of(a: Architecture) -> tuple[Unit, ...]:
    """Units in forward order."""
    letters, words = _letters(a), _words(a)
    found: dict[str, list[Param]] = {}
    kinds: dict[str, UnitKind] = {}
    lines = [line for line in TABLES[a.family].splitlines() if line]
    for at, line in enumerate(lines):
        first, *rest = line.split()
        if line.startswith(" "):
            continue
        if first != "blocks":
            found.setdefault(first, []).extend(_rows([rest], letters, words))
            kinds[first] = _KINDS.get(first, "other")
            continue
        name, count, prefix = rest
        rows = [x.split() for x in _indented(lines[at + 1 :])]
        made: dict[frozenset[str], list[Param]] = {}
        for i in range(letters[count]):
            here = words | {"dense" if i in a.dense_layers else "sparse", *(("first",) if not i else ())}
            if here not in made:
                made[here] = list(_rows(rows, letters, here))
            found[f"{name}.{i}"] = [Param(f"{prefix}.{i}.{p.name}", p.shape) for p in made[here]]
            kinds[f"{name}.{i}"] = "block"
    return tuple(Unit(name, kinds[name], tuple(params)) for name, params in found.items())


def _indented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(" "):
            return
        yield line


def _rows(rows: list[list[str]], letters: Mapping[str, int], words: frozenset[str]) -> Iterator[Param]:
    for name, *extents in rows:
        # `extents` is a new list, so the row keeps its word.
        if extents[-1].startswith("?") and extents.pop()[1:] not in words:
            continue
        yield Param(name, tuple(_extent(x, letters) for x in extents))


def _extent(text: str, letters: Mapping[str, int]) -> int:
    total = 0
    for term in text.split("+"):
        found = re.fullmatch(r"(\d*)(\w*)", term)
        assert found is not None, text
        factor, letter = found.groups()
        total += int(factor or 1) * (letters[letter] if letter else 1)
    return total


def _letters(a: Architecture) -> dict[str, int]:
    """See [Note: letters]."""
    return {
        "C": a.hidden,
        "Q": a.heads * a.head_dim,
        "K": a.kv_heads * a.head_dim,
        "D": a.head_dim,
        "H": a.heads,
        "F": a.ffn,
        "V": a.vocab,
        "T": a.max_seq,
        "layers": a.layers,
        **{name: value for name, value in a.traits if not isinstance(value, bool)},
    }


def _words(a: Architecture) -> frozenset[str]:
    on = {name for name, value in a.traits if value is True}
    return frozenset(on if a.tied else on | {"untied"})
