"""Which settings of the kernels are fastest on this GPU? What `compiler.TUNED` holds came from here.

python tests/bench/gpu_tune.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from kernel_timing import Adam, Copy, Norm, Sum, millis, say

from zplan.cuda_ops import compiler


def short(setting: dict[str, int]) -> str:
    return "/".join(f"{k[0]}{v}" for k, v in setting.items())


def adamw() -> None:
    """One setting after the other, each from the best so far."""
    a = Adam(10**9)
    other = torch.empty_like(a.half)
    say(f"  bf16 copy of 2 GB: {4 / millis(lambda: other.copy_(a.half), 20):.2f} TB/s read and written")
    flat, twin = a.flat[0], a.flat[1]
    say(f"  fp32 copy of 4 GB: {8 / millis(lambda: twin.copy_(flat), 20):.2f} TB/s read and written")
    best: dict[str, int] = dict(compiler.TUNED["adamw"])
    trials = [
        [{"BLOCK": b, "UNROLL": u} for b in (128, 256, 512) for u in (1, 2, 4)],
        [{"CHUNK": c} for c in (4096, 8192, 16384, 32768, 65536)],
        [{"STREAM": s} for s in (1, 0)],
        [{"max_blocks": 132 * k} for k in (4, 8, 16, 0)],
    ]
    for group in trials:
        found = [(a.ours(half=True, **{**best, **t}), t) for t in group]
        say("  adamw " + "  ".join(f"{short(t)} {ms:.3f}" for ms, t in found))
        best |= min(found, key=lambda x: x[0])[1]
    say(f"  adamw best {best}: {a.ours(half=True, **best):.3f} ms, without copy {a.ours(half=False, **best):.3f}")
    for block, unroll in ((128, 2), (256, 1), (256, 2), (256, 4), (512, 2)):
        setting = {"BLOCK": block, "UNROLL": unroll}
        say(f"  adamw split {short(setting)}: {a.ours(half=True, split=True, **setting):.3f} ms")


def norm() -> None:
    n = Norm()
    for block, unroll in ((128, 4), (256, 2), (256, 4), (256, 8), (512, 2), (512, 4), (1024, 2)):
        setting = {"BLOCK": block, "UNROLL": unroll}
        say(f"  norm {short(setting)}: 2^28 {n.ours(2**28, **setting):.4f} ms, 2^24 {n.ours(2**24, **setting):.4f}")


def tell(name: str, settings: Sequence[tuple[int, int, int, int]], **timed: Callable[..., float]) -> None:
    """A line for each (threads a block, vectors in flight, elements a block, STREAM)."""
    for setting in (dict(zip(("BLOCK", "UNROLL", "CHUNK", "STREAM"), row, strict=True)) for row in settings):
        times = ", ".join(f"{what} {fn(**setting):.3f} ms" for what, fn in timed.items())
        say(f"  {name} {short(setting)}: {times}")


def copy() -> None:
    c = Copy()
    settings = [(256, 4, 8192, 1), (128, 4, 8192, 1), (256, 2, 8192, 1), (256, 4, 16384, 1), (256, 4, 8192, 0)]
    tell("copy", settings, write=partial(c.ours, add=False), add=partial(c.ours, add=True))


def sums() -> None:
    s = Sum(2)
    settings = [(256, 4, 8192, 1), (256, 2, 8192, 1), (512, 2, 8192, 1), (128, 4, 8192, 1), (256, 4, 4096, 1)]
    settings.append((256, 4, 8192, 0))
    tell("sums", settings, with_norm=partial(s.ours, norm=True), without=partial(s.ours, norm=False))


if __name__ == "__main__":
    adamw()
    norm()
    copy()
    sums()
