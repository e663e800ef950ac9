"""Are the kernels that models use right, and how fast are they beside torch's and Liger-Kernel's?

python tests/bench/gpu_model_kernels.py            all of it; zplan must be importable
python tests/bench/gpu_model_kernels.py checks     only whether they are right
python tests/bench/gpu_model_kernels.py tune       the kernel of cross-entropy in other shapes of threads, too
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import model_kernel_checks
import torch
import torch.nn.functional as F
from kernel_timing import DEVICE, millis, say

from zplan.cuda_ops import compiler, rms_norm, rotary, swiglu
from zplan.cuda_ops import linear_cross_entropy as lce
from zplan.runtime.decoder import rotate

TOKENS, WIDTH, FFN = 8192, 4096, 11008
BF16 = torch.bfloat16


def checks() -> int:
    """Every new tensor of torch's is filled with NaN first, so what a kernel does not write is seen."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    bad, worst = 0, 0.0
    for name, case in model_kernel_checks.CASES.items():
        torch.manual_seed(sum(name.encode()))
        try:
            found = case(DEVICE)
            worst = max(worst, found)
            good, told = found <= 1.0, f"{found:.2f} of its bound"
        except Exception:
            good, told = False, " | ".join(traceback.format_exc(limit=-3).splitlines()[-6:])
        bad += not good
        if not good:
            say(f"  BAD {name}: {told}")
    torch.use_deterministic_algorithms(False)
    say(f"{len(model_kernel_checks.CASES)} checks, {bad} bad, worst {worst:.2f} of its bound")
    return bad


def say_pair(name: str, moved: int, ours: float, *others: tuple[str, float]) -> None:
    beside = ", ".join(f"{who} {ms:.4f} ({ms / ours:.2f}x)" for who, ms in others)
    say(f"  {name}: ours {ours:.4f} ms, {moved / ours / 1e9:.2f} TB/s; {beside}")


# --- cross-entropy ------------------------------------------------------------------------------------------------


def plain(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x @ weight.t()).float(), target)


def liger(accum_dtype: torch.dtype | None) -> Callable[..., torch.Tensor] | None:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused
    except Exception as problem:
        say(f"  Liger-Kernel can't be imported: {problem!r}"[:300])
        return None

    def run(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        out = fused(x, weight, target, accum_dtype=accum_dtype)
        return out[0] if isinstance(out, tuple) else getattr(out, "loss", out)

    return run


def losses(vocab: int) -> None:
    """Forward and backward of the head: milliseconds, peak of what they allocate, errors beside plain fp32 logits."""
    torch.manual_seed(vocab)
    x = torch.randn(TOKENS, WIDTH, device=DEVICE).to(BF16).requires_grad_()
    weight = (torch.randn(vocab, WIDTH, device=DEVICE) * 0.02).to(BF16).requires_grad_()
    target = torch.randint(vocab, (TOKENS,), device=DEVICE)
    target[::10] = -100
    want: list[torch.Tensor] = []
    rows = {"plain torch": plain}
    for chunk in (1024, 2048, 4096):
        rows[f"ours, chunks of {chunk}"] = lambda a, b, t, c=chunk: lce.linear_cross_entropy(a, b, t, chunk=c)
    rows |= {"Liger": liger(None), "Liger, fp32 sums": liger(torch.float32)}
    for name, fn in rows.items():
        if fn is None:
            continue

        def step(f: Callable[..., torch.Tensor] = fn) -> torch.Tensor:
            x.grad = weight.grad = None
            loss = f(x, weight, target)
            loss.backward()
            return loss.detach()

        try:
            found = [step(), x.grad, weight.grad]
            want = want or [t.clone() for t in found]
            errors = [
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, want, strict=True)
            ]
            del found
            x.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            peak = torch.cuda.max_memory_allocated() - before
            ms = millis(step, 8)
            told = " ".join(f"{e:.1e}" for e in errors)
            say(f"  V {vocab}, {name}: {ms:.2f} ms, {peak / 2**20:.0f} MiB, off plain torch by {told}")
        except Exception as problem:
            say(f"  V {vocab}, {name}: {problem!r}"[:400])
    parts(vocab, x.detach(), weight.detach(), target)


