"""Each kernel once or twice, on small inputs, for tools that slow everything down: see gpu_sanitize.sh."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_checks
import model_kernel_checks
import torch
from kernel_timing import DEVICE, say

CASES = (
    *(
        "adamw bf16 copy",
        "adamw unequal offsets",
        "adamw split",
        "adamw split, unequal offsets",
        "norm unaligned",
        "non-finite NaN",
        "copy unaligned",
        "sums bf16",
        "sums fp16 of 2, unaligned",
        "rescale",
    ),
    *("cross-entropy bf16", "cross-entropy fp32, smoothing", "cross-entropy fp16, loss alone", "bad label"),
    *("rms norm bf16", "rms norm fp16, unaligned", "rms norm, no row", "swiglu bf16", "swiglu fp32, unaligned"),
    *("rotary fp16", "rotary bf16, unaligned"),
)
WITH_PRODUCTS = ("whole bf16", "whole, bias and smoothing")
"""For memcheck alone: under racecheck cuBLAS fails, and its products may read what lies between rows, and drop it."""


def main() -> None:
    known = {**kernel_checks.CASES, **model_kernel_checks.CASES}
    for name in (*CASES, *(WITH_PRODUCTS if sys.argv[1:] == ["memcheck"] else ())):
        torch.manual_seed(sum(name.encode()))
        found = known[name](DEVICE)
        assert found <= 1.0, f"{name}: {found:.2f} of its bound"
    torch.cuda.synchronize()
    say(f"{len(CASES)} checks or more are right")


if __name__ == "__main__":
    main()
