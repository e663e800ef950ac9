"""Every optimizer on flat slices beside the same one in one plain process: values, groups, states and their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import any_model as m
import numpy as np
import pytest
import torch
from test_models_flow import Net
from test_models_frozen import ledger
from torch import nn

from zplan.planner.errors import ZplanError
from zplan.runtime.elementwise import round_stochastically
from zplan.runtime.engine import Engine
from zplan.runtime.foreign import try_out
from zplan.runtime.initialize import initialize, summon
from zplan.runtime.verify import Meter

STEPS = 4


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, a tensor at a time."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                momentum.copy_(beta2 * momentum + (1 - beta2) * p.grad)


class Norms(torch.optim.Optimizer):
    """Looks at whole tensors: steps by the gradient over its norm."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad / (p.grad.norm() + 1e-3))
                    p.sub_(group["lr"] * self.state[p]["sum"])


WD = {"weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, **WD}


def adadelta(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(params, lr=0.5, eps=1e-3, weight_decay=0.1)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-3, eps=1e-4, weight_decay=0.1)


def slow_adagrad(params: Any) -> torch.optim.Optimizer:
    """Its constructor makes states, and they do not start from zero."""
    return torch.optim.Adagrad(params, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **ADAMW, amsgrad=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **ADAMW)


def sgd_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.8)


OURS: dict[str, tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": ("AdamW", ADAMW, lambda p: torch.optim.AdamW(p, **ADAMW)),
    "adam": ("Adam", {**ADAMW, "adam_w_mode": False}, lambda p: torch.optim.Adam(p, **ADAMW)),
    "sgd": ("SGD", {"lr": 0.05, **WD}, lambda p: torch.optim.SGD(p, lr=0.05, **WD)),
    "sgd-momentum": (
        "SGD",
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, **WD},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, **WD),
    ),
    "lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.95], **WD}, lambda p: Lion(p, 1e-3, (0.9, 0.95), 0.1)),
    "adagrad": ("Adagrad", {"lr": 0.01, "eps": 1e-4, **WD}, lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-4, **WD)),
}
"""Name -> type and params of a config, and the reference."""
BROUGHT = {f.__name__: f for f in (adadelta, nadam, slow_adagrad, amsgrad, adamw, sgd_of_torch)}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As users write them: no decay for norms and biases, a rate of its own for the head."""
    named = list(model.named_parameters())
    head = [p for n, p in named if n.startswith("head")]
    flat = [p for n, p in named if p.ndim < 2 and not n.startswith("head")]
    rest = [p for n, p in named if p.ndim >= 2 and not n.startswith("head")]
    return [{"params": rest}, {"params": flat, "weight_decay": 0.0}, {"params": head, "lr": 3e-3}]


def config(stage: int, name: str, **options: Any) -> dict[str, Any]:
    kind, params, _ = OURS.get(name, OURS["adamw"])
    own = {"optimizer": name} if name.startswith("adamw-bf16") else {}
    return {**m.config(stage, **options, **own), "optimizer": {"type": kind, "params": params}}


def go(engine: Engine, losses: list[float], rank: int, steps: range) -> None:
    for step in steps:
        loss = engine(**m.tokens(step, rank, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())


def run(rank: int, world_size: int, stages: list[int], names: list[str]) -> dict[str, Any]:
    """Losses and final parameters of each optimizer, with groups; its lines beside what is there."""
    out: dict[str, Any] = {}
    for stage in stages:
        for name in names:
            with Meter(torch.device("cpu")) as meter:
                model = Net("")
                options = {"optimizer": BROUGHT[name](groups(model))} if name in BROUGHT else {}
                if not options:
                    options = {"model_parameters": groups(model)}
                engine, *_ = initialize(model=model, config=config(stage, name), **options)
                meter.attach(engine)
                predicted = ledger(engine, model)
                losses: list[float] = []
                go(engine, losses, rank, range(2))
                rows = [r for r in meter.compare(predicted).lines if r.name.startswith(("optim", "params"))]
            go(engine, losses, rank, range(2, STEPS))
            out[f"{name} {stage}"] = losses, m.whole(engine), [r for r in rows if r.difference], len(rows)
            engine.close()
    return out


def reference(name: str, world_size: int) -> tuple[list[float], dict[str, Any]]:
    model = Net("")
    optimizer = (BROUGHT[name] if name in BROUGHT else OURS[name][2])(groups(model))
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(world_size):
            loss = model(**m.tokens(step, rank, 0)) / world_size
            loss.backward()
            total += loss.item()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), m.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {n: p.detach().numpy() for n, p in model.named_parameters()}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("names", "stages"),
    [
        (list(OURS), (1, 3)),
        (list(BROUGHT), (3,)),
        pytest.param(list(OURS), (0, 2), marks=pytest.mark.slow),
        pytest.param(list(BROUGHT), (0, 1, 2), marks=pytest.mark.slow),
    ],
    ids=["ours", "brought", "ours, other stages", "brought, other stages"],
)
def test_every_optimizer_equals_one_process_and_its_lines(run_ranks, names, stages):
    results = run_ranks(2, run, stages, names, limit=200)
    for name in names:
        losses, params = reference(name, 2)
        for stage in stages:
            key = f"{name} {stage}"
            assert np.mean([r[key][0] for r in results], axis=0) == pytest.approx(losses, rel=1e-6), key
            for r in results:
                for n, value in params.items():
                    np.testing.assert_allclose(r[key][1][n], value, rtol=1e-5, atol=2e-6, err_msg=f"{key} {n}")
                assert not r[key][2] and r[key][3] > 5, key


# --- 16-bit states ---------------------------------------------------------------------------------------------------


def in_bf16(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Losses of bf16 training, lines, and what a checkpoint brings back."""
    out: dict[str, Any] = {}
    for name in names:
        for stage in (0, 3):
            with Meter(torch.device("cpu")) as meter:
                engine, *_ = initialize(model=Net(""), config=config(stage, name, precision="bf16"))
                meter.attach(engine)
                predicted = ledger(engine, engine.module)
                losses = []
                for _ in range(STEPS):
                    loss = engine(**m.tokens(0, rank, 0))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                    del loss
                rows = [r for r in meter.compare(predicted).lines if r.name.startswith(("optim", "params"))]
            out[f"{name} {stage}"] = losses, [r for r in rows if r.difference], {r.name: r.predicted for r in rows}
            engine.close()
    return out


