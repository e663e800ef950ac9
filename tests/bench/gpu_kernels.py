"""Are the kernels right, and how fast are they beside torch's?

python tests/bench/gpu_kernels.py            all of it; zplan must be importable
python tests/bench/gpu_kernels.py checks     only whether they are right
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_checks
import torch
from kernel_timing import DEVICE, Adam, Copy, Norm, Sum, say

from zplan.cuda_ops import compiler


def checks() -> int:
    bad = 0
    for name, case in kernel_checks.CASES.items():
        torch.manual_seed(len(name))
        try:
            worst = f"{case(DEVICE):.2f} of its bound"
            good = float(worst.split()[0]) <= 1.0
        except AssertionError as problem:
            worst, good = repr(problem), False
        bad += not good
        say(f"  {'ok ' if good else 'BAD'} {name}: {worst}")
    return bad


def main() -> None:
    start = time.perf_counter()
    reason = compiler.available()
    took = time.perf_counter() - start
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {reason or 'kernels'} after {took:.1f} s")
    bad = checks()
    if sys.argv[1:] == ["checks"] or reason is not None:
        sys.exit(bad or reason)
    for numel in (5 * 10**8, 10**9, 2 * 10**9):
        a = Adam(numel)
        ours, theirs = ([fn(half=h) * 1e9 / numel for h in (True, False)] for fn in (a.ours, a.torch))
        say(f"  {numel:.0e} parameters, ms per 1e9 with / without 16-bit copy: ours {ours[0]:.2f} / {ours[1]:.2f}, ")
        apart = a.ours(half=True, split=True) * 1e9 / numel
        narrow = a.ours(half=True, split=True, bf16_grads=True) * 1e9 / numel
        say(f"     masters in halves {apart:.2f}, and gradients in bf16 {narrow:.2f}")
        say(f"     torch's norm, fused AdamW and copy {theirs[0]:.2f} / {theirs[1]:.2f}")
        del a
    n, c = Norm(), Copy()
    for numel in (2**28, 2**24):
        say(f"  norm of {numel} elements: ours {n.ours(numel):.4f} ms, torch {n.torch(numel):.4f} ms")
    for verb, add in (("write", False), ("add", True)):
        say(
            f"  7B block's gradients, bf16 to fp32, {verb}: ours {c.ours(add=add):.3f}, torch {c.torch(add=add):.3f} ms"
        )
    for ranks in (2, 8):
        s = Sum(ranks)
        say(f"  7B block's slice of 1 / {ranks}, sums over ranks of bf16, with norm / without:")
        for name, fn in (("ours", s.ours), ("torch", s.torch)):
            say(f"     {name} {fn(norm=True):.3f} / {fn(norm=False):.3f} ms")
    say(f"{bad} bad, {time.perf_counter() - start:.0f} s")
    sys.exit(bad)


if __name__ == "__main__":
    main()
