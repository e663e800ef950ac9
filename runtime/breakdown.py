"""Where a step's time goes: forward, backward, gathers, reduces, optimizer step, and what of it compute waited for.

[Note: breakdown] On a GPU each span is a pair of events on the stream that it runs on, read one step late, so nothing
waits while a step is queued. Gathers and reduces run beside compute; *exposed* is how long the computing stream stood
still for them. On the CPU collectives block, so all of them is exposed. Forward, backward and step contain what is
exposed in them. Without `wall_clock_breakdown` nothing is recorded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
    from zplan.planner.dsconfig import TrainingConfig
    from zplan.runtime.collectives import Collectives
    from zplan.runtime.engine import Engine
    from zplan.runtime.streams import Streams

Part = Literal["forward", "backward", "gather", "reduce", "step", "exposed"]
PARTS: tuple[Part, ...] = get_args(Part)
COLLECTIVE: tuple[Part, ...] = ("gather", "reduce")


@dataclass(frozen=True)
class Times:
    """Mean seconds of one optimizer step on one rank, all micro-steps together."""

    first_step: int
    last_step: int
    seconds: dict[Part, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {self.seconds[name] * 1000:.2f}" for name in PARTS)
        return f"steps {self.first_step} to {self.last_step}, ms a step: {parts}"


class Breakdown:
    """Spans of the steps of one engine. `last` is the mean of the last interval that was told."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.sums: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self.last: Times | None = None
        self.pending: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []
        """Pairs of events of this step."""
        self.finished: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []
        """Of the step before, to be read."""

    @contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """Time what runs inside, on the current stream."""
        if self.on_cuda:
            start = self._mark()
            yield
            self.pending.append((part, start, self._mark()))
            return
        begun = time.perf_counter()
        yield
        taken = time.perf_counter() - begun
        self.sums[part] += taken
        if part in COLLECTIVE:
            self.sums["exposed"] += taken

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_step(self) -> None:
        """An optimizer step is queued: read the one before."""
        self.steps += 1
        self._read()
        self.pending, self.finished = [], self.pending

    def _read(self) -> None:
        for part, start, end in self.finished:
            end.synchronize()
            self.sums[part] += start.elapsed_time(end) / 1000
        self.finished = []

    def take(self, last_step: int) -> Times:
        """Mean of the steps since the last call, and begin anew. Waits for the device."""
        self._read()
        n = max(1, self.steps)
        self.last = Times(last_step - n + 1, last_step, {part: s / n for part, s in self.sums.items()})
        self.sums, self.steps = dict.fromkeys(PARTS, 0.0), 0
        return self.last


class Telling:
    """Lines on rank 0's stderr every so many optimizer steps: how training goes, and where the time goes."""

    def __init__(self, engine: Engine, every: int, *, progress: bool, breakdown: Breakdown | None) -> None:
        self.engine, self.every, self.progress, self.breakdown = engine, every, progress, breakdown

    def after_step(self) -> None:
        """Once per optimizer step. Waits for the device only in steps that are told."""
        engine = self.engine
        if self.breakdown is not None:
            self.breakdown.end_step()
        if engine.global_steps % self.every:
            return
        lines = [self.progress_line()] if self.progress else []
        if self.breakdown is not None:
            lines.append(str(self.breakdown.take(engine.global_steps)))
        if engine.rank == 0:
            sys.stderr.write("".join(f"zplan: {line}\n" for line in lines))

    def progress_line(self) -> str:
        """Steps, those that were skipped, learning rate, and gradient norm."""
        engine, optimizer = self.engine, self.engine.optimizer
        skipped = engine.global_steps - int(optimizer.applied.item())
        words = [f"step {engine.global_steps}", f"{skipped} skipped", f"lr {optimizer.param_groups[0]['lr']:.6g}"]
        words.append(f"grad norm {engine.grad_norm.item():.4g}")
        if optimizer.scaler is not None:
            words.append(f"loss scale {optimizer.scaler.scale.item():g}")
        return ", ".join(words)


def telling_of(engine: Engine, training: TrainingConfig) -> Telling | None:
    """Who tells how training goes: where the config names `steps_per_print` or wants times; None for nobody."""
    progress = "steps_per_print" in training.given
    if not progress and engine.breakdown is None:
        return None
    return Telling(engine, training.steps_per_print, progress=progress, breakdown=engine.breakdown)


def breakdown_of(training: TrainingConfig, collectives: Collectives, streams: Streams) -> Breakdown | None:
    """Times of the parts of a step, where the config wants them; gathers, reduces and waits are watched from now on."""
    if not training.breakdown:
        return None
    made = Breakdown(collectives.mesh.device)
    collectives.watch = streams.watch = made.span
    return made
