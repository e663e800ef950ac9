"""Every ledger line equals the storage that an independent walk finds, on every rank, to the byte; so do all peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.predict import predict
from zplan.runtime.engine import initialize
from zplan.runtime.verify import Comparison, Meter


def measure(rank: int, world_size: int, arch_name: str, config: dict[str, Any]) -> Comparison:
    """Two metered steps; the second is compared."""
    arch = w.ARCHS[arch_name]
    accumulation = config["gradient_accumulation_steps"]
    with Meter(torch.device("cpu")) as meter:
        engine, *_ = initialize(model=w.build(arch, config["zplan"]["checkpointing"]), config=config, init=w.fill)
        meter.attach(engine)
        for step in range(2):
            for k in range(accumulation):
                batch = w.batch(arch.vocab, step, rank, k)
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                del batch, loss
        comparison = meter.compare(predict(w.spec(arch), engine.choice))
        engine.close()
    return comparison


def exact(results: list[Comparison], *, at_least: int = 20) -> None:
    for rank, c in enumerate(results):
        assert not c.off_by_more_than(0.0), f"rank {rank}: {c.off_by_more_than(0.0)}"
        assert len(c.lines) >= at_least and len(c.peaks) >= at_least


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ledger_equals_storages(run_ranks, stage, accumulation, world_size, checkpointing, precision):
    config = w.config(stage, accumulation, checkpointing=checkpointing, precision=precision)
    exact(run_ranks(world_size, measure, "llama", config))


@pytest.mark.gloo
@pytest.mark.parametrize("arch", ["gpt2", "llama-tied", "llama4"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ledger_of_other_shapes(run_ranks, arch, stage):
    """Tied heads, learned positions, several pieces a unit, a third ring slot."""
    config = w.config(stage, 1, checkpointing="full", precision="bf16", piece=16384, ring_slots=3)
    exact(run_ranks(2, measure, arch, config))
