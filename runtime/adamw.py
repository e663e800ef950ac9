"""The arithmetic of the step, in two forms that hold the same state: our kernels on CUDA, torch's ops elsewhere.

[Note: averaging] Gradients reach the step as plain sums over ranks and micro-steps. Their mean, and the clipping, are
one factor that the update divides by as it reads them, so neither costs a pass. Norm, clip coefficient and the
non-finite flag stay on the device; the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zplan.cuda_ops.adamw import FusedAdamW, Slice, table_words
from zplan.cuda_ops.norm import GradNorm
from zplan.planner.states import norm_chunk


@dataclass(frozen=True)
class Hyper:
    """The numbers of one step, as `torch.optim.AdamW` means them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, eq=False)
class Row:
    """One contiguous slice that this rank updates: 1D tensors of equal length, all fp32 but `half`."""

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    half: Tensor | None
    """The slice of the resident compute-dtype buffer that receives the new values, where it is not the master itself.
    """


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


class TorchAdamW:
    """Torch's fused AdamW over a list of slices; norms in short stretches, in place."""

    def __init__(self, norms: Tensor) -> None:
        self.norms = norms  # fp32, one a stretch

    def landed(self, first_row: int, grads: Sequence[Tensor]) -> None:
        """Nothing: norms are taken in `square_sum`."""

    def square_sum(self, grads: Sequence[Tensor], into: Scalars, *, device: str) -> Tensor:
        """This rank's sum of squares, as a 0-dim tensor that may be summed over ranks."""
        parts = [part for grad in grads for part in grad.split(norm_chunk(device, grad.numel()))]
        for out, part in zip(self.norms.unbind(), parts, strict=True):
            torch.linalg.vector_norm(part, out=out)
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

    def update(self, rows: Sequence[Row], s: Scalars, hyper: Hyper) -> None:
        torch._fused_adamw_(
            [r.master for r in rows],
            [r.grad for r in rows],
            [r.exp_avg for r in rows],
            [r.exp_avg_sq for r in rows],
            [],
            [s.applied] * len(rows),
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=s.scale,
            found_inf=s.skip,
        )
        for r in rows:
            if r.half is not None:
                r.half.copy_(r.master)


class KernelAdamW:
    """Our kernels: one launch for all slices, norms taken on the reduce stream as each reduce lands.

    Parameters
    ----------
    norm_words, table
        1D int64 buffers on the device, sized by `cuda_ops`.
    num_rows
        Slices of this rank.
    """

    def __init__(self, norm_words: Tensor, table: Tensor, num_rows: int) -> None:
        self.norm = GradNorm(norm_words, num_rows)
        self.table, self.used = table, 0
        self.fused: dict[int, FusedAdamW] = {}

    def landed(self, first_row: int, grads: Sequence[Tensor]) -> None:
        """Norm and non-finite flag of gradients that were just reduced, on the current stream."""
        for i, grad in enumerate(grads):
            self.norm.add(first_row + i, grad)

    def square_sum(self, grads: Sequence[Tensor], into: Scalars, *, device: str) -> Tensor:
        """This rank's sum of squares in fp64; all of it was gathered by `landed`."""
        self.norm.finish()
        return self.norm.total

    def settle(self, total: Tensor, s: Scalars, *, mean: float, clip: float) -> None:
        self.norm.settle(
            applied=s.applied, norm=s.norm, coefficient=s.coefficient, scale=s.scale, skip=s.skip, mean=mean, clip=clip
        )

    def update(self, rows: Sequence[Row], s: Scalars, hyper: Hyper) -> None:
        self._for(rows).step(
            [r.grad for r in rows],
            applied=s.applied,
            scale=s.scale,
            skip=s.skip,
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
        )

    def _for(self, rows: Sequence[Row]) -> FusedAdamW:
        """The launch for these rows, made once; groups of rows share the table."""
        key = rows[0].master.data_ptr()
        if key in self.fused:
            assert len(self.fused[key].slices) == len(rows), "groups of a step may not change"
        else:
            start, self.used = self.used, self.used + table_words(len(rows))
            slices = [Slice(r.master, r.exp_avg, r.exp_avg_sq, r.half) for r in rows]
            self.fused[key] = FusedAdamW(slices, self.table[start : self.used])
        return self.fused[key]
