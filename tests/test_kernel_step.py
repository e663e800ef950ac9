"""The step as it runs on GPUs (a table of slices, norms as reduces land), on CPU ranks by the kernels' torch faces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_engine
import torch
import workload as w

from zplan.cuda_ops import compiler
from zplan.runtime import cut, optimizer


class Usable:
    """`compiler`, but that says kernels can run: their wrappers still find that they can't, and take torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(compiler, name)

    @staticmethod
    def usable(_device: Any) -> bool:
        return True


def look_at_rows(self: optimizer.ShardedOptimizer) -> None:
    """Each row of the norm is the sum of squares of what the slice holds, unless it is gone; then none is left."""
    norm = self.norms.norm
    for u in self.units if not self.choice.optimizer_in_backward else ():
        for i, piece in enumerate(self._measured(u)):
            want = self._grad(u, piece).double().square().sum()
            torch.testing.assert_close(norm.square_sum(self.first_row[u] + i), want, rtol=1e-12, atol=0)
    norm._rows[0::2].view(torch.float64).fill_(torch.nan)


def train_by_table(
    rank: int, world_size: int, arch: str, config: dict[str, Any], steps: int
) -> tuple[dict[str, Any], int]:
    """As `test_engine.train`, and how many kernel steps were built."""
    built = []

    class Counted(optimizer.KernelAdamW):
        def __init__(self, *args: Any) -> None:
            built.append(1)
            super().__init__(*args)

    def settle(self: optimizer.ShardedOptimizer, *args: Any) -> None:
        real_settle(self, *args)
        look_at_rows(self)

    real, real_settle = cut.choice_of, optimizer.ShardedOptimizer._settle
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cut, "choice_of", lambda training, mesh: replace(real(training, mesh), device="cuda"))
        m.setattr(optimizer, "compiler", Usable())
        m.setattr(optimizer, "KernelAdamW", Counted)
        m.setattr(optimizer.ShardedOptimizer, "_settle", settle)
        return test_engine.train(rank, world_size, arch, config, steps, False), len(built)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "accumulation", "world_size", "precision", "more"),
    [
        (0, 1, 1, "bf16", {}),
        (0, 2, 2, "bf16", {"deterministic": True}),
        (1, 2, 2, "bf16", {}),
        (2, 2, 2, "fp16", {}),
        (3, 1, 2, "bf16", {}),
    ],
)
def test_the_kernels_step_is_torchs(run_ranks, stage, accumulation, world_size, precision, more):
    config = w.config(stage, accumulation, precision=precision, piece=16384, **more)
    by_table = run_ranks(world_size, train_by_table, "llama4", config, 4)
    plain = run_ranks(world_size, test_engine.train, "llama4", config, 4, False)
    for (mine, built), theirs in zip(by_table, plain, strict=True):
        assert built == 1
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-2)
