"""The step as it runs on GPUs (a table of slices, norms as reduces land), on CPU ranks by the kernels' torch faces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_engine
import workload as w

from zplan.cuda_ops import compiler
from zplan.runtime import engine, optimizer


class Usable:
    """`compiler`, but that says kernels can run: their wrappers still find that they can't, and take torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(compiler, name)

    @staticmethod
    def usable(_device: Any) -> bool:
        return True


def train_by_table(
    rank: int, world_size: int, arch: str, config: dict[str, Any], steps: int
) -> tuple[dict[str, Any], int]:
    """As `test_engine.train`, and how many kernel steps were built."""
    built = []

    class Counted(optimizer.KernelAdamW):
        def __init__(self, *args: Any) -> None:
            built.append(1)
            super().__init__(*args)

    real = engine.choice_of
    with pytest.MonkeyPatch.context() as m:
        m.setattr(engine, "choice_of", lambda training, mesh: replace(real(training, mesh), device="cuda"))
        m.setattr(optimizer, "compiler", Usable())
        m.setattr(optimizer, "KernelAdamW", Counted)
        return test_engine.train(rank, world_size, arch, config, steps, False), len(built)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "accumulation", "world_size", "precision"), [(0, 1, 1, "bf16"), (2, 2, 2, "fp16"), (3, 1, 2, "bf16")]
)
def test_the_kernels_step_is_torchs(run_ranks, stage, accumulation, world_size, precision):
    config = w.config(stage, accumulation, precision=precision, piece=16384)
    by_table = run_ranks(world_size, train_by_table, "llama4", config, 4)
    plain = run_ranks(world_size, test_engine.train, "llama4", config, 4, False)
    for (mine, built), theirs in zip(by_table, plain, strict=True):
        assert built == 1
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-2)
