"""Picks one of all choices, which `planner/evaluation.py` evaluates.

[Note: rules] What is left open is chosen like this:

- micro-batch 1; with a global batch, the largest divisor of a rank's sequences that fits, the rest by accumulation:
  fewer micro-steps never move more;
- checkpointing none only where that leaves a tenth of the card free, because an out-of-memory error costs the run;
- of what is left the fastest that fits, by predicted step time (`planner/step_time.py`). What is less than a hundredth
  slower counts as fast, and then no checkpointing comes before full, and the lower stage before the higher;
- where no time can be told, because no card is named, these two orders alone decide: the lowest stage moves least;
- where nothing fits so, clipping is off and a micro-step is a step: the same with the optimizer in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from zplan.planner.activations import prefers_eager
from zplan.planner.batch import FLAGS, KEYS, Batch, divisors, solve_batch
from zplan.planner.config import DEFAULT_CLIP, Checkpointing
from zplan.planner.evaluation import Evaluation, Row
from zplan.planner.halving import largest_multiple, last_good
from zplan.planner.peer_rules import PARALLEL, allowed_stages, data_parallel
from zplan.planner.sequence import IMAGES, NO_LIMIT, POSITION_TABLES, SEQ_STEP, made_for

STAGES = (0, 1, 2, 3)
BATCH = ("global_batch", "micro_batch", "accumulation")
TIE = 0.01
"""Share of a step's time that predictions do not tell apart."""


