"""Lion, Adagrad and AdamW with bf16 states: rules that torch has no fused kernel for, in a few in-place ops.

Rules go through a slice in parts of a scratch buffer, so that nothing is allocated. `go` is 1, or 0 in a step that is
skipped: all is then left as it is, without the host asking.

[Note: stochastic rounding] A second moment decays by 1 - beta2 of itself in a step, which at beta2 0.999 is less than
half a unit of bf16's last place: rounded to nearest it would never move. It is therefore rounded up with a probability
equal to the fraction that is cut off, and so are weights that have no fp32 master. The random bits are a hash of the
values themselves and of the step, so that a run can be repeated and resumed bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zplan.planner.states import NUM_COEFFICIENTS
from zplan.runtime.adamw import Group, Row
from zplan.runtime.norms import Scalars

HASH = -1640531535
"""2**32 / golden ratio, as a signed 32-bit number: multiplying spreads low bits over high ones."""


class Chunked:
    """A rule that goes through rows in parts.

    Parameters
    ----------
    scratch
        1D fp32: `num` buffers of equal length, then `NUM_COEFFICIENTS` scalars.
    """

    num = 1

    def __init__(self, scratch: Tensor) -> None:
        self.buffers = scratch[:-NUM_COEFFICIENTS].chunk(self.num)
        self.coefficients = scratch[-NUM_COEFFICIENTS:].unbind()

    def scaled(self, s: Scalars, *factors: float) -> tuple[Tensor, ...]:
        """`go` times each factor, as 0-dim tensors."""
        out = self.coefficients[: len(factors)]
        for o, factor in zip(out, factors, strict=True):
            torch.neg(s.skip, out=o)
            o.add_(1.0).mul_(factor)
        return out

    def parts(self, rows: Sequence[Row], s: Scalars) -> Iterator[tuple[Row, list[Tensor]]]:
        """Stretches of rows with their scratch; gradients divided by the scale, and finite."""
        length = self.buffers[0].numel()
        for r in rows:
            for at in range(0, r.master.numel(), length):
                cut = slice(at, at + length)
                grad = r.grad[cut]
                grad.div_(s.scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                half = None if r.half is None else r.half[cut]
                part = Row(r.master[cut], grad, tuple(x[cut] for x in r.states), r.key, half)
                yield part, [b[: grad.numel()] for b in self.buffers]


class Lion(Chunked):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, weight decay decoupled."""

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        keep, rate, weight = self.scaled(s, -lr * group["weight_decay"], lr, 1.0 - beta2)
        keep.add_(1.0)
        for r, (direction,) in self.parts(rows, s):
            (exp_avg,) = r.states
            torch.lerp(exp_avg, r.grad, 1.0 - beta1, out=direction)
            r.master.mul_(keep).sub_(direction.sign_().mul_(rate))
            exp_avg.lerp_(r.grad, weight)
            if r.half is not None:
                r.half.copy_(r.master)


class Adagrad(Chunked):
    """Adagrad as in torch, without decay of the learning rate."""

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        (go,) = self.scaled(s, 1.0)
        for r, (denominator,) in self.parts(rows, s):
            (total,) = r.states
            r.grad.add_(r.master, alpha=group["weight_decay"]).mul_(go)
            total.addcmul_(r.grad, r.grad)
            torch.sqrt(total, out=denominator).add_(group["eps"])
            r.master.addcdiv_(r.grad, denominator, value=-float(group["lr"]))
            if r.half is not None:
                r.half.copy_(r.master)


class AdamWBf16(Chunked):
    """AdamW with moments, and weights where there is no fp32 master, in bf16. See [Note: stochastic rounding]."""

    num = 3

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        keep, rate, first, second = self.scaled(s, -lr * group["weight_decay"], lr, 1.0 - beta1, 1.0 - beta2)
        keep.add_(1.0)
        correction, seed = self.coefficients[4], self._seed(s)
        rate.div_(self._correct(s, beta1, correction))
        self._correct(s, beta2, correction)
        for r, (m, v, w) in self.parts(rows, s):
            exp_avg, exp_avg_sq = r.states
            m.copy_(exp_avg).lerp_(r.grad, first)
            exp_avg.copy_(m)
            r.grad.square_()
            v.copy_(exp_avg_sq).lerp_(r.grad, second)
            # The squares are free from here on: they give the random bits, then hold the denominator.
            round_stochastically(v, exp_avg_sq, r.grad, seed)
            torch.div(v, correction, out=r.grad).sqrt_().add_(group["eps"])
            w.copy_(r.master).mul_(keep).addcdiv_(m.mul_(rate), r.grad, value=-1.0)
            if r.master.dtype == torch.bfloat16:
                round_stochastically(w, r.master, m, seed)
            else:
                r.master.copy_(w)
            if r.half is not None:
                r.half.copy_(r.master)

    def _seed(self, s: Scalars) -> Tensor:
        """A hash of the number of steps applied: 0-dim int32, whose bits are unlike those of the step before."""
        seed, shifted = (c.view(torch.int32) for c in self.coefficients[5:7])
        seed.copy_(s.applied)
        for shift in (15, 13, 16):
            seed.mul_(HASH)
            torch.bitwise_right_shift(seed, shift, out=shifted)
            seed.bitwise_xor_(shifted)
        return seed

    def _correct(self, s: Scalars, beta: float, out: Tensor) -> Tensor:
        """1 - beta to the number of steps applied, at least one."""
        torch.clamp(s.applied, min=1.0, out=out)
        return out.mul_(math.log(beta) if beta > 0 else -math.inf).expm1_().neg_()


def round_stochastically(values: Tensor, into: Tensor, noise: Tensor, seed: Tensor) -> None:
    """Round fp32 to bf16, up or down at random so that the mean is kept. See [Note: stochastic rounding].

    Parameters
    ----------
    values, noise
        fp32; `noise` gives random bits and is overwritten. Values that bf16 can hold come out as they are.
    seed
        0-dim int32.
    """
    bits, random = values.view(torch.int32), noise.view(torch.int32)
    random.bitwise_xor_(bits).add_(seed).mul_(HASH)
    random.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    random.add_(bits).bitwise_and_(-0x10000)
    into.copy_(noise)
