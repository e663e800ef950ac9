"""Each kernel against `zplan.cuda_ops.reference` on fresh random inputs, on whatever device it is given.

On the CPU the same checks look at the torch path. A check returns its worst error as a share of its bound.
"""

import math

import torch

from zplan.cuda_ops import reference
from zplan.cuda_ops.adamw import FusedAdamW, Slice, table_words
from zplan.cuda_ops.grads import GradPlaces
from zplan.cuda_ops.halves import merge, split
from zplan.cuda_ops.norm import GradNorm, norm_words

EPS = 2.0**-23
GUARD = 96
"""Elements around every buffer that must keep their values."""
LENGTHS = [0, 1, 3, 64, 1000, 16384, 16385, 70003]
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Guarded:
    """A 1D tensor that begins `offset` elements past a 16-byte boundary, with marked memory on both sides."""

    def __init__(self, values: torch.Tensor, offset: int) -> None:
        self.low, self.high = GUARD + offset, GUARD + offset + values.numel()
        self.whole = torch.full((self.high + GUARD,), 77.0, dtype=values.dtype, device=values.device)
        self.view = self.whole[self.low : self.high]
        self.view.copy_(values)

    def check(self) -> None:
        assert bool((self.whole[: self.low] == 77).all() and (self.whole[self.high :] == 77).all()), "written outside"


def scalars(device, *values):
    return [torch.tensor(float(v), device=device) for v in values]


def share(found, expected, bound):
    """Largest error over its bound; NaN counts as equal to NaN alone."""
    found = found.double()
    assert torch.equal(found.isnan(), expected.isnan()), "NaN in other places"
    both = expected.isfinite() & found.isfinite()
    assert torch.equal(found[~both & ~found.isnan()], expected.float().double()[~both & ~found.isnan()])
    return float(((found - expected).abs() / bound)[both].max()) if bool(both.any()) else 0.0


def adamw(
    device,
    *,
    offsets=(0,) * 5,
    half=torch.bfloat16,
    step=1,
    scale=3.7,
    skip=0.0,
    numbers=None,
    poison=None,
    apart=False,
    grads=torch.float32,
):
    """One update of slices of all lengths; `offsets` of master, gradient, the two moments and the 16-bit copy.

    With `apart` masters are in two halves, which take the places of master and copy. `grads`: the gradients' dtype.
    """
    numbers = numbers or ADAMW
    parts, slices = [], []
    for i, n in enumerate(LENGTHS):
        values = [torch.randn(n, device=device) for _ in range(3)] + [torch.rand(n, device=device) ** 4]
        values[1] *= scale
        if poison is not None and n > 2:
            values[1][n // 2] = poison
        values[1] = values[1].to(grads)
        first = [v.float() for v in values]
        if apart:
            values[0], high = halves(values[0])[::-1]
        part = [Guarded(v, o) for v, o in zip(values, offsets, strict=False)]
        if apart:
            part.append(Guarded(high, offsets[4]))
        elif half is not None and i != 3:
            part.append(Guarded(torch.full((n,), math.nan, dtype=half, device=device), offsets[4]))
        master, _, m, v, *copy = (g.view for g in part)
        lr_scale, decay_scale = {4: (0.5, 0.0), 5: (3.0, 0.5)}.get(i, (1.0, 1.0))
        whole, low = (None, master) if apart else (master, None)
        slices.append(Slice(whole, m, v, copy[0] if copy else None, lr_scale, decay_scale, low))
        parts.append((part, first))
    table = torch.zeros(table_words(len(slices)), dtype=torch.int64, device=device)
    applied, scale_t, skip_t = scalars(device, step, scale, skip)
    optimizer = FusedAdamW(slices, table)
    optimizer.step([part[1].view for part, _ in parts], applied=applied, scale=scale_t, skip=skip_t, **numbers)
    return max(
        _adamw_share(s, part, old, step, float(scale_t), skip, numbers)
        for s, (part, old) in zip(slices, parts, strict=True)
    )


def _adamw_share(s, part, old, step, scale, skip, numbers):
    for g in part:
        g.check()
    master, _, m, v, *copy = (g.view for g in part)
    if master.dtype == torch.int16:
        low, master = master, merge(copy[0], master, torch.empty_like(m), torch.empty_like(m, dtype=torch.int32))
        known = ~master.isnan()
        for found, want in zip((copy[0], low), halves(master), strict=True):
            assert torch.equal(found[known], want[known]), "halves"
        copy = []
    if skip:
        assert all(torch.equal(a, b) for a, b in zip((master, m, v), (old[0], old[2], old[3]), strict=True)), (
            "skipped step"
        )
        return 0.0
    betas, eps = numbers["betas"], numbers["eps"]
    lr, decay = numbers["lr"] * s.lr_scale, numbers["weight_decay"] * s.weight_decay_scale
    want_p, want_m, want_v = reference.adamw(
        *old, step=step, scale=scale, lr=lr, betas=betas, eps=eps, weight_decay=decay
    )
    grad = old[1].double().abs() / scale
    size_m = betas[0] * old[2].double().abs() + (1 - betas[0]) * grad + 1e-44
    update = lr / (1 - betas[0] ** step) * size_m / ((want_v / (1 - betas[1] ** step)).sqrt() + eps)
    if copy:
        assert torch.equal(copy[0].float().nan_to_num(7.0), master.to(copy[0].dtype).float().nan_to_num(7.0)), (
            "16-bit copy"
        )
    return max(
        share(m, want_m, 1.2 * EPS * size_m),
        share(v, want_v, 2.5 * EPS * (want_v.abs() + 1e-38)),
        share(master, want_p, EPS * (old[0].double().abs() + 6 * update)),
    )


def halves(values):
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, high, low, torch.empty_like(values, dtype=torch.int32))
    return high, low