def parts(vocab: int, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    """One chunk taken apart."""
    chunk = lce.CHUNK
    part, rows = x[:chunk], target[:chunk]
    logits = torch.empty(chunk, lce.padded_vocab(vocab, 2), dtype=BF16, device=DEVICE)[:, :vocab]
    out, total = torch.empty_like(part), torch.empty(weight.shape, dtype=torch.float32, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    times = {
        "logits": millis(lambda: torch.mm(part, weight.t(), out=logits)),
        "kernel": millis(lambda: lce.cross_entropy_(logits, rows, total[0, :chunk], lce.Loss(), grads=True)),
        "grad of x": millis(lambda: torch.mm(logits, weight, out=out)),
        "grad of weight": millis(lambda: lce._add_product(total, logits, part, start=True)),
        "and added": millis(lambda: lce._add_product(total, logits, part, start=False)),
        "last factor": millis(lambda: lce.rescale(total, one, one, BF16)),
    }
    say(f"    a chunk of {chunk}: " + ", ".join(f"{k} {v:.3f}" for k, v in times.items()) + " ms")
    speed, rate = 6 * chunk * vocab / times["kernel"] / 1e9, 2 * chunk * vocab * WIDTH / times["logits"] / 1e9
    say(f"    kernel {speed:.2f} TB/s, product {rate:.0f} TFLOP/s")
    if sys.argv[1:] == ["tune"]:
        for block, unroll in ((256, 2), (256, 4), (512, 1), (512, 2), (512, 4), (1024, 1), (1024, 2), (1024, 4)):
            defines = {"BLOCK": block, "UNROLL": unroll}
            ms = millis(
                lambda d=defines: lce.cross_entropy_(logits, rows, total[0, :chunk], lce.Loss(), grads=True, defines=d)
            )
            say(f"    kernel with {block} threads, {unroll} vectors: {ms:.3f} ms")


# --- the others ------------------------------------------------------------------------------------------------------


def norms() -> None:
    x, grad = (torch.randn(TOKENS, WIDTH, device=DEVICE).to(BF16) for _ in range(2))
    weight = torch.randn(WIDTH, device=DEVICE).to(BF16)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    theirs = F.rms_norm(leaves[0], (WIDTH,), leaves[1], 1e-5)
    _, rstd = rms_norm.forward(x, weight, 1e-5)
    rows = []
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger

        other = Liger.apply(leaves[0], leaves[1], 1e-5, 0.0, "llama", False)
        rows = [
            ("Liger", millis(lambda: Liger.apply(leaves[0], leaves[1], 1e-5, 0.0, "llama", False))),
            ("Liger", millis(lambda: torch.autograd.grad(other, leaves, grad, retain_graph=True))),
        ]
    except Exception as problem:
        say(f"  Liger's RMSNorm: {problem!r}"[:300])
    t = millis(lambda: F.rms_norm(x, (WIDTH,), weight, 1e-5))
    ours = millis(lambda: rms_norm.forward(x, weight, 1e-5))
    say_pair("RMSNorm forward", 2 * x.nbytes, ours, ("torch", t), *rows[:1])
    t = millis(lambda: torch.autograd.grad(theirs, leaves, grad, retain_graph=True))
    ours = millis(lambda: rms_norm.backward(grad, x, weight, rstd))
    say_pair("RMSNorm backward", 3 * x.nbytes, ours, ("torch", t), *rows[1:])
    used = rms_norm.SHARE, rms_norm.PARTS
    for share in (8, 16, 32, 64):
        rms_norm.SHARE = share
        ours = (
            millis(lambda: rms_norm.forward(x, weight, 1e-5)),
            millis(lambda: rms_norm.backward(grad, x, weight, rstd)),
        )
        say(f"    {share} elements a thread: forward {ours[0]:.4f}, backward {ours[1]:.4f} ms")
    rms_norm.SHARE = used[0]
    for count in (128, 256, 528):
        rms_norm.PARTS = count
        say(f"    backward in {count} parts: {millis(lambda: rms_norm.backward(grad, x, weight, rstd)):.4f} ms")
    rms_norm.PARTS = used[1]


def gates() -> None:
    gate, up, grad = (torch.randn(TOKENS, FFN, device=DEVICE).to(BF16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    theirs = F.silu(leaves[0]) * leaves[1]
    t = millis(lambda: F.silu(gate) * up)
    say_pair("SwiGLU forward", 3 * gate.nbytes, millis(lambda: swiglu.forward(gate, up)), ("torch", t))
    t = millis(lambda: torch.autograd.grad(theirs, leaves, grad, retain_graph=True))
    say_pair("SwiGLU backward", 5 * gate.nbytes, millis(lambda: swiglu.backward_(grad, gate, up)), ("torch", t))


def turns() -> None:
    heads, seq, dim = 32, 2048, 128
    x, grad = (torch.randn(TOKENS // seq, seq, heads, dim, device=DEVICE).to(BF16) for _ in range(2))
    cos, sin = (torch.randn(seq, dim // 2, device=DEVICE).to(BF16) for _ in range(2))
    leaf = x.clone().requires_grad_()
    theirs = rotate(leaf, cos, sin)
    t = millis(lambda: rotate(x, cos, sin))
    say_pair("rotary forward", 2 * x.nbytes, millis(lambda: rotary.turn(x, cos, sin, sign=1)), ("torch", t))
    t = millis(lambda: torch.autograd.grad(theirs, leaf, grad, retain_graph=True))
    say_pair("rotary backward", 2 * x.nbytes, millis(lambda: rotary.turn(grad, cos, sin, sign=-1)), ("torch", t))


def main() -> None:
    start = time.perf_counter()
    reason = compiler.available()
    took = time.perf_counter() - start
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {reason or 'kernels'} after {took:.1f} s")
    bad = checks()
    say(f"  after {time.perf_counter() - start:.0f} s")
    if sys.argv[1:] == ["checks"] or reason is not None:
        sys.exit(bad or reason)
    for vocab in (32000, 128256):
        losses(vocab)
    for part in (norms, gates, turns):
        try:
            part()
        except Exception:
            say(traceback.format_exc(limit=-3))
    say(f"{bad} bad, {time.perf_counter() - start:.0f} s")
    sys.exit(bad)


if __name__ == "__main__":
    main()
