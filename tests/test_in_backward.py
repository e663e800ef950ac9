"""The optimizer in backward: the same bits as a step, the ledger's bytes, and refusals of all it can't do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import any_model as m
import pytest
import torch
import workload as w
from test_engine import exact, train_each
from test_kernel_step import train_by_table
from test_models_flow import Net
from test_models_tokens import counted, mean_loss
from test_ring import failing_loss
from torch import nn

import zplan
from zplan.planner.api import estimate
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import load_plan, save_plan
from zplan.planner.predict import predict
from zplan.runtime.engine import Engine
from zplan.runtime.halves import values_of
from zplan.runtime.initialize import initialize

STEPS = 3
"""In the third, moments and weights are what the second made of those of the first."""
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}


def config(stage: int, *, on: bool = True, optimizer: dict[str, Any] | None = None, **zplan_keys: Any) -> Any:
    own = {"piece": 16384, "clip": 0.0, **zplan_keys}
    made = w.config(stage, 1, optimizer_in_backward=on, **own)
    return {**made, "scheduler": SCHEDULE, **({} if optimizer is None else {"optimizer": optimizer})}


def same(plain: list[dict[str, Any]], early: list[dict[str, Any]]) -> None:
    for a, b in zip(plain, early, strict=True):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        assert a["params"].keys() == b["params"].keys()
        for name, value in a["params"].items():
            assert (value == b["params"][name]).all(), name


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_bits_as_an_ordinary_step_and_the_ledgers_bytes(run_ranks, stage, world_size, precision):
    arch = "llama-tied" if stage in (1, 3) and precision == "fp32" else "llama4"
    how = {"precision": precision, "checkpointing": "full" if precision == "bf16" else "none"}
    runs = {
        "plain": (arch, config(stage, on=False, **how), STEPS, True),
        "early": (arch, config(stage, **how), STEPS, True, True),
    }
    results = run_ranks(world_size, train_each, runs)
    plain, early = ([r[name] for r in results] for name in runs)
    same(plain, early)
    exact(early)
    assert early[0]["memory"].peak.measured > 0
    names = {row.name for row in early[0]["memory"].lines}
    assert "grads.reduced" in names and not any(n.startswith(("grads.shard", "grads.full")) for n in names)


# --- the same training in every way that models and configs go ------------------------------------------------------


def frozen_net() -> nn.Module:
    """The second layer, and a part of the third, are not trained."""
    model = Net("logits")
    for p in [*model.layers[1].parameters(), model.layers[2].up.weight]:
        p.requires_grad_(False)
    return model


def weighted(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> torch.Tensor:
    """Some labels count, and none on one rank in the second step."""
    batch, n = counted(step, rank, k) if (step, rank) != (1, 1) else (m.tokens(step, rank, k), 0)
    loss = mean_loss(model, batch)
    backward(loss, num_tokens=n)
    return loss


def loss_of_two(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> torch.Tensor:
    """One backward through two forwards."""
    loss = sum(mean_loss(model, m.tokens(step, rank, i)) for i in range(2))
    backward(loss)
    return loss


FLOWS = {
    "tied": ("test_models_flow:Net", ("tied", "plain"), "any_model:plain"),
    "outside": ("test_models_flow:Net", ("outside",), "any_model:plain"),
    "called twice": ("test_models_flow:Net", ("loss",), "test_models_flow:twice"),
    "layers dropped": ("test_models_flow:Net", ("loss", "plain"), "test_models_flow:dropped"),
    "frozen": ("test_in_backward:frozen_net", (), "test_in_backward:loss_of_two"),
    "weighted": ("test_models_flow:Net", ("logits",), "test_in_backward:weighted"),
}


@pytest.mark.gloo
@pytest.mark.parametrize("flow", FLOWS)
def test_control_flow_changes_no_bit(run_ranks, flow):
    build, args, recipe = FLOWS[flow]
    cases = {}
    for stage in range(4) if flow != "outside" else range(3):
        for on in (False, True):
            how = {**m.config(stage, optimizer_in_backward=on), "gradient_clipping": 0.0}
            cases[stage, on] = (build, args, how, 3, recipe)
    for result in run_ranks(2, m.train_each, cases, limit=200):
        for stage in {s for s, _ in cases}:
            same([result[stage, False]], [result[stage, True]])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {"weight_decay": 0.1},
    "Adagrad": {},
}


def each_optimizer(rank: int, world_size: int, stage: int) -> list[tuple[Any, Any]]:
    """Every optimizer, bf16 states, and one of the user's with two groups and a torch schedule: without and with."""
    out = []
    for name in (*OPTIMIZERS, "adamw-bf16", "RMSprop"):
        pair = []
        for on in (False, True):
            how = config(stage, on=on, precision="bf16")
            del how["scheduler"]
            if name in OPTIMIZERS:
                how["optimizer"] = {"type": name, "params": {"lr": 1e-3, **OPTIMIZERS[name]}}
            elif name == "adamw-bf16":
                how["zplan"]["optimizer"] = name
            options: dict[str, Any] = {"init": w.fill}
            model = w.build(w.LLAMA4, device="cpu" if name == "RMSprop" else "meta")
            if name == "RMSprop":
                groups = [
                    {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-4},
                    {"params": [p for p in model.parameters() if p.dim() > 1]},
                ]
                del how["optimizer"]
                options = {
                    "optimizer": torch.optim.RMSprop(groups, lr=1e-3),
                    "lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
                }
                torch.manual_seed(0)
                for n, p in model.named_parameters():
                    w.fill(n, p.data)
            engine, *_ = initialize(model=model, config=how, **options)
            losses = []
            for step in range(STEPS):
                loss = engine(*w.batch(w.LLAMA4.vocab, step, rank, 0))
                engine.backward(loss)
                engine.step()
                losses.append((loss.item(), engine.grad_norm.item(), [g["lr"] for g in engine.optimizer.param_groups]))
            pair.append((losses, {n: v.tobytes() for n, v in m.whole(engine).items()}))
            engine.close()
        out.append((pair[0], pair[1]))
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_every_optimizer_gives_the_same_bits(run_ranks, stage):
    for result in run_ranks(2, each_optimizer, stage, limit=200):
        for plain, early in result:
            assert plain == early


