"""What each kernel must compute, in plain torch: the truth in float64, and the path where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NORM_CHUNK = 65536
"""Elements that are widened to float64 at a time."""


def adamw(  # noqa: PLR0913  an optimizer's numbers, all of them named
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    scale: float = 1.0,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW with decoupled weight decay, in float64.

    Parameters
    ----------
    step
        Number of steps applied, this one included.
    scale
        What gradients are divided by.

    Returns
    -------
    tuple
        New master, exp_avg, exp_avg_sq.
    """
    p, g, m, v = (t.double() for t in (master, grad, exp_avg, exp_avg_sq))
    g = g / scale
    p = p * (1 - lr * weight_decay)
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = (v / (1 - betas[1] ** step)).sqrt() + eps
    return p - lr / (1 - betas[0] ** step) * m / denominator, m, v


def square_sum(x: Tensor) -> tuple[float, int]:
    """Sum of squares in float64, and the offset of the first element that is not finite, -1 if there is none."""
    total, bad = 0.0, -1
    for start in range(0, x.numel(), NORM_CHUNK):
        part = x[start : start + NORM_CHUNK].double()
        total += float(part.square().sum())
        if bad < 0 and not bool(part.isfinite().all()):
            bad = start + int((~part.isfinite()).nonzero()[0])
    return total, bad


def settle(total: float, *, mean: float, clip: float) -> tuple[float, float, float, float]:
    """Norm, clip coefficient, what gradients are divided by, and the skip flag, from a sum of squares."""
    norm = total**0.5 * mean
    finite = norm - norm == 0.0
    coefficient = min(1.0, clip / (norm + 1e-6)) if clip > 0 and finite else 1.0
    return norm, coefficient, 1.0 / (coefficient * mean), 0.0 if finite else 1.0


def copy_grads(
    grads: Sequence[Tensor | None], spans: Sequence[tuple[int, int]], target: Tensor, start: int, *, add: bool
) -> None:
    """Write or add gradients into the part of a flat address space that begins at `start` and that `target` holds.

    Parameters
    ----------
    grads
        fp32, bf16 or fp16, any shape and layout; None counts as zeros.
    spans
        `(start, end)` of each gradient in the flat address space, in elements, in order.
    target
        1D fp32.
    add
        If false, everything is overwritten; what no gradient fills becomes 0.
    """
    if not add:
        target.zero_()
    end = start + target.numel()
    for grad, (low, high) in zip(grads, spans, strict=True):
        first, last = max(low, start), min(high, end)
        if grad is None or first >= last:
            continue
        into, part = target[first - start : last - start], grad.reshape(-1)[first - low : last - low]
        into.add_(part) if add else into.copy_(part)


def sum_slices(slices: Tensor, out: Tensor, *, add: bool) -> None:
    """Write, or add to what is there, the sum of (N, numel) slices into `out`, (numel,) fp32, in order."""
    if not add:
        out.copy_(slices[0])
    for one in slices if add else slices[1:]:
        out.add_(one)
