"""`deterministic`: the same bits at every stage and in every run, bytes as the ledger has them, and nothing left on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import test_engine
import torch
import workload as w
from test_engine import exact
from test_kernel_step import train_by_table

from zplan.planner.api import estimate
from zplan.planner.comm import traffic
from zplan.planner.config import Choice
from zplan.planner.deterministic import check_deterministic, split_lines
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.overhead import overhead_lines
from zplan.planner.placement import place
from zplan.runtime import compiled as compiling
from zplan.runtime import deterministic
from zplan.runtime.initialize import initialize
from zplan.runtime.launch import rank_environment

STEPS = 6


def train(rank: int, world_size: int, config: dict[str, Any]) -> str:
    """A hash of losses, norms, final parameters and moments."""
    bits = hashlib.sha256()
    arch, k = w.LLAMA4, config["gradient_accumulation_steps"]
    model = w.build(arch, config["zplan"]["checkpointing"])
    engine, *_ = initialize(model=model, config=config, init=w.fill, checked=False)
    for step in range(STEPS):
        for micro_step in range(k):
            loss = engine(*w.batch(arch.vocab, step, rank, micro_step))
            engine.backward(loss, num_tokens=10 + rank)
            engine.step()
        bits.update(engine.grad_norm.numpy().tobytes())
    with engine.summon(optim=True) as whole:
        for p in engine.module.parameters():
            bits.update(p.detach().float().numpy().tobytes())
        for states in whole.optim.values():
            bits.update(states["exp_avg_sq"].numpy().tobytes())
    engine.close()
    return bits.hexdigest()


def train_all(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[str]:
    return [train(rank, world_size, c) for c in configs]


@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "precision", "k"),
    [(2, "bf16", 3), (3, "fp32", 1), pytest.param(3, "bf16", 2, marks=pytest.mark.slow)],
)
def test_stages_and_runs_give_the_same_bits(run_ranks, world_size, precision, k):
    options = {"precision": precision, "piece": 16384, "deterministic": True, "checkpointing": "none"}
    configs = [w.config(stage, k, **options) for stage in (0, 1, 2, 3, 3)]
    found = run_ranks(world_size, train_all, configs, limit=240)
    assert {bits for ranks in found for bits in ranks} == {found[0][0]}


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "k"), [(0, 1), (0, 2), (1, 2), (3, 1)])
def test_the_ledger_follows(run_ranks, stage, k):
    config = w.config(stage, k, precision="bf16", piece=16384, deterministic=True)
    exact(run_ranks(2, test_engine.train, "llama4", config, 2, False, True))


@pytest.mark.gloo
def test_norms_as_reduces_land_are_the_same_bits(run_ranks):
    """As on GPUs, where each rank's slices have rows of their own."""
    configs = [w.config(stage, 2, precision="bf16", piece=16384, deterministic=True) for stage in (0, 1, 3)]
    found = [run_ranks(2, train_by_table, "llama4", c, 4) for c in configs]
    (first, _), *_ = found[0]
    for result, built in (x for ranks in found for x in ranks):
        assert built == 1
        assert result["norms"] == first["norms"]
        assert all((a == b).all() for a, b in zip(result["params"].values(), first["params"].values(), strict=True))


def modes() -> tuple[bool, ...]:
    """What a deterministic engine changes in torch."""
    import torch._inductor.config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        inductor.deterministic,
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_close_puts_torchs_modes_back(monkeypatch, compiled):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = modes()
        config = w.config(0, deterministic=True, compile=compiled)
        engine, *_ = initialize(model=w.build(w.LLAMA4), config=config, init=w.fill)
        assert modes()[:4] == (True, False, False, False)
        assert modes()[4] or not compiled
        engine.close()
        assert modes() == before
        assert before[:4] == (True, True, True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_cublas_needs_its_workspaces_and_the_launcher_gives_them(monkeypatch):
    monkeypatch.delenv(deterministic.VARIABLE, raising=False)
    deterministic.check_workspace(torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ZplanError, match="is not set"):
        deterministic.check_workspace(gpu)
    assert deterministic.VARIABLE not in rank_environment(2, cpu=False)
    given = rank_environment(2, cpu=False, deterministic=True)[deterministic.VARIABLE]
    monkeypatch.setenv(deterministic.VARIABLE, given)
    deterministic.check_workspace(gpu)
    hardware = Hardware(1, 1, 2**34, "card", None, "8.9")
    lines = overhead_lines(hardware, Choice(0, 1, deterministic=True), ("idle",))
    assert next(x.nbytes for x in lines if x.id == "overhead.cublas") == 8 * 4096 * 1024


def test_traffic_by_formula():
    spec = ModelSpec("tiny", decoder_units(w.LLAMA4), w.LLAMA4)
    for n, k in ((2, 1), (3, 4)):
        sent = sum(p.layout.padded_numel for p in place(spec, Choice(0, n))) * (n - 1) // n
        zero, one, two = (traffic(spec, Choice(s, n, accumulation=k, deterministic=True)) for s in (0, 1, 2))
        assert (zero.gather_bytes, zero.reduce_bytes) == (0, k * 2 * sent + 4 * sent)
        assert one == two
        assert one.reduce_bytes == k * 2 * sent


def test_a_reduce_of_another_order_is_refused():
    check_deterministic(Choice(3, 1, deterministic=True, reduce="scatter"))
    with pytest.raises(ZplanError, match="exclude each other"):
        check_deterministic(Choice(3, 2, deterministic=True, reduce="scatter"))
    early = Choice(0, 2, deterministic=True, optimizer_in_backward=True)
    check_deterministic(replace(early, stage=1))
    with pytest.raises(ZplanError, match="at stage 0"):
        check_deterministic(early)
    answer = estimate("smollm2-135m", gpus=16, nodes=2, mem=80, config={"zplan": {"deterministic": True}})
    assert answer.row.choice.reduce == "exchange"


def test_attention_keeps_a_copy_for_each_share_of_the_multiprocessors():
    arch = replace(w.LLAMA4, heads=32, head_dim=128)
    at = {f"backward.blocks.{i}": i for i in range(4)}
    choice = Choice(3, 2, micro_batch=2, seq=2000, deterministic=True)
    (line,) = split_lines(arch, choice, at)
    assert (line.nbytes, line.low, line.instances) == (2 * 2 * 32 * 2048 * 128 * 4, 0, 4)
    (none,) = split_lines(arch, replace(choice, micro_batch=5), at)
    assert none.nbytes == 0
    assert split_lines(arch, replace(choice, precision="fp32"), at) == ()
