"""Norm of the gradients, clipping and the skip flag: what comes before any optimizer's update.

[Note: averaging] Gradients reach the step as plain sums over ranks and micro-steps. Their mean, and the clipping, are
one factor that the update divides by as it reads them, so neither costs a pass. Norm, clip coefficient and the
non-finite flag stay on the device; the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zplan.cuda_ops.norm import GradNorm
from zplan.planner.states import norm_chunk


class Scalars:
    """0-dim fp32 tensors on the device, over one buffer of `NUM_SCALARS`."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.applied, self.norm, self.coefficient, self.scale, self.skip, self.tokens, self.scratch = buffer.unbind()


def clip_scalars(s: Scalars, *, mean: float, clip: float) -> None:
    """Clip coefficient and divisor from the norm that is there."""
    s.coefficient.fill_(1.0)
    if clip > 0:
        torch.add(s.norm, 1e-6, out=s.scratch)
        torch.div(s.coefficient.fill_(clip), s.scratch, out=s.coefficient)
        s.coefficient.clamp_(max=1.0)
    torch.reciprocal(s.coefficient, out=s.scale)
    s.scale.div_(mean)


def _guard(value: Tensor, s: Scalars) -> None:
    """Set the skip flag where a 0-dim number is not finite."""
    # x - x is 0 for a finite x and NaN otherwise, and only NaN differs from 0.
    torch.sub(value, value, out=s.scratch)
    s.scratch.ne_(0.0)
    torch.maximum(s.skip, s.scratch, out=s.skip)


class TorchNorms:
    """Norms in short stretches with torch's own kernels, in place.

    Parameters
    ----------
    norms
        1D fp32, one a stretch, and perhaps more.
    lengths
        Elements of each slice of this rank.
    device
        Decides how long a stretch is.
    """

    def __init__(self, norms: Tensor, lengths: Sequence[int], *, device: str) -> None:
        self.device = device
        counts = [-(-n // norm_chunk(device, n)) for n in lengths]
        self.norms = norms[: sum(counts)]
        self.rows = self.norms.split(counts)

    def landed(self, first_row: int, grads: Sequence[Tensor]) -> None:
        """Norms of gradients that were just reduced, on the current stream."""
        for row, grad in zip(self.rows[first_row:], grads, strict=False):
            for out, part in zip(row.unbind(), grad.split(norm_chunk(self.device, grad.numel())), strict=True):
                torch.linalg.vector_norm(part, dtype=torch.float32, out=out)

    def guard(self, row: int, s: Scalars) -> None:
        """Set the skip flag where the norm of a slice is not finite; never take it back."""
        torch.linalg.vector_norm(self.rows[row], out=s.scratch)
        _guard(s.scratch, s)

    def square_sum(self, into: Scalars) -> Tensor:
        """This rank's sum of squares, as a 0-dim tensor that may be summed over ranks."""
        torch.linalg.vector_norm(self.norms, out=into.norm)
        return into.norm.square_()

    def settle(self, total: Tensor, s: Scalars, *, mean: float, clip: float) -> None:
        """Norm, clip coefficient, divisor, skip flag and step count from the sum of squares over all ranks."""
        assert total is s.norm or total.data_ptr() == s.norm.data_ptr()
        s.norm.sqrt_().mul_(mean)
        # x - x is 0 for a finite x and NaN otherwise, and only NaN differs from 0.
        torch.sub(s.norm, s.norm, out=s.skip)
        s.skip.ne_(0.0)
        clip_scalars(s, mean=mean, clip=clip)
        s.applied.add_(1.0).sub_(s.skip)


class KernelNorms:
    """Our kernels: norms are taken on the reduce stream as each reduce lands.

    Parameters
    ----------
    norm_words
        1D int64 on the device, sized by `cuda_ops`.
    num_rows
        Slices of this rank.
    """

    def __init__(self, norm_words: Tensor, num_rows: int) -> None:
        self.norm = GradNorm(norm_words, num_rows)

    def landed(self, first_row: int, grads: Sequence[Tensor]) -> None:
        """Norm and non-finite flag of gradients that were just reduced, on the current stream."""
        for i, grad in enumerate(grads):
            self.norm.add(first_row + i, grad)

    def guard(self, row: int, s: Scalars) -> None:
        """Set the skip flag where the norm of a slice is not finite; never take it back."""
        _guard(self.norm.square_sum(row), s)

    def square_sum(self, into: Scalars) -> Tensor:
        """This rank's sum of squares in fp64; all of it was gathered by `landed`."""
        self.norm.finish()
        return self.norm.total

    def settle(self, total: Tensor, s: Scalars, *, mean: float, clip: float) -> None:
        self.norm.settle(
            applied=s.applied, norm=s.norm, coefficient=s.coefficient, scale=s.scale, skip=s.skip, mean=mean, clip=clip
        )