def norm(device, *, offset=0, dtype_range=1.0, dtype=torch.float32):
    """Sums of squares of slices of all lengths, twice, in fp32 the second time: equal bits; then the scalars."""
    values = [(torch.randn(n, device=device) * dtype_range).to(dtype) for n in LENGTHS]
    found = []
    for kind in (dtype, torch.float32):
        grads = [Guarded(x.to(kind), offset).view for x in values]
        g = GradNorm(torch.empty(norm_words(len(grads)), dtype=torch.int64, device=device), len(grads))
        for row, grad in enumerate(grads):
            g.add(row, grad)
        g.finish()
        assert g.first_nonfinite() is None
        found.append(float(g.total))
    assert found[0] == found[1], "two runs, two sums"
    expected = sum(float(x.double().square().sum()) for x in grads)
    return max(abs(found[0] - expected) / expected / (2 * EPS), settled(device, g, found[0]))


def settled(device, g, total):
    applied, *outputs = scalars(device, 4, 9, 9, 9, 9)
    worst = 0.0
    for clip in (0.0, 1.0, 1e30):
        g.settle(
            applied=applied,
            **dict(zip(("norm", "coefficient", "scale", "skip"), outputs, strict=True)),
            mean=1 / 24,
            clip=clip,
        )
        want = reference.settle(total, mean=1 / 24, clip=clip)
        worst = max(
            worst, *(abs(float(a) - b) / (4 * EPS * (abs(b) + 1e-30)) for a, b in zip(outputs, want, strict=True))
        )
    assert float(applied) == 7.0
    return worst


def nonfinite(device, bad=math.nan, dtype=torch.float32):
    """The first row and offset, and a step that is marked to be skipped."""
    for offset in (0, 1):
        for row, at in ((2, 1), (5, 16383), (7, 0), (7, 70002), (7, 40001)):
            grads = [Guarded(torch.randn(n, device=device).to(dtype), offset).view for n in LENGTHS]
            grads[row][at] = bad
            grads[7][70002] = -bad
            g = GradNorm(torch.empty(norm_words(len(grads)), dtype=torch.int64, device=device), len(grads))
            for i in (7, 0, 6, 3, 1, 2, 5, 4):
                g.add(i, grads[i])
            g.finish()
            assert g.first_nonfinite() == (row, at), (g.first_nonfinite(), row, at)
            applied, *outputs = scalars(device, 4, 9, 9, 9, 9)
            g.settle(
                applied=applied,
                **dict(zip(("norm", "coefficient", "scale", "skip"), outputs, strict=True)),
                mean=1.0,
                clip=1.0,
            )
            assert float(outputs[3]) == 1.0 and float(applied) == 4.0
    return 0.0


