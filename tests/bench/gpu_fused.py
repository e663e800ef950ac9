"""The bare decoder with and without our kernels on one GPU: bytes predicted and measured, and milliseconds.

python tests/bench/gpu_fused.py

Exit 1: a phase of a case differs by a byte.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
from kernel_timing import millis, say
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parent.parent))
from phases import allocator_peaks, decoder_of

from zplan.planner.activations import activation_lines
from zplan.planner.config import Choice
from zplan.planner.ledger import merge
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.timeline import timeline

CASES = {
    "7b, 4 blocks": (replace(SHAPES["7b"], layers=4), Choice(0, 1, micro_batch=2, seq=2048)),
    "8b, 2 blocks": (replace(SHAPES["8b"], layers=2), Choice(0, 1, micro_batch=4, seq=2048)),
    "8b, 2 blocks, full": (
        replace(SHAPES["8b"], layers=2),
        Choice(0, 1, micro_batch=4, seq=2048, checkpointing="full"),
    ),
    "1.3b, 4 blocks, tied, odd": (replace(SHAPES["1.3b"], layers=4, tied=True), Choice(0, 1, micro_batch=3, seq=1000)),
}
KINDS = (("plain", "torch"), ("fused", "torch"), ("plain", "fused"), ("fused", "fused"))


def milliseconds(arch: Architecture, choice: Choice) -> float:
    """Of a forward and backward."""
    with torch.device("cuda"):
        model = decoder_of(arch, choice)
    model.to(torch.bfloat16)
    inputs, labels = (torch.randint(arch.vocab, (choice.micro_batch, choice.seq), device="cuda") for _ in range(2))

    def step() -> None:
        model(inputs, labels).backward()
        for p in model.parameters():
            p.grad = None

    return millis(step, 10)


def one(name: str, arch: Architecture, choice: Choice) -> int:
    spec = ModelSpec(name, decoder_units(arch), arch)
    ledger = merge(phases := timeline(spec.units).phases, activation_lines(spec, choice, phases))
    measured = allocator_peaks(arch, choice)
    gc.collect()
    torch.cuda.empty_cache()
    predicted = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
    off = {p: measured.get(p, 0) - n for p, n in predicted.items() if measured.get(p, 0) != n}
    shown = ", ".join(f"{p} {n:+,}" for p, n in sorted(off.items(), key=lambda x: -abs(x[1]))[:5]) or "equal"
    ms = milliseconds(arch, choice)
    gc.collect()
    torch.cuda.empty_cache()
    say(
        f"{name:26} loss {choice.cross_entropy}, kernels {choice.kernels}: {ms:7.2f} ms, predicted "
        f"{max(predicted.values()):>14,} measured {max(measured.values()):>14,}, {len(off)} phases off: {shown}"
    )
    return bool(off)


def main() -> None:
    wrong = 0
    for name, (arch, choice) in CASES.items():
        for loss, kernels in KINDS:
            wrong += one(name, arch, replace(choice, cross_entropy=loss, kernels=kernels))
    say(f"{wrong} of {len(CASES) * len(KINDS)} cases differ")
    sys.exit(bool(wrong))


main()
