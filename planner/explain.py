"""`zplan check --explain KEY`: what a key does in DeepSpeed and what zplan makes of it, from the tables of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zplan.planner import key_words
from zplan.planner.config_doc import treatment
from zplan.planner.dsschema import BF16, FP16, LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, REMOVED, TOP, ZERO, Key
from zplan.planner.errors import ZplanError, did_you_mean

Block = tuple[str, ...]

_ZERO: Block = ("zero_optimization",)
BLOCKS: dict[Block, tuple[Mapping[str, str], Mapping[str, Key]]] = {
    (): (key_words.TOP, TOP),
    _ZERO: (key_words.ZERO, ZERO),
    (*_ZERO, "offload_param"): (key_words.OFFLOAD, OFFLOAD_PARAM),
    (*_ZERO, "offload_optimizer"): (key_words.OFFLOAD, OFFLOAD_OPTIMIZER),
    (*_ZERO, "leaf_module"): (key_words.LEAF_MODULE, LEAF_MODULE),
    ("fp16",): (key_words.FP16, FP16),
    ("bf16",): (key_words.BF16, BF16),
    ("optimizer", "params"): (key_words.OPTIMIZER, {}),
}
"""Block -> what its keys do, and their rows in the schema."""


@dataclass(frozen=True)
class Explained:
    """One key."""

    path: Block
    deepspeed: str
    row: Key | None
    zplan: str


def explain(key: str) -> tuple[Explained, ...]:
    """Every key of that name, in any block; `a.b` names one block, and names without `stage3_` are known too.

    Raises
    ------
    ZplanError
        When there is none.
    """
    path = tuple(key.strip().split("."))
    found = tuple(_named(path))
    if found:
        return found
    if path[-1] in REMOVED:
        row = Explained(path, f"removed: DeepSpeed since 0.19 refuses the file; {REMOVED[path[-1]]}", None, "refused")
        return (row,)
    known = sorted({name for words, _ in BLOCKS.values() for name in words})
    raise ZplanError(f"there is no key `{key}`", did_you_mean(path[-1], known) or "docs/config.md lists them")


def _named(path: Block) -> Iterator[Explained]:
    for block, (words, rows) in BLOCKS.items():
        name = path[-1]
        if block == _ZERO and name not in words and f"stage3_{name}" in words:
            name = f"stage3_{name}"
        asked = path[:-1]
        if name in words and (not rows or name in rows or block == ()) and block[len(block) - len(asked) :] == asked:
            yield Explained((*block, name), words[name], rows.get(name), treatment(block, name))


def explanation(key: str) -> str:
    """The same as text."""
    return "\n".join("\n".join(_text(e)) for e in explain(key)) + "\n"


def _text(e: Explained) -> Iterator[str]:
    yield ".".join(e.path)
    yield f"  DeepSpeed  {e.deepspeed}"
    if e.row is not None:
        yield f"             {', '.join(_facts(e.row))}"
    yield f"  zplan      {e.zplan}"


def _facts(row: Key) -> Iterator[str]:
    kind = {"bool": "true or false", "int": "a whole number", "number": "a number", "text": "a string"}
    yield kind.get(row.type, f"an {row.type}" if row.type == "object" else "any value")
    if row.numel:
        yield "counted in elements, not bytes"
    if row.default is not None:
        default = str(row.default).lower() if isinstance(row.default, bool) else row.default
        yield f"{default:,} by default" if isinstance(default, int) and default >= 10_000 else f"{default} by default"
    if row.auto:
        yield 'trainers fill in "auto"'
    if row.stages != (0, 1, 2, 3):
        yield f"no effect outside stage{'s' * (len(row.stages) > 1)} {', '.join(map(str, row.stages))}"
    if row.since:
        yield f"since {'.'.join(map(str, row.since))}"
    if row.instead:
        yield f"deprecated: write {row.instead}"
