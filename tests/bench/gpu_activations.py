"""Predicted against measured activations of the bare decoder on one GPU, phase by phase; one line per case.

python tests/bench/gpu_activations.py
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parent.parent))
from phases import allocator_peaks

from zplan.planner.activations import activation_lines
from zplan.planner.config import Choice
from zplan.planner.ledger import merge
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.timeline import timeline

# Blocks beyond the fourth repeat the third.
GPT2_XL = replace(SHAPES["gpt2-xl"], layers=4)
LLAMA_8B = replace(SHAPES["8b"], layers=2)
BYTES = Architecture("llama", 4, 512, 8, 4, 64, 1408, 257, 8192, tied=False)
CASES: dict[str, tuple[Architecture, Choice]] = {}


def case(name: str, arch: Architecture, batch: int, seq: int, **choice: str) -> None:
    CASES[name] = arch, Choice(0, 1, micro_batch=batch, seq=seq, **choice)


case("gpt2-xl, tied", GPT2_XL, 4, 1024)
case("gpt2-xl, tied, full, few tokens", GPT2_XL, 2, 1024, checkpointing="full")
case("gpt2-xl, tied, eager", GPT2_XL, 2, 1000, attention="eager")
case("gpt2-xl, tied, fp32", GPT2_XL, 3, 1000, precision="fp32")
case("8b, grouped heads", LLAMA_8B, 1, 4096)
case("8b, tied, full", replace(LLAMA_8B, tied=True), 2, 2048, checkpointing="full")
case("8b, odd batch", LLAMA_8B, 3, 1000)
case("8b, fp32", LLAMA_8B, 1, 1000, precision="fp32")
case("8b, fp32, full, sorted", LLAMA_8B, 1, 3500, precision="fp32", checkpointing="full")
case("8b, eager, full", LLAMA_8B, 1, 1000, attention="eager", checkpointing="full")
case("bytes", BYTES, 4, 1024)
case("bytes, tied", replace(BYTES, tied=True), 3, 1333)
case("bytes, fp32, eager", BYTES, 4, 1000, precision="fp32", attention="eager")
case("bytes, positions sorted", Architecture("gpt2", 2, 512, 8, 8, 64, 2048, 257, 4096, tied=True), 2, 3500)
case("bytes, one token", BYTES, 1, 1)


def main() -> None:
    wrong = 0
    for name, (arch, choice) in CASES.items():
        spec = ModelSpec(name, decoder_units(arch), arch)
        ledger = merge(phases := timeline(spec.units).phases, activation_lines(spec, choice, phases))
        measured = allocator_peaks(arch, choice)
        gc.collect()
        torch.cuda.empty_cache()
        predicted = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
        off = {p: measured.get(p, 0) - n for p, n in predicted.items()}
        worst = sorted((p for p in off if off[p]), key=lambda p: -abs(off[p]))
        wrong += bool(worst)
        shown = ", ".join(f"{p} {off[p]:+,}" for p in worst[:4]) or "equal"
        print(  # noqa: T201
            f"{name:34} {choice.micro_batch} x {choice.seq:5} {choice.precision} {choice.checkpointing:4} "
            f"{choice.attention:5} predicted {max(predicted.values()):>15,} measured {max(measured.values()):>15,} "
            f"phases off: {len(worst)} of {len(off)}; {shown}",
            flush=True,
        )
    sys.exit(f"{wrong} of {len(CASES)} cases differ" if wrong else 0)


main()
