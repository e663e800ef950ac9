"""Evaluates choices and picks one.

[Note: rules] What is left open is chosen like this:

- micro-batch 1; with a global batch, the largest divisor of a rank's sequences that fits, the rest by accumulation;
- checkpointing none where that fits and leaves a tenth of the card free, else full: recomputing costs up to a third of
  the time, an out-of-memory error costs the run;
- the lowest stage that fits, because it moves least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zplan.planner.activations import prefers_eager
from zplan.planner.batch import FLAGS, Batch, divisors, solve_batch
from zplan.planner.buffers import page_lines
from zplan.planner.config import Checkpointing, Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Ledger, Line
from zplan.planner.overhead import overhead_lines
from zplan.planner.placement import place
from zplan.planner.predict import predict
from zplan.planner.request import Request
from zplan.planner.sources import Model
from zplan.planner.textbook import runtime_rate
from zplan.planner.timeline import timeline

STAGES = (0, 1, 2, 3)
POSITION_TABLES = ("gpt2", "opt", "bert", "vit")
"""Families that cannot run a longer sequence than they have positions for."""
DEFAULT_SEQ = 2048
SEQ_STEP = 128
MARGIN = 10
"""A tenth of the card stays free unless checkpointing is on."""


@dataclass(frozen=True)
class Row:
    """One choice and what it needs of a card."""

    choice: Choice
    ledger: Ledger
    capacity_bytes: int
    peak_bytes: int
    peak_phase: str

    @property
    def spare_bytes(self) -> int:
        """Negative where it does not fit."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @property
    def roomy(self) -> bool:
        """Whether a tenth of the card stays free."""
        return self.spare_bytes * MARGIN >= self.capacity_bytes