@pytest.mark.gloo
def test_moments_and_weights_in_bf16(run_ranks):
    """Close to fp32 states, equal at all stages, and 4 (with master weights 8) bytes an element instead of 12."""
    names = ["adamw", "adamw-bf16-states", "adamw-bf16"]
    for r in run_ranks(2, in_bf16, names):
        full = r["adamw 0"][0]
        for name in names[1:]:
            for stage in (0, 3):
                losses, off, lines = r[f"{name} {stage}"]
                assert not off, (name, stage)
                assert losses == pytest.approx(full, rel=1e-2), (name, stage)
                assert any("optim.master." in n for n in lines) == (name == "adamw-bf16-states")
            assert r[f"{name} 3"][2]["params.shard.block" if name == "adamw-bf16" else "optim.master.block"] > 0
            assert 2 * r[f"{name} 3"][2]["optim.exp_avg.block"] == r["adamw 3"][2]["optim.exp_avg.block"]


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_can_hold():
    torch.manual_seed(0)
    values = torch.rand(1000) + 0.5
    total, out = torch.zeros(1000), torch.empty(1000, dtype=torch.bfloat16)
    for step in range(400):
        round_stochastically(
            values.clone(), out, torch.full((1000,), 0.3), torch.tensor(step * 7919, dtype=torch.int32)
        )
        total += out.float()
        assert (out.float() - values).abs().max() < 2**-7
    assert (total / 400 - values).abs().max() < 2**-7 * 0.2
    exact = values.bfloat16()
    round_stochastically(exact.float(), out, torch.rand(1000), torch.tensor(3, dtype=torch.int32))
    assert torch.equal(out, exact)


