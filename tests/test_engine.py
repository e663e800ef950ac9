"""Every stage trains like one process: losses, gradient norms, and bit for bit between modes that must not matter."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.predict import predict
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Meter

METERED_STEPS = 2
STEPS = 4
"""Of most comparisons: from the third on, moments and weights are what the engine itself made of them."""
LONG = 10
"""Of those in which errors would have time to grow."""


def train(
    rank: int, world_size: int, arch_name: str, config: dict[str, Any], steps: int, checked: bool, metered: bool = False
) -> dict[str, Any]:
    """Losses and norms of this rank, the final parameters of the whole model, and predicted beside measured bytes."""
    arch, accumulation = w.ARCHS[arch_name], config["gradient_accumulation_steps"]
    losses, norms = [], []
    meter = Meter(torch.device("cpu")) if metered else None
    with meter or nullcontext():
        parts = {k: v for k, v in config["zplan"].items() if k in ("cross_entropy", "kernels")}
        model = w.build(arch, config["zplan"]["checkpointing"], **parts)
        engine, *_ = initialize(model=model, config=config, init=w.fill, checked=checked)
        if meter is not None:
            meter.attach(engine)
        for step in range(METERED_STEPS):
            one_step(engine, step, losses, norms, arch.vocab)
        comparison = None if meter is None else meter.compare(predict(w.spec(arch), engine.choice))
    for step in range(METERED_STEPS, steps):
        one_step(engine, step, losses, norms, arch.vocab)
    with engine.summon():
        params = {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}
    engine.close()
    assert accumulation == engine.choice.accumulation
    return {"losses": losses, "norms": norms, "params": params, "memory": comparison}


def train_each(rank: int, world_size: int, runs: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """`train` for several runs in one start of the ranks."""
    return {name: train(rank, world_size, *run) for name, run in runs.items()}


def one_step(engine: Engine, step: int, losses: list[float], norms: list[float], vocab: int) -> None:
    total = 0.0
    for k in range(engine.choice.accumulation):
        batch = w.batch(vocab, step, engine.rank, k)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        total += loss.item() / engine.choice.accumulation
        del batch, loss
    losses.append(total)
    norms.append(engine.grad_norm.item())


@lru_cache
def reference(arch: str, steps: int, world_size: int, accumulation: int, dtype: torch.dtype) -> Any:
    return w.reference(w.ARCHS[arch], steps=steps, world_size=world_size, accumulation=accumulation, dtype=dtype)


def exact(results: list[dict[str, Any]]) -> None:
    """Every line and every peak to the byte, and nothing unclaimed, on every rank."""
    for rank, r in enumerate(results):
        memory = r["memory"]
        assert not memory.off_by_more_than(0.0), f"rank {rank}: {memory.off_by_more_than(0.0)}"
        assert len(memory.lines) >= 20 and len(memory.peaks) >= 20


def close_to_reference(results: list[dict[str, Any]], expected: Any, relative: float, norms: float = 0.0) -> None:
    for step, (loss, norm) in enumerate(expected):
        mean = sum(r["losses"][step] for r in results) / len(results)
        assert mean == pytest.approx(loss, rel=relative), f"loss at step {step}"
        for r in results:
            assert r["norms"][step] == pytest.approx(norm, rel=norms or relative), f"gradient norm at step {step}"


CELLS = list(product((1, 3), (1, 2), ("none", "full"))) + [
    (1, 4, "full"),
    (3, 4, "none"),
    pytest.param(1, 4, "none", marks=pytest.mark.slow),
    pytest.param(3, 4, "full", marks=pytest.mark.slow),
]
"""Accumulation, ranks and checkpointing. Half of those on 4 ranks, which cost the most, are slow ones."""


@pytest.mark.gloo
@pytest.mark.parametrize(("accumulation", "world_size", "checkpointing"), CELLS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_one_process_and_its_ledger(run_ranks, stage, accumulation, world_size, checkpointing):
    config = w.config(stage, accumulation, checkpointing=checkpointing)
    steps = LONG if (world_size, accumulation) == (2, 1) else STEPS
    results = run_ranks(world_size, train, "llama", config, steps, False, True)
    exact(results)
    close_to_reference(results, reference("llama", steps, world_size, accumulation, torch.float32), 1e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("arch", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_models_equal_one_process(run_ranks, stage, arch):
    results = run_ranks(2, train, arch, w.config(stage, 2, checkpointing="full", piece=16384), STEPS, True, True)
    exact(results)
    close_to_reference(results, reference(arch, STEPS, 2, 2, torch.float32), 1e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_equals_one_process(run_ranks, stage, accumulation, world_size):
    """bf16 compute, fp32 masters and sums. A weight that rounds the other way moves a gradient norm by up to 0.4 %."""
    # Both ways to reduce in turn, over the cells.
    reduce = "scatter" if stage == 3 and accumulation == 3 or stage == 2 and accumulation == 1 else "exchange"
    checkpointing = "full" if accumulation == 1 else "none"
    config = w.config(stage, accumulation, precision="bf16", checkpointing=checkpointing, reduce=reduce)
    steps = LONG if accumulation == 1 else STEPS
    results = run_ranks(world_size, train, "llama", config, steps, False, True)
    exact(results)
    close_to_reference(results, reference("llama", steps, world_size, accumulation, torch.bfloat16), 1e-3, norms=1e-2)


OWN = {"cross_entropy": "fused", "kernels": "fused"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "accumulation", "arch", "checkpointing"),
    [(0, 2, "llama", "none"), (1, 1, "llama-tied", "full"), (3, 1, "llama4", "full"), (3, 2, "llama-tied", "none")],
)
def test_fused_kernels_equal_one_process_and_their_ledger(run_ranks, stage, accumulation, arch, checkpointing):
    config = w.config(stage, accumulation, checkpointing=checkpointing, piece=16384, **OWN)
    results = run_ranks(2, train, arch, config, STEPS, True, True)
    exact(results)
    close_to_reference(results, reference(arch, STEPS, 2, accumulation, torch.float32), 1e-6)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (3, 2), (3, 1)])
def test_fused_kernels_in_bf16(run_ranks, stage, world_size):
    results = run_ranks(world_size, train, "llama", w.config(stage, precision="bf16", **OWN), STEPS, False, True)
    exact(results)
    close_to_reference(results, reference("llama", STEPS, world_size, 1, torch.bfloat16), 1e-3, norms=1e-2)


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("accumulation", "stages"), [(1, (0, 1, 2, 3)), (3, (0, 1)), (3, (2, 3))])
def test_stages_agree_bit_for_bit(run_ranks, accumulation, stages, precision):
    """On two ranks a sum has one order, so no stage changes a bit.

    Clipping is off, since the norm is added up in an order of its own. With accumulation, stages 0 and 1 add
    micro-steps before ranks and stages 2 and 3 ranks before micro-steps.
    """
    runs = {}
    for stage in stages:
        config = w.config(stage, accumulation, precision=precision, checkpointing="full", clip=0.0, piece=16384)
        runs[f"stage {stage}"] = "llama", config, STEPS, False
    config = w.config(stages[-1], accumulation, precision=precision, clip=0.0)
    runs["one piece a unit"] = "llama", config, STEPS, False
    same_bits(run_ranks(2, train_each, runs))


@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stage", "steps"), [(3, STEPS), *(pytest.param(s, 2 * LONG, marks=pytest.mark.slow) for s in (1, 2, 3))]
)
def test_checked_mode_ring_size_and_overlap_change_no_bit(run_ranks, stage, steps):
    def how(**options: Any) -> dict[str, Any]:
        return w.config(stage, 2, precision="bf16", checkpointing="full", piece=16384, **options)

    alone = how()
    alone["zero_optimization"]["overlap_comm"] = False
    runs = {
        "reduce-scatter": ("llama4", how(reduce="scatter"), steps, False),
        "without overlap": ("llama4", alone, steps, False),
    }
    for checked, slots in product((False, True), (2, 3) if stage == 3 else (2,)):
        runs[f"{slots} slots, checked {checked}"] = "llama4", how(ring_slots=slots), steps, checked
    same_bits(run_ranks(2, train_each, runs, limit=280))


def same_bits(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """All runs of each rank."""
    for results in ranks:
        expected = next(iter(results.values()))
        for name, r in results.items():
            assert r["losses"] == expected["losses"], name
            for key, value in r["params"].items():
                assert (value == expected["params"][key]).all(), f"{name}: {key}"
