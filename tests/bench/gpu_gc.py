"""Does Python's cyclic garbage collector cost steps, and does collecting on a schedule save them?

python tests/bench/gpu_gc.py MODEL MICRO_BATCH SEQ [accum=K] [rounds=3] [steps=60] [objects=N]

In turn on one engine: the collector as Python has it; off after `gc.freeze()`, with a `gc.collect(1)` every 50 steps.
The process holds N containers more, as a data set in memory would. Time within collections is from `gc.callbacks`; the
spread of steps is of the host's time of one, the device waited for.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from shapes import number, read_case
from training import Step, batches, step_of, zplan_engine

EVERY = 50


@dataclass
class Clock:
    """Seconds and counts of collections, by generation."""

    begun: float = 0.0
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.begun = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self.begun)
            self.counts[info["generation"]] += 1


def run(step: Step, data: list, *, scheduled: bool) -> tuple[list[float], Clock]:
    """Seconds of each step, and what the collector did meanwhile."""
    clock, times = Clock(), []
    gc.collect()
    if scheduled:
        gc.freeze()
        gc.disable()
    gc.callbacks.append(clock)
    for i, (ids, labels) in enumerate(data):
        start = time.perf_counter()
        step(ids, labels)
        if scheduled and i % EVERY == EVERY - 1:
            gc.collect(1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    gc.callbacks.remove(clock)
    gc.enable()
    gc.unfreeze()
    return times, clock


def main() -> None:
    case, rest = read_case(sys.argv[1:])
    held = [{"text": [i]} for i in range(number(rest, "objects=", 0) // 2)]
    engine = zplan_engine(case)
    step, steps = step_of(engine), number(rest, "steps=", 60)
    data = batches(case, 2, engine.device, 0) * (steps // 2)
    run(step, data[:4], scheduled=False)
    rates: dict[str, list[float]] = {}
    for i in range(number(rest, "rounds=", 3)):
        for name in ("default", "scheduled")[:: 1 if i % 2 == 0 else -1]:
            times, clock = run(step, data, scheduled=name == "scheduled")
            rate = case.micro_batch * case.seq * case.accumulation * len(times) / sum(times)
            rates.setdefault(name, []).append(rate)
            ms = sorted(1000 * t for t in times)
            each, longest = 1000 * sum(clock.seconds) / len(times), 1000 * max(clock.seconds, default=0.0)
            sys.stdout.write(
                f"{name:9} {rate:9,.0f} tok/s, step median {statistics.median(ms):8.2f} ms, "
                f"95 % {ms[len(ms) * 95 // 100]:8.2f}, most {ms[-1]:8.2f}; {clock.counts} collections, "
                f"{each:.3f} ms a step, longest {longest:.2f}\n"
            )
            sys.stdout.flush()
    pairs = [b / a for a, b in zip(rates["default"], rates["scheduled"], strict=True)]
    start = time.perf_counter()
    gc.collect()
    sys.stdout.write(
        f"{case}, {len(gc.get_objects()):,} containers ({2 * len(held):,} asked for), all of them collected in "
        f"{1000 * (time.perf_counter() - start):.0f} ms: scheduled / default {statistics.median(pairs):.4f} "
        f"({min(pairs):.4f} to {max(pairs):.4f})\n"
    )
    engine.close()


main()
