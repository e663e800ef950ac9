"""The engine's schedule: one position on for each applied step, none for a skipped one."""

import pytest
import torch
from torch import nn

import zplan
from zplan.planner.errors import ZplanError
from zplan.planner.schedules import read_schedule

WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 0.1}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}}
LR = 0.05


@pytest.fixture
def make():
    engines = []

    def build(scheduler, **extra):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        config = {
            "train_batch_size": 1,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            **({"scheduler": scheduler} if scheduler else {}),
        }
        engine, optimizer, _, schedule = zplan.initialize(model=model, config=config, **extra)
        engines.append(engine)
        return engine, optimizer, schedule

    yield build
    for engine in engines:
        engine.close()


def inputs(step, device="cpu"):
    if step == "bad":
        return torch.full((2, 4), float("inf"), device=device)
    return torch.linspace(-1, 1, 8, device=device).view(2, 4) * (step + 1)


def train(engine, steps):
    for step in steps:
        loss = engine(inputs(step, engine.device)).square().mean()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("scheduler", [WARMUP, CYCLE, None], ids=["warmup", "cycle", "none"])
def test_weights_are_those_of_torchs_adamw_at_the_same_rates(make, scheduler):
    engine, _, schedule = make(scheduler)
    assert (schedule is None) is (scheduler is None)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(engine.device)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.1)
    curve = read_schedule(scheduler, "x") if scheduler else None
    for step in range(10):
        train(engine, [step])
        if curve:
            group = theirs.param_groups[0]
            group["lr"], group["betas"] = curve.lr(step - 1, LR), curve.betas(step - 1, (0.9, 0.999))
        reference(inputs(step, engine.device)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for ours, other in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.data, other.data, rtol=2e-6, atol=1e-6)


def test_a_skipped_step_does_not_move_the_schedule(make):
    engine, optimizer, schedule = make(WARMUP)
    curve = read_schedule(WARMUP, "x")
    assert (schedule.last_batch_iteration, schedule.get_last_lr(), optimizer.param_groups[0]["lr"]) == (-1, [0.0], 0.0)
    applied = 0
    for step in (0, 1, "bad", "bad", 2, 3):
        train(engine, [step])
        assert optimizer.param_groups[0]["lr"] == curve.lr(applied - 1, LR), "the rate that the step ran at"
        applied += step != "bad"
    assert engine.global_steps == 6
    assert schedule.last_batch_iteration == applied - 1
    assert schedule.get_last_lr() == [curve.lr(applied - 1, LR)]


def test_clipping_by_hand_before_the_step_does_not_move_it_early(make):
    engine, optimizer, schedule = make(WARMUP)
    train(engine, [0, 1])
    engine.backward(engine(inputs(2, engine.device)).square().mean())
    engine.clip_grad_norm_(1.0)
    engine.step()
    assert optimizer.param_groups[0]["lr"] == read_schedule(WARMUP, "x").lr(1, LR)
    assert schedule.last_batch_iteration == 2


def test_a_resumed_run_goes_on_where_it_stopped(make, tmp_path):
    engine, _, schedule = make(WARMUP)
    train(engine, [0, 1, "bad", 2])
    engine.save_checkpoint(tmp_path)
    train(engine, [3])
    weights = [p.data.clone() for p in engine.module.parameters()]
    again, optimizer, resumed = make(WARMUP)
    again.load_checkpoint(tmp_path)
    assert resumed.last_batch_iteration == 2 == schedule.last_batch_iteration - 1
    train(again, [3])
    assert optimizer.param_groups[0]["lr"] == read_schedule(WARMUP, "x").lr(2, LR)
    assert all(torch.equal(a, b.data) for a, b in zip(weights, again.module.parameters(), strict=True))


def test_nobody_else_steps_it(make):
    _, _, schedule = make(WARMUP)
    with pytest.raises(ZplanError, match="the engine steps the schedule"):
        schedule.step()
