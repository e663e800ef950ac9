"""One frozen answer to a parsed question: an estimate, or the plan that zplan would run. Never torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zplan.planner.activations import counted
from zplan.planner.activities import activities
from zplan.planner.activity import Activity
from zplan.planner.comm import Traffic, textbook_traffic
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.evaluation import Row
from zplan.planner.hardware import Hardware, hardware_from
from zplan.planner.ledger import Line
from zplan.planner.models import LLAMA_CLASS, ModelSpec
from zplan.planner.placement import single_gradients
from zplan.planner.request import Request
from zplan.planner.search import STAGES, Search
from zplan.planner.sequence import made_for
from zplan.planner.sources import Model, model_from
from zplan.planner.textbook import textbook_states
from zplan.planner.tiers import TierUse, tier_uses
from zplan.planner.units import format_percent
from zplan.planner.verdict import (
    Decision,
    Verdict,
    beyond_offload,
    decisions,
    judge,
    judge_states,
    judge_tiers,
    whose_buffers,
)

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan
    from zplan.planner.remedies import Remedy
    from zplan.planner.timing import Timing

NOT_COUNTED = (
    "fragmentation beyond the line `alloc.rounding`: the launcher sets expandable segments",
    "other processes and a display on the card",
    "memory that a script of your own keeps: logits, extra losses, a second model",
    "of the host's memory: the page cache and data loading",
)
"""What no row holds. Every table says so."""

OTHERS_FRAGMENTS = (
    "fragmentation beyond the line `alloc.rounding`: it is least with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
"""Instead of the first of these for a runtime that zplan does not launch."""

WIDENED = (
    "2 bytes a parameter until the step after a second backward, `engine.penalty` or a write to gradients: one GPU "
    "without accumulation keeps them in bf16"
)
"""Nor this, on one GPU. See [Note: single gradients] in `planner/placement.py`."""


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
    untimed: str
    """Why `timings` is empty; empty where it is not."""
    timings: tuple[Timing, ...]
    """By stage, for the choices of `rows`: time of a step and cost of the training; empty where they can't be told."""
    activities: tuple[Activity, ...]
    """What the picked choice holds beside its steps; zplan's own runtime only."""
    tiers: tuple[TierUse, ...]
    """Device, host, pinned and NVMe at their fullest, over the step and what `zplan run` does beside it."""
    notes: tuple[str, ...]

    @property
    def counted(self) -> bool:
        """Whether activations are counted; without them a row that fits says nothing."""
        return counted(self.model.spec)

    @property
    def fits(self) -> bool:
        """Whether the picked choice does, in every memory whose size is known."""
        return self.row.fits and self.counted and not any(use.over_bytes for use in self.tiers)

    @property
    def estimate_only(self) -> tuple[str, ...]:
        """What zplan's runtime can't do of it, and why; empty where `zplan plan` and `zplan run` take it."""
        from zplan.planner.runnable import limits

        return tuple(limit.told() for limit in limits(self.row.choice, self.model.spec))

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What no row holds."""
        told = NOT_COUNTED
        if self.row.choice.runtime != "zplan":
            told = (OTHERS_FRAGMENTS, *told[1:])
        if self.counted:
            return (*told, *([WIDENED] if single_gradients(self.row.choice) else []))
        kind = self.model.arch.family
        return (f"activations: model_type `{kind}` has no op list yet, so these are states and buffers", *told)

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
        m, n = self.model, self.hardware.world_size
        frozen = m.frozen_bytes(2)
        return tuple(textbook_states(m.reckoned_params, s, n) + -(-frozen // (n if s == 3 else 1)) for s in STAGES)

    def textbook_traffic(self) -> tuple[int, ...]:
        """Bytes sent per step by stage, as textbooks count them, for the accumulation of each row."""
        return tuple(
            textbook_traffic(
                self.model.reckoned_params, s, world_size=self.hardware.world_size, accumulation=r.choice.accumulation
            )
            for s, r in zip(STAGES, map(self.row_of, STAGES), strict=True)
        )

    def row_of(self, stage: int) -> Row:
        """The row of a stage; the picked one where the runtime does not have it."""
        return next((r for r in self.rows if r.choice.stage == stage), self.row)

    def to_json(self) -> str:
        """Everything in exact bytes, as one JSON document."""
        from zplan.planner.answer_json import estimate_json

        return estimate_json(self)


def answer(request: Request) -> Estimate:
    """The estimate of a parsed request."""
    search = open_search(request, remainder=True)
    rows = search.rows()
    row, single = search.pick(rows), search.single()
    others, uses = beside(search.model.spec, row, search.hardware)
    verdict = _judge(search, row, single)
    verdict = verdict._replace(text=verdict.text + whose_buffers(row))
    times = _timings(search, rows)
    return Estimate(
        request=request,
        model=search.model,
        hardware=search.hardware,
        verdict=judge_tiers(row, uses) or verdict,
        rows=rows,
        row=row,
        single=single,
        decisions=decisions(search, row, rows),
        longest_seq=search.longest_seq(row) if counted(search.model.spec) else 0,
        remedies=_remedies(search, row, uses),
        activities=others,
        tiers=uses,
        traffic=tuple(search.traffic(r.choice) for r in rows),
        timings=times,
        untimed="" if times else search.why_untimed(row.choice),
        notes=_notes(search),
    )


def _remedies(search: Search, row: Row, uses: tuple[TierUse, ...]) -> tuple[Remedy, ...]:
    """What would make it fit, over the step or beside it."""
    if row.fits and not any(use.over_bytes for use in uses):
        return ()
    from zplan.planner.remedies import larger, remedies

    return remedies(search, row) if not row.fits else larger(row, uses, search.request.margin)


def _timings(search: Search, rows: Sequence[Row]) -> tuple[Timing, ...]:
    untimed = next((r for r in rows if search.time(r.choice) is None), None)
    if untimed is not None and not search.request.goal.asked:
        return ()
    from zplan.planner.timing import cost_of, timings

    if untimed is not None:
        cost_of(search, untimed.choice)
    return timings(search, rows)


def _judge(search: Search, row: Row, single: Row) -> Verdict:
    """The verdict of the step; what nothing can help is told at once."""
    if not counted(search.model.spec):
        return judge_states(row)
    verdict = judge(row, single)
    if row.spare_bytes >= 0:
        return verdict
    from zplan.planner.remedies import leanest

    lean = leanest(search, row)
    seq = search.longest_seq(lean) if lean is not None and lean.spare_bytes < 0 else 0
    return verdict._replace(text=verdict.text + beyond_offload(row, lean, seq))


def beside(spec: ModelSpec, row: Row, hardware: Hardware) -> tuple[tuple[Activity, ...], tuple[TierUse, ...]]:
    """What zplan's runtime holds outside the step, and what every memory holds at its fullest."""
    c = row.choice
    others = activities(spec, c, row.ledger) if c.runtime == "zplan" else ()
    plain = [a for a in others if a.plain]
    return others, tier_uses(row.ledger, plain, hardware, c.num_gpus, row.margin_bytes)


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


