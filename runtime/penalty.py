"""An L1 or L2 term over all trained parameters, on the slices that each rank keeps.

Written by hand, `sum(p.square().sum() for p in model.parameters())` reads parameters outside their own forward, where
stage 3 has not gathered them. Its gradient needs no gather: a rank adds that of its own slices to theirs, before norm
and clipping, as the term in the loss would have done.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.runtime.collectives import Collectives
from zplan.runtime.halves import values_of
from zplan.runtime.optimizer import ShardedOptimizer

CHUNK_NUMEL = 4 * 2**20
"""Elements whose values and signs are held at a time: 16 MiB each."""


class Penalty:
    """The term that counts in the step that comes, if any."""

    def __init__(self, optimizer: ShardedOptimizer, collectives: Collectives) -> None:
        self.optimizer, self.collectives = optimizer, collectives
        self.l1, self.l2 = 0.0, 0.0

    @torch.no_grad()
    def add(self, l1: float, l2: float) -> Tensor:
        """Have the term count in the coming step; its value, summed over ranks, as a 0-dim fp32 tensor."""
        if not (math.isfinite(l1) and math.isfinite(l2)):
            raise ZplanError(f"`penalty` with l1 {l1} and l2 {l2}", "give finite numbers")
        self.l1, self.l2 = self.l1 + l1, self.l2 + l2
        total = torch.zeros((), device=self.optimizer.norm.device)
        for u in self.optimizer.units:
            for w in self.optimizer.weights(u):
                for at in range(0, w.numel(), CHUNK_NUMEL):
                    part = values_of(w[at : at + CHUNK_NUMEL])
                    if l1:
                        total += l1 * torch.linalg.vector_norm(part, 1.0, dtype=torch.float32)
                    if l2:
                        total += l2 * torch.linalg.vector_norm(part, dtype=torch.float32).square()
        if self.optimizer.sharded:
            self.collectives.sum_scalar(total, "penalty")
        return total

    @torch.no_grad()
    def apply(self) -> None:
        """Add the term's gradient to those that were reduced; norms are taken anew."""
        if not self.l1 and not self.l2:
            return
        mean = self.optimizer.mean(self.collectives)
        self.optimizer.widen_grads()
        for u in self.optimizer.units:
            for grad, w in zip(self.optimizer.slices(u, "grad"), self.optimizer.weights(u), strict=True):
                grad.mul_(mean)
                for at in range(0, w.numel(), CHUNK_NUMEL):
                    cut = slice(at, at + CHUNK_NUMEL)
                    part = values_of(w[cut])
                    if self.l2:
                        grad[cut].add_(part, alpha=2.0 * self.l2)
                    if self.l1:
                        grad[cut].add_(part.sign(), alpha=self.l1)
                grad.div_(mean)
        self.optimizer.measure_again()
        self.forget()

    def forget(self) -> None:
        self.l1 = self.l2 = 0.0