def test_a_second_moment_in_bf16_still_decays():
    """Rounded to nearest, a decay by 1/1000 would never move it."""
    engine, *_ = initialize(
        model=nn.Linear(64, 64, bias=False), config=config(0, "adamw-bf16-states", precision="bf16")
    )
    engine.optimizer.param_groups[0].update(betas=(0.9, 0.999), lr=0.0)
    (unit,) = engine.trained
    start = torch.rand(64 * 64).add_(1.0).bfloat16()
    unit.states["exp_avg_sq"].copy_(start)
    for _ in range(50):
        engine.backward(engine(torch.zeros(2, 64)).sum())
        engine.step()
    left = (unit.states["exp_avg_sq"].float() / start.float()).mean().item()
    assert left == pytest.approx(0.999**50, rel=2e-3)
    engine.close()


def test_a_step_that_is_skipped_changes_nothing():
    for name in (*OURS, "adamw-bf16-states"):
        engine, *_ = initialize(model=nn.Linear(8, 8), config=config(0, name, precision="bf16"))
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        (unit,) = engine.trained
        kept = [t for t in (unit.flat, unit.master, unit.low, *unit.states.values()) if t is not None]
        before = [t.clone() for t in kept]
        engine.backward(engine(torch.full((2, 8), torch.inf)).sum())
        engine.step()
        assert engine.optimizer.scalars.skip.item() == 1.0
        for t, was in zip(kept, before, strict=True):
            assert torch.equal(t, was), name
        engine.close()


# --- what users pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "elementwise", "states"),
    [
        (torch.optim.NAdam, True, {"exp_avg": 4, "exp_avg_sq": 4}),
        (torch.optim.RMSprop, True, {"square_avg": 4}),
        (torch.optim.Rprop, True, {"prev": 4, "step_size": 4}),
        (torch.optim.ASGD, True, {"ax": 4}),
        (torch.optim.RAdam, True, {"exp_avg": 4, "exp_avg_sq": 4}),
        (torch.optim.Adamax, True, {"exp_avg": 4, "exp_inf": 4}),
        (torch.optim.Muon, False, {}),
        (torch.optim.Adafactor, False, {}),
        (Norms, False, {}),
    ],
)
def test_whether_an_optimizer_looks_at_one_element_at_a_time_is_tried_out(make, elementwise, states):
    given = make([nn.Parameter(torch.ones(4, 4))], lr=1e-2)
    trial = try_out(given)
    assert (trial.elementwise, trial.states) == (elementwise, states)
    assert not any(given.state.values())


def refusal(**options: Any) -> ZplanError:
    with pytest.raises(ZplanError) as refused:
        initialize(config=m.config(0), **options)
    return refused.value


def test_what_is_refused_of_optimizers_and_groups():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = list(model[0].parameters())
    error = refusal(model=model, model_parameters=first)
    assert "2 parameters require gradients and are in no group" in error.message and "`1.weight`" in error.message
    error = refusal(model=model, model_parameters=[{"params": model.parameters(), "weigt_decay": 0.0}])
    assert "unknown key `weigt_decay`" in error.message and "weight_decay" in error.hint
    both = [{"params": list(model.parameters())}, {"params": first}]
    assert "is in two parameter groups" in refusal(model=model, model_parameters=both).message
    assert "not the model's" in refusal(model=model, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())).message
    assert "needs no closure" in (refusal(model=model, optimizer=torch.optim.LBFGS).hint or "")
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    stepped.step()
    assert "has stepped already" in refusal(model=model, optimizer=stepped).message


