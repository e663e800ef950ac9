"""What would make a choice fit that does not: single changes first, each evaluated before it is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zplan.planner.batch import divisors
from zplan.planner.config import Choice, Offload, Place
from zplan.planner.evaluation import Row
from zplan.planner.interval import Margin
from zplan.planner.placement import single_gradients
from zplan.planner.search import Search
from zplan.planner.tiers import Memory, TierUse
from zplan.planner.units import GIB, format_gib

MOST_GPUS = 4096


@dataclass(frozen=True)
class Remedy:
    """One change that makes it fit."""

    what: str
    option: str
    """What to add to the command, or to change in it."""
    peak_bytes: int
    spare_bytes: int
    estimate_only: bool = False
    """Counted, but nothing that zplan's runtime can run."""
    saved_bytes: int = 0
    """Of the peak, beside the row that does not fit."""
    longer: float | None = None
    """GPU time of a token over that of the row that does not fit, less one; None where it can't be told."""


def remedies(search: Search, row: Row) -> tuple[Remedy, ...]:
    """Changes to a row that make it fit, the cheapest in time first; where no single one does, to its leanest form."""
    c = row.choice
    found = tuple(_changes(search, c, ""))
    top = search.stages[-1]
    lean = replace(c, stage=top if c.world_size > 1 else c.stage, checkpointing="full")
    base, prefix = row, ""
    if not found and lean != c:
        words = f"stage {top} and full checkpointing" if c.world_size > 1 else "full checkpointing"
        option = f"--stage {top} --checkpointing full" if c.world_size > 1 else "--checkpointing full"
        base = search.row(lean)
        prefix = f"{option} "
        both = (_remedy(search, c, words, option, base),) if base.fits else ()
        found = (*both, *_changes(search, lean, prefix, c))
    found = tuple(sorted(found, key=lambda r: 0.0 if r.longer is None else round(r.longer, 3)))
    if base.spare_bytes >= 0:
        beside = tuple(_larger_node(base))
    else:
        card = _larger_card(base.peak_bytes, base.high_bytes, base, search.request.margin)
        beside = (card,) if card and base.off_device.fits else ()
    beside = tuple(replace(r, option=prefix + r.option) for r in beside)
    told = (*found, *beside, *_offloads(search, c, lean))
    return tuple(replace(r, saved_bytes=row.peak_bytes - r.peak_bytes) for r in told)


def _remedy(search: Search, c: Choice, what: str, option: str, row: Row, *, estimate_only: bool = False) -> Remedy:
    """A change from a choice `c` to a row that fits, with the time it costs a token and rank."""
    before, after = search.time(c), search.time(row.choice)
    longer = None
    if before is not None and after is not None:
        spent = after.total * row.choice.world_size / after.tokens
        longer = spent / (before.total * c.world_size / before.tokens) - 1
    return Remedy(what, option, row.peak_bytes, row.spare_bytes, estimate_only, longer=longer)


def _offloads(search: Search, c: Choice, lean: Choice) -> Iterator[Remedy]:
    """The first offload that makes it fit, as it is or in its leanest form; never one that zplan could run."""
    if c.runtime != "zplan" or c.offload.optimizer != "none" or c.device == "cpu" or c.optimizer_in_backward:
        return
    fixed = search.request.get("stage")
    places: tuple[Place, ...] = ("cpu", "nvme")
    for place, params in product(places, (False, True)):
        if params and fixed not in (None, 3):
            continue
        offload = Offload(place, place if params else "none")
        for base in (c, lean) if lean != c else (c,):
            row = search.row(replace(base, stage=3 if params else base.stage, offload=offload))
            if row.fits:
                where = {"cpu": "host memory", "nvme": "NVMe"}[place]
                what = f"optimizer{' and parameters' if params else ''} in {where}"
                option = f"--offload {place}{f' --offload-params {place}' if params else ''}"
                option += " --checkpointing full" if base.checkpointing != c.checkpointing else ""
                option += f" --stage {base.stage}" if base.stage != c.stage and not params else ""
                yield _remedy(search, c, what, option, row, estimate_only=True)
                return


