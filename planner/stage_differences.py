"""Why one ZeRO stage uses more than another: the lines that differ between their peaks, largest difference first.

Two rows that differ in the stage alone, each in its own peak phase. The differences add up to that of the peaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zplan.planner.errors import ZplanError
from zplan.planner.evaluation import Row
from zplan.planner.ledger import Line
from zplan.planner.peer_rules import NAMES
from zplan.planner.request import Request
from zplan.planner.search import Search
from zplan.planner.units import format_gib

SMALL = 2**20
"""Bytes; smaller differences are summed up."""
WORDS = 76
"""Columns of a source."""


@dataclass(frozen=True)
class Difference:
    """One line in the two peaks; bytes are of all its instances alive there."""

    line: str
    kind: str
    first_bytes: int
    second_bytes: int
    source: str
    """Where its number comes from, of the stage that has more."""

    @property
    def more_bytes(self) -> int:
        """What the second stage has more; negative where it has less."""
        return self.second_bytes - self.first_bytes


@dataclass(frozen=True)
class Explanation:
    """Two stages of one choice, line by line."""

    first: Row
    second: Row
    differences: tuple[Difference, ...]
    """Largest first, either way."""

    @property
    def more_bytes(self) -> int:
        return self.second.peak_bytes - self.first.peak_bytes


def read_pair(text: str, search: Search, picked: int) -> tuple[int, int]:
    """Two stages: `2,3`, or `auto` for the picked one and the one below it, else above."""
    stages = search.stages
    if len(stages) < 2:
        name = NAMES[search.request.get("runtime") or "zplan"]
        raise ZplanError(f"`--explain` compares two stages, and {name} has stage {stages[0]} alone", "drop --explain")
    if text == "auto":
        at = stages.index(picked)
        return (stages[at - 1], picked) if at else (picked, stages[1])
    found = [int(x) for x in text.split(",")] if re.fullmatch(r"\d,\d", text) else []
    if len(set(found)) != 2 or not set(found) <= set(stages):
        can = ", ".join(map(str, stages))
        raise ZplanError(
            f"`--explain {text}` names no two of the stages {can}", f"write --explain {stages[-2]},{stages[-1]}"
        )
    return found[0], found[1]


def explain(request: Request, pair: str) -> Explanation:
    """The picked choice at two stages.

    Parameters
    ----------
    pair
        As of `read_pair`.
    """
    from zplan.planner.answer import open_search

    search = open_search(request, remainder=True)
    row = search.pick(search.rows())
    first, second = (search.row(replace(row.choice, stage=s)) for s in read_pair(pair, search, row.choice.stage))
    return Explanation(first, second, tuple(_differences(first, second)))


def _differences(first: Row, second: Row) -> list[Difference]:
    a, b = _live(first), _live(second)
    found = []
    for name in dict.fromkeys([*a, *b]):
        left, right = a.get(name, []), b.get(name, [])
        before, then = (sum(n * x.nbytes for x, n in side) for side in (left, right))
        if before != then:
            shown: Line = (left if before > then else right)[0][0]
            source = f"{shown.source}: {shown.note}" if shown.note else shown.source
            found.append(Difference(name, shown.kind, before, then, source))
    return sorted(found, key=lambda d: -abs(d.more_bytes))


def _live(row: Row) -> dict[str, list[tuple[Line, int]]]:
    """Lines alive in the peak phase by name; instances of unequal size share one."""
    out: dict[str, list[tuple[Line, int]]] = {}
    for x, n in row.ledger.live(row.peak_phase):
        out.setdefault(re.sub(r"\.other\d+$", "", x.id), []).append((x, n))
    return out


def explanation_text(e: Explanation) -> str:
    """The answer as text."""
    from zplan.planner.report import table

    a, b = e.first.choice.stage, e.second.choice.stage
    c, more = e.second.choice, e.more_bytes
    name = "zplan" if c.runtime == "zplan" else NAMES[c.runtime]
    where = "one GPU" if c.num_gpus == 1 else f"each of {c.num_gpus} GPUs"
    word = "more" if more > 0 else "less"
    head = f"{name}'s stage {b} holds {format_gib(abs(more))} GiB {word} than stage {a} on {where}"
    if not more:
        head = f"{name}'s stages {a} and {b} hold the same on {where}"
    rows = [
        [d.line, d.kind, format_gib(d.first_bytes), format_gib(d.second_bytes), _signed(d.more_bytes), _short(d.source)]
        for d in e.differences
        if abs(d.more_bytes) >= SMALL
    ]
    small = [d for d in e.differences if abs(d.more_bytes) < SMALL]
    if small:
        rows.append([f"{len(small)} smaller lines", "", "", "", _signed(sum(d.more_bytes for d in small)), ""])
    peaks = [format_gib(row.peak_bytes) for row in (e.first, e.second)]
    rows.append(["peak", "", *peaks, _signed(more), ""])
    out = [
        f"{head}.",
        f"Stage {a} peaks in {e.first.peak_phase}, stage {b} in {e.second.peak_phase} "
        f"(micro-batch {c.micro_batch} x accumulation {c.accumulation}, sequence {c.seq}, "
        f"checkpointing {c.checkpointing}).",
        "",
        *table(["line", "kind", f"stage {a}", f"stage {b}", "GiB more", "source"], rows, "llrrrl"),
        "",
        *_why(e),
    ]
    return "\n".join(out) + "\n"


def _why(e: Explanation) -> Iterator[str]:
    """The largest line of either sign, in a sentence."""
    up = [d for d in e.differences if d.more_bytes > 0]
    down = [d for d in e.differences if d.more_bytes < 0]
    for found, verb in ((up, "adds"), (down, "saves")):
        if found:
            total = sum(d.more_bytes for d in found)
            names = ", ".join(f"`{d.line}`" for d in found[:3])
            yield f"Stage {e.second.choice.stage} {verb} {format_gib(abs(total))} GiB, most of it {names}."


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ' '}{format_gib(abs(nbytes))}"


def _short(text: str) -> str:
    return text if len(text) <= WORDS else text[: WORDS - 3].rstrip() + "..."


def explanation_json(e: Explanation) -> str:
    """The same in exact bytes."""
    from zplan.planner.answer_json import row_json
    from zplan.planner.writing import render

    def rows(found: Sequence[Difference]) -> list[dict[str, Any]]:
        return [{**asdict(d), "more_bytes": d.more_bytes} for d in found]

    document = {
        "runtime": e.second.choice.runtime,
        "first": row_json(e.first),
        "second": row_json(e.second),
        "more_bytes": e.more_bytes,
        "lines": rows(e.differences),
    }
    return render(document) + "\n"
