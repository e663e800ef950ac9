"""fp16: the loss scale is DeepSpeed's state machine, and training under it is training."""

import random
from types import SimpleNamespace

import pytest
import torch
import workload as w
from loss_scale_model import Model
from test_engine import close_to_reference, exact, reference, train
from torch import nn

import zplan
from zplan.planner.dsconfig import from_mapping
from zplan.planner.dswriting import to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import LossScale
from zplan.runtime.arena import Arena
from zplan.runtime.precision import LossScaler, Suspects

SETTINGS = [
    LossScale(),
    LossScale(window=3),
    LossScale(window=7, hysteresis=1),
    LossScale(window=1, hysteresis=3, minimum=4),
    LossScale(window=5, hysteresis=2, consecutive=True, power=4),
]


def scaler(settings):
    return LossScaler(settings, Arena(torch.device("cpu")))


def outcomes(seed):
    """3,000 steps with quiet stretches and bursts of overflow."""
    r = random.Random(seed)
    rate = 0.0
    for _ in range(3000):
        if r.random() < 0.02:
            rate = r.choice([0.0, 0.02, 0.3, 0.6])
        yield r.random() < rate


@pytest.mark.parametrize("seed", range(len(SETTINGS)))
def test_3000_steps_are_those_of_the_model(seed):
    settings = SETTINGS[seed]
    ours, model = scaler(settings), Model(settings)
    failures = 0
    for step, overflow in enumerate(outcomes(seed)):
        overflow = overflow or model.scale > 2**40  # noqa: PLW2901 - as any fp16 gradient would
        failed = model.update(overflow)
        ours.update(torch.tensor(float(overflow)))
        assert ours.scale.item() == model.scale, f"step {step}"
        if failed:
            failures += 1
            with pytest.raises(ZplanError, match=f"step {step} overflowed at the minimum loss scale"):
                ours.check(step)
            ours._failed.zero_()
            ours._stuck.copy()
        else:
            ours.check(step)
    assert failures or settings.hysteresis < 3 or settings.minimum == 1, "a case that should reach the minimum did not"


@pytest.mark.witness
@pytest.mark.parametrize("seed", range(len(SETTINGS)))
def test_deepspeeds_own_scaler_agrees(seed, monkeypatch):
    """Witness. DeepSpeed raises at the minimum, so its trace is followed until then."""
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 0))
    s = SETTINGS[seed]
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2.0**s.power,
        scale_window=s.window,
        min_scale=s.minimum,
        delayed_shift=s.hysteresis,
        consecutive_hysteresis=s.consecutive,
        raise_error_at_min_scale=True,
        dtype=torch.half,
    )
    ours = scaler(s)
    for step, overflow in enumerate(outcomes(seed)):
        overflow = overflow or theirs.cur_scale > 2**40  # noqa: PLW2901
        ours.update(torch.tensor(float(overflow)))
        try:
            theirs.update_scale(overflow)
        except Exception:  # noqa: BLE001 - a bare Exception is what it raises
            with pytest.raises(ZplanError):
                ours.check(step)
            return
        assert ours.scale.item() == theirs.cur_scale, f"step {step}"


def test_a_static_scale_stays():
    ours = scaler(LossScale(static=128.0))
    for skip in (1.0, 1.0, 0.0):
        ours.update(torch.tensor(skip))
    assert ours.scale.item() == 128.0


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "accumulation", "world_size"), [(0, 1, 1), (1, 2, 2), (2, 1, 2), (3, 2, 2)])
def test_fp16_equals_one_process_and_its_ledger(run_ranks, stage, accumulation, world_size):
    config = w.config(stage, accumulation, precision="fp16", checkpointing="full" if accumulation == 1 else "none")
    results = run_ranks(world_size, train, "llama", config, 6, False, True)
    exact(results)
    close_to_reference(results, reference("llama", 6, world_size, accumulation, torch.float32), 3e-3, norms=2e-2)