def leanest(search: Search, row: Row) -> Row | None:
    """The least that a rank can hold of a row's model and sequence: stage 3, all offloaded, one sequence a micro-step.

    None where the row is no choice of zplan's runtime on GPUs.
    """
    c = row.choice
    if c.runtime != "zplan" or c.device == "cpu":
        return None
    everything = Offload("cpu", "cpu")
    least = replace(c, stage=3, micro_batch=1, checkpointing="full", offload=everything, optimizer_in_backward=False)
    return search.row(least)


def larger(row: Row, uses: Sequence[TierUse], margin: Margin) -> tuple[Remedy, ...]:
    """Hardware that holds a row whose steps fit, where something that is done beside them does not."""
    found: list[Remedy | None] = []
    for use in uses:
        if not use.over_bytes:
            continue
        if use.tier == "device":
            found.append(_larger_card(use.nbytes, use.high_bytes, row, margin))
        else:
            found.append(_node(use.tier, use.per_node_bytes, row))
    return tuple(r for r in found if r is not None)


def _larger_node(row: Row) -> Iterator[Remedy]:
    """Nodes with as much host memory and disk as a row takes."""
    off = row.off_device
    if off.host_over:
        yield _node("host", off.host_bytes * off.ranks, row)
    if off.nvme_over:
        yield _node("nvme", off.nvme_bytes * off.ranks, row)


def _node(memory: Memory, nbytes: int, row: Row) -> Remedy:
    size = -(-nbytes // GIB)
    name, option = ("NVMe", "--nvme") if memory == "nvme" else ("host memory", "--host-mem")
    return Remedy(f"{size} GiB of {name} a node", f"{option} {size}", row.peak_bytes, row.spare_bytes)


def _changes(search: Search, choice: Choice, prefix: str, before: Choice | None = None) -> Iterator[Remedy]:
    """Single changes to a choice; `before` is the one that their time is compared with."""
    for what, option, changed in _candidates(search, choice):
        row = search.row(changed)
        if row.fits:
            yield _remedy(search, before or choice, what, prefix + option, row)


def _candidates(search: Search, c: Choice) -> Iterator[tuple[str, str, Choice]]:
    """`(in words, option, choice)` of each change, the cheapest in time first."""
    top = search.stages[-1]
    if c.stage < top and c.world_size > 1:
        yield f"stage {top}", f"--stage {top}", replace(c, stage=top)
    if c.saving == "background" and not search.row(c).off_device.fits:
        yield "checkpoints in the foreground", "--saving foreground", replace(c, saving="foreground")
    if c.accumulation > 1 and single_gradients(replace(c, accumulation=1)):
        micro = c.micro_batch * c.accumulation
        option = f"--micro-batch {micro} --accumulation 1"
        yield f"micro-batch {micro}, accumulation 1", option, replace(c, micro_batch=micro, accumulation=1)
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
        stage = "" if more.stage == c.stage else f" --stage {more.stage}"
        yield f"{more.num_gpus} GPUs at stage {more.stage}", f"--gpus {more.num_gpus}{stage}", more


def _smaller_batch(search: Search, c: Choice) -> Choice | None:
    """The largest smaller micro-batch of the same global batch that fits."""
    if c.optimizer_in_backward:
        return None
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
        changed = replace(c, stage=search.stages[-1], world_size=n, accumulation=accumulation)
        same = changed.global_batch == c.global_batch or not search.request.get("global_batch")
        if same and search.row(changed).fits:
            return changed
        n *= 2
    return None


def _larger_card(peak_bytes: int, high_bytes: int, row: Row, margin: Margin) -> Remedy | None:
    """The smallest NVIDIA card of the table that holds so much, at most `high_bytes`."""
    from zplan.planner.hardware import AMPERE, read_gpus

    def spare(mem_bytes: int) -> int:
        return mem_bytes - margin.of(mem_bytes) - high_bytes

    large = [g for g in read_gpus() if g.mem_reported and g.vendor == "NVIDIA" and spare(g.mem_bytes) >= 0]
    if row.choice.flash:  # Older cards have neither bf16 nor its attention.
        large = [g for g in large if float(g.compute_capability) >= AMPERE]
    if not large or row.choice.device == "cpu":
        return None
    card = min(large, key=lambda g: g.mem_bytes)
    what = f"a card of {format_gib(card.mem_bytes)} GiB, such as {card.name}"
    return Remedy(what, f'--gpu "{card.name}"', peak_bytes, spare(card.mem_bytes))
