"""What the scripts about kernels time: each of ours, with the settings asked for, and torch's over the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch

from zplan.cuda_ops.adamw import FusedAdamW, Slice, table_words
from zplan.cuda_ops.grads import GradPlaces
from zplan.cuda_ops.norm import GradNorm, norm_words

DEVICE = torch.device("cuda", 0)
NUMBERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LLAMA_7B_BLOCK = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def millis(fn: Callable[[], object], repeats: int = 12) -> float:
    """Median milliseconds on the device, which begins when all has been queued."""
    for _ in range(3):
        fn()
    torch.cuda._sleep(2**25)  # some 17 ms: launches may take longer than what they launch
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        fn()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))[repeats // 2]


class Adam:
    """`numel` elements in slices of 32 Mi, with torch's tensors over the same memory."""

    def __init__(self, numel: int) -> None:
        self.flat = [torch.randn(numel, device=DEVICE) * 1e-2 for _ in range(3)] + [
            torch.rand(numel, device=DEVICE) * 1e-4
        ]
        self.half = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
        self.master, self.grads, self.m, self.v = ([*t.split(2**25)] for t in self.flat)
        self.numel, self.halves = numel, [*self.half.split(2**25)]
        values = torch.tensor([9.0, 2.0, 0.0], device=DEVICE).unbind()
        self.scalars = dict(zip(("applied", "scale", "skip"), values, strict=True))
        self.norm, self.norms = torch.zeros((), device=DEVICE), torch.zeros(len(self.grads), device=DEVICE)

    def ours(
        self, *, half: bool, split: bool = False, bf16_grads: bool = False, max_blocks: int = 0, **defines: int
    ) -> float:
        """Milliseconds of an update, the numbers of `defines` aside as tuned; `split`: masters in two halves."""
        rows = zip(self.master, self.m, self.v, self.halves, strict=True)
        slices = [Slice(p, m, v, h if half else None) for p, m, v, h in rows]
        if split:
            slices = [
                replace(s, master=None, half_copy=h, low=torch.zeros_like(h, dtype=torch.int16))
                for s, h in zip(slices, self.halves, strict=True)
            ]
        table = torch.empty(table_words(len(slices)), dtype=torch.int64, device=DEVICE)
        optimizer = FusedAdamW(slices, table, defines=defines, max_blocks=max_blocks)
        grads = [g.bfloat16() for g in self.grads] if bf16_grads else self.grads
        return millis(lambda: optimizer.step(grads, **self.scalars, **NUMBERS))

    def torch(self, *, half: bool) -> float:
        options = {**NUMBERS, "amsgrad": False, "maximize": False}
        beta1, beta2 = options.pop("betas")
        steps, scale, skip = [self.scalars["applied"]] * len(self.m), self.scalars["scale"], self.scalars["skip"]

        def step() -> None:
            for out, grad in zip(self.norms.unbind(), self.grads, strict=True):
                torch.linalg.vector_norm(grad, out=out)
            torch.linalg.vector_norm(self.norms, out=self.norm)
            state = (self.master, self.grads, self.m, self.v, [], steps)
            torch._fused_adamw_(*state, beta1=beta1, beta2=beta2, grad_scale=scale, found_inf=skip, **options)
            for h, p in zip(self.halves, self.master, strict=True):
                if half:
                    h.copy_(p)

        return millis(step, 6)


class Copy:
    """The bf16 gradients of a 7B block into its flat fp32 buffer."""

    def __init__(self) -> None:
        ends = list(accumulate(LLAMA_7B_BLOCK))
        self.spans = list(zip([0, *ends], ends, strict=False))
        self.grads = [torch.randn(n, device=DEVICE).bfloat16() for n in LLAMA_7B_BLOCK]
        self.target = torch.zeros(ends[-1], device=DEVICE)
        self.into = [self.target[a:b] for a, b in self.spans]

    def ours(self, *, add: bool, **defines: int) -> float:
        grads = GradPlaces(self.spans, defines=defines).of(self.grads)
        return millis(lambda: grads.copy(self.target, 0, add=add), 20)

    def torch(self, *, add: bool) -> float:
        verb = torch.Tensor.add_ if add else torch.Tensor.copy_
        return millis(lambda: [verb(t, g) for t, g in zip(self.into, self.grads, strict=True)], 20)


class Sum:
    """One rank's slice of a 7B block's gradients, summed with what the other ranks sent, all in bf16."""

    def __init__(self, ranks: int) -> None:
        c = Copy()
        self.spans, self.grads, self.ranks = c.spans, c.grads, ranks
        numel = c.target.numel() // ranks
        self.target, self.others = c.target[:numel], torch.randn(ranks - 1, numel, device=DEVICE).bfloat16()
        self.flat = torch.cat([g.view(-1) for g in self.grads])[:numel]
        self.norm = GradNorm(torch.empty(norm_words(1), dtype=torch.int64, device=DEVICE), 1)
        self.out = torch.zeros((), device=DEVICE)

    def ours(self, *, norm: bool, **defines: int) -> float:
        grads, row = GradPlaces(self.spans, defines=defines).of(self.grads), (self.norm, 0) if norm else None
        return millis(lambda: grads.sum(self.others, 0, self.target, 0, add=False, norm=row), 20)

    def torch(self, *, norm: bool) -> float:
        def run() -> None:
            self.target.copy_(self.flat)
            for other in self.others:
                self.target.add_(other)
            if norm:
                torch.linalg.vector_norm(self.target, out=self.out)

        return millis(run, 20)


class Norm:
    """The norm of one long slice."""

    def __init__(self) -> None:
        self.x, self.out = torch.randn(2**28, device=DEVICE), torch.zeros((), device=DEVICE)
        self.words = torch.empty(norm_words(1), dtype=torch.int64, device=DEVICE)

    def ours(self, numel: int, **defines: int) -> float:
        g = GradNorm(self.words, 1, defines=defines)
        return millis(lambda: g.add(0, self.x[:numel]), 30)

    def torch(self, numel: int) -> float:
        return millis(lambda: torch.linalg.vector_norm(self.x[:numel], out=self.out), 30)
