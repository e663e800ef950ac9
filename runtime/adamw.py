"""The update of optimizers that have fused kernels: ours for AdamW on CUDA, torch's elsewhere.

A rule updates rows of one parameter group in place, divides gradients by the scale as it reads them, and leaves all as
it is where the skip flag is set. Scale, flag and step count stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zplan.cuda_ops.adamw import FusedAdamW, Slice, table_words
from zplan.cuda_ops.halves import merge, split
from zplan.runtime.norms import Scalars

Group = Mapping[str, Any]
"""The numbers of one parameter group: `lr`, `weight_decay` and whatever else its optimizer reads, by torch's names."""


@dataclass(frozen=True, eq=False)
class Row:
    """One contiguous slice that this rank updates: 1D tensors of equal length."""

    master: Tensor | None
    """fp32; in the compute dtype where there are no master weights; None where they are split into `half` and `low`."""
    grad: Tensor
    """fp32, or bf16 where masters are split. A rule may overwrite it."""
    states: tuple[Tensor, ...]
    key: int
    """Names the slice from step to step."""
    half: Tensor | None
    """The slice of the resident compute-dtype buffer that receives the new values, where it is not the master itself.
    """
    low: Tensor | None = None
    """int16: lower halves of split masters. See [Note: halves] in `cuda_ops/halves.py`."""


class Rule(Protocol):
    """What an optimizer does to the rows of one group."""

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None: ...


class TorchFused:
    """Torch's fused AdamW, Adam (L2) or SGD over a list of slices; no memory of their own.

    Momentum starts from zeros, which without dampening is what torch's first step comes to.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        weights, grads = [r.master for r in rows], [r.grad for r in rows]
        states = [list(column) for column in zip(*(r.states for r in rows), strict=True)]
        common = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "maximize": False}
        if self.name.startswith("sgd"):
            torch._fused_sgd_(
                weights,
                grads,
                states[0] if states else [],
                momentum=group["momentum"] if states else 0.0,
                dampening=0.0,
                nesterov=group["nesterov"],
                is_first_step=False,
                grad_scale=s.scale,
                found_inf=s.skip,
                **common,
            )
        else:
            fused = torch._fused_adamw_ if self.name == "adamw" else torch._fused_adam_
            fused(
                weights,
                grads,
                *states,
                [],
                [s.applied] * len(rows),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                amsgrad=False,
                grad_scale=s.scale,
                found_inf=s.skip,
                **common,
            )
        for r in rows:
            if r.half is not None:
                r.half.copy_(r.master)


class TorchHalves:
    """Torch's fused AdamW over split masters, which are put together part by part.

    Parameters
    ----------
    scratch
        1D fp32: two buffers of equal length, or three.
    bf16_grads
        Gradients may come in bf16: they are made fp32 in the third buffer.
    """

    def __init__(self, scratch: Tensor, *, bf16_grads: bool) -> None:
        self.whole, work, *wide = scratch.chunk(3 if bf16_grads else 2)
        self.work, self.wide = work.view(torch.int32), wide
        self.inner = TorchFused("adamw")

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        for r in rows:
            assert r.half is not None and r.low is not None, "a master that is not split"
            for at in range(0, r.low.numel(), self.whole.numel()):
                cut = slice(at, at + self.whole.numel())
                half, low = r.half[cut], r.low[cut]
                master = merge(half, low, self.whole[: low.numel()], self.work[: low.numel()])
                grad = r.grad[cut]
                if grad.dtype != torch.float32:
                    grad = self.wide[0][: grad.numel()].copy_(grad)
                part = Row(master, grad, tuple(x[cut] for x in r.states), r.key, None)
                self.inner.update([part], s, group)
                split(master, half, low, self.work[: low.numel()])


class KernelAdamW:
    """Our kernel: one launch for all slices of a group.

    Parameters
    ----------
    table
        1D int64 on the device, sized by `cuda_ops`; launches share it.
    """

    def __init__(self, table: Tensor) -> None:
        self.table, self.used = table, 0
        self.fused: dict[int, FusedAdamW] = {}

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        self._for(rows).step(
            [r.grad for r in rows],
            applied=s.applied,
            scale=s.scale,
            skip=s.skip,
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def _for(self, rows: Sequence[Row]) -> FusedAdamW:
        """The launch for these rows, made once."""
        key = rows[0].key
        if key in self.fused:
            assert len(self.fused[key].slices) == len(rows), "rows of a step may not change"
        else:
            start, self.used = self.used, self.used + table_words(len(rows))
            slices = [Slice(r.master, *r.states, r.half, low=r.low) for r in rows]
            self.fused[key] = FusedAdamW(slices, self.table[start : self.used])
        return self.fused[key]
