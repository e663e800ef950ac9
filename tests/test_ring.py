"""Between passes a stage-3 parameter shows NaN, never another block's weights; inside `summon` it is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.errors import ZplanError
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize, summon


def start(stage: int, *, steps: int = 1, checkpointing: str = "none") -> tuple[Engine, list[torch.Tensor]]:
    engine, *_ = initialize(model=w.build(w.LLAMA4, checkpointing), config=w.config(stage), init=w.fill)
    for step in range(steps):
        loss = engine(*w.batch(w.LLAMA4.vocab, step, engine.rank, 0))
        engine.backward(loss)
        engine.step()
    return engine, list(engine.module.parameters())


def stray_reads(rank: int, world_size: int, stage: int) -> dict[str, object]:
    engine, params = start(stage)
    blocks = engine.module.blocks
    outside = [b.q.weight.sum().item() for b in blocks]
    shapes = [tuple(p.shape) for p in params]
    with summon(engine.module):
        inside = [b.q.weight.clone() for b in blocks]
        state = {k: v.clone() for k, v in engine.state_dict().items()}
    same = [a is b for a, b in zip(params, engine.module.parameters(), strict=True)]
    again = [b.q.weight.sum().item() for b in blocks]
    try:
        engine.state_dict()
        refused = ""
    except ZplanError as error:
        refused = str(error)
    engine.close()
    return {
        "outside": outside,
        "inside": [x.sum().item() for x in inside],
        "again": again,
        "shapes": shapes,
        "same": same,
        "refused": refused,
        "state": {k: v.numpy() for k, v in state.items()},
    }


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stray_reads_are_nan_and_summon_is_right(run_ranks, stage):
    whole = run_ranks(1, stray_reads, 0)[0]
    results = run_ranks(2, stray_reads, stage)
    for r in results:
        assert all(x != x for x in r["outside"])
        # Below stage 3 what was gathered once stays right until the next step.
        assert all((x != x) == (stage == 3) for x in r["again"])
        assert all(x == x for x in r["inside"])
        assert r["shapes"] == whole["shapes"] and all(r["same"])
        assert ("zplan.summon" in r["refused"]) == (stage == 3)
    for key, value in results[0]["state"].items():
        assert (value == results[1]["state"][key]).all() and value.shape == whole["state"][key].shape


def test_one_rank_holds_everything():
    engine, params = start(3)
    assert all(p.isfinite().all() for p in params) and engine.state_dict()
    engine.close()


def writes(rank: int, world_size: int, stage: int) -> tuple[float, float, str]:
    engine, _ = start(stage)
    with summon(engine.module, write=True), torch.no_grad():
        engine.module.blocks[1].q.weight.fill_(0.25)
        engine.module.norm.weight.fill_(2.0)
    with summon(engine.module):
        block, norm = engine.module.blocks[1].q.weight.mean().item(), engine.module.norm.weight.mean().item()
    try:
        with summon(engine.module), torch.no_grad():
            engine.module.blocks[0].q.weight.zero_()
        refused = ""
    except ZplanError as error:
        refused = error.message
    loss = engine(*w.batch(w.LLAMA4.vocab, 7, engine.rank, 0))
    assert loss.isfinite()
    engine.close()
    return block, norm, refused


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_summon_writes(run_ranks, stage):
    for block, norm, refused in run_ranks(2, writes, stage):
        assert (block, norm) == (0.25, 2.0)
        assert "blocks.0" in refused


def evaluates(rank: int, world_size: int, stage: int) -> tuple[list[float], list[float]]:
    """Evaluation between steps, under no_grad and in the middle of accumulation, disturbs nothing."""
    out = []
    for evaluate in (False, True):
        engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(stage, 2), init=w.fill, checked=True)
        losses = []
        for step in range(3):
            for k in range(2):
                loss = engine(*w.batch(w.LLAMA4.vocab, step, rank, k))
                engine.backward(loss)
                if evaluate:
                    with torch.no_grad():
                        engine(*w.batch(w.LLAMA4.vocab, 99, rank, 0))
                engine.step()
                losses.append(loss.item())
        out.append(losses)
        engine.close()
    return out[0], out[1]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_between_steps(run_ranks, stage):
    for plain, evaluated in run_ranks(2, evaluates, stage):
        assert plain == evaluated


def too_many_backwards(rank: int, world_size: int) -> str:
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(2), init=w.fill)
    for k in range(2):
        try:
            engine.backward(engine(*w.batch(w.LLAMA4.vocab, 0, rank, k)))
        except ZplanError as error:
            return error.message
    return ""


@pytest.mark.gloo
def test_backward_without_step_is_an_error(run_ranks):
    assert "2 times" in run_ranks(2, too_many_backwards)[0]


def other_order(rank: int, world_size: int) -> str:
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(3), init=w.fill, checked=True)
    if rank == 1:
        engine.module.blocks[0], engine.module.blocks[1] = engine.module.blocks[1], engine.module.blocks[0]
    try:
        engine(*w.batch(w.LLAMA4.vocab, 0, rank, 0))
    except ZplanError as error:
        return error.message
    return ""


@pytest.mark.gloo
def test_ranks_that_run_another_order_are_named(run_ranks):
    for message in run_ranks(2, other_order):
        assert "different orders in the first step: rank 1 ran `blocks.0`" in message


def drifted(rank: int, world_size: int, config: dict[str, Any], checked: bool) -> str:
    """What a step says when a weight, whole on every rank, changed on one after its use."""
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=config, init=w.fill, checked=checked)
    engine.backward(engine(*w.batch(w.LLAMA4.vocab, 0, rank, 0)))
    if rank == 1:
        engine.units[2].buffer[5] += 1.0
    try:
        engine.step()
    except ZplanError as error:
        return error.message
    return ""


@pytest.mark.gloo
def test_checked_mode_finds_replicas_that_drift(run_ranks):
    for message in run_ranks(2, drifted, w.config(0), True):
        assert "unit `blocks.1` differs between ranks" in message and "[1]" in message


def peak_of_initialization(rank: int, world_size: int) -> tuple[int, int, int]:
    from zplan.runtime.verify import Meter

    model = w.build(w.LLAMA4)
    with Meter(torch.device("cpu")) as meter:
        engine, *_ = initialize(model=model, config=w.config(3), init=w.fill)
        assert meter.registry is not None
        peak, after = meter.registry.peaks["idle"], meter.registry.live_bytes
        engine.close()
    return peak, after, max(u.layout.padded_numel for u in engine.units) * 4


@pytest.mark.gloo
def test_initialization_holds_one_full_unit_beside_the_shards(run_ranks):
    for peak, after, unit in run_ranks(2, peak_of_initialization):
        assert peak <= after + unit


def interrupted(rank: int, world_size: int, stage: int) -> list[list[float]]:
    """Losses of three steps, without and with a backward or forward that breaks off in the second and is forgotten."""
    out = []
    for breaks in ("", "backward", "forward"):
        engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(stage), init=w.fill)
        losses = []
        for step in range(3):
            batch = w.batch(w.LLAMA4.vocab, step, rank, 0)
            if breaks == "backward" and step == 1:
                with pytest.raises(MemoryError):
                    engine.backward(failing_loss(engine, batch))
                engine.reset_step()
            if breaks == "forward" and step == 1:
                stop_forward(engine, batch)
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        out.append(losses)
        engine.close()
    return out


def stop_forward(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Ctrl-C in a forward, which torch tells no hook of."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].q.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        engine(*batch)
    handle.remove()


def failing_loss(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch whose backward fails below the second block."""

    def fail(_grad: torch.Tensor) -> None:
        raise MemoryError("no room")

    handle = engine.module.blocks[1].register_forward_hook(lambda _m, _a, out: out.register_hook(fail) and None)
    loss = engine(*batch)
    handle.remove()
    return loss


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pass_that_broke_off_can_be_forgotten(run_ranks, stage):
    for plain, backward, forward in run_ranks(2, interrupted, stage):
        assert plain == backward == forward
