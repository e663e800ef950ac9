"""Predicted against measured activations of transformers' classes on one GPU, phase by phase; one line per case.

python tests/bench/gpu_classes.py [--device cpu] [--predict] [--detail] [CASE ...]

CASE is a name, such as `qwen3`, or a part of what a line begins with. `--detail` prints every phase of the cases, and
for those that differ the ledger's lines beside what the allocator and an observer of storages hold at the phase's peak.
`--device cpu` compares small shapes with the CPU's op lists; `--predict` measures nothing and needs no GPU.
Exit 1: a phase is off by more than 1 % of a case's peak, or a case failed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from dataclasses import dataclass

import torch
import transformers
from class_cases import Case, cases
from class_detail import tell
from class_models import build
from phases import AllocatorMeter, activation_ledger

from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import Ledger
from zplan.runtime.meter import StorageRegistry

TOLERANCE = 0.01
"""Of a case's measured peak, for the difference of any of its phases."""


@dataclass(frozen=True)
class Result:
    """Bytes by phase, of the phases that are compared."""

    ledger: Ledger
    predicted: dict[str, int]
    measured: dict[str, int]

    @property
    def off(self) -> dict[str, int]:
        """What differs, the largest first."""
        found = {p: n - self.predicted.get(p, 0) for p, n in self.measured.items()}
        return {p: found[p] for p in sorted(found, key=lambda p: -abs(found[p])) if found[p]}

    @property
    def worst(self) -> float:
        """Largest difference by the measured peak."""
        return max((abs(n) for n in self.off.values()), default=0) / max(self.measured.values())


def measured(case: Case) -> dict[str, int]:
    """What a step holds beside parameters, buffers and cuBLAS's workspaces, by phase."""
    if case.choice.device == "cpu":
        registry = StorageRegistry()
        with registry:
            step, model = build(case.config, case.choice, registry)
            registry.adopt(*model.parameters(), *model.buffers())
            states = registry.live_bytes
            registry.peaks.clear()
            step()
        return {phase: peak - states for phase, peak in registry.peaks.items()}
    meter = AllocatorMeter()
    step, _ = build(case.config, case.choice, meter)
    step()  # cuBLAS takes its workspaces for good
    states = torch.cuda.memory_stats()["requested_bytes.all.current"]
    meter.peaks.clear()
    step()
    return {phase: peak - states for phase, peak in meter.peaks.items()}


def ledger_of(case: Case) -> Ledger:
    return activation_ledger(read_architecture(case.config, case.name)[0], case.choice)


def compare(case: Case) -> Result:
    ledger = ledger_of(case)
    seen = measured(case)
    expected = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
    apart = ("idle", *(f"{kind}.{unit}" for kind in ("forward", "backward", "reduce") for unit in case.apart))
    phases = [p for p in {**expected, **seen} if not p.startswith(apart)]
    return Result(ledger, {p: expected.get(p, 0) for p in phases}, {p: seen.get(p, 0) for p in phases})


def line(case: Case, r: Result) -> str:
    top, true = max(r.predicted.values()), max(r.measured.values())
    shown = "equal"
    if r.off:
        p = next(iter(r.off))
        shown = f"most {p} predicted {r.predicted[p]:,} measured {r.measured[p]:,} ({r.off[p]:+,})"
    bad = "BAD" if r.worst > TOLERANCE else "ok "
    return (
        f"{bad} {case!s:58} predicted {top:>15,} measured {true:>15,} ({100 * (true / top - 1):+.3f} %) "
        f"phases off {len(r.off):2} of {len(r.measured):2}; {shown}"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def chosen(args: argparse.Namespace) -> list[Case]:
    found = list(cases(args.device))
    if not args.cases:
        return found
    names = {c.name for c in found}
    return [c for c in found if any(c.name == w if w in names else w in str(c) for w in args.cases)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    args = parser.parse_args()
    on_gpu = args.device == "cuda" and not args.predict
    where = torch.cuda.get_device_name() if on_gpu else "cpu"
    say(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}")
    gc.freeze()  # What is imported is no case's garbage.
    start, all_cases, results = time.perf_counter(), chosen(args), []
    for case in all_cases:
        try:
            if args.predict:
                say(f"{case!s:58} predicted {ledger_of(case).peak_bytes():>15,}")
                continue
            results.append(r := compare(case))
            say(line(case, r))
            for row in tell(case, r.ledger, r.predicted, r.measured) if args.detail else ():
                say(row)
        except Exception as error:  # noqa: BLE001  (one case must not cost the others)
            say(f"BAD {case!s:58} {traceback.format_exception_only(error)[-1].strip()}")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    if args.predict:
        return
    bad = len(all_cases) - sum(r.worst <= TOLERANCE for r in results)
    say(
        f"{len(all_cases)} cases, {sum(not r.off for r in results)} equal in every phase, {bad} bad "
        f"({len(all_cases) - len(results)} of them failed), largest difference "
        f"{100 * max((r.worst for r in results), default=0):.3f} % of a peak, {time.perf_counter() - start:.0f} s"
    )
    sys.exit(f"{bad} cases are off by more than {TOLERANCE:.0%} of their peak, or failed" if bad else 0)


if __name__ == "__main__":
    main()
