"""What a choice needs of a card, how long its steps take, and what it moves: one row each, evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Any, get_args

from zplan.planner.activations import counted, prefers_eager
from zplan.planner.batch import Batch
from zplan.planner.buffers import page_lines
from zplan.planner.comm import Traffic, traffic
from zplan.planner.config import DEFAULT_CLIP, Checkpointing, Choice, Offload
from zplan.planner.errors import ZplanError
from zplan.planner.folding import ENDS, Folding, Vectors, by_part, fold, foldable, unfolded
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Kind, Ledger, Line, Tier
from zplan.planner.overhead import overhead_lines
from zplan.planner.peer_rules import check_shape
from zplan.planner.placement import place
from zplan.planner.predict import predict
from zplan.planner.request import Request
from zplan.planner.sequence import check_limit, check_seq, default_seq
from zplan.planner.sources import Model
from zplan.planner.textbook import Rate, off_device_rates, runtime_rate
from zplan.planner.tiers import OffDevice
from zplan.planner.timeline import Timeline, timeline

if TYPE_CHECKING:
    from zplan.planner.clock import Clock
    from zplan.planner.step_time import StepTime

TRAINING = (
    *("optimizer", "reduce_dtype", "checkpoint_every", "checkpoint_offload", "padded", "deterministic"),
    "check_replicas_every",
    *("runtime", "tensor_parallel", "pipeline_parallel", "context_parallel", "hpz", "zero"),
)
"""Fields of a choice that are what was asked for, else their default: the search leaves them alone."""
MARGIN = 10
"""A tenth of the card stays free unless checkpointing is on."""


@dataclass(frozen=True)
class Row:
    """One choice and what it needs of a card."""

    choice: Choice
    capacity_bytes: int
    peak_bytes: int
    peak_phase: str
    low_bytes: int
    high_bytes: int
    """Between which bytes the peak lies; see [Note: intervals] in interval.py."""
    margin_bytes: int
    """What was asked to stay free beyond that."""
    off_device: OffDevice
    """What it takes of the host and of NVMe."""
    kinds: Mapping[Kind, int]
    """Bytes by kind in the peak phase; they add up to `peak_bytes`."""
    write_out: Callable[[], Ledger] = field(repr=False, compare=False)

    @cached_property
    def ledger(self) -> Ledger:
        """All lines, written out when they are asked for: a search needs sums only."""
        return self.write_out()

    @property
    def spare_bytes(self) -> int:
        """What the upper end and the margin leave of the card; negative where it does not fit."""
        return self.capacity_bytes - self.margin_bytes - self.high_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0 and self.off_device.fits

    @property
    def roomy(self) -> bool:
        """Whether it fits, and a tenth of the card stays free."""
        return self.fits and self.spare_bytes * MARGIN >= self.capacity_bytes


@dataclass
class Evaluation:
    """A model on a machine, and the rows evaluated so far.

    Attributes
    ----------
    remainder
        Count the parameters that an assumed shape lacks as a line of their own. Off for plans, which run the shape.
    """

    model: Model
    hardware: Hardware
    request: Request
    remainder: bool = True
    memo: dict[Choice, Row] = field(default_factory=dict)
    foldings: dict[int, Folding] = field(default_factory=dict)
    """By slots of the ring."""

    def __post_init__(self) -> None:
        self.seq = self._seq()
        if self.request.get("precision") == "bf16" and not self.hardware.bf16:
            by = self.request.fixed_by["precision"]
            raise ZplanError(
                f"{by} asks for bf16, which a {self.hardware.gpu} (compute capability "
                f"{self.hardware.compute_capability}) does not compute in",
                "use --precision fp16, or a card of Ampere or later",
            )

    @cached_property
    def phases(self) -> tuple[str, ...]:
        return timeline(self.model.spec.units).phases

    def _seq(self) -> int:
        """The sequence asked for, or the default; refused where the model cannot run it."""
        asked: int | None = self.request.get("seq")
        if asked is None:
            return default_seq(self.model.arch)
        check_seq(self.model.arch, self.model.spec.name, asked)
        if not (self.request.beyond_limit or self.model.assumed):
            check_limit(self.model.arch, self.model.spec.name, asked)
        return asked

    def choice(
        self, stage: int, batch: Batch, checkpointing: Checkpointing, *, offload: Offload | None = None
    ) -> Choice:
        """A choice with everything else as asked for or by default; `offload` instead of what was asked."""
        wanted = (
            *("precision", "attention", "cross_entropy", "kernels", "ring_slots", "piece_numel", "persist_numel"),
            *("device", "compile", "optimizer_in_backward", "reduce", "transport", "saving", "offload", *TRAINING),
        )
        fixed = {name: self.request.get(name) for name in wanted if self.request.get(name) is not None}
        if not self.hardware.bf16:
            fixed.setdefault("precision", "fp16")
        if prefers_eager(self.model.arch) or self.no_shared_heads(fixed):
            fixed.setdefault("attention", "eager")
        own = fixed.get("runtime", "zplan") == "zplan"
        if own and self.hardware.nodes > 1:
            fixed.setdefault("reduce", "exchange" if fixed.get("deterministic") else "scatter")
        elif own and self.hardware.nvlink and self.hardware.world_size > 1 and self.request.get("device") != "cpu":
            fixed.setdefault("transport", "copies")
        fixed["flash"] = self.hardware.flash
        fixed["cudnn_width"] = self._cudnn_width(deterministic=bool(fixed.get("deterministic")))
        if offload is not None:
            fixed["offload"] = offload
        if "offload" in fixed and stage < 3:
            # Below stage 3 parameters are whole on every rank, so there is nothing to fetch.
            fixed["offload"] = replace(fixed["offload"], params="none")
        choice = Choice(
            stage=stage,
            world_size=batch.world_size,
            micro_batch=batch.micro,
            accumulation=batch.accumulation,
            seq=self.seq,
            checkpointing=checkpointing,
            **fixed,
        )
        if choice.runtime != "zplan":
            check_shape(self.model.arch, choice)
        if choice.deterministic:
            from zplan.planner.deterministic import check_deterministic

            check_deterministic(choice)
        if choice.optimizer_in_backward:
            from zplan.planner.in_backward import check_in_backward

            check_in_backward(choice, clip=self.request.settings.get("clip", DEFAULT_CLIP))
        return choice

    def no_shared_heads(self, fixed: Mapping[str, Any]) -> bool:
        """Whether no kernel of the card shares keys and values among heads, as the model does: none but flash does."""
        on_card = fixed.get("device", "cuda") == "cuda" and not self.hardware.flash
        return on_card and fixed.get("precision") != "fp32" and self.model.arch.shares_keys

    def _cudnn_width(self, *, deterministic: bool) -> int:
        """Of a choice: zplan's own decoders say which kernel they take, and cuDNN's is not deterministic."""
        own = self.model.arch is not None and self.model.arch.runnable
        return 0 if own or deterministic else self.hardware.cudnn_width

    def row(self, choice: Choice) -> Row:
        """Evaluate a choice, once."""
        if choice not in self.memo:
            self.memo[choice] = self._evaluate(choice)
        return self.memo[choice]

    def _evaluate(self, choice: Choice) -> Row:
        def further(phases: Sequence[str]) -> tuple[Line, ...]:
            extra = (*overhead_lines(self.hardware, choice, phases), *self._remainder(choice, phases))
            return (*extra, *self._pages(choice, phases))

        def write_out() -> Ledger:
            # Of another runtime's ranks the one that holds most decides.
            return predict(self.model.spec, choice, overheads=further(self.phases), rank=None)

        if foldable(choice):
            folding = self.folding(choice)
            vectors, phases = folding.vectors(choice, further), folding.phases
            return self._row(choice, vectors, phases, write_out)
        ledger = write_out()
        return self._row(choice, by_part(ledger.lines, ledger.phases), ledger.phases, lambda: ledger)

    def _row(self, choice: Choice, vectors: Vectors, phases: Sequence[str], write_out: Callable[[], Ledger]) -> Row:
        """A choice by the live bytes of its parts in each phase."""
        device: dict[Kind, list[int]] = {kind: vectors[kind] for kind in get_args(Kind) if kind in vectors}
        per_phase = [sum(column) for column in zip(*device.values(), strict=True)]
        at = per_phase.index(max(per_phase))
        low, high = (max(map(add, per_phase, vectors.get(end, [0] * len(phases)))) for end in ENDS)
        card = self.hardware.mem_bytes
        return Row(
            choice,
            card,
            per_phase[at],
            phases[at],
            low_bytes=low,
            high_bytes=high,
            margin_bytes=self.request.margin.of(card),
            off_device=OffDevice.of(vectors, self.hardware, choice.num_gpus),
            kinds={kind: values[at] for kind, values in device.items()},
            write_out=write_out,
        )

    def _pages(self, choice: Choice, phases: Sequence[str]) -> list[Line]:
        """Ends of pages of buffers that other GPUs read: they do not depend on the depth of the model."""
        if not choice.copies or choice.runtime != "zplan":
            return []
        spec = self.folding(choice).specs[0] if foldable(choice) else self.model.spec
        return page_lines(place(spec, choice), choice, Timeline(tuple(phases), {}))

    def _remainder(self, choice: Choice, phases: Sequence[str]) -> tuple[Line, ...]:
        missing = self.model.missing_params
        if not self.remainder or not missing:
            return ()
        whole = Rate(0, choice.itemsize) if choice.sharded else Rate(choice.itemsize, 0)
        rates: dict[Tier, Rate] = {"device": whole if self.model.spec.adapters else runtime_rate(choice)}
        if not self.model.spec.adapters:
            rates |= off_device_rates(choice)
        always, lines = (0, len(phases) - 1), []
        for tier, rate in rates.items():
            note = f"{missing:,} parameters that the assumed shape lacks, at {rate.formula()} bytes"
            nbytes = rate.of(missing, choice.world_size)
            lines.append(Line("states.remainder", nbytes, (always,), "states", tier, "derived", note))
        return tuple(lines)

    def folding(self, choice: Choice) -> Folding:
        """The folded model for a choice's ring."""
        if choice.ring_slots not in self.foldings:
            self.foldings[choice.ring_slots] = fold(self.model.spec, ring_slots=choice.ring_slots)
        return self.foldings[choice.ring_slots]

    @cached_property
    def clock(self) -> Clock | None:
        """What tells step times; None where no card is named, ops are not counted, or the runtime is DeepSpeed."""
        if self.hardware.gpu is None or not counted(self.model.spec) or self.request.get("runtime") == "deepspeed":
            return None
        from zplan.planner.clock import Clock

        return Clock(self.hardware, self.request.efficiency, self.request.network)

    def time(self, choice: Choice) -> StepTime | None:
        """Predicted time of one optimizer step; None where it can't be told."""
        if self.clock is None:
            return None
        return self.clock.time(choice, self.folding(choice) if foldable(choice) else self.whole)

    @cached_property
    def whole(self) -> Folding:
        """The model itself, for choices that do not fold."""
        return unfolded(self.model.spec)

    def why_untimed(self, choice: Choice) -> str:
        """Why `time` tells none."""
        if choice.runtime == "deepspeed":
            return "DeepSpeed's step times follow from no byte: its steps wait for host code"
        if choice.num_gpus > choice.world_size or choice.hpz > 1:
            return "step times are those of data-parallel ranks"
        if self.hardware.gpu is None or choice.device == "cpu":
            return "no card is named (--gpu)"
        if self.clock is None:
            return "the model's ops are not counted"
        return f"no peak of {self.hardware.gpu} in {choice.precision} is known"

    def traffic(self, choice: Choice) -> Traffic:
        """Bytes that one rank moves in a step."""
        if not foldable(choice) or choice.offload.optimizer != "none":
            return traffic(self.model.spec, choice)
        per_model = self.folding(choice).affine
        return Traffic(
            per_model(lambda spec: traffic(spec, choice).gather_bytes),
            per_model(lambda spec: traffic(spec, choice).reduce_bytes),
        )