# --- what goes wrong -------------------------------------------------------------------------------------------------


def made(stage: int, **zplan_keys: Any) -> Engine:
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=config(stage, **zplan_keys), init=w.fill)
    return engine


def step_of(engine: Engine, step: int) -> float:
    loss = engine(*w.batch(w.LLAMA4.vocab, step, engine.rank, 0))
    engine.backward(loss)
    engine.step()
    return loss.item()


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(ZplanError) as caught:
        call()
    return f"{caught.value.message} -- {caught.value.hint}"


def refused(rank: int, world_size: int) -> None:
    engine = made(3)
    engine.step()  # before any backward: nothing, as always
    assert engine.global_steps == 0

    def hold() -> None:
        with engine.no_sync():
            pass

    before = (hold, lambda: engine.penalty(l2=0.1), lambda: engine.clip_grad_norm_(1.0))
    for call in before:
        assert "optimizer_in_backward" in said(call)
    loss = engine(*w.batch(w.LLAMA4.vocab, 0, rank, 0))
    assert "retain_graph" in said(lambda: engine.backward(loss, retain_graph=True))
    engine.backward(loss)
    assert "second `backward` in one step" in said(lambda: engine.backward(loss))
    again = engine(*w.batch(w.LLAMA4.vocab, 0, rank, 1))
    assert "second `backward` in one step" in said(lambda: engine.backward(again))
    assert "summon(grads=True)" in said(lambda: engine.summon(grads=True))
    assert "call `engine.step()`" in said(engine.reset_step)
    with engine.summon() as whole, torch.no_grad():
        assert not whole.grads
    with torch.no_grad():
        engine(*w.batch(w.LLAMA4.vocab, 0, rank, 2))
    engine.step()
    assert engine.global_steps == 1
    step_of(engine, 1)
    assert engine.optimizer.applied.item() == 2.0
    assert "call `engine.backward(loss)`" in said(engine(*w.batch(w.LLAMA4.vocab, 2, rank, 0)).backward)
    engine.close()


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_needs_gradients_of_all_units_is_refused(run_ranks, world_size):
    run_ranks(world_size, refused)


