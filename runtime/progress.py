"""Lines that tell how a training goes: loss, speed and memory per step."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `loss` is the mean over ranks and micro-steps, `grad_norm` before clipping."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens: int
    memory: str


def memory_now(device: torch.device) -> str:
    """What this rank holds: the allocator's numbers on a GPU, the process on a CPU."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return f"{now / 2**20:,.1f} MiB allocated, peak {peak / 2**20:,.1f}"
    import psutil

    return f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB resident"


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
