"""Every model x checkpointing x stage x ranks: five steps, final parameters and ledger lines beside one plain process.

`test_hf.py` has a part of this that runs in a minute; here is all of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import any_model as m
import pytest
import torch

from zplan.planner.buffers import buffer_lines
from zplan.planner.ledger import Ledger, merge
from zplan.planner.states import state_lines
from zplan.planner.timeline import timeline
from zplan.runtime.detect import find_units
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Meter

pytest.importorskip("transformers")

from hf_models import ALL, build, recipe

STEPS = 5


def as_run(engine: Engine) -> Ledger:
    """States and buffers, with units in the order in which they run, which module trees need not follow."""
    place = {name: i for i, name in enumerate(engine.windows.schedule.order)}
    units = sorted((f.unit for f in find_units(engine.module)), key=lambda u: place[u.name])
    time, trained = timeline(units), [u.placement for u in reversed(engine.reducer.order)]
    placements = [*(u.placement for u in engine.units if u.placement.frozen), *trained]
    return merge(
        time.phases, state_lines(placements, engine.choice, time), buffer_lines(placements, engine.choice, time)
    )


def train(rank: int, world_size: int, name: str, checkpointing: str, stage: int) -> dict[str, Any]:
    losses, norms = [], []
    with Meter(torch.device("cpu")) as meter:
        model = build(name, checkpointing)
        engine, *_ = initialize(model=model, config=m.config(stage), checked=True)
        meter.attach(engine)
        for step in range(STEPS):
            losses.append(recipe(engine, engine.backward, step, rank, 0).item())
            engine.step()
            norms.append(engine.grad_norm.item())
        lines = [r for r in meter.compare(as_run(engine)).lines if r.name.startswith(("optim.", "params.", "grads."))]
    out = {"losses": losses, "norms": norms, "params": m.whole(engine), "units": [u.name for u in engine.units]}
    out |= {"off": [r for r in lines if r.difference], "lines": len(lines)}
    engine.close()
    return out


def train_all(rank: int, world_size: int, stage: int, checkpointing: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: train(rank, world_size, name, checkpointing, stage) for name in names}


@lru_cache
def reference(name: str, world_size: int) -> dict[str, Any]:
    path = "hf_models:build"
    return m.reference(path, (name, "none"), steps=STEPS, world_size=world_size, recipe="hf_models:recipe")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", ["none", "plain", "reentrant"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_model_equals_one_process_and_its_ledger(run_ranks, world_size, stage, checkpointing):
    results = run_ranks(world_size, train_all, stage, checkpointing, ALL, limit=800)
    for name in ALL:
        m.equal([r[name] for r in results], reference(name, world_size))
        for r in results:
            assert r[name]["lines"] > 8 and not r[name]["off"], name
