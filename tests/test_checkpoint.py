"""A checkpoint goes on as if nothing had happened: bit for bit on the same ranks and stage, and equal on any others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workload as w
from safetensors import safe_open

from zplan.runtime.checkpoint_format import ADAMW, WEIGHT
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize

GLOBAL_BATCH = 24
UNEVEN = replace(w.LLAMA, layers=3, hidden=40, heads=2, kv_heads=1, head_dim=20, ffn=72, vocab=67)
"""Sizes that no world size divides."""


def start(stage: int, world_size: int, precision: str = "fp32", arch: Any = UNEVEN) -> Engine:
    accumulation = 2 if world_size in (2, 4) else 1
    config = w.config(stage, accumulation, precision=precision, piece=8192)
    config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // (accumulation * world_size)
    engine, *_ = initialize(model=w.build(arch), config=config, init=w.fill)
    return engine


def go(engine: Engine, steps: int, arch: Any = UNEVEN) -> dict[str, Any]:
    """Train on the samples that the engine's own count names; this rank's losses and the gradient norms by step."""
    c, norms, losses = engine.choice, [], []
    for _ in range(steps):
        losses.append([])
        for k in range(c.accumulation):
            first = engine.global_samples + (k * c.world_size + engine.rank) * c.micro_batch
            rows = [w.batch(arch.vocab, first + i, 0, 0) for i in range(c.micro_batch)]
            ids, labels = (torch.stack([r[j][0] for r in rows]) for j in (0, 1))
            loss = engine(ids, labels)
            losses[-1].append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(engine.grad_norm.item())
    return {"norms": norms, "losses": losses}


def masters(engine: Engine) -> dict[str, Any]:
    return {f"{u.name}.{s}": u.states[s].clone().numpy() for u in engine.units for s in ("exp_avg", "exp_avg_sq")}


def whole(engine: Engine) -> dict[str, Any]:
    with engine.summon():
        return {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}


def save_and_go_on(rank: int, world_size: int, folder: str, stage: int, precision: str) -> dict[str, Any]:
    engine = start(stage, world_size, precision)
    go(engine, 2)
    torch.manual_seed(rank + 17)
    torch.rand(5)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    found = {"random": torch.rand(3).tolist(), **go(engine, 2), "params": whole(engine), "own": masters(engine)}
    engine.close()
    return found


def load_and_go_on(rank: int, world_size: int, folder: str, stage: int, precision: str) -> dict[str, Any]:
    engine = start(stage, world_size, precision)
    go(engine, 1)  # what is loaded replaces something
    _, client = engine.load_checkpoint(folder)
    assert (engine.global_steps, engine.global_samples, client) == (2, 2 * GLOBAL_BATCH, {"epoch": 3})
    found = {"random": torch.rand(3).tolist(), **go(engine, 2), "params": whole(engine), "own": masters(engine)}
    engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "world_size", "precision"),
    [(3, 4, "fp32"), (3, 3, "bf16"), (2, 2, "bf16"), (1, 2, "fp32"), (0, 2, "bf16"), (0, 1, "fp32")],
)
def test_going_on_is_bitwise_what_it_would_have_been(run_ranks, tmp_path, stage, world_size, precision):
    folder = str(tmp_path / "saved")
    expected = run_ranks(world_size, save_and_go_on, folder, stage, precision)
    found = run_ranks(world_size, load_and_go_on, folder, stage, precision)
    for e, f in zip(expected, found, strict=True):
        assert (f["norms"], f["losses"], f["random"]) == (e["norms"], e["losses"], e["random"])
        for part in ("params", "own"):
            assert all((f[part][k] == v).all() for k, v in e[part].items()), part


FEW = [(3, 1), (1, 2), (2, 3), (0, 8)]
"""Stages and ranks: each of them once."""
ALL = [(stage, world_size) for stage in (0, 1, 2, 3) for world_size in (1, 2, 3, 8)]


@pytest.mark.gloo
@pytest.mark.parametrize("places", [FEW, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_any_other_ranks_and_stage_go_on_alike(run_ranks, tmp_path, places):
    """4 ranks at stage 3 save; losses, gradient norms and parameters of two more steps, in fp32."""
    folder = str(tmp_path / "saved")
    saved = run_ranks(4, save_and_go_on, folder, 3, "fp32")
    for stage, world_size in places:
        found = run_ranks(world_size, load_and_go_on, folder, stage, "fp32")
        assert mean_losses(found) == pytest.approx(mean_losses(saved), rel=1e-6), (stage, world_size)
        assert found[0]["norms"] == pytest.approx(saved[0]["norms"], rel=1e-6), (stage, world_size)
        assert apart(found[0]["params"], saved[0]["params"]) < 1e-6, (stage, world_size)


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Of each step, over ranks and micro-steps."""
    return [float(np.mean(row)) for row in zip(*(r["losses"] for r in ranks), strict=True)]


def apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative distance of all parameters as one vector.

    Not element by element: Adam divides by the root of a second moment, so an element whose gradient is all rounding
    noise is moved by up to the learning rate either way.
    """
    far = sum(float(((found[n] - v).astype(np.float64) ** 2).sum()) for n, v in expected.items())
    return float(np.sqrt(far / sum(float((v.astype(np.float64) ** 2).sum()) for v in expected.values())))


def load_and_save_again(rank: int, world_size: int, source: str, target: str, stage: int) -> None:
    engine = start(stage, world_size)
    engine.load_checkpoint(source)
    engine.save_checkpoint(target)
    engine.close()


@pytest.mark.gloo
def test_what_was_loaded_is_saved_to_the_bit(run_ranks, tmp_path):
    """4 ranks at stage 3, then 3 at stage 1, then one: every state of every parameter, by another reader."""
    folders = [tmp_path / str(i) for i in range(3)]
    run_ranks(4, save_and_go_on, str(folders[0]), 3, "fp32")
    run_ranks(3, load_and_save_again, str(folders[0]), str(folders[1]), 1)
    run_ranks(1, load_and_save_again, str(folders[1]), str(folders[2]), 0)
    first, *others = [by_safetensors(f / "global_step2") for f in folders]
    assert len(first) == 3 * len(Checkpoint(folders[0] / "global_step2").manifest.parameters)
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[k], other[k]) for k in first)


def by_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """`state|name` -> all elements, read by the format's own library."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  not a mapping
                state, name, span = key.split("|")
                assert state in (WEIGHT, *ADAMW)
                parts.setdefault(f"{state}|{name}", []).append((int(span.split(":")[0]), file.get_tensor(key)))
    return {k: torch.cat([t for _, t in sorted(v, key=lambda row: row[0])]) for k, v in parts.items()}


def test_groups_changed_by_hand_come_back_and_a_new_config_wins(tmp_path):
    """Every group has its own rate and decay; what is made otherwise at the resume is not overwritten."""

    def start_groups(lr: float) -> Engine:
        model = w.build(w.LLAMA)
        named = list(model.named_parameters())
        norms = [p for n, p in named if "norm" in n]
        groups = [{"params": [p for n, p in named if "norm" not in n]}, {"params": norms, "lr": lr}]
        return initialize(model=model, config=w.config(0), init=w.fill, model_parameters=groups)[0]

    engine = start_groups(0.01)
    engine.optimizer.param_groups[1].update(lr=0.05, weight_decay=0.5, betas=(0.8, 0.9))
    engine.save_checkpoint(tmp_path)
    engine.close()
    for lr, expected in ((0.01, 0.05), (0.02, 0.02)):
        engine = start_groups(lr)
        engine.load_checkpoint(tmp_path)
        first, second = engine.optimizer.param_groups
        assert (second["lr"], second["weight_decay"], second["betas"]) == (expected, 0.5, (0.8, 0.9))
        assert (first["lr"], first["weight_decay"]) == (w.ADAMW["lr"], w.ADAMW["weight_decay"])
        engine.close()


def test_loss_scale_and_schedule_go_on(tmp_path):
    """fp16 that grew its scale and a schedule in the middle of its warm-up, beside a run without a stop."""
    config = w.config(0, precision="fp32")
    config["bf16"] = {"enabled": False}
    config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}}

    def begin() -> Engine:
        return initialize(model=w.build(w.LLAMA), config=config, init=w.fill)[0]

    def steps(engine: Engine, count: int) -> list[tuple[float, ...]]:
        seen = []
        for _ in range(count):
            engine.backward(engine(*w.batch(w.LLAMA.vocab, engine.global_steps, 0, 0)))
            engine.step()
            scaler = engine.optimizer.scaler
            assert scaler is not None
            seen.append((engine.grad_norm.item(), engine.optimizer.param_groups[0]["lr"], *scaler.state()))
        return seen

    one = begin()
    steps(one, 3)
    one.save_checkpoint(tmp_path)
    expected = steps(one, 3)
    one.close()
    other = begin()
    other.load_checkpoint(tmp_path)
    assert steps(other, 3) == expected
    other.close()
    assert len({row[1] for row in expected}) == 3 and expected[-1][2] > 2**8
