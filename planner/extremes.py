"""The largest sequence, micro-batch or model that fits (`--max`); the fewest GPUs or the smallest card (`--min`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from zplan.planner.batch import nearest_multiples
from zplan.planner.cost import Cost
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.evaluation import Row
from zplan.planner.halving import largest_multiple, last_good
from zplan.planner.peer_rules import model_ranks
from zplan.planner.request import Request
from zplan.planner.search import Search
from zplan.planner.sequence import IMAGES, NO_LIMIT, SEQ_STEP, made_for
from zplan.planner.units import GIB, format_count, format_gib

if TYPE_CHECKING:
    from zplan.planner.hardware import Gpu

MAX = ("seq", "micro-batch", "params")
MIN = ("gpus", "mem")
MOST_MICRO = 2**20
MOST_GPUS = 4096
PER_NODE = 8
"""GPUs of a node, as far as more than one node is counted without --nodes."""

Open = Callable[[Request], Search]
"""The model and the machine of a request."""


@dataclass(frozen=True)
class Extreme:
    """The answer: a value, and the choice at which it fits."""

    what: str
    """`seq`, `micro-batch`, `params`, `gpus` or `mem`."""
    value: int | None
    """Tokens, sequences, parameters, GPUs or bytes; None where nothing fits."""
    row: Row | None
    where: str
    """The model or the machine, in words."""
    note: str = ""
    cost: Cost | None = None
    """Of the training that was asked for."""

    @property
    def fits(self) -> bool:
        return self.value is not None

    def text(self) -> str:
        if self.value is None or self.row is None:
            return f"Nothing fits: {self.where}. {self.note}\n".replace(". \n", "\n")
        words = {
            "seq": "Longest sequence that fits: {} tokens",
            "micro-batch": "Largest micro-batch that fits: {} sequences",
            "params": "Largest model that fits: {} parameters",
            "gpus": "Fewest GPUs on which it fits: {}",
            "mem": "Smallest card on which it fits: {} GiB",
        }
        shown = {"mem": format_gib(self.value), "params": format_count(self.value)}.get(self.what, f"{self.value:,}")
        c = self.row.choice
        how = f"stage {c.stage}, checkpointing {c.checkpointing}, micro-batch {c.micro_batch} x {c.accumulation}"
        peak = f"{format_gib(self.row.peak_bytes)} GiB, at most {format_gib(self.row.high_bytes)}"
        note = f"\n  {self.note}" if self.note else ""
        if self.cost is not None:
            note += f"\n  {self.cost.told()}"
        line = words[self.what].format(shown)
        card = format_gib(self.row.capacity_bytes)
        return f"{line}\n  {self.where}: {how}, sequence {c.seq:,}\n  peak {peak} of {card}{note}\n"

    def json(self) -> dict[str, Any]:
        from zplan.planner.answer_json import row_json
        from zplan.planner.timing import cost_json

        name = {"mem": "mem_bytes"}.get(self.what, self.what.replace("-", "_"))
        return {
            "fits": self.fits,
            name: self.value,
            "where": self.where,
            "note": self.note,
            "row": None if self.row is None else row_json(self.row),
            **({} if self.cost is None else {"cost": cost_json(self.cost)}),
        }


def extreme(request: Request, open_: Open, *, end: str, what: str) -> Extreme:
    """Answer `--max what` or `--min what`.

    Parameters
    ----------
    request
        Everything else that was asked; what it fixes stays fixed.
    open_
        Opens a search for a changed request.
    end
        `max` or `min`.
    """
    known = MAX if end == "max" else MIN
    if what not in known:
        raise ZplanError(f"`--{end} {what}` is unknown", did_you_mean(what, known) or f"use one of {', '.join(known)}")
    name = what.replace("-", "_")
    given = request.get(name) if end == "max" else {"gpus": request.gpus, "mem": request.mem_bytes}[what]
    sized = what == "params" and (request.model or request.params)
    if given is not None or sized:
        other = "--model" if what == "params" and request.model else f"--{what}"
        raise ZplanError(f"--{end} {what} looks for what {other} gives", f"drop {other}, or --{end} {what}")
    return {
        "seq": _longest,
        "micro-batch": _largest_batch,
        "params": _largest_model,
        "gpus": _fewest,
        "mem": _smallest,
    }[what](request, open_)


def _picked(search: Search) -> Row:
    return search.pick(search.rows())


def _found(what: str, value: int, row: Row, search: Search, note: str = "") -> Extreme:
    from zplan.planner.timing import cost_of

    return Extreme(what, value, row, _machine(search), note, cost_of(search, row.choice))


def _machine(search: Search) -> str:
    return f"{search.model.spec.name} on {search.hardware.told()}"


def _longest(request: Request, open_: Open) -> Extreme:
    search = open_(request)
    limit = search.seq_limit
    if search.model.arch.family in IMAGES:
        raise ZplanError(
            f"--max seq has nothing to look for: a sequence of `{search.model.spec.name}` is an image, {limit} tokens",
            "use --max micro-batch",
        )

    def at(seq: int) -> Row:
        return _picked(search.at("seq", seq))

    row = at(limit)
    seq = limit
    if not row.fits:
        seq = largest_multiple(lambda s: _spare(at(s)), SEQ_STEP, below=limit, near=min(2048, limit))
        row = at(seq) if seq else at(min(SEQ_STEP, limit))
    if not seq:
        return Extreme("seq", None, None, _machine(search), f"Not even {min(SEQ_STEP, limit)} tokens do; {_WITHOUT}")
    return _found("seq", seq, row, search.at("seq", seq), _limit(search, seq))


def _limit(search: Search, seq: int) -> str:
    """What a model says about the longest sequence, and what else ended the search."""
    arch = search.model.arch
    note = "an assumed shape has no limit of its own"
    if not search.model.assumed:
        note = f"the model is made for {made_for(arch):,}"
    if seq == arch.window:
        return f"{note}; attention beyond its window of {arch.window:,} is not built yet"
    return f"{note}; more than {NO_LIMIT:,} are not looked at" if seq == NO_LIMIT else note


_WITHOUT = "without --max the same options tell by how much, and what would"


def _spare(row: Row) -> int:
    """Bytes to spare, of the card or beside it; negative where it does not fit."""
    return row.spare_bytes if row.fits or row.spare_bytes < 0 else -1


def _largest_batch(request: Request, open_: Open) -> Extreme:
    if request.get("global_batch"):
        raise ZplanError("--max micro-batch with --global-batch has nothing to look for", "drop --global-batch")
    search = open_(request)

    def at(micro: int) -> Row:
        return _picked(search.at("micro_batch", micro))

    micro = largest_multiple(lambda m: _spare(at(m)), 1, below=MOST_MICRO, near=8)
    if not micro:
        return Extreme("micro-batch", None, None, _machine(search), f"Not even 1 sequence does; {_WITHOUT}")
    return _found("micro-batch", micro, at(micro), search)


def _largest_model(request: Request, open_: Open) -> Extreme:
    from zplan.planner.shape import LARGEST, SMALLEST

    counts = [m * 10**e for e in range(4, 12) for m in range(100, 1000, 10)]
    counts = [c for c in counts if SMALLEST <= c <= LARGEST]

    def at(count: int) -> tuple[Search, Row]:
        search = open_(replace(request, model=None, params=count))
        return search, _picked(search)

    found = last_good(counts, at, lambda pair: pair[1].fits)
    note = "two digits are looked at; a Llama-like shape is assumed"
    if found is None:
        return Extreme("params", None, None, f"not even {format_count(counts[0])} parameters", note)
    search, row = found
    return _found("params", search.model.num_params, row, search, note)


def fewest(request: Request, open_: Open, holds: Callable[[Search], bool]) -> Search | None:
    """The smallest number of GPUs, up to `MOST_GPUS`, at which `holds` says so of the search.

    Beyond one node in whole nodes. With a global batch only numbers that divide it count.
    """
    step = request.nodes
    group = model_ranks(request.fixed)
    counts = [n for n in (*range(1, PER_NODE), *range(PER_NODE, MOST_GPUS + 1, PER_NODE)) if n % step == n % group == 0]
    train = request.get("global_batch")
    if train is not None:
        micro, accumulation = request.get("micro_batch"), request.get("accumulation")
        unit = (micro or 1) * (accumulation or 1)
        counts = [n for n in counts if train % (n // group * unit) == 0]
        if micro and accumulation:
            counts = [n for n in counts if n // group * unit == train]
        if not counts:
            raise ZplanError(
                f"no number of GPUs makes {train} sequences a step of {unit} on each",
                f"use --global-batch {nearest_multiples(train, unit)}",
            )

    @cache
    def at(negative: int) -> Search:
        gpus = -negative
        nodes = request.nodes if request.nodes > 1 else -(-gpus // PER_NODE)
        return open_(replace(request, gpus=gpus, nodes=nodes))

    # `last_good` takes rising need: the most GPUs first.
    return last_good([-n for n in reversed(counts)], at, holds) if counts else None


def _fewest(request: Request, open_: Open) -> Extreme:
    search = fewest(request, open_, Search.anything_fits)
    if search is None:
        name = request.model or format_count(request.params or 0)
        return Extreme("gpus", None, None, f"{name} on up to {MOST_GPUS:,} of these GPUs")
    return _found("gpus", search.hardware.world_size, _picked(search), search)


def _smallest(request: Request, open_: Open) -> Extreme:
    from zplan.planner.hardware import AMPERE, read_gpus

    if request.gpu is not None:
        raise ZplanError("--min mem looks for what --gpu gives", "drop --gpu, or --min mem")
    cards = [g for g in read_gpus() if g.vendor == "NVIDIA" and g.mem_reported]
    cards.sort(key=lambda g: g.mem_bytes)
    request = replace(request, gpus=request.gpus or 1)

    def opened(card: Gpu) -> Search:
        return open_(replace(request, gpu=card.name))

    # A card before Ampere takes more than a smaller one after it, or is refused what was asked.
    newer = [g for g in cards if float(g.compute_capability) >= AMPERE]
    found = _least(newer, lambda g: _picked(opened(g)))
    older = [g for g in cards if g not in newer and (found is None or g.mem_bytes < found[0].mem_bytes)]
    with suppress(ZplanError):
        found = _least(older, lambda g: _picked(opened(g))) or found
    if found is None:
        least = _picked(opened(cards[-1]))
        note = f"The largest, {cards[-1].name}, is {format_gib(-least.spare_bytes)} GiB short"
        return Extreme("mem", None, None, f"{request.gpus} x any card of the table", note)
    card, row = found
    need = -(-row.high_bytes // GIB)
    same = [g.name for g in cards if g.mem_bytes == card.mem_bytes and (g in newer) == (card in newer)]
    note = f"{need} GiB would do; cards of this size: {', '.join(same)}"
    return _found("mem", card.mem_bytes, row, opened(card), note)


def _least(cards: Sequence[Gpu], row: Callable[[Gpu], Row]) -> tuple[Gpu, Row] | None:
    """The first of cards by rising memory on which a row fits."""
    rows = cache(lambda i: row(cards[i]))
    at = last_good([*range(-len(cards) + 1, 1)], lambda i: -i, lambda i: rows(i).fits) if cards else None
    return None if at is None else (cards[at], rows(at))


def hardware_given(request: Request) -> bool:
    """Whether anything about the machine was said."""
    sizes = (request.gpus, request.mem_bytes, request.gpu, request.host_mem_bytes, request.nvme_bytes)
    return any(sizes) or request.nodes > 1
