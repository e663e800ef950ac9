"""Lines that tell how a training goes: loss, speed and memory per step."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import torch

if TYPE_CHECKING:
    from zplan.runtime.verify import Meter


@dataclass(frozen=True)
class Memory:
    """What a rank holds, and the most it held in the step, where that is known. In bytes."""

    what: Literal["allocated", "live", "resident"]
    """Of the CUDA allocator, of all storages that a meter follows, or of the whole process."""
    now: int
    peak: int | None = None

    def __str__(self) -> str:
        peak = "" if self.peak is None else f", peak {self.peak / 2**20:,.1f}"
        return f"{self.now / 2**20:,.1f} MiB {self.what}{peak}"


def memory_now(device: torch.device, meter: Meter | None = None) -> Memory:
    """Between steps. A meter resets the allocator's peak in every phase, so while there is one it tells the peak."""
    peak = max(meter.peaks.values(), default=0) if meter is not None else None
    if device.type == "cuda":
        highest = torch.cuda.max_memory_allocated(device) if peak is None else peak
        return Memory("allocated", torch.cuda.memory_allocated(device), highest)
    if meter is not None and meter.registry is not None:
        return Memory("live", meter.registry.live_bytes, peak)
    import psutil

    return Memory("resident", psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `loss` is the mean over ranks and micro-steps, `grad_norm` before clipping."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens: int
    memory: Memory


def line(r: StepRecord, steps: int) -> str:
    width = len(str(steps))
    return (
        f"step {r.step:>{width}}/{steps}  loss {r.loss:.4f}  grad norm {r.grad_norm:.3f}  "
        f"{r.tokens / r.seconds:,.0f} tokens/s  {r.seconds:.3f} s  {r.memory}"
    )


class Progress:
    """Prints one line per `every` steps to stderr; on a terminal the steps between overwrite each other."""

    def __init__(self, steps: int, every: int, out: TextIO | None = None) -> None:
        self.steps, self.every = steps, every
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self.records: list[StepRecord] = []
        self.started = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        self.records.append(record)
        kept = record.step % self.every == 0 or record.step in (1, self.steps)
        if self.live:
            # Clear to the end of the line: the one before may have been longer.
            self.out.write(f"\r{line(record, self.steps)}\x1b[K" + ("\n" if kept else ""))
        elif kept:
            self.out.write(line(record, self.steps) + "\n")
        self.out.flush()

    def write(self, path: Path) -> None:
        """All records, one JSON object a line."""
        path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in self.records))