def unit(device, num, offset=0, *, strided=False):
    """Spans and gradients of one unit, of all dtypes, some missing, some not finite; and its length."""
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    spans, grads, at = [], [], 0
    for i in range(num):
        n = [9000, 64, 1, 0, 700, 12801, 4096][i % 7]
        spans.append((at + offset, at + offset + n))
        at = -(-(at + n) // 64) * 64
        grad = torch.randn(n, device=device).to(dtypes[i % 3])
        if n > 3:
            grad[1], grad[2] = math.inf, math.nan
        grads.append(
            None
            if i % 5 == 4
            else Guarded(grad, i % 4).view
            if n % 2
            else grad.view(2, -1).t()
            if strided
            else grad.view(2, -1)
        )
    return spans, grads, at


def copy(device, *, add, offset=0, num=11, strided=False, into=torch.float32):
    """A unit of gradients of all dtypes, whole and window by window; equal bits."""
    spans, grads, at = unit(device, num, offset, strided=strided)
    total, mine = at + 256, GradPlaces(spans).of(grads)
    for start, end in ((0, total), (0, 128), (64, 8192 + 64), (8960, 22000), (at, total), (5, 5)):
        target = Guarded(torch.randn(end - start, device=device).to(into), offset)
        want = target.view.clone() if add else torch.zeros_like(target.view)
        reference.copy_grads(grads, spans, want, start, add=add)
        if not add:
            target.view.fill_(math.nan)
        mine.copy(target.view, start, add=add)
        target.check()
        torch.testing.assert_close(target.view, want, rtol=0, atol=0, equal_nan=True)
    return 0.0


def sums(device, *, add, dtype, ranks=3, offset=0, num=11, finite=False, strided=False, **defines):
    """Windows of a unit as every rank sums them, with the norm of what comes out and without; equal bits."""
    spans, grads, at = unit(device, num, offset, strided=strided)
    if finite:
        grads = [None if g is None else g.nan_to_num(0.5, 0.25) for g in grads]
    mine, worst, normed = GradPlaces(spans, defines=defines).of(grads), 0.0, 0
    for start, end in ((0, at + 64), (64, 8192 + 64), (8961, 22000), (at, at + 3)):
        others = Guarded(torch.randn((ranks - 1) * (end - start), device=device).to(dtype), offset)
        came = others.view.view(ranks - 1, -1)
        for rank in range(ranks):
            out = Guarded(torch.randn(end - start, device=device), offset)
            want, before = out.view.clone(), out.view.clone()
            reference.sum_grads(grads, spans, came, rank, want, start, add=add)
            norm = GradNorm(torch.empty(norm_words(2), dtype=torch.int64, device=device), 2)
            norm.add(0, out.view[:0])
            for given in (None, (norm, 1), (norm, 1)):
                out.view.copy_(before if add else torch.full_like(before, math.nan))
                mine.sum(came, rank, out.view, start, add=add, norm=given)
                out.check()
                torch.testing.assert_close(out.view, want, rtol=0, atol=0, equal_nan=True)
            norm.finish()
            total, bad = reference.square_sum(want)
            assert norm.first_nonfinite() == (None if bad < 0 else (1, bad)), (norm.first_nonfinite(), bad)
            if bad < 0:
                normed += 1
                worst = max(worst, abs(float(norm.total) - total) / total / (2 * EPS))
    assert normed or not finite, "no window had a norm"
    return worst


CASES = {
    "adamw bf16 copy": lambda d: adamw(d),
    "adamw fp16 copy, step 1000": lambda d: adamw(d, half=torch.float16, step=1000),
    "adamw no copy, step 3": lambda d: adamw(d, half=None, step=3),
    "adamw equal offsets": lambda d: adamw(d, offsets=(3, 3, 3, 3, 3)),
    "adamw unequal offsets": lambda d: adamw(d, offsets=(1, 2, 3, 0, 1)),
    "adamw odd copy": lambda d: adamw(d, offsets=(0, 0, 0, 0, 1)),
    "adamw beta 0.999, no decay": lambda d: adamw(
        d, step=77, numbers={"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    ),
    "adamw beta 0": lambda d: adamw(d, numbers={**ADAMW, "betas": (0.0, 0.0)}),
    "adamw NaN": lambda d: adamw(d, poison=math.nan),
    "adamw inf": lambda d: adamw(d, poison=math.inf),
    "adamw split": lambda d: adamw(d, apart=True),
    "adamw split, unequal offsets": lambda d: adamw(d, apart=True, offsets=(1, 2, 3, 0, 1)),
    "adamw split, odd copy": lambda d: adamw(d, apart=True, offsets=(0, 0, 0, 0, 1), step=1000),
    "adamw split, NaN": lambda d: adamw(d, apart=True, poison=math.nan),
    "adamw split, inf": lambda d: adamw(d, apart=True, poison=math.inf),
    "adamw split, skipped": lambda d: adamw(d, apart=True, poison=math.nan, skip=1.0),
    "adamw split, bf16 gradients": lambda d: adamw(d, apart=True, grads=torch.bfloat16, step=3),
    "adamw split, bf16 gradients, unequal offsets": lambda d: adamw(
        d, apart=True, grads=torch.bfloat16, offsets=(1, 2, 3, 0, 1)
    ),
    "adamw split, bf16 gradients, odd": lambda d: adamw(d, apart=True, grads=torch.bfloat16, offsets=(0, 1, 0, 0, 0)),
    "adamw fp16 gradients": lambda d: adamw(d, half=torch.float16, grads=torch.float16),
    "adamw skipped": lambda d: adamw(d, poison=math.nan, skip=1.0),
    "norm": lambda d: norm(d),
    "norm unaligned": lambda d: norm(d, offset=3),
    "norm bf16": lambda d: norm(d, dtype=torch.bfloat16) + norm(d, dtype=torch.bfloat16, offset=3),
    "norm fp16": lambda d: norm(d, dtype=torch.float16),
    "norm past 1e19": lambda d: norm(d, dtype_range=1e25),
    "non-finite NaN": lambda d: nonfinite(d),
    "non-finite NaN bf16": lambda d: nonfinite(d, dtype=torch.bfloat16),
    "non-finite inf": lambda d: nonfinite(d, math.inf),
    "copy": lambda d: copy(d, add=False),
    "copy add": lambda d: copy(d, add=True),
    "copy unaligned": lambda d: copy(d, add=False, offset=1) + copy(d, add=True, offset=2),
    "copy 150 gradients": lambda d: copy(d, add=False, num=150) + copy(d, add=True, num=150),
    "copy into bf16": lambda d: copy(d, add=False, into=torch.bfloat16),
    "copy 150 gradients into bf16": lambda d: copy(d, add=False, num=150, into=torch.bfloat16),
    "copy into fp16, unaligned": lambda d: copy(d, add=False, into=torch.float16, offset=1),
    "sums bf16": lambda d: sums(d, add=False, dtype=torch.bfloat16) + sums(d, add=True, dtype=torch.bfloat16),
    "sums fp32 of 8": lambda d: sums(d, add=False, dtype=torch.float32, ranks=8),
    "sums fp16 of 2, unaligned": lambda d: sums(d, add=True, dtype=torch.float16, ranks=2, offset=1),
    "sums and norms": lambda d: max(
        sums(d, add=a, dtype=torch.bfloat16, ranks=2, finite=True, offset=o) for a in (False, True) for o in (0, 3)
    ),
    "sums of 150 gradients": lambda d: sums(d, add=False, dtype=torch.bfloat16, ranks=2, num=150, finite=True),
    # Four chunks for each of the 1,024 blocks that a launch has at most.
    "sums of many chunks": lambda d: sums(
        d, add=False, dtype=torch.bfloat16, ranks=2, num=28, finite=True, BLOCK=32, CHUNK=32
    ),
    "sums strided": lambda d: sums(d, add=False, dtype=torch.bfloat16, strided=True),
    "copy strided": lambda d: copy(d, add=True, strided=True),
}
