"""The first parameter whose gradient was not finite is named, from what the norms keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.layout import lay_out
from zplan.runtime.initialize import initialize
from zplan.runtime.nonfinite import params_within


def steps(rank: int, world_size: int, stage: int, names: list[str]) -> list[Any]:
    """What is said after a good step, after one with NaN in the named parameters' gradients, and after a good one."""
    arch = w.ARCHS["llama4"]
    config = w.config(stage, 1, precision="bf16", piece=16384)
    engine, *_ = initialize(model=w.build(arch), config=config, init=w.fill)
    bad = {n: p for n, p in engine.module.named_parameters() if n in names}
    said = []
    for step in range(3):
        poison = step == 1 and rank == 0
        hooks = [p.register_hook(lambda g: torch.full_like(g, float("nan"))) for p in bad.values() if poison]
        engine.backward(engine(*w.batch(arch.vocab, step, rank, 0)))
        engine.step()
        found = engine.first_nonfinite()
        said.append(None if found is None else (found.unit, found.params, found.rank, str(found)))
        for hook in hooks:
            hook.remove()
    applied = engine.optimizer.applied.item()
    engine.close()
    return [*said, applied]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 2), (3, 2)])
def test_the_last_unit_that_a_rank_owns_is_named_with_its_parameter(run_ranks, stage, world_size):
    results = run_ranks(world_size, steps, stage, ["embed.weight", "blocks.1.down.weight", "norm.weight"])
    for rank, (before, there, after, applied) in enumerate(results):
        assert before is None and after is None and applied == 2.0
        if rank == 0:
            assert there == ("norm", ("norm.weight",), 0, "`norm.weight` of unit `norm` on rank 0")
        else:
            # Of the small unit this rank owns padding alone. Without kernels norms are of stretches.
            assert there[0] == "blocks.1" and "blocks.1.down.weight" in there[1] and there[2] == rank


def test_parameters_of_a_stretch():
    layout = lay_out("u", [("a", 100), ("b", 10), ("c", 64)], world_size=1, piece_numel=128)
    assert params_within(layout, 0, 1) == ["a"] and params_within(layout, 99, 129) == ["a", "b"]
    assert params_within(layout, 100, 128) == [] and params_within(layout, 0, 10**6) == ["a", "b", "c"]