def _tuned(model: Model, request: Request) -> Model:
    """The model with the adapters that were asked for."""
    if request.tuning is None:
        return model
    from zplan.planner.adapters import adapted_model

    return adapted_model(model, request.tuning)


def open_search(request: Request, *, remainder: bool, like: Search | None = None) -> Search:
    """The model and the machine of a request.

    Parameters
    ----------
    remainder
        As in `Evaluation`.
    like
        A search of the same model and adapters: what does not depend on the machine is shared with it.
    """
    model = like.model if like else _tuned(model_from(request.model, request.params, offline=request.offline), request)
    request = _with_ring(request, model)
    hardware = hardware_from(
        gpus=request.gpus,
        mem_bytes=request.mem_bytes,
        gpu=request.gpu,
        nodes=request.nodes,
        host_mem_bytes=request.host_mem_bytes,
        nvme_bytes=request.nvme_bytes,
        device=request.get("device") or "cuda",
    )
    return Search(model, hardware, request, remainder=remainder, foldings=like.foldings if like else {})


def _notes(search: Search) -> tuple[str, ...]:
    """What a user should see that is no part of the answer."""
    limit = made_for(search.model.arch)
    long: tuple[str, ...] = ()
    if search.seq > limit and not search.model.assumed:
        long = (f"--seq {search.seq} is longer than what `{search.model.spec.name}` is made for, {limit} tokens",)
    padded: tuple[str, ...] = ()
    if search.request.get("padded"):
        padded = (f"the worst batch counts: every sequence is taken as padded to {search.seq} tokens, loss included",)
    return (*search.request.notes, *search.hardware.notes, *search.model.notes, *long, *padded)


OWN = "zplan runs llama, mistral and gpt2; train another module by your own script, with zplan.initialize"


def make_plan(request: Request) -> Plan:
    """The plan of a parsed request."""
    from zplan.planner.dswriting import from_choice
    from zplan.planner.plan_file import Plan

    search = open_search(request, remainder=False)
    if not search.model.arch.runnable:
        name, kind = search.model.spec.name, search.model.arch.family
        if kind == LLAMA_CLASS:
            from zplan.planner.runnable import limits

            raise ZplanError(
                f"`{name}` is estimate only: {next(iter(limits(Choice(0, 1), search.model.spec))).why}", OWN
            )
        raise ZplanError(
            f"`model_type` of `{name}` is `{kind}`, which is estimate only: zplan has no decoder for it",
            OWN,
        )
    rows = search.rows()
    row = search.pick(rows)
    if not row.fits:
        from zplan.planner.remedies import remedies

        nearest = [r for r in remedies(search, row) if not r.estimate_only]
        hint = (
            f"it would fit with {nearest[0].what} ({nearest[0].option})" if nearest else "no single change makes it fit"
        )
        raise DoesNotFit(_judge(search, row, search.single()).text.rstrip("."), hint)
    _, uses = beside(search.model.spec, row, search.hardware)
    verdict = judge_tiers(row, uses)
    if verdict is not None:
        from zplan.planner.remedies import larger

        hardware = larger(row, uses, request.margin)
        raise DoesNotFit(verdict.text.rstrip("."), f"it would fit with {hardware[0].what}" if hardware else None)
    notes = _notes(search)
    if search.model.assumed:
        missing, asked = search.model.missing_params, search.model.num_params
        count = f"{search.model.shape_params:,} parameters, {format_percent(missing, asked)} fewer than asked"
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