def broken_off(rank: int, world_size: int, stage: int, folder: str) -> None:
    """Steps, a backward that breaks off halfway, and the checkpoint that repairs it."""
    engine = made(stage)
    losses = [step_of(engine, 0)]
    engine.save_checkpoint(folder)
    losses += [step_of(engine, s) for s in (1, 2)]
    failing = failing_loss(engine, w.batch(w.LLAMA4.vocab, 3, rank, 0))
    with pytest.raises(MemoryError):
        engine.backward(failing)
    for call in (
        lambda: engine(*w.batch(w.LLAMA4.vocab, 3, rank, 0)),
        engine.step,
        engine.summon,
        lambda: engine.save_checkpoint(folder, "half"),
        lambda: engine.load_checkpoint(folder, weights_only=True) and engine.step(),
        engine.reset_step,
        engine.reset_step,
    ):
        text = said(call)
        assert "part of the parameters was updated" in text and "load the last checkpoint" in text, text
    assert not any(name.startswith("grads.") for name in engine.arena.held())
    engine.load_checkpoint(folder)
    assert [step_of(engine, s) for s in (1, 2)] == losses[1:]
    # Without a reset in between, too.
    failing = failing_loss(engine, w.batch(w.LLAMA4.vocab, 3, rank, 0))
    with pytest.raises(MemoryError):
        engine.backward(failing)
    engine.load_checkpoint(folder)
    assert [step_of(engine, s) for s in (1, 2)] == losses[1:]
    engine.close()


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_a_backward_that_broke_off_a_checkpoint_is_the_way_out(run_ranks, stage, tmp_path):
    run_ranks(2, broken_off, stage, str(tmp_path / "saved"))


def no_room(_grad: torch.Tensor) -> None:
    raise MemoryError("no room")


