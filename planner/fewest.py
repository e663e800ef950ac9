"""How many of each common GPU train a model: the answer where nothing is said of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

from zplan.planner.config import Offload, Runtime
from zplan.planner.errors import ZplanError
from zplan.planner.evaluation import Row
from zplan.planner.extremes import MOST_GPUS, Open, fewest
from zplan.planner.hardware import hardware_from
from zplan.planner.peer_rules import allowed_stages
from zplan.planner.request import Request, Tuning
from zplan.planner.search import Search

COMMON = (
    "RTX 4090",
    "RTX 5090",
    "L40S",
    "A100 SXM 40GB",
    "A100 SXM 80GB",
    "H100 SXM 80GB",
    "H200 SXM 141GB",
)
"""Names of the GPU table."""


@dataclass(frozen=True)
class Way:
    """One column: a way of training.

    Attributes
    ----------
    runtimes
        For which it is counted.
    change
        What is asked for in this way, from what was asked.
    holds
        Whether a machine does it.
    accept
        The row with which it does, or None.
    """

    name: str
    runtimes: tuple[Runtime, ...]
    change: Callable[[Request], Request]
    holds: Callable[[Search], bool]
    accept: Callable[[Search], Row | None]


def _fully(search: Search) -> Row | None:
    row = search.pick(search.rows())
    return row if row.fits else None


def _can_offload(search: Search) -> bool:
    return _offloaded(search) is not None


def _offloaded(search: Search) -> Row | None:
    """What was asked to be offloaded; else the optimizer to host memory, and parameters where that is not enough."""
    batches, asked = search.batches(search.ranks), search.request.get("stage")
    wanted: Offload | None = search.request.get("offload")
    for offload in (wanted,) if wanted else (Offload("cpu"), Offload("cpu", "cpu")):
        allowed = allowed_stages({**search.request.fixed, "offload": offload})
        stages = [s for s in allowed if asked in (None, s) and (s == 3 or offload.params == "none")]
        for stage in [s for s in stages if s > 1] or stages[-1:]:
            for checkpointing in search.checkpointings:
                row = search.row(search.choice(stage, batches[0], checkpointing, offload=offload))
                if row.fits:
                    return row
    return None


def _without_offload(request: Request) -> Request:
    gone = {"offload", *(["stage"] if request.fixed_by.get("stage") == "--offload-params" else [])}
    return replace(request, fixed={k: v for k, v in request.fixed.items() if k not in gone})


def _in_full(request: Request) -> Request:
    return replace(_without_offload(request), tuning=None)


def _off_the_card(request: Request) -> Request:
    offload = request.get("offload")
    asked = offload is not None and offload.optimizer != "none"
    return replace(request if asked else _without_offload(request), tuning=None)


def _with_adapters(request: Request) -> Request:
    return replace(_without_offload(request), tuning=request.tuning or ADAPTERS)


ADAPTERS = Tuning(16, "q,v")
"""Where none were asked for."""

WAYS = (
    Way("fully", get_args(Runtime), _in_full, Search.anything_fits, _fully),
    Way("offloaded", ("zplan", "deepspeed"), _off_the_card, _can_offload, _offloaded),
    Way("LoRA", ("zplan",), _with_adapters, Search.anything_fits, _fully),
)


@dataclass(frozen=True)
class Count:
    """How many of one card one way takes; None for more than are looked at."""

    gpu: str
    way: str
    gpus: int | None
    row: Row | None


@dataclass(frozen=True)
class Fewest:
    """The answer: a row for each card, a column for each way."""

    request: Request
    search: Search
    ways: tuple[Way, ...]
    counts: tuple[Count, ...]

    @property
    def fits(self) -> bool:
        return any(c.gpus is not None for c in self.counts)

    def text(self) -> str:
        from zplan.planner.report import table
        from zplan.planner.units import format_count, format_gib

        m = self.search.model
        out = [f"{m.spec.name}, {format_count(m.num_params)} parameters, sequence {self.search.seq}: the fewest GPUs"]
        rows = []
        for gpu in COMMON:
            mine = {c.way: c for c in self.counts if c.gpu == gpu}
            capacity = hardware_from(gpus=1, gpu=gpu).mem_bytes
            rows.append([gpu, format_gib(capacity), *(_cell(mine[w.name]) for w in self.ways)])
        out += table(["GPU", "GiB", *(w.name for w in self.ways)], rows, "lr" + "l" * len(self.ways))
        legend = _legend(self.request)
        return "\n".join([*out, *(f"  {w.name}: {legend[w.name]}" for w in self.ways), _FURTHER]) + "\n"

    def json(self) -> dict[str, Any]:
        from zplan.planner.answer_json import row_json

        return {
            "fits": self.fits,
            "fewest": [
                {"gpu": c.gpu, "way": c.way, "gpus": c.gpus, "row": None if c.row is None else row_json(c.row)}
                for c in self.counts
            ],
        }


_FURTHER = "  Beyond 8 GPUs in whole nodes of 8. Name a machine (--gpus 8 --gpu H200) for the whole answer."


def _legend(request: Request) -> dict[str, str]:
    """What the columns mean, by name."""
    only = "; estimate only" if request.get("runtime") in (None, "zplan") else ""
    offload, t = request.get("offload"), request.tuning or ADAPTERS
    if offload is None or offload.optimizer == "none":
        off = f"the same with optimizer states, or all, in host memory, however much that takes{only}"
    else:
        off = f"the same with --offload {offload.told()}, however much memory that takes{only}"
    where = "queries and values" if t.targets == "q,v" else t.targets
    rest = "frozen in 4 bits" if t.quantized else "frozen"
    tables = ", embedding and head in full" if t.embeddings else ""
    return {
        "fully": "every parameter trained, all states on the GPUs; in brackets stage and checkpointing",
        "offloaded": off,
        "LoRA": f"adapters of rank {t.rank} on {where}{tables}, the rest {rest}; estimate only",
    }


def _cell(count: Count) -> str:
    if count.gpus is None or count.row is None:
        return f"none up to {MOST_GPUS:,}"
    c = count.row.choice
    inner = f"stage {c.stage}, {c.checkpointing}" if c.world_size > 1 else c.checkpointing
    return f"{count.gpus:,} ({inner}{', parameters too' if c.offload.params != 'none' else ''})"


def fewest_of_each(request: Request, open_: Open) -> Fewest:
    """Look for the fewest of each common GPU, in each way that is counted for the runtime."""
    if request.goal.asked:
        raise ZplanError(
            "hours are told of one machine, and here none is named", "give --gpus and --gpu, or drop --tokens"
        )
    ways = tuple(w for w in WAYS if (request.get("runtime") or "zplan") in w.runtimes)
    counts = []
    search: Search | None = None
    for gpu in COMMON:
        for way in ways:
            found = fewest(way.change(replace(request, gpu=gpu, mem_bytes=None)), open_, way.holds)
            search = search or found
            gpus, row = (found.hardware.world_size, way.accept(found)) if found else (None, None)
            counts.append(Count(gpu, way.name, gpus, row))
    search = search or open_(replace(request, gpu=COMMON[-1], gpus=1))
    return Fewest(request, search, ways, tuple(counts))
