"""`zplan.estimate` and `zplan.plan`: a question in, one frozen answer out. Never torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zplan.planner.activations import counted
from zplan.planner.activities import Activity, activities
from zplan.planner.comm import Traffic, textbook_traffic
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware, hardware_from
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec
from zplan.planner.request import Request, make_request
from zplan.planner.search import STAGES, Row, Search
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


def estimate(  # noqa: PLR0913 - one keyword for each option, so that editors can show them
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    nvme: int | float | str | None = None,
    margin: int | float | str | None = None,
    efficiency: float | None = None,
    network: float | None = None,
    tokens: int | float | str | None = None,
    epochs: int | None = None,
    examples: int | float | str | None = None,
    price: float | None = None,
    stage: int | None = None,
    offload: str | None = None,
    offload_params: str | None = None,
    offload_ratio: float | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offload: bool = False,
    attention: str | None = None,
    cross_entropy: str | None = None,
    reduce_dtype: str | None = None,
    padded: bool = False,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    saving: str | None = None,
    runtime: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    hpz: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_embeddings: bool = False,
    qlora: bool = False,
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
    host_mem, nvme
        Per node; what the ranks of a node take together is held against them.
    margin
        What stays free of a card beyond the interval of the total: a share (`"15%"`) or a size.
    efficiency
        Share of the card's dense peak that matrix products reach in a step; 0.5 where left out, 0.7 on A100.
    network
        GB/s that a node sends to others.
    tokens, epochs, examples
        How much is trained: so many tokens, or so many times so many sequences.
    price
        Of one GPU for one hour.
    stage, accumulation, micro_batch, global_batch, seq, precision, checkpointing, attention, device, compile, saving
        Fix a choice; what is left out is chosen and marked so.
    runtime
        Whose buffers are counted: `zplan`, `deepspeed`, `fsdp2` or `ddp`. Only the first can be run by zplan.
    tp, pp, cp, hpz
        Ranks of tensor, pipeline and context parallelism and of hpZ's second shard; DeepSpeed and FSDP2 only.
    offload, offload_params
        Where the optimizer and the parameters lie between their uses: `none`, `cpu` or `nvme`.
    offload_ratio
        Share of the elements that is offloaded, the first units of the schedule.
    optimizer
        A name of `planner/optimizers.py`: what zplan does not step with is answered as `estimate only`.
    checkpoint_every, checkpoint_offload
        Blocks in one checkpointed segment; whether a segment's input waits in host memory.
    cross_entropy
        `plain` from whole logits in fp32, `bf16` from them as they are, `chunked` or `fused` without whole ones.
    padded
        Sequences are padded to `seq` and attention takes a mask; otherwise they are packed, and none is needed.
    reduce_dtype
        `fp32` or `bf16`: in which gradients are reduced and accumulated.
    config
        A DeepSpeed config, a path or a mapping; fixes what it names.
    offline
        Never touch the network.
    lora, lora_targets, lora_embeddings, qlora
        Freeze the model and train adapters of this rank beside its linear maps: `q,v`, `attention`, `all-linear` or
        names with commas; embedding and head in full beside them; the frozen linear maps in 4 bits.

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
    if untimed is not None:
        if search.request.goal.asked:
            raise ZplanError(
                f"no hours can be told: {search.why_untimed(untimed.choice)}",
                "name a card of `zplan gpus` with --gpu, and use --precision bf16 and --runtime zplan",
            )
        return ()
    from zplan.planner.timing import timings

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


def open_search(request: Request, *, remainder: bool) -> Search:
    """The model and the machine of a request."""
    model = _tuned(model_from(request.model, request.params, offline=request.offline), request)
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
    return Search(model, hardware, request, remainder=remainder)


def _notes(search: Search) -> tuple[str, ...]:
    """What a user should see that is no part of the answer."""
    limit = search.seq_limit
    long: tuple[str, ...] = ()
    if search.seq > limit and not search.model.assumed:
        long = (f"--seq {search.seq} is longer than what `{search.model.spec.name}` is made for, {limit} tokens",)
    padded: tuple[str, ...] = ()
    if search.request.get("padded"):
        padded = (f"the worst batch counts: every sequence is taken as padded to {search.seq} tokens, loss included",)
    return (*search.request.notes, *search.hardware.notes, *search.model.notes, *long, *padded)


def plan(  # noqa: PLR0913 - as `estimate`
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    nvme: int | float | str | None = None,
    margin: int | float | str | None = None,
    efficiency: float | None = None,
    network: float | None = None,
    tokens: int | float | str | None = None,
    epochs: int | None = None,
    examples: int | float | str | None = None,
    price: float | None = None,
    stage: int | None = None,
    offload: str | None = None,
    offload_params: str | None = None,
    offload_ratio: float | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offload: bool = False,
    attention: str | None = None,
    cross_entropy: str | None = None,
    reduce_dtype: str | None = None,
    padded: bool = False,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    saving: str | None = None,
    runtime: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    hpz: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_embeddings: bool = False,
    qlora: bool = False,
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
