"""`compile` goes through the blocks' forward alone, trains the same, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workload as w
from torch import nn

import zplan
from zplan.planner.activations import BOUND
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.predict import predict
from zplan.runtime import compiled, outcome, verify
from zplan.runtime.initialize import initialize

ARCH = w.LLAMA4


def train(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Losses, how often compiled graphs ran, and whether `close` put the blocks' own forward back."""
    compiled.BACKEND = counting
    runs.clear()
    losses = []
    model = w.build(ARCH, config["zplan"]["checkpointing"])
    plain = [b.forward.__func__ for b in model.blocks]
    engine, *_ = initialize(model=model, config=config, init=w.fill)
    for step in range(3):
        loss = engine(*w.batch(ARCH.vocab, step, rank, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    back = [b.forward.__func__ is f and "forward" not in vars(b) for b, f in zip(model.blocks, plain, strict=True)]
    return {"losses": losses, "runs": len(runs), "put back": all(back)}


runs: list[int] = []


def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
    def run(*args: Any) -> Any:
        runs.append(1)
        return graph.forward(*args)

    return run


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_train_the_same(run_ranks, stage):
    plain, comp = (w.config(stage, precision="bf16", compile=on) for on in (False, True))
    a, b = run_ranks(2, train, plain), run_ranks(2, train, comp)
    for x, y in zip(a, b, strict=True):
        assert x["losses"] == pytest.approx(y["losses"], rel=2e-3)
        assert x["runs"] == 0 and y["runs"] >= 3 * ARCH.layers
        assert x["put back"] and y["put back"]


def test_under_a_bound_only_more_is_wrong():
    """Rows of `zplan verify`, in the ranks and after them."""
    for row in (verify.Row, outcome.Line):
        assert not row("peak", "loss", 100, 60, bound=True).outside(0.01)
        assert row("peak", "loss", 100, 60).outside(0.01)
        assert row("peak", "loss", 100, 102, bound=True).outside(0.01)


def test_the_ledger_says_that_it_is_a_bound():
    a, b = (predict(w.spec(ARCH), Choice(3, 2, seq=16, compile=on)) for on in (False, True))
    assert a.per_phase() == b.per_phase()
    acts = [x for x in b.lines if x.kind == "activations"]
    assert acts and all(x.source == "estimate" and x.note == BOUND for x in acts)
    assert not any(x.note == BOUND for x in a.lines)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ZplanError, match="no unit of this model is a block"):
        initialize(model=nn.Linear(4, 4), config={**w.config(0), "zplan": {"compile": True}})


def test_plan_and_config_carry_it():
    plan = zplan.plan("smollm2-135m", gpus=2, mem=8, seq=64, compile=True)
    assert plan.choice.compile and '"compile": true' in plan.to_json()
    assert not zplan.plan("smollm2-135m", gpus=2, mem=8, seq=64).choice.compile
    with pytest.raises(ZplanError, match="compile"):
        zplan.plan("smollm2-135m", gpus=2, mem=8, config={"zplan": {"compile": "yes"}, "train_batch_size": 2})