def one_rank_overflows(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine, optimizer, *_ = zplan.initialize(model=model, config={**config, "zero_optimization": {"stage": 2}})
    trace = []
    for step in range(3):
        x = torch.ones(1, 4, dtype=torch.float16)
        loss = engine(x).float().sum()
        engine.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
        engine.step()
        trace.append((optimizer.applied.item(), optimizer.scaler.scale.item()))
    with engine.summon():
        weights = torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()
    engine.close()
    return trace, weights


class Named(nn.Module):
    """Three blocks; backward multiplies the gradients of a layer's weight by what a switch says."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def overflow_at_the_minimum(rank, world_size, stage, accumulation, bad):
    """Steps until the scale gives up, with an infinity in `bad` = {rank: (micro-step, parameter)} of every step."""
    torch.manual_seed(0)
    model = Named()
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "fp16": fp16}
    engine, *_ = zplan.initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})
    here = {"micro_step": 0}
    for name, p in model.named_parameters():
        for who, (micro_step, parameter) in bad.items():
            if who == rank and parameter == name:
                p.register_hook(lambda g, m=micro_step: g * float("inf") if here["micro_step"] == m else g)
    try:
        for _ in range(8):
            for micro_step in range(accumulation):
                here["micro_step"] = micro_step
                engine.backward(engine(torch.ones(1, 4)))
                engine.step()
    except ZplanError as error:
        return engine.global_steps, error.message
    finally:
        engine.close()
    return None


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (3, 2)])
def test_the_error_names_parameter_unit_rank_and_step(run_ranks, stage, accumulation):
    """Scale 8, 4, 2, 1: the overflow of step 4 is the last, told in step 5. The earliest micro-step counts, then the
    order of reduces, last unit first.
    """
    bad = {0: (1, "blocks.2.1.weight"), 1: (0, "blocks.1.0.bias")}
    for step, message in run_ranks(2, overflow_at_the_minimum, stage, accumulation, bad):
        assert step == 4
        assert message == (
            "gradients of optimizer step 4 overflowed at the minimum loss scale 1: "
            "first in `blocks.1.0.bias` of unit `blocks.1` on rank 1, micro-step 1"
        )


@pytest.mark.parametrize("parameter", ["blocks.2.1.weight", "blocks.0.0.bias"])
def test_one_rank_alone_is_told_too(parameter):
    _, message = overflow_at_the_minimum(0, 1, 2, 1, {0: (0, parameter)})
    assert message.endswith(f"first in `{parameter}` of unit `{parameter[:8]}` on rank 0, micro-step 1")


def test_nobody_looks_while_the_scale_is_far_from_its_end():
    ours = scaler(LossScale(power=4))
    looking = []
    for _ in range(6):
        looking.append(ours.near_end())
        ours.update(torch.tensor(1.0))
    assert looking == [False, False, False, True, True, True], "16, 16, 8, 4, 2, 1"
    assert not scaler(LossScale(static=2.0)).near_end()
    quiet = Suspects()
    assert quiet.told(["", ""]) == "every rank's own gradients were finite, their sum was not"


@pytest.mark.gloo
def test_an_overflow_on_one_rank_skips_the_step_on_all(run_ranks):
    (first, weights), (second, others) = run_ranks(2, one_rank_overflows)
    assert first == second == [(1.0, 256.0), (1.0, 128.0), (2.0, 128.0)] and weights == others


@pytest.mark.witness
def test_the_config_comes_back_and_deepspeed_loads_it():
    block = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 3}
    c = from_mapping({"train_batch_size": 1, "fp16": block}, world_size=1)
    assert (c.precision, c.loss_scale) == ("fp16", LossScale(power=12, window=50, hysteresis=3))
    written = to_mapping(c, largest_block_numel=1)
    assert from_mapping(written, world_size=1).loss_scale == c.loss_scale and written["bf16"]["enabled"] is False
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    theirs = DeepSpeedConfig(written)
    assert theirs.float16_config.enabled and theirs.float16_config.dynamic_loss_scale_args()["scale_window"] == 50


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both `bf16` and"),
        ({"fp16": {"enabled": "false"}}, 'the string "false"'),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "`auto_cast`"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "`loss_scale`"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "`loss_scale_window`"),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, "`initial_scale_power`"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}}, "below its minimum"),
    ],
)
def test_bad_blocks_are_refused(config, message):
    with pytest.raises(ZplanError, match=message):
        from_mapping({"train_batch_size": 1, **config}, world_size=1)
