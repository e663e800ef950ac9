"""How many of each common GPU train a model: the answer where nothing is said of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from zplan.planner.config import Offload
from zplan.planner.evaluation import Row
from zplan.planner.extremes import MOST_GPUS, Open, fewest
from zplan.planner.hardware import hardware_from
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
    change
        What is asked for in this way, from what was asked.
    holds
        Whether a machine does it.
    accept
        The row with which it does, or None.
    """

    name: str
    change: Callable[[Request], Request]
    holds: Callable[[Search], bool]
    accept: Callable[[Search], Row | None]


def _fully(search: Search) -> Row | None:
    row = search.pick(search.rows())
    return row if row.fits else None


def _can_offload(search: Search) -> bool:
    return _offloaded(search) is not None


def _offloaded(search: Search) -> Row | None:
    """Optimizer states in host memory; parameters too where that is not enough. Host memory is not limited."""
    if search.request.get("runtime") in ("fsdp2", "ddp"):
        return None  # no offload of theirs is counted
    for offload in (Offload("cpu"), Offload("cpu", "cpu")):
        batches = search.batches(search.ranks)
        for stage in (2, 3) if offload.params == "none" else (3,):
            for checkpointing in search.checkpointings:
                row = search.row(search.choice(stage, batches[0], checkpointing, offload=offload))
                if row.fits:
                    return row
    return None


def _with_adapters(request: Request) -> Request:
    return replace(request, tuning=Tuning(LORA_RANK, "q,v"))


LORA_RANK = 16

WAYS = (
    Way("fully", lambda r: r, Search.anything_fits, _fully),
    Way("offloaded", lambda r: r, _can_offload, _offloaded),
    Way("LoRA", _with_adapters, Search.anything_fits, _fully),
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

    search: Search
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
            rows.append([gpu, format_gib(capacity), *(_cell(mine[w.name]) for w in WAYS)])
        out += table(["GPU", "GiB", *(w.name for w in WAYS)], rows, "lr" + "l" * len(WAYS))
        return "\n".join([*out, *_LEGEND]) + "\n"

    def json(self) -> dict[str, Any]:
        from zplan.planner.answer_json import row_json

        return {
            "fits": self.fits,
            "fewest": [
                {"gpu": c.gpu, "way": c.way, "gpus": c.gpus, "row": None if c.row is None else row_json(c.row)}
                for c in self.counts
            ],
        }


_LEGEND = (
    "  fully: every parameter trained, all states on the GPUs; in brackets stage and checkpointing",
    "  offloaded: the same with optimizer states, or all, in host memory, however much that takes; estimate only",
    f"  LoRA: adapters of rank {LORA_RANK} on queries and values, the rest frozen; estimate only",
    "  Beyond 8 GPUs in whole nodes of 8. Name a machine (--gpus 8 --gpu H200) for the whole answer.",
)


def _cell(count: Count) -> str:
    if count.gpus is None or count.row is None:
        return f"more than {MOST_GPUS:,}"
    c = count.row.choice
    inner = f"stage {c.stage}, {c.checkpointing}" if c.world_size > 1 else c.checkpointing
    return f"{count.gpus:,} ({inner}{', parameters too' if c.offload.params != 'none' else ''})"


def fewest_of_each(request: Request, open_: Open) -> Fewest:
    """Look for the fewest of each common GPU, in each way."""
    counts = []
    search: Search | None = None
    for gpu in COMMON:
        for way in WAYS:
            found = fewest(way.change(replace(request, gpu=gpu, mem_bytes=None)), open_, way.holds)
            search = search or found
            gpus, row = (found.hardware.world_size, way.accept(found)) if found else (None, None)
            counts.append(Count(gpu, way.name, gpus, row))
    search = search or open_(replace(request, gpu=COMMON[-1], gpus=1))
    return Fewest(search, tuple(counts))
