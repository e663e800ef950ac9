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


def lambda_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))


@pytest.mark.parametrize("own", [False, True], ids=["function", "instance"])
def test_a_torch_scheduler_does_not_move_in_a_skipped_step(make, own):
    """Rates are those of the steps applied, though the host learns of a skipped one late."""
    given = lambda_lr
    if own:
        given = lambda_lr(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR))
    engine, optimizer, schedule = make(None, lr_scheduler=given)
    rates = []
    for step in (0, "bad", 1, "bad", "bad", 2):
        train(engine, [step])
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([LR / n for n in (1, 2, 2, 3, 3, 3)])
    train(engine, [3])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 4) and schedule.get_last_lr() == [
        pytest.approx(LR / 4)
    ]
    with pytest.raises(ZplanError, match="steps the schedule by itself"):
        schedule.step()


def test_a_torch_scheduler_that_cycles_betas(make):
    from torch.optim.lr_scheduler import OneCycleLR

    engine, optimizer, schedule = make(None, lr_scheduler=lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10))
    theirs = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)
    curve = OneCycleLR(theirs, max_lr=0.1, total_steps=10)
    for step in range(6):
        group = theirs.param_groups[0]
        train(engine, [step])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(group["lr"])
        assert optimizer.param_groups[0]["betas"] == pytest.approx(group["betas"])
        theirs.step()
        curve.step()
    assert schedule.torch.last_epoch == 5, "the sixth step's outcome is read in the seventh"


def test_a_group_that_was_changed_on_the_way_goes_on_from_there(make):
    """As with a plain optimizer: a scheduler multiplies the new rate, and leaves what is not its own."""
    engine, optimizer, _ = make(None, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    train(engine, [0, 1])
    group = optimizer.param_groups[0]
    group["betas"], group["lr"] = (0.7, 0.8), 0.4
    train(engine, [2])
    assert group["lr"] == pytest.approx(0.2) and group["betas"] == (0.7, 0.8)


def test_a_schedule_keeps_betas_of_groups(make):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "betas": (0.7, 0.8)}]
    engine, optimizer, *_ = zplan.initialize(
        model=model,
        model_parameters=groups,
        config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "scheduler": WARMUP},
    )
    engine.close()
    assert [tuple(g["betas"]) for g in optimizer.param_groups] == [(0.9, 0.999), (0.7, 0.8)]


def test_a_torch_scheduler_follows_a_checkpoint(make, tmp_path):
    engine, optimizer, _ = make(None, lr_scheduler=lambda_lr)
    train(engine, [0, 1, "bad", 2])
    engine.save_checkpoint(tmp_path)
    train(engine, [3])
    rate = optimizer.param_groups[0]["lr"]
    again, fresh, _ = make(None, lr_scheduler=lambda_lr)
    again.load_checkpoint(tmp_path)
    train(again, [3])
    assert fresh.param_groups[0]["lr"] == rate == pytest.approx(LR / 4)
    train(again, [4, 5])
    again.load_checkpoint(tmp_path)
    with pytest.raises(ZplanError, match="can't go back"):
        train(again, [3])


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (WARMUP, lambda_lr, "both the config's `scheduler` and `lr_scheduler`"),
        (None, lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), "needs a measured value"),
        (None, lambda o: o, "made a _Rates"),
        (
            None,
            lambda_lr(torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)], lr=LR)),
            "has 2 parameter groups",
        ),
    ],
)
def test_schedulers_that_are_refused_leave_nothing_behind(make, config, given, message):
    with pytest.raises(ZplanError, match=message):
        make(config, lr_scheduler=given)
    assert zplan.runtime.initialize.engines() == ()
