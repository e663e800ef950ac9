"""What each kernel must compute, in plain torch: the truth in float64, and the path where there are no kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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
        1D; fp32, or 16 bits without `add`.
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


def sum_grads(
    grads: Sequence[Tensor | None],
    spans: Sequence[tuple[int, int]],
    others: Tensor,
    rank: int,
    target: Tensor,
    start: int,
    *,
    add: bool,
) -> None:
    """Write, or add to what is there, one slice of gradients as for `copy_grads`, summed over ranks in their order.

    Parameters
    ----------
    others
        (N - 1, numel): the slice of every rank but this one, which is `rank`.
    target
        (numel,) fp32, the part of the flat address space from `start` on.
    """
    if not add:
        target.zero_()
    for r in range(len(others) + 1):
        if r == rank:
            copy_grads(grads, spans, target, start, add=True)
        else:
            target.add_(others[r - (r > rank)])


def cross_entropy_(
    logits: Tensor, target: Tensor, losses: Tensor, *, ignore_index: int, label_smoothing: float, grads: bool
) -> None:
    """Loss of each row of logits, and with `grads` its gradient in their place; 16-bit logits are widened to fp32.

    Parameters
    ----------
    logits
        (n, V).
    target
        (n,) int64. Rows with `ignore_index` have loss and gradient 0.
    losses
        (n,), in fp32 or the logits' own wider dtype; overwritten.
    label_smoothing
        Share of the target that is spread evenly over the vocabulary.
    """
    vocab = logits.shape[1]
    wide = logits.to(losses.dtype)
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)[:, None]
    lse = wide.logsumexp(-1)
    # A logit of +inf makes its whole row NaN, as log_softmax does.
    lse.masked_fill_(lse == math.inf, math.nan)
    losses.copy_(lse)
    losses.sub_(wide.gather(-1, index)[:, 0], alpha=1 - label_smoothing)
    if label_smoothing > 0:
        losses.sub_(wide.mean(-1), alpha=label_smoothing)
    losses.masked_fill_(ignored, 0.0)
    if not grads:
        return
    wide.sub_(lse[:, None]).exp_().sub_(label_smoothing / vocab)
    wide.scatter_add_(1, index, wide.new_full((), label_smoothing - 1).expand_as(index))
    wide.masked_fill_(ignored[:, None], 0.0)
    if wide.dtype != logits.dtype:
        logits.copy_(wide)


def rescale(grad: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * first * second`, computed in the dtype of the factors. `grad` is overwritten; it is the result where it
    has `dtype`.
    """
    factor = first * second
    if grad.dtype == factor.dtype:
        return grad.mul_(factor).to(dtype)
    return grad.copy_(grad.to(factor.dtype).mul_(factor))


def _wide(x: Tensor) -> Tensor:
    """In at least fp32."""
    return x if x.element_size() >= 4 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of `x` (..., C) over their root mean square, times `weight` (C,), and one over that root (..., 1)."""
    wide = _wide(x)
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * rstd).mul_(weight).to(x.dtype), rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight` from that of `rms_norm`'s output."""
    normed = _wide(x) * rstd
    wide = grad * normed
    grad_weight = wide.flatten(0, -2).sum(0).to(weight.dtype)
    mean = wide.mul_(weight).mean(-1, keepdim=True)
    wide = (grad * weight.to(wide.dtype)).sub_(normed.mul_(mean)).mul_(rstd)
    return wide.to(x.dtype), grad_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    wide = _wide(gate)
    return wide.sigmoid().mul_(wide).mul_(up).to(gate.dtype)


def swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """The gradients of `gate` and `up` written over them."""
    wide = _wide(gate)
    share = wide.sigmoid()
    silu = wide * share
    of_gate = (1 - share).mul_(wide).add_(1).mul_(share).mul_(up).mul_(grad)
    up.copy_(silu.mul_(grad))
    gate.copy_(of_gate)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """(B, T, H, D), whose halves are turned by the angles of (T, D/2), or back for a sign of -1."""
    a, b = _wide(x).chunk(2, dim=-1)
    cos, sin = _wide(cos)[:, None], _wide(sin)[:, None] * sign
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
