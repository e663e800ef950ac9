"""What is alive at the peaks of a step's phases: by the ledger, by an observer of storages, by CUDA's allocator."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from class_cases import Case
from class_models import build

from zplan.planner.ledger import Ledger
from zplan.runtime.meter import StorageRecord, StorageRegistry

SHOWN, PHASES = 40, 4
"""Groups of a list, and phases that are listed."""

Groups = Counter[tuple[int, str]]
"""How often a size is there with what is known of it."""


class PeakRegistry(StorageRegistry):
    """A registry that keeps what was alive at each phase's peak."""

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: dict[str, list[StorageRecord]] = {}

    def _note_peak(self) -> None:
        if self.live_bytes > self.peaks.get(self.phase, -1):
            self.at_peak[self.phase] = list(self._live.values())
        super()._note_peak()


class Marks:
    """A meter that leaves a mark of a size of its own in the allocator's history where a phase begins."""

    SIZE = 1_000_003

    def __init__(self) -> None:
        self.phases: list[str] = []

    def enter(self, phase: str) -> None:
        torch.empty(self.SIZE + 2 * len(self.phases), dtype=torch.uint8, device="cuda")
        self.phases.append(phase)


def of_ledger(ledger: Ledger, phase: str) -> Groups:
    return Counter({(x.nbytes, x.id): times for x, times in ledger.live(phase) if x.nbytes})


def observed(case: Case) -> dict[str, Groups]:
    """Beside the states, as ops show them. A fan-in's third gradient is the observer's own."""
    registry = PeakRegistry()
    with registry:
        step, model = build(case.config, case.choice, registry)
        if case.choice.device == "cuda":
            step()
        registry.adopt(*model.parameters(), *model.buffers())
        states = set(registry._live)
        registry.peaks.clear()
        # From here on the states are what they were; only what is new is of interest.
        old = {id(registry._live[k]) for k in states}
        step()
    return {
        phase: Counter((r.nbytes, f"{r.op} in {r.phase.rstrip('.0123456789')}") for r in records if id(r) not in old)
        for phase, records in registry.at_peak.items()
    }


def allocated(case: Case) -> dict[str, Groups]:
    """What a second step has allocated, with the line of Python that asked for it."""
    marks = Marks()
    step, _ = build(case.config, case.choice, marks)
    step()
    marks.phases.clear()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=2**20)
    try:
        step()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return replay(trace, marks.phases)


def replay(trace: Iterable[dict[str, Any]], phases: list[str]) -> dict[str, Groups]:
    """The blocks of each phase's peak, of those that the history saw from their birth on."""
    marks = {Marks.SIZE + 2 * i: phase for i, phase in enumerate(phases)}
    alive: dict[int, tuple[int, str]] = {}
    now, phase, peaks, found = 0, "idle", {}, {}
    for event in trace:
        size, address = event["size"], event["addr"]
        if event["action"] == "alloc" and size in marks:
            phase = marks[size]
        elif event["action"] == "alloc":
            alive[address] = size, _place(event.get("frames", []))
            now += size
        elif event["action"] == "free_completed" and address in alive:
            now -= alive.pop(address)[0]
        else:
            continue
        if now > peaks.get(phase, -1):
            peaks[phase], found[phase] = now, dict(alive)
    return {phase: Counter(blocks.values()) for phase, blocks in found.items()}


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is not torch's."""
    for f in frames:
        if "/torch/" not in f["filename"]:
            return f"{f['filename'].rpartition('/')[2]}:{f['line']} {f['name']}"
    return "backward or torch itself"


def tell(case: Case, ledger: Ledger, predicted: dict[str, int], measured: dict[str, int]) -> Iterable[str]:
    """Every phase, and the lists of those that differ most."""
    for phase, seen in measured.items():
        difference = seen - predicted[phase]
        yield f"  {phase:24} predicted {predicted[phase]:>15,} measured {seen:>15,} {difference:>+14,}"
    gaps = {p: abs(n - predicted[p]) for p, n in measured.items()}
    listed = [p for p in sorted(gaps, key=lambda p: -gaps[p]) if gaps[p]][:PHASES]
    if not listed:
        return
    lists = {"an observer of storages": observed(case)}
    gc.collect()
    if case.choice.device == "cuda":
        torch.cuda.empty_cache()
        lists["the allocator"] = allocated(case)
    for phase in listed:
        yield f"  {phase}: lines of the ledger"
        yield from _rows(of_ledger(ledger, phase))
        for who, found in lists.items():
            yield f"  {phase}: alive at the peak of {who}"
            yield from _rows(found.get(phase, Counter()))


def _rows(groups: Groups) -> Iterable[str]:
    order = sorted(groups.items(), key=lambda g: -g[0][0] * g[1])
    for (nbytes, what), times in order[:SHOWN]:
        yield f"    {nbytes * times:>15,} = {times:3} x {nbytes:>13,} {what}"
    rest = sum(n * times for (n, _), times in order[SHOWN:])
    yield f"    {sum(n * t for (n, _), t in order):>15,} in all" + (f", {rest:,} of it not shown" if rest else "")
