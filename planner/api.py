"""`zplan.estimate` and `zplan.plan`: a question in, one frozen answer out. Never torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zplan.planner.activations import counted
from zplan.planner.comm import Traffic, textbook_traffic, traffic
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware, hardware_from
from zplan.planner.ledger import Line
from zplan.planner.remedies import Remedy, remedies
from zplan.planner.request import Request, make_request
from zplan.planner.search import STAGES, Row, Search
from zplan.planner.sources import Model, model_from
from zplan.planner.textbook import textbook_states
from zplan.planner.units import format_percent
from zplan.planner.verdict import Decision, Verdict, decisions, judge, judge_states

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan

NOT_COUNTED = (
    "fragmentation beyond the line `alloc.rounding`: the launcher sets expandable segments",
    "other processes and a display on the card",
    "evaluation, generation and saving of checkpoints",
    "memory that a script of your own keeps: logits, extra losses, a second model",
    "the host's memory: page cache, data loading, the process itself",
)
"""What no row holds. Every table says so."""


class DoesNotFit(ZplanError):
    """A plan was asked for that no choice makes fit."""


@dataclass(frozen=True)
class Estimate:
    """Whether a training fits, what it takes, and what zplan would do."""

    request: Request
    model: Model
    hardware: Hardware
    verdict: Verdict
    rows: tuple[Row, ...]
    """By stage, each with its own best checkpointing and micro-batch."""
    row: Row
    """The one that was picked."""
    single: Row
    """The best on one GPU alone."""
    decisions: tuple[Decision, ...]
    longest_seq: int
    """Tokens; the longest sequence at which the picked row fits. 0: none, or activations are not counted."""
    remedies: tuple[Remedy, ...]
    """What would make it fit; empty when it does."""
    traffic: tuple[Traffic, ...]
    """By stage, for the choices of `rows`."""
    notes: tuple[str, ...]

    @property
    def counted(self) -> bool:
        """Whether activations are counted; without them a row that fits says nothing."""
        return counted(self.model.spec)

    @property
    def fits(self) -> bool:
        return self.row.fits and self.counted

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What no row holds."""
        if self.counted:
            return NOT_COUNTED
        kind = self.model.arch.family
        return (f"activations: model_type `{kind}` has no op list yet, so these are states and buffers", *NOT_COUNTED)

    @property
    def peak_bytes(self) -> int:
        """Of one GPU, overheads included."""
        return self.row.peak_bytes

    @property
    def lines(self) -> tuple[Line, ...]:
        """The ledger of the picked row."""
        return self.row.ledger.lines

    def textbook(self) -> tuple[int, ...]:
        """Bytes of model states by stage, as textbooks count them."""
        return tuple(textbook_states(self.model.num_params, s, self.hardware.world_size) for s in STAGES)

    def textbook_traffic(self) -> tuple[int, ...]:
        """Bytes sent per step by stage, as textbooks count them, for the accumulation of each row."""
        return tuple(
            textbook_traffic(
                self.model.num_params, s, world_size=self.hardware.world_size, accumulation=r.choice.accumulation
            )
            for s, r in zip(STAGES, self.rows, strict=True)
        )

    def to_json(self) -> str:
        """Everything in exact bytes, as one JSON document."""
        from zplan.planner.answer_json import estimate_json

        return estimate_json(self)


def estimate(  # noqa: PLR0913 - one keyword for each option, so that editors can show them
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    stage: int | None = None,
    offload: str | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    attention: str | None = None,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
) -> Estimate:
    """Say whether a training fits and how zplan would run it.

    Parameters
    ----------
    model
        A name that `zplan models` lists, a folder, a `config.json`, or a hub id. Or `params` instead.
    params
        A count alone, such as `7e9` or `"7B"`: a Llama-like shape is assumed and shown.
    gpus, nodes
        GPUs over all nodes. Left out: one where a card is described, else this machine's.
    mem, gpu
        Memory per GPU (a bare number is GiB), or a name that `zplan gpus` lists. Left out: this machine's.
    host_mem
        Per node. Nothing lies there without offload.
    stage, accumulation, micro_batch, global_batch, seq, precision, checkpointing, attention, device, compile
        Fix a choice; what is left out is chosen and marked so.
    offload, optimizer
        `none` and `adamw`; the rest are refused by name.
    config
        A DeepSpeed config, a path or a mapping; fixes what it names.
    offline
        Never touch the network.

    Examples
    --------
    >>> answer = estimate(params="7e9", gpus=8, mem=24)
    >>> answer.fits, answer.row.choice.stage
    (True, 3)
    """
    return answer(make_request(locals()))


