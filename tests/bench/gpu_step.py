"""What zplan's step is made of: optimizer pass, waits, four micro-steps, and collectives that move nothing.

torchrun --standalone --nproc-per-node N tests/bench/gpu_step.py MODEL MICRO_BATCH SEQ
    [full] [compile] [fused] [deterministic] [stageN] [rounds=3]

- waiting: how long the stream that computes stood still for gathers and reduces, from events, beside the step.
- optimizer pass: from the last backward's end to the step's, from events; AdamW: its kernels alone.
- four accumulation steps: at most 4 (step - optimizer pass) + one optimizer pass, + 2 %.
- collectives that move nothing: each GPU trains as rank 0 of N over a process group without peers. The other ranks'
  parts of a gathered unit are then random numbers, so that products take the power that they take in training.
"""

from __future__ import annotations

import gc
import statistics
import sys
from dataclasses import dataclass, replace

import torch
from job import join_job
from shapes import Case, number, read_case
from training import say, step_of, time_steps, wait_for_all, zplan_engine

from zplan.runtime.engine import Engine
from zplan.runtime.mesh import Mesh

STEPS = 8
MOST = 1.02
"""Of the four-step formula."""


@dataclass(frozen=True)
class Parts:
    """Milliseconds of one optimizer step on one rank."""

    step: float
    waiting: float
    optimizer: float
    adamw: float


def time_updates(engine: Engine) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Events around each of the engine's coming updates."""
    inner, marks = engine.optimizer.update, []

    def update(units) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        inner(units)
        end.record()
        marks.append((begin, end))

    engine.optimizer.update = update
    return marks


def run(case: Case, world: int | None) -> tuple[Parts, int]:
    """The parts, and how many steps were applied."""
    engine = zplan_engine(case, world=world, wall_clock_breakdown=True, steps_per_print=10**9)
    for slot in {id(u.slot): u.slot for u in engine.units if u.slot is not None and world is not None}.values():
        slot.buffer.normal_(0.0, 0.02)
    marks = time_updates(engine)

    def begin() -> None:
        engine.breakdown.take(engine.global_steps)
        marks.clear()

    seconds, _, _ = time_steps(step_of(engine), case, engine.mesh, steps=STEPS, begin=begin)
    found = engine.breakdown.take(engine.global_steps).seconds
    adamw = sum(a.elapsed_time(b) for a, b in marks) / STEPS
    applied = int(engine.optimizer.applied.item())
    engine.close()
    return Parts(1000 * seconds, 1000 * found["exposed"], 1000 * found["step"], adamw), applied


def measure(case: Case, mesh: Mesh, *, world: int | None = None) -> Parts:
    parts, applied = run(case, world)
    gc.collect()
    torch.cuda.empty_cache()
    say(
        mesh,
        f"{case}{' moving nothing' if world else ''}: step {parts.step:.2f} ms, waiting {parts.waiting:.2f} "
        f"({parts.waiting / parts.step:.1%}), optimizer pass {parts.optimizer:.2f}, AdamW {parts.adamw:.2f}; "
        f"{applied} steps applied",
    )
    return parts


def median(rows: list[Parts]) -> Parts:
    return Parts(*(statistics.median(getattr(r, n) for r in rows) for n in Parts.__dataclass_fields__))


def main() -> None:
    case, rest = read_case(sys.argv[1:])
    mesh, cases = join_job(), {k: replace(case, accumulation=k) for k in (1, 4)}
    rows: dict[int, list[Parts]] = {k: [] for k in cases}
    for i in range(number(rest, "rounds=", 3)):
        for k in list(cases)[:: 1 if i % 2 == 0 else -1]:
            rows[k].append(measure(cases[k], mesh))
    one, four = median(rows[1]), median(rows[4])
    bound = 4 * (one.step - one.optimizer) + one.optimizer
    say(mesh, f"MEDIAN step {one.step:.2f} ms, waiting {one.waiting / one.step:.2%}, AdamW {one.adamw:.2f} ms")
    good = "ok" if four.step <= MOST * bound else "BAD"
    say(mesh, f"{good} four steps {four.step:.2f} ms, of {bound:.2f}: {four.step / bound:.3f} (at most {MOST})")
    rate = case.micro_batch * case.seq / one.step * 1000
    say(mesh, f"{rate:,.0f} tok/s/GPU, MFU {case.mfu(rate):.1%}")
    ranks = mesh.world_size
    wait_for_all(mesh)
    mesh.close()
    if ranks > 1:
        still = [measure(case, mesh, world=ranks) for _ in range(2)]
        base = min(p.step for p in still)
        say(mesh, f"slowdown against collectives that move nothing: {one.step / base - 1:+.1%} of {base:.2f} ms")


main()