def whole_tensors(rank: int, world_size: int) -> tuple[Any, str]:
    model = Net("")
    engine, *_ = initialize(model=model, config=m.config(0), optimizer=Norms)
    for step in range(3):
        engine.backward(engine(**m.tokens(step, rank, 0)))
        engine.step()
    params = m.whole(engine)
    with pytest.raises(ZplanError, match="in no checkpoint yet"):
        engine.save_checkpoint("nowhere")
    engine.close()
    with pytest.raises(ZplanError, match="looks at whole tensors") as refused:
        initialize(model=Net(""), config=m.config(1), optimizer=Norms)
    return params, refused.value.hint or ""


@pytest.mark.gloo
def test_an_optimizer_of_whole_tensors_runs_at_stage_0_only(run_ranks):
    model = Net("")
    optimizer = Norms(model.parameters())
    for step in range(3):
        for rank in range(2):
            (model(**m.tokens(step, rank, 0)) / 2).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), m.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for params, hint in run_ranks(2, whole_tensors):
        assert '"stage": 0' in hint
        for n, p in model.named_parameters():
            np.testing.assert_allclose(params[n], p.detach().numpy(), rtol=1e-5, atol=2e-6, err_msg=n)


def test_torchs_schedulers_take_the_optimizer():
    engine, optimizer, *_ = initialize(model=nn.Linear(4, 4), config=m.config(0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 3)
    with pytest.raises(ZplanError, match="optimizer.step"):
        optimizer.step()
    with pytest.raises(ZplanError, match="state_dict"):
        optimizer.state_dict()
    engine.close()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def resumes(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """Four steps in one go, and two and two around a checkpoint that another stage loads; states too."""
    out: dict[str, Any] = {}
    for name in names:
        finals = []
        for stages in ((3, 3), (2, 3)):
            for part, stage in enumerate(stages):
                model = Net("")
                options = {"optimizer": BROUGHT[name]} if name in BROUGHT else {}
                engine, *_ = initialize(model=model, config=config(stage, name), **options)
                if part and stages[0] != stages[1]:
                    engine.load_checkpoint(f"{folder}/{name}")
                for step in range(2 * part if stages[0] != stages[1] else 0, 2 + 2 * part):
                    engine.backward(engine(**m.tokens(step, rank, 0)))
                    engine.step()
                if not part and stages[0] != stages[1]:
                    engine.save_checkpoint(f"{folder}/{name}")
                final = m.whole(engine)
                with summon(engine.module, optim=True) as whole:
                    kept = {n: {k: v.numpy().copy() for k, v in s.items()} for n, s in whole.optim.items()}
                engine.close()
            finals.append((final, kept))
        out[name] = finals
    return out


@pytest.mark.gloo
def test_checkpoints_hold_the_states_that_there_are(run_ranks, tmp_path):
    names = ["sgd", "sgd-momentum", "lion", "nadam"]
    for r in run_ranks(2, resumes, str(tmp_path), names, limit=120):
        for name in names:
            (straight, kept), (resumed, kept_too) = r[name]
            for n, value in straight.items():
                np.testing.assert_allclose(resumed[n], value, rtol=1e-6, atol=1e-7, err_msg=f"{name} {n}")
            assert {n: set(s) for n, s in kept.items()} == {n: set(s) for n, s in kept_too.items()}
            for n, states in kept.items():
                for k, v in states.items():
                    np.testing.assert_allclose(kept_too[n][k], v, rtol=1e-4, atol=1e-7, err_msg=f"{name} {n} {k}")


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    engine, *_ = initialize(model=nn.Linear(4, 4), config=config(0, "lion"))
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine, *_ = initialize(model=nn.Linear(4, 4), config=config(0, "adamw"))
    with pytest.raises(
        ZplanError,
        match="of another optimizer: of `weight` it has `exp_avg`, and this one keeps `exp_avg`, `exp_avg_sq`",
    ):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, weights_only=True)
    engine.close()