def early_error(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Losses without and with a backward that breaks off before anything was updated."""
    out = []
    for breaks in (False, True):
        engine = made(2)
        losses = [step_of(engine, 0)]
        if breaks:
            loss = engine(*w.batch(w.LLAMA4.vocab, 1, rank, 0))
            loss.register_hook(no_room)
            with pytest.raises(MemoryError):
                engine.backward(loss)
            engine.reset_step()
        losses += [step_of(engine, s) for s in (1, 2)]
        out.append(losses)
        engine.close()
    return out[0], out[1]


@pytest.mark.gloo
def test_an_error_before_the_first_update_can_be_forgotten(run_ranks):
    for plain, broken in run_ranks(2, early_error):
        assert plain == broken


def not_finite(rank: int, world_size: int, stage: int, folder: str) -> None:
    """NaN in a gradient in the middle of the model on one rank: the next call says so, and no parameter is spoilt."""
    engine = made(stage, precision="bf16")
    step_of(engine, 0)
    engine.save_checkpoint(folder)
    expected = [step_of(engine, s) for s in (1, 2)]
    bad = dict(engine.module.named_parameters())["blocks.1.down.weight"]
    hook = bad.register_hook(lambda g: torch.full_like(g, float("nan")) if rank == 0 else g)
    step_of(engine, 3)
    hook.remove()
    assert engine.optimizer.applied.item() == 3.0
    for u in engine.optimizer.units:
        assert all(torch.isfinite(x).all() for x in (*map(values_of, engine.optimizer.weights(u)), *u.states.values()))
    loss = engine(*w.batch(w.LLAMA4.vocab, 4, rank, 0))
    for call in (lambda: engine.backward(loss), lambda: engine.save_checkpoint(folder, "bad"), engine.reset_step):
        text = said(call)
        assert "gradients of step 4 were not finite" in text and "load the last checkpoint" in text, text
    assert "blocks.1.down.weight" in text, text
    engine.load_checkpoint(folder)
    assert [step_of(engine, s) for s in (1, 2)] == expected
    engine.close()


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (0, 2), (2, 2), (3, 2)])
def test_gradients_that_are_not_finite_end_the_run(run_ranks, stage, world_size, tmp_path):
    run_ranks(world_size, not_finite, stage, str(tmp_path / "saved"))


# --- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why", "hint"),
    [
        ({"gradient_clipping": 1.0}, "`gradient_clipping` 1 clips to", '"gradient_clipping": 0.0'),
        ({"gradient_accumulation_steps": 2}, "2 micro-steps are added up", "gradient_accumulation_steps 1"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "the loss scale", "bf16"),
    ],
)
def test_a_config_that_needs_all_gradients_first_is_refused(changes, why, hint):
    how = {**config(0), **changes}
    text = said(lambda: initialize(model=w.build(w.LLAMA), config=how, init=w.fill))
    assert "`optimizer_in_backward` updates before" in text and why in text and hint in text
    text = said(lambda: zplan.estimate("llama-2-7b", gpus=8, mem=80, config=how))
    assert why in text and hint in text


ASKED = {"gradient_clipping": 0.0, "train_batch_size": 8}
HEADLINE: dict[str, Any] = {"params": "7e9", "gpus": 8, "mem": 17.5}


def test_the_search_proposes_it_where_nothing_clips_and_nothing_else_fits(tmp_path):
    plan = zplan.plan(**HEADLINE, config=ASKED)
    assert plan.fits and plan.choice.optimizer_in_backward and '"optimizer_in_backward": true' in plan.to_json()
    save_plan(plan, tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read.choice == plan.choice and read.training.optimizer_in_backward and read.to_json() == plan.to_json()
    row = next(d for d in plan.decisions if d.name == "optimizer_in_backward")
    assert row.chosen and "nothing clips" in row.reason
    for config, changes in [
        ({**ASKED, "gradient_clipping": 1.0}, {}),
        ({"train_batch_size": 8}, {}),
        ({**ASKED, "zplan": {"optimizer_in_backward": False}}, {}),
        ({**ASKED, "fp16": {"enabled": True}}, {}),
        ({**ASKED, "train_batch_size": 16, "gradient_accumulation_steps": 2}, {}),
        (ASKED, {"mem": 20}),
        (ASKED, {"mem": 4}),
    ]:
        other = zplan.estimate(**{**HEADLINE, **changes}, config=config)
        assert not other.row.choice.optimizer_in_backward, (config, changes)


def test_asked_for_it_takes_whole_batches_only():
    asked = {**ASKED, "zplan": {"optimizer_in_backward": True}}
    found = zplan.estimate(**{**HEADLINE, "mem": 80}, config=asked).row.choice
    assert found.optimizer_in_backward and found.accumulation == 1


def test_the_ledger_keeps_one_units_gradients():
    spec = w.spec(w.LLAMA4)
    plain, early = (predict(spec, Choice(3, 2, seq=16, optimizer_in_backward=on)) for on in (False, True))
    shards = [x for x in plain.lines if x.id.startswith("grads.shard.")]
    (one,) = [x for x in early.lines if x.id == "grads.reduced"]
    assert one.total_bytes == max(x.nbytes for x in shards) < sum(x.total_bytes for x in shards)
    assert early.per_phase()[-1] == plain.per_phase()[-1] - sum(x.total_bytes for x in shards)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 2), (3, 2)])
def test_the_kernels_step_in_backward_is_their_step(run_ranks, stage, world_size):
    """Norms by rows and an update by table, a unit at a time, as on GPUs."""
    plain, early = (
        run_ranks(world_size, train_by_table, "llama4", config(stage, on=on, precision="bf16"), STEPS)
        for on in (False, True)
    )
    assert all(built == 1 for _, built in early)
    same([r for r, _ in plain], [r for r, _ in early])


def without_tokens(rank: int, world_size: int, on: bool) -> tuple[list[float], float]:
    """Three steps of which the second has no token on any rank."""
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=config(2, on=on), init=w.fill)
    for step in range(3):
        engine.backward(engine(*w.batch(w.LLAMA4.vocab, step, rank, 0)), num_tokens=0 if step == 1 else 7)
        engine.step()
    with engine.summon():
        values = [p.double().sum().item() for p in engine.module.parameters()]
    applied = engine.optimizer.applied.item()
    engine.close()
    return values, applied


@pytest.mark.gloo
def test_a_step_without_tokens_changes_nothing(run_ranks):
    plain, early = run_ranks(2, without_tokens, False), run_ranks(2, without_tokens, True)
    assert plain == early and plain[0][1] == 2.0


def test_deterministic_plans_pass_over_stage_0():
    """There the two exclude each other; nobody asked for it."""
    asked = {"gradient_clipping": 0.0, "zplan": {"deterministic": True, "optimizer_in_backward": True}}
    assert estimate("llama-2-7b", gpus=8, gpu="H200", config=asked).row.choice.stage > 0
    with pytest.raises(ZplanError, match="at stage 0"):
        estimate("llama-2-7b", gpus=8, gpu="H200", config=asked, stage=0)
    asked["zplan"] = {"deterministic": True}
    for stage in (None, 0):
        assert not estimate("llama-2-7b", gpus=2, mem=10, config=asked, stage=stage).fits
