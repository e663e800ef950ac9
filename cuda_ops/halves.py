"""fp32 values in two arrays of 16 bits: the bf16 value that is nearest, and what it lacks.

[Note: halves] The bits of an fp32 number are those of its bf16 neighbour, shifted by 16, plus a difference that fits
into 16 bits with sign. So the weights that compute reads in bf16 serve as the upper halves of their fp32 masters: no
bit of the master is lost, and no byte is there twice. A value that lies exactly between two bf16 numbers goes to the
one of larger magnitude, since its difference would not fit otherwise; all others are rounded as torch rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIE = 1 << 15
"""Difference of a value that lies exactly between two bf16 numbers."""

QUIET_NAN = 0x7FC0
"""Its bits in bf16."""

OVER_ZERO = 0x7FFF8000
"""What a zero and a negative lower half come to; no NaN that is taken apart comes back with these bits."""


def merge(high: Tensor, low: Tensor, out: Tensor, work: Tensor) -> Tensor:
    """Write the fp32 values of two halves.

    A zero never has a negative lower half; where somebody wrote one over an upper half, it is a zero all the same.

    Parameters
    ----------
    high, low
        bf16 and int16, of equal shape.
    out
        fp32 of that shape. Returned.
    work
        int32 of that shape, overwritten.
    """
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    bits.mul_(work.copy_(bits).bitwise_and_(OVER_ZERO).ne_(OVER_ZERO))
    return out


def split(values: Tensor, high: Tensor, low: Tensor, work: Tensor) -> None:
    """Write the two halves of fp32 values.

    Parameters
    ----------
    values
        fp32; left as they are.
    high, low
        bf16 and int16, of equal shape.
    work
        int32 of that shape, overwritten.
    """
    high.copy_(values)
    upper = high.view(torch.int16)
    work.copy_(upper).bitwise_left_shift_(16)
    torch.sub(values.view(torch.int32), work, out=work)
    low.copy_(work)  # of a tie it keeps -TIE
    upper.add_(work.eq_(TIE))
    # A NaN's bits may have become any others by that.
    torch.eq(values, values, out=work)
    upper.mul_(work)
    upper.add_(work.sub_(1).mul_(-QUIET_NAN))
