"""What would make a choice fit that does not: single changes first, each evaluated before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zplan.planner.batch import divisors
from zplan.planner.config import Choice
from zplan.planner.interval import Margin
from zplan.planner.search import Row, Search
from zplan.planner.units import format_gib

MOST_GPUS = 4096


@dataclass(frozen=True)
class Remedy:
    """One change that makes it fit."""

    what: str
    option: str
    """What to add to the command, or to change in it."""
    peak_bytes: int
    spare_bytes: int


def remedies(search: Search, row: Row) -> tuple[Remedy, ...]:
    """Changes to a row that make it fit; where no single one does, changes to its leanest form."""
    c = row.choice
    found = tuple(_changes(search, c, ""))
    lean = replace(c, stage=3 if c.world_size > 1 else c.stage, checkpointing="full")
    if not found and lean != c:
        words = "stage 3 and full checkpointing" if c.world_size > 1 else "full checkpointing"
        option = "--stage 3 --checkpointing full" if c.world_size > 1 else "--checkpointing full"
        row = search.row(lean)
        both = (Remedy(words, option, row.peak_bytes, row.spare_bytes),) if row.fits else ()
        found = (*both, *_changes(search, lean, f"{option} "))
    card = _larger_card(row, search.request.margin)
    return (*found, card) if card else found


def _changes(search: Search, choice: Choice, prefix: str) -> Iterator[Remedy]:
    for what, option, changed in _candidates(search, choice):
        row = search.row(changed)
        if row.fits:
            yield Remedy(what, prefix + option, row.peak_bytes, row.spare_bytes)


def _candidates(search: Search, c: Choice) -> Iterator[tuple[str, str, Choice]]:
    """`(in words, option, choice)` of each change, the cheapest in time first."""
    if c.stage < 3 and c.world_size > 1:
        yield "stage 3", "--stage 3", replace(c, stage=3)
    if c.checkpointing == "none":
        yield "full checkpointing", "--checkpointing full", replace(c, checkpointing="full")
    smaller = _smaller_batch(search, c)
    if smaller is not None:
        option = f"--micro-batch {smaller.micro_batch} --accumulation {smaller.accumulation}"
        yield f"micro-batch {smaller.micro_batch}, accumulation {smaller.accumulation}", option, smaller
    seq = search.longest_seq(search.row(c))
    if 0 < seq < c.seq:
        yield f"sequences of {seq:,}", f"--seq {seq}", replace(c, seq=seq)
    more = _more_gpus(search, c)
    if more is not None:
        stage = "" if more.stage == c.stage else " --stage 3"
        yield f"{more.world_size} GPUs at stage {more.stage}", f"--gpus {more.world_size}{stage}", more


def _smaller_batch(search: Search, c: Choice) -> Choice | None:
    """The largest smaller micro-batch of the same global batch that fits."""
    per_rank = c.micro_batch * c.accumulation
    for micro in reversed([d for d in divisors(per_rank) if d < c.micro_batch]):
        changed = replace(c, micro_batch=micro, accumulation=per_rank // micro)
        if search.row(changed).fits:
            return changed
    return None


def _more_gpus(search: Search, c: Choice) -> Choice | None:
    """Stage 3 on more GPUs, doubling; with the same global batch where that still splits."""
    n, per_rank = c.world_size * 2, c.micro_batch * c.accumulation
    while n <= MOST_GPUS:
        accumulation = max(1, per_rank * c.world_size // (c.micro_batch * n))
        changed = replace(c, stage=3, world_size=n, accumulation=accumulation)
        same = changed.global_batch == c.global_batch or not search.request.get("global_batch")
        if same and search.row(changed).fits:
            return changed
        n *= 2
    return None


def _larger_card(row: Row, margin: Margin) -> Remedy | None:
    """The smallest NVIDIA card of the table that holds the row as it is."""
    from zplan.planner.hardware import read_gpus

    def spare(mem_bytes: int) -> int:
        return mem_bytes - margin.of(mem_bytes) - row.high_bytes

    large = [g for g in read_gpus() if g.mem_reported and g.vendor == "NVIDIA" and spare(g.mem_bytes) >= 0]
    if not large or row.choice.device == "cpu":
        return None
    card = min(large, key=lambda g: g.mem_bytes)
    what = f"a card of {format_gib(card.mem_bytes)} GiB, such as {card.name}"
    return Remedy(what, f'--gpu "{card.name}"', row.peak_bytes, spare(card.mem_bytes))