class Search(Evaluation):
    """The choices that a request leaves open, and which of them is taken."""

    @property
    def seq_limit(self) -> int:
        """Longest sequence that the model is made for, or may have, or that is counted."""
        arch = self.model.arch
        if prefers_eager(arch) and self.request.get("attention") == "sdpa":
            return arch.trait("window") - 1
        if self.request.beyond_limit and arch.family not in (*POSITION_TABLES, *IMAGES):
            return arch.window or NO_LIMIT
        return min(made_for(arch), arch.window or NO_LIMIT)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Stages to choose from: those that the runtime has with what is asked."""
        found, get = allowed_stages(self.request.fixed), self.request.get
        if get("deterministic") and get("optimizer_in_backward") and self.ranks > 1 and get("stage") != 0:
            found = tuple(s for s in found if s)  # `deterministic.py` says why
        return found

    @cached_property
    def ranks(self) -> int:
        """Data-parallel ranks: the GPUs, unless several share one copy of the model."""
        return data_parallel(self.hardware.world_size, self.request.fixed)

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
        by = {self.request.fixed_by[name] for name in BATCH if get(name) is not None}
        names = FLAGS if any(flag in by for flag in FLAGS) else KEYS  # Of a config.
        fixed = solve_batch(train=train, micro=micro, accumulation=accumulation, world_size=world_size, names=names)
        if micro is not None or accumulation is not None:
            return [fixed]
        per_rank = train // world_size
        if get("optimizer_in_backward"):
            return [Batch(per_rank, 1, world_size)]
        return [Batch(m, per_rank // m, world_size) for m in divisors(per_rank)]

    def at(self, name: str, value: int) -> Search:
        """The same search with one more thing asked for; what was evaluated is shared."""
        fixed = {**self.request.fixed, name: value}
        request = replace(self.request, fixed=fixed, fixed_by={**self.request.fixed_by, name: f"--{name}"})
        return replace(self, request=request)

    def fastest(self, rows: Sequence[Row]) -> Row:
        """The first row that is as fast as any, ties within `TIE`; the very first where no time can be told."""
        times = [self.time(row.choice) for row in rows]
        told = [t.total / t.tokens for t in times if t is not None]
        if len(told) < len(rows):
            return rows[0]
        return next(row for row, t in zip(rows, told, strict=True) if t <= min(told) * (1 + TIE))

    def candidates(self, stage: int, batches: Sequence[Batch]) -> list[Row]:
        """The row with the largest micro-batch that fits of each way to run a stage, in order of preference."""
        found: list[Row] = []
        for checkpointing in self.checkpointings:
            open_and_none = checkpointing == "none" and len(self.checkpointings) > 1
            good = _is_roomy if open_and_none else _fits
            row = last_good([self.choice(stage, b, checkpointing) for b in batches], self.row, good)
            if row is not None:
                found.append(row)
                if self.clock is None:
                    break
        return found

    def best(self, stage: int, batches: Sequence[Batch]) -> Row:
        """The row of one stage by the rules; where nothing fits, the leanest."""
        found = self.candidates(stage, batches)
        if found:
            return self.fastest(found)
        # Without accumulation one rank keeps bf16 gradients, so that one large micro-batch may be leaner than many.
        ends = dict.fromkeys((batches[0], batches[-1]))
        return min((self.row(self.choice(stage, b, self.checkpointings[-1])) for b in ends), key=lambda r: r.peak_bytes)

    def rows(self) -> tuple[Row, ...]:
        """One row for each stage."""
        batches = self.batches(self.ranks)
        found = tuple(self.best(stage, batches) for stage in self.stages)
        early = () if self.pick(found).fits else self._in_backward(batches)
        return early if early and self.pick(early).fits else found

    def anything_fits(self) -> bool:
        """Whether the row to run fits; the leanest stage is looked at first, so this is quicker than to pick it."""
        batches, asked = self.batches(self.ranks), self.request.get("stage")
        stages = self.stages if asked is None else (asked,)
        if any(self.candidates(stage, batches) for stage in reversed(stages)):
            return True
        return self.pick(self.rows()).fits

    def _in_backward(self, batches: Sequence[Batch]) -> tuple[Row, ...]:
        """The rows with the optimizer in backward; none where that was decided already or something forbids it."""
        fixed, clip = self.request.fixed, self.request.settings.get("clip", DEFAULT_CLIP)
        whole = [b for b in batches if b.accumulation == 1]
        if clip or not whole or "optimizer_in_backward" in fixed or fixed.get("runtime", "zplan") != "zplan":
            return ()
        from zplan.planner.in_backward import allows_in_backward

        if not allows_in_backward(self.choice(self.stages[-1], whole[0], "full"), clip=clip):
            return ()
        search = self.at("optimizer_in_backward", value=True)
        barred = 0 if self.request.get("deterministic") and self.ranks > 1 else None
        return tuple(self.best(s, batches) if s == barred else search.best(s, whole) for s in self.stages)

    def pick(self, rows: Sequence[Row]) -> Row:
        """The row to run: the stage asked for, else the fastest that fits, else the one that misses by least."""
        stage = self.request.get("stage")
        if stage is not None:
            return rows[self.stages.index(stage)]
        fitting = [r for r in rows if r.fits]
        return self.fastest(fitting) if fitting else min(rows, key=lambda r: r.peak_bytes)

    def single(self) -> Row:
        """The best row of one GPU alone, with the same global batch."""
        shared = [name for name in PARALLEL if self.request.get(name) not in (None, 1)]
        if shared:
            alone = replace(self._without(shared), memo={})
            return alone.best(alone.stages[0], [b._replace(world_size=1) for b in alone.batches(self.ranks)])
        world_size = self.ranks
        times = world_size if self.request.get("global_batch") else 1
        offload = self.request.get("offload")
        stage = 3 if offload is not None and offload.params != "none" else self.stages[0]
        alone = self._without(("optimizer_in_backward",)) if times > 1 else self
        fixed = self.request.get("micro_batch") is not None or self.request.get("accumulation") is not None
        if times > 1 and not fixed:
            return alone.best(stage, alone.batches(1))
        return alone.best(stage, [Batch(b.micro, b.accumulation * times, 1) for b in self.batches(world_size)])

    def _without(self, names: Sequence[str]) -> Search:
        """The same search with less asked for."""
        fixed = {k: v for k, v in self.request.fixed.items() if k not in names}
        return replace(self, request=replace(self.request, fixed=fixed))

    def longest_seq(self, row: Row) -> int:
        """Longest sequence at which a row still fits: the model's limit, else a multiple of 128; 0 for none.

        An assumed shape has no limit of its own.
        """
        limit = self.seq_limit

        def spare(seq: int) -> int:
            return self.row(replace(row.choice, seq=seq)).spare_bytes

        at_limit = spare(limit)
        if at_limit >= 0:
            return limit
        if self.model.arch.family in IMAGES:
            return 0
        return largest_multiple(spare, SEQ_STEP, below=limit, near=row.choice.seq, below_spare=at_limit)


def _fits(row: Row) -> bool:
    return row.fits


def _is_roomy(row: Row) -> bool:
    return row.roomy
