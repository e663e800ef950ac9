"""The kernels that models use against `zplan.cuda_ops.reference` in float64, on whatever device they are given.

As in `kernel_checks`: on the CPU the same checks look at the torch path, and a check returns its worst error as a share
of its bound.
"""

import math

import torch
from kernel_checks import Guarded, share

from zplan.cuda_ops import linear_cross_entropy as lce
from zplan.cuda_ops import reference, rms_norm, rotary, swiglu

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Largest relative error of rounding to a dtype."""
SMALLEST = {torch.bfloat16: 1e-40, torch.float16: 2.0**-25, torch.float32: 1e-44}
"""Largest absolute error of rounding a number that is too small for it."""


def bound(want, dtype, arithmetic):
    """Rounding to `dtype`, and `arithmetic`, an absolute error of what comes before it."""
    return HALF_ULP[dtype] * 1.01 * (want.abs() + arithmetic) + arithmetic + SMALLEST[dtype]


def cross_entropy(device, dtype, *, smoothing=0.0, special=False, grads=True):
    worst = 0.0
    for vocab in (1, 7, 8, 50, 1000, 4099, 32768, 50257):
        stride = lce.padded_vocab(vocab, dtype.itemsize)
        guarded = Guarded((torch.randn(9 * stride, device=device) * 4).to(dtype), 0)
        logits = guarded.view.view(9, stride)[:, :vocab]
        target = torch.randint(vocab, (9,), device=device)
        target[2] = target[7] = -100
        if special:
            logits[2, vocab // 2] = math.nan
            logits[3, vocab // 2] = math.nan
            logits[4, vocab - 1] = math.inf
            logits[5, :] = -math.inf
            logits[6, : vocab // 2] = -math.inf
        losses = Guarded(torch.full((9,), math.nan, device=device), 1)
        wide, want = logits.double(), torch.empty(9, dtype=torch.float64, device=device)
        size = wide.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
        before = logits.clone()
        arguments = {"ignore_index": -100, "label_smoothing": smoothing}
        reference.cross_entropy_(wide, target, want, grads=grads, **arguments)
        lce.cross_entropy_(logits, target, losses.view, lce.Loss(-100, smoothing), grads=grads)
        guarded.check()
        losses.check()
        worst = max(worst, share(losses.view, want, 4e-7 * (4 * size + math.log(vocab) + 1)))
        if not grads:
            assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "logits were changed"
            continue
        likely = (wide + (1.0 - smoothing)).clamp(max=1.0).abs() * 1e-6 + 4e-6 * wide.abs()
        worst = max(worst, share(logits, wide, bound(wide, dtype, likely)))
    return worst


def bad_label(device):
    """A label out of range is loud, and reads nothing."""
    logits = torch.randn(2, 64, device=device)
    losses, target = torch.zeros(2, device=device), torch.tensor([64, 3], device=device)
    lce.cross_entropy_(logits, target, losses, lce.Loss(), grads=True)
    assert losses.isnan().tolist() == [True, False] and logits.isnan().all(-1).tolist() == [True, False]
    return 0.0


def rescale(device):
    worst = 0.0
    for numel in (0, 1, 7, 8, 4095, 70003):
        for before, after in (
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
        ):
            guarded = Guarded(torch.randn(numel, device=device).to(before), 0)
            if numel > 1:
                guarded.view[numel // 2] = math.inf
            first, second = torch.tensor(0.7, device=device), torch.tensor(1.9, device=device)
            want = guarded.view.double() * first.double() * second.double()
            out = lce.rescale(guarded.view, first, second, after)
            guarded.check()
            assert (out.data_ptr() == guarded.view.data_ptr()) == (before == after or not numel)
            worst = max(worst, share(out, want, bound(want, after, 2e-7 * want.abs())))
            same = out.clone()
            lce.rescale(out, torch.ones((), device=device), torch.ones((), device=device), after)
            assert torch.equal(out, same)
    return worst


def whole(device, dtype, *, bias=False, smoothing=0.0, reduction="mean", strided=False):
    """Loss and all gradients against float64, over chunks that do not divide the tokens."""
    worst = 0.0
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    for tokens, width, vocab, chunk in ((100, 64, 1000, 37), (5, 8, 11, 64), (64, 32, 257, 64), (1, 16, 50, 1)):
        x = torch.randn(tokens, width, device=device).to(dtype)
        if strided:
            x = torch.randn(tokens, 2 * width, device=device).to(dtype)[:, ::2]
        weight = (torch.randn(vocab, width, device=device) * 0.3).to(dtype)
        offset = torch.randn(vocab, device=device).to(dtype) if bias else None
        target = torch.randint(vocab, (tokens,), device=device)
        target[1::3] = -100
        leaves = [t.requires_grad_() for t in (x, weight, offset) if t is not None]
        loss = lce.linear_cross_entropy(
            *leaves[:2], target, bias=offset, label_smoothing=smoothing, reduction=reduction, chunk=chunk
        )
        (loss * 8).backward()
        exact = [t.detach().double().requires_grad_() for t in leaves]
        logits = torch.nn.functional.linear(*exact)
        want = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
        (want * 8).backward()
        worst = max(worst, float(((loss - want).abs() / want.abs().clamp(min=1)).detach()) / tolerance)
        for mine, theirs in zip(leaves, exact, strict=True):
            assert mine.grad.dtype == dtype
            worst = max(worst, float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) / tolerance)
    return worst


WIDTHS = (1, 100, 1023, 4096, 11008)


def norm(device, dtype, *, rows=21, offset=0, special=False):
    worst = 0.0
    for width in WIDTHS:
        x, grad = (Guarded(torch.randn(rows * width, device=device).to(dtype), offset).view for _ in range(2))
        x, grad = x.view(rows, width), grad.view(rows, width)
        weight = torch.randn(width, device=device).to(dtype)
        if special and rows > 3:
            x[2, width // 2], x[3, 0] = math.nan, math.inf
        out, rstd = rms_norm.forward(x, weight, 1e-5)
        want, want_rstd = reference.rms_norm(x.double(), weight.double(), 1e-5)
        worst = max(worst, share(out, want, bound(want, dtype, 1e-6 * want.abs())))
        worst = max(worst, share(rstd, want_rstd, 1e-6 * want_rstd))
        if special:
            continue
        found = rms_norm.backward(grad, x, weight, rstd)
        wanted = reference.rms_norm_backward(grad.double(), x.double(), weight.double(), want_rstd)
        size = (grad.double() * weight.double()).abs() + x.double().abs() * want_rstd
        scales = (1e-6 * want_rstd * size * (1 + (grad * weight).double().abs().mean(-1, keepdim=True)) * 8,)
        parts = 1e-6 * (grad.double() * x.double() * want_rstd).abs().sum(0)
        for mine, exact, arithmetic in zip(found, wanted, (*scales, parts), strict=True):
            worst = max(worst, share(mine, exact, bound(exact, dtype, arithmetic)))
    return worst


def gated(device, dtype, *, offset=0, special=False):
    worst = 0.0
    for numel in (0, 1, 7, 8, 4095, 8192, 8193, 70003):
        gate, up = (Guarded((torch.randn(numel, device=device) * 3).to(dtype), offset) for _ in range(2))
        grad = Guarded(torch.randn(numel, device=device).to(dtype), offset)
        if special and numel > 3:
            gate.view[0], gate.view[1], gate.view[2], up.view[3] = math.nan, math.inf, -100.0, math.inf
        exact = [g.view.double() for g in (gate, up)]
        want = reference.swiglu(*exact)
        size = 1e-6 * exact[0].abs() * exact[1].abs()
        worst = max(worst, share(swiglu.forward(gate.view, up.view), want, bound(want, dtype, size)))
        if special:
            continue
        sizes = (grad.view.double() * exact[1]).abs() * (1 + exact[0].abs()), (grad.view.double() * exact[0]).abs()
        reference.swiglu_backward_(grad.view.double(), *exact)
        swiglu.backward_(grad.view, gate.view, up.view)
        for mine, wanted, size in zip((gate, up), exact, sizes, strict=True):
            mine.check()
            worst = max(worst, share(mine.view, wanted, bound(wanted, dtype, 1e-6 * size)))
    return worst


def turned(device, dtype, *, offset=0):
    worst = 0.0
    for shape in ((2, 5, 3, 8), (1, 7, 2, 128), (3, 1, 1, 2), (2, 9, 4, 80), (2, 3, 5, 6), (0, 3, 2, 4)):
        x = Guarded(torch.randn(math.prod(shape), device=device).to(dtype), offset).view.view(shape)
        cos, sin = (torch.randn(shape[1], shape[3] // 2, device=device).to(dtype) for _ in range(2))
        for sign in (1, -1):
            want = reference.rotary(x.double(), cos.double(), sin.double(), sign=sign)
            arithmetic = (
                2e-7 * reference.rotary(x.double().abs(), cos.double().abs(), -sin.double().abs(), sign=1).abs()
            )
            arithmetic += 2e-7 * x.double().abs().amax() * 4 if x.numel() else 0.0
            worst = max(worst, share(rotary.turn(x, cos, sin, sign=sign), want, bound(want, dtype, arithmetic)))
    return worst


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CASES = {
    "bad label": bad_label,
    "rescale": rescale,
    "whole, bias and smoothing": lambda d: whole(d, torch.bfloat16, bias=True, smoothing=0.2),
    "whole, sum": lambda d: whole(d, torch.bfloat16, reduction="sum"),
    "whole, strided": lambda d: whole(d, torch.bfloat16, strided=True),
    "rms norm, a row": lambda d: norm(d, torch.bfloat16, rows=1),
    "rms norm, many rows": lambda d: norm(d, torch.bfloat16, rows=600),
    "rms norm, no row": lambda d: norm(d, torch.bfloat16, rows=0),
}
for word, dtype_ in DTYPES.items():
    CASES |= {
        f"cross-entropy {word}": lambda d, t=dtype_: cross_entropy(d, t),
        f"cross-entropy {word}, smoothing": lambda d, t=dtype_: cross_entropy(d, t, smoothing=0.1),
        f"cross-entropy {word}, NaN and inf": lambda d, t=dtype_: cross_entropy(d, t, special=True),
        f"cross-entropy {word}, loss alone": lambda d, t=dtype_: cross_entropy(d, t, grads=False),
        f"whole {word}": lambda d, t=dtype_: whole(d, t),
        f"rms norm {word}": lambda d, t=dtype_: norm(d, t),
        f"rms norm {word}, unaligned": lambda d, t=dtype_: norm(d, t, offset=1),
        f"rms norm {word}, NaN and inf": lambda d, t=dtype_: norm(d, t, special=True),
        f"swiglu {word}": lambda d, t=dtype_: gated(d, t),
        f"swiglu {word}, unaligned": lambda d, t=dtype_: gated(d, t, offset=1),
        f"swiglu {word}, NaN and inf": lambda d, t=dtype_: gated(d, t, special=True),
        f"rotary {word}": lambda d, t=dtype_: turned(d, t),
        f"rotary {word}, unaligned": lambda d, t=dtype_: turned(d, t, offset=1),
    }
"""`whole` is the loss with its matrix products; the rest is one kernel each."""