def answer(request: Request) -> Estimate:
    """The estimate of a parsed request."""
    search = open_search(request, remainder=True)
    rows = search.rows()
    row, single = search.pick(rows), search.single()
    return Estimate(
        request=request,
        model=search.model,
        hardware=search.hardware,
        verdict=judge(row, single) if counted(search.model.spec) else judge_states(row),
        rows=rows,
        row=row,
        single=single,
        decisions=decisions(search, row, rows),
        longest_seq=search.longest_seq(row) if counted(search.model.spec) else 0,
        remedies=() if row.fits else remedies(search, row),
        traffic=tuple(traffic(search.model.spec, r.choice) for r in rows),
        notes=_notes(search),
    )


def _with_ring(request: Request, model: Model) -> Request:
    """The request with the ring that its config's `stage3_max_live_parameters` makes for this model."""
    settings = dict(request.settings)
    max_live = settings.pop("max_live", None)
    if max_live is None or "ring_slots" in request.fixed:
        return replace(request, settings=settings)
    from zplan.planner.dsconfig import slots_within

    slots = slots_within(max_live, [u.numel for u in model.spec.units if u.kind == "block"])
    fixed_by = {**request.fixed_by, "ring_slots": f"`stage3_max_live_parameters` {max_live:,}"}
    return replace(request, settings=settings, fixed={**request.fixed, "ring_slots": slots}, fixed_by=fixed_by)


def open_search(request: Request, *, remainder: bool) -> Search:
    """The model and the machine of a request."""
    model = model_from(request.model, request.params, offline=request.offline)
    request = _with_ring(request, model)
    hardware = hardware_from(
        gpus=request.gpus,
        mem_bytes=request.mem_bytes,
        gpu=request.gpu,
        nodes=request.nodes,
        host_mem_bytes=request.host_mem_bytes,
        device=request.get("device") or "cuda",
    )
    return Search(model, hardware, request, remainder=remainder)


def _notes(search: Search) -> tuple[str, ...]:
    """What a user should see that is no part of the answer."""
    limit = search.seq_limit
    long: tuple[str, ...] = ()
    if search.seq > limit and not search.model.assumed:
        long = (f"--seq {search.seq} is longer than what `{search.model.spec.name}` is made for, {limit} tokens",)
    return (*search.request.notes, *search.hardware.notes, *search.model.notes, *long)


def plan(  # noqa: PLR0913 - as `estimate`
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    stage: int | None = None,
    offload: str | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    attention: str | None = None,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
) -> Plan:
    """Choose as `estimate` does and return the plan that `zplan run` and `zplan.initialize` take.

    The parameters are those of `estimate`. With `params`, the plan is for the assumed shape itself.

    Raises
    ------
    DoesNotFit
        When no choice fits; the hint names the nearest change that would.

    Examples
    --------
    >>> p = plan("smollm2-135m", gpus=2, mem=8, seq=256, global_batch=8)
    >>> p.choice.global_batch
    8
    """
    return make_plan(make_request(locals()))


def make_plan(request: Request) -> Plan:
    """The plan of a parsed request."""
    from zplan.planner.dsconfig import from_choice
    from zplan.planner.plan_file import Plan

    search = open_search(request, remainder=False)
    if not search.model.arch.runnable:
        name, kind = search.model.spec.name, search.model.arch.family
        raise ZplanError(
            f"`model_type` of `{name}` is `{kind}`, which is estimate only: zplan has no decoder for it",
            "zplan runs llama, mistral and gpt2; train another module by your own script, with zplan.initialize",
        )
    rows = search.rows()
    row = search.pick(rows)
    if not row.fits:
        nearest = remedies(search, row)
        hint = (
            f"it would fit with {nearest[0].what} ({nearest[0].option})" if nearest else "no single change makes it fit"
        )
        raise DoesNotFit(judge(row, search.single()).text.rstrip("."), hint)
    notes = _notes(search)
    if search.model.assumed:
        missing, asked = search.model.missing_params, search.model.num_params
        count = f"{search.model.spec.num_params:,} parameters, {format_percent(missing, asked)} fewer than asked"
        notes = (*notes, f"the plan is for the assumed shape itself: {count}")
    return Plan(
        asked=dict(request.asked),
        decisions=decisions(search, row, rows),
        spec=search.model.spec,
        source=search.model.source,
        hardware=search.hardware,
        choice=row.choice,
        training=from_choice(row.choice, search.request.settings),
        ledger=row.ledger,
        settings=tuple(search.request.settings),
        notes=notes,
    )
