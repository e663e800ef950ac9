"""What an engine held is free as soon as nobody holds it: no cycle keeps it until the garbage collector comes by."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import workload as w

from zplan.runtime.initialize import initialize

CASES = {
    **{f"stage {stage} on {world}": (stage, world, {}) for stage in range(4) for world in (1, 2)},
    "fp16, accumulation": (3, 2, {"precision": "fp16", "accumulation": 2}),
    "bf16, checkpointing": (2, 2, {"precision": "bf16", "checkpointing": "full"}),
    "optimizer in backward": (3, 2, {"optimizer_in_backward": True, "clip": 0.0}),
}


@pytest.fixture
def uncollected():
    w.build(w.LLAMA)  # the first on the meta device leaves frames of torch's own behind
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def lines(refs: dict[str, list[weakref.ref[torch.UntypedStorage]]]) -> set[str]:
    """Lines of the ledger that have storages alive."""
    return {line for line, storages in refs.items() if any(s() is not None for s in storages)}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken off"])
@pytest.mark.parametrize(("stage", "world", "more"), CASES.values(), ids=CASES)
def test_nothing_outlives_engine_and_model(stage, world, more, broken):
    engine, *_ = initialize(
        model=w.build(w.LLAMA), config=w.config(stage, **more), init=w.fill, world=world if world > 1 else None
    )
    model = engine.module
    for step in range(2):
        for micro_step in range(engine.choice.accumulation):
            loss = engine(*w.batch(w.LLAMA.vocab, step, 0, micro_step))
            engine.backward(loss)
        engine.step()
    with engine.summon(), torch.no_grad():
        model(*w.batch(w.LLAMA.vocab, 0, 0, 0))
    if broken:
        engine(*w.batch(w.LLAMA.vocab, 0, 0, 0))
    given = {line: list(refs) for line, refs in engine.arena._given.items()}
    assert {"params", "optim"} <= {line.partition(".")[0] for line in lines(given)}
    engine.close()
    del engine, _, loss
    assert all(line.startswith("params.") for line in lines(given)), "parameters keep what they show"
    del model
    assert not lines(given)