@dataclass
class Search:
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

    def __post_init__(self) -> None:
        self.time = timeline(self.model.spec.units)
        self.phases = self.time.phases
        self.seq = self._seq()

    def _seq(self) -> int:
        """The sequence asked for, or the default; refused where the model cannot run it."""
        arch = self.model.arch
        asked: int | None = self.request.get("seq")
        limits = [n for n in (arch.max_seq, arch.window) if n]
        if asked is None:
            return min(DEFAULT_SEQ, *limits)
        if arch.window and asked > arch.window:
            raise ZplanError(
                f"`--seq {asked}` is beyond the sliding window of `{self.model.spec.name}`, {arch.window} tokens, "
                "and windowed attention is not built yet",
                f"use --seq {arch.window} or less",
            )
        if arch.family in POSITION_TABLES and asked > arch.max_seq:
            raise ZplanError(
                f"`--seq {asked}` is beyond the position table of `{self.model.spec.name}`, {arch.max_seq} tokens",
                f"use --seq {arch.max_seq} or less",
            )
        return asked

    @property
    def seq_limit(self) -> int:
        """Longest sequence the model is made for, or that is counted."""
        arch = self.model.arch
        if prefers_eager(arch) and self.request.get("attention") == "sdpa":
            return arch.trait("window") - 1
        return min(arch.max_seq, arch.window or arch.max_seq)

    @property
    def checkpointings(self) -> tuple[Checkpointing, ...]:
        """What may be chosen, in order of preference."""
        fixed: Checkpointing | None = self.request.get("checkpointing")
        return (fixed,) if fixed else ("none", "full")

    def batches(self, world_size: int) -> list[Batch]:
        """What may be chosen of micro-batch and accumulation, by rising micro-batch."""
        get = self.request.get
        train, micro, accumulation = get("global_batch"), get("micro_batch"), get("accumulation")
        if train is None:
            return [Batch(micro or 1, accumulation or 1, world_size)]
        fixed = solve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size, names=FLAGS)
        if micro is not None or accumulation is not None:
            return [fixed]
        per_rank = train // world_size
        return [Batch(m, per_rank // m, world_size) for m in divisors(per_rank)]

    def choice(self, stage: int, batch: Batch, checkpointing: Checkpointing) -> Choice:
        """A choice with everything else as asked for or by default."""
        names = (
            "precision",
            "attention",
            "cross_entropy",
            "kernels",
            "ring_slots",
            "piece_numel",
            "device",
            "compile",
            "reduce",
            "transport",
            "saving",
            "optimizer",
        )
        fixed = {name: self.request.get(name) for name in names if self.request.get(name) is not None}
        if prefers_eager(self.model.arch):
            fixed.setdefault("attention", "eager")
        if self.hardware.nodes > 1:
            fixed.setdefault("reduce", "scatter")
        elif self.hardware.nvlink and self.hardware.world_size > 1 and self.request.get("device") != "cpu":
            fixed.setdefault("transport", "copies")
        return Choice(
            stage=stage,
            world_size=batch.world_size,
            micro_batch=batch.micro,
            accumulation=batch.accumulation,
            seq=self.seq,
            checkpointing=checkpointing,
            **fixed,
        )

    def row(self, choice: Choice) -> Row:
        """Evaluate a choice, once."""
        if choice not in self.memo:
            pages = page_lines(place(self.model.spec, choice), choice, self.time) if choice.copies else ()
            extra = (*overhead_lines(self.hardware, choice, self.phases), *self._remainder(choice), *pages)
            ledger = predict(self.model.spec, choice, overheads=extra)
            per_phase = ledger.per_phase()
            peak = max(per_phase)
            self.memo[choice] = Row(choice, ledger, self.hardware.mem_bytes, peak, ledger.phases[per_phase.index(peak)])
        return self.memo[choice]

    def _remainder(self, choice: Choice) -> tuple[Line, ...]:
        missing = self.model.missing_params
        if not self.remainder or not missing:
            return ()
        rate = runtime_rate(choice)
        note = f"{missing:,} parameters that the assumed shape lacks, at {rate.formula()} bytes"
        nbytes = rate.of(missing, choice.world_size)
        always = (0, len(self.phases) - 1)
        return (Line("states.remainder", nbytes, (always,), "states", source="derived", note=note),)

    def best(self, stage: int, batches: Sequence[Batch]) -> Row:
        """The row of one stage by the rules; where nothing fits, the leanest."""
        for checkpointing in self.checkpointings:
            open_and_none = checkpointing == "none" and len(self.checkpointings) > 1
            good = _is_roomy if open_and_none else _fits
            rows = _Lazy([self.choice(stage, b, checkpointing) for b in batches], self.row)
            found = rows.last(good)
            if found is not None:
                return found
        return self.row(self.choice(stage, batches[0], self.checkpointings[-1]))

    def rows(self) -> tuple[Row, ...]:
        """One row for each stage."""
        batches = self.batches(self.hardware.world_size)
        return tuple(self.best(stage, batches) for stage in STAGES)

    def pick(self, rows: Sequence[Row]) -> Row:
        """The row to run: the stage asked for, else the lowest that fits, else the one that misses by least."""
        stage = self.request.get("stage")
        if stage is not None:
            return rows[STAGES.index(stage)]
        return next((r for r in rows if r.fits), None) or min(rows, key=lambda r: r.peak_bytes)

    def single(self) -> Row:
        """The best row of one GPU alone, with the same global batch."""
        world_size = self.hardware.world_size
        times = world_size if self.request.get("global_batch") else 1
        return self.best(0, [Batch(b.micro, b.accumulation * times, 1) for b in self.batches(world_size)])

    def longest_seq(self, row: Row) -> int:
        """Longest sequence at which a row still fits: the model's limit, else a multiple of 128; 0 for none.

        An assumed shape has no limit of its own.
        """
        limit = self.seq_limit

        def spare(seq: int) -> int:
            return self.row(replace(row.choice, seq=seq)).spare_bytes

        if spare(limit) >= 0:
            return limit
        return largest_multiple(spare, SEQ_STEP, below=limit, near=row.choice.seq)


def largest_multiple(spare: Callable[[int], int], step: int, *, below: int, near: int) -> int:
    """Largest multiple of `step` with `spare(x) >= 0`, for a falling `spare`; 0 when there is none.

    Parameters
    ----------
    spare
        Nearly linear, so that a straight line between the two sides finds the place in a few calls; where it is not,
        halving takes over.
    below
        A value that is known not to fit.
    near
        Where to look first.

    Examples
    --------
    >>> largest_multiple(lambda x: 1000 - x, 128, below=10**6, near=2048)
    896
    """
    low, high = 0, -(-below // step)
    low_spare: int | None = None
    high_spare: int | None = None
    at, calls = min(max(1, near // step), high - 1), 0
    while high - low > 1:
        found = spare(at * step)
        calls += 1
        if found >= 0:
            low, low_spare = at, found
        else:
            high, high_spare = at, found
        if low_spare is not None and high_spare is not None and calls < 8:
            at = low + (high - low) * low_spare // (low_spare - high_spare)
        elif low_spare is not None and high_spare is None:
            at = low * 8
        else:
            at = (low + high) // 2
        at = min(max(at, low + 1), high - 1)
    return low * step


def _fits(row: Row) -> bool:
    return row.fits


def _is_roomy(row: Row) -> bool:
    return row.roomy


@dataclass(frozen=True)
class _Lazy:
    """Choices by rising need, evaluated only as far as a search has to."""

    choices: list[Choice]
    row: Callable[[Choice], Row]

    def last(self, good: Callable[[Row], bool]) -> Row | None:
        """The last row that is good, given that none is good after one that is not."""
        low, high = -1, len(self.choices)
        at = high - 1  # Most often the largest fits.
        while high - low > 1:
            if good(self.row(self.choices[at])):
                low = at
            else:
                high = at
            at = (low + high) // 2
        return self.row(self.choices[low]) if low >= 0 else None
