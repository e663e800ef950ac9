"""Predicted against measured activations of transformers' classes on one GPU, phase by phase; one line per case.

python tests/bench/gpu_classes.py [--device cpu] [--predict] [--detail FILE] [CASE ...]

CASE is a name, such as `qwen3`, or a part of what a line begins with. `--detail` writes every phase of the cases to a
file, and for those that differ the ledger's lines beside what the allocator and an observer of storages hold at the
phase's peak. `--device cpu` compares small shapes with the CPU's op lists; `--predict` measures nothing and needs no
GPU: without one it is compute capability 9.0. Exit 1: a phase is off by more than 1 % of a case's peak, for no reason
that `NAMED` knows, or a case failed. A case whose class refuses its attention is left out, which its line says.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
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
LITTLE = 64 * 2**20
"""Bytes that may be allocated before a case: room for libraries' workspaces, and for no model of a case before it."""
CONVOLUTION = "cuDNN's workspace for the convolution"
NAMED = {("vit", "forward.embed"): CONVOLUTION, ("vit", "backward.embed"): CONVOLUTION}
"""What a phase of a class holds that shapes don't tell, while it doesn't decide the peak (`docs/memory-model.md`)."""


@dataclass(frozen=True)
class Result:
    """Bytes by phase, of the phases that are compared. `reasons` are why some of them may differ."""

    ledger: Ledger
    predicted: dict[str, int]
    measured: dict[str, int]
    reasons: dict[str, str]

    @property
    def off(self) -> dict[str, int]:
        """What differs for no known reason, the largest first."""
        found = {p: n - self.predicted[p] for p, n in self.measured.items() if p not in self.named}
        return {p: found[p] for p in sorted(found, key=lambda p: -abs(found[p])) if found[p]}

    @property
    def named(self) -> dict[str, int]:
        """What differs for a known one, in phases below the peak."""
        top = max(self.measured.values())
        found = {p: self.measured[p] - self.predicted[p] for p in self.reasons if p in self.measured}
        return {p: n for p, n in found.items() if n and self.measured[p] < top}

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
    kind = case.config["model_type"]
    reasons = {p: why for (k, p), why in NAMED.items() if k == kind and case.choice.device == "cuda"}
    return Result(ledger, {p: expected.get(p, 0) for p in phases}, {p: seen.get(p, 0) for p in phases}, reasons)


def line(case: Case, r: Result) -> str:
    top, true = max(r.predicted.values()), max(r.measured.values())
    shown = "equal"
    if r.off:
        p = next(iter(r.off))
        shown = f"most {p} predicted {r.predicted[p]:,} measured {r.measured[p]:,} ({r.off[p]:+,})"
    shown += "".join(f"; {p} {n:+,}, {r.reasons[p]}" for p, n in r.named.items())
    if r.named:
        p = max(r.named, key=lambda p: r.measured[p])
        shown += f"; with it {p} is {100 * r.measured[p] / true:.1f} % of the peak"
    bad = "BAD" if r.worst > TOLERANCE else "ok "
    return (
        f"{bad} {case!s:58} predicted {top:>15,} measured {true:>15,} ({100 * (true / top - 1):+.3f} %) "
        f"phases off {len(r.off):2} of {len(r.measured):2}; {shown}"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def clear(*, on_gpu: bool) -> int:
    """Let go of everything that nobody holds; the bytes that are still allocated on the GPU."""
    gc.collect()
    if not on_gpu:
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def attempt(case: Case, tell_of: Callable[[Result], None], *, on_gpu: bool) -> tuple[str, Result | None]:
    """A case's line, and its result where it has one; whatever goes wrong stays in here."""
    try:
        held = clear(on_gpu=on_gpu)
        if held > LITTLE:
            raise RuntimeError(f"{held:,} bytes are still allocated from earlier cases, more than {LITTLE:,}")
        r = compare(case)
        clear(on_gpu=on_gpu)
        tell_of(r)
        return line(case, r), r
    except Exception as error:  # noqa: BLE001  (one case must not cost the others)
        text = traceback.format_exception_only(error)[-1].strip()[:200]
        refused = isinstance(error, ValueError) and "does not support an attention implementation" in str(error)
        return f"{'skip' if refused else 'BAD '}{case!s:58} {text}", None


def chosen(args: argparse.Namespace) -> list[Case]:
    card = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    found = list(cases(args.device, ".".join(map(str, card))))
    if not args.cases:
        return found
    names = {c.name for c in found}
    return [c for c in found if any(c.name == w if w in names else w in str(c) for w in args.cases)]


def summary(lines: list[str], results: list[Result], seconds: float) -> int:
    """Says it; how many cases are bad."""
    skipped = sum(x.startswith("skip") for x in lines)
    bad = len(lines) - skipped - sum(r.worst <= TOLERANCE for r in results)
    say(
        f"{len(lines)} cases, {sum(not r.off for r in results)} equal in every phase, {skipped} skipped, {bad} bad "
        f"({len(lines) - skipped - len(results)} of them failed), largest difference "
        f"{100 * max((r.worst for r in results), default=0):.3f} % of a peak, {seconds:.0f} s"
    )
    return bad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--detail", metavar="FILE", type=argparse.FileType("w"))
    parser.add_argument("cases", nargs="*", metavar="CASE")
    args = parser.parse_args()
    on_gpu = args.device == "cuda" and not args.predict
    where = torch.cuda.get_device_name() if on_gpu else "cpu"
    say(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}")
    if args.predict:
        for case in chosen(args):
            say(f"{case!s:58} predicted {ledger_of(case).peak_bytes():>15,}")
        return
    gc.freeze()  # What is imported is no case's garbage.
    start, lines, results = time.perf_counter(), [], []
    for case in chosen(args):

        def write(r: Result, case: Case = case) -> None:
            if args.detail:
                rows = tell(case, r.ledger, r.predicted, r.measured)
                args.detail.write("\n".join((line(case, r), *rows, "")))
                args.detail.flush()

        text, r = attempt(case, write, on_gpu=on_gpu)
        lines.append(text)
        results += [r] if r else []
        say(text)
    bad = summary(lines, results, time.perf_counter() - start)
    sys.exit(f"{bad} cases are off by more than {TOLERANCE:.0%} of their peak, or failed" if bad else 0)


if __name__ == "__main__":
    main()
