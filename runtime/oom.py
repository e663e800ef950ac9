"""When memory runs out: the ledger of the phase that it happened in, beside what is really held."""

from __future__ import annotations

from pathlib import Path

from zplan.planner.ledger import Ledger

MESSAGES = ("can't allocate memory", "CUDA driver error: out of memory")
"""What torch's CPU allocator, and its symmetric memory, say in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    refused = isinstance(error, RuntimeError) and any(said in str(error) for said in MESSAGES)
    return refused or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def rows(ledger: Ledger, phase: str, held: dict[str, int]) -> list[tuple[str, str, str]]:
    """`(line, predicted bytes, held bytes)` of one phase; held is known for what the runtime itself allocates.

    Lines that are held but not predicted in this phase come last: they are what went wrong, if anything did.
    """
    live = {line.id: line.nbytes * count for line, count in ledger.live(phase)}
    out = [(name, f"{nbytes:,}", f"{held[name]:,}" if name in held else "-") for name, nbytes in live.items()]
    return out + [(name, "0", f"{nbytes:,}") for name, nbytes in held.items() if name not in live]


def explain(error: BaseException, plan: Path, phase: str) -> str:
    """The lines of `phase` for an out-of-memory error of this process; empty for any other error."""
    if not is_out_of_memory(error):
        return ""
    from tabulate import tabulate

    from zplan.planner.plan_file import load_plan
    from zplan.planner.predict import predict
    from zplan.runtime.initialize import engines
    from zplan.runtime.progress import memory_now

    if not engines():
        return "memory ran out before the engine was there: no line of the plan was allocated yet"
    engine = engines()[-1]
    ledger = predict(load_plan(plan).spec, engine.choice)
    at = phase if phase in ledger.phases else "idle"
    predicted = ledger.per_phase()[ledger.phases.index(at)]
    found = tabulate(
        rows(ledger, at, engine.arena.held()),
        headers=(f"phase `{at}`, rank {engine.rank}", "predicted B", "held B"),
        colalign=("left", "right", "right"),
        disable_numparse=True,
    )
    total = f"all lines of this phase: {predicted:,} B predicted; this rank now: {memory_now(engine.device)}"
    return f"out of memory; the plan's lines in the phase it happened in:\n\n{found}\n\n{total}"
