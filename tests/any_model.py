"""Training of any model under the engine beside the same micro-batches in one plain process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize

# A gradient that is zero but for rounding (a key's bias under softmax) would be blown up to +-lr by a smaller eps.
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.1}
CLIP = 1.0
VOCAB, SEQ, MICRO_BATCH = 61, 8, 2

Batch = dict[str, Tensor]
Backward = Callable[..., Any]


def config(stage: int, accumulation: int = 1, *, precision: str = "fp32", **zplan: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 65536},
        "zplan": zplan,
    }


def tokens(step: int, rank: int, micro_step: int, *, seq: int = SEQ) -> Batch:
    """Token ids and labels (MICRO_BATCH, seq)."""
    g = torch.Generator().manual_seed(step * 10_000 + rank * 100 + micro_step)
    ids = torch.randint(0, VOCAB, (MICRO_BATCH, seq), generator=g)
    return {"input_ids": ids, "labels": torch.randint(0, VOCAB, (MICRO_BATCH, seq), generator=g)}


def find(path: str) -> Callable[..., Any]:
    """`module:function`, since functions of test files travel to ranks by name."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def plain(model: nn.Module, backward: Backward, step: int, rank: int, micro_step: int) -> Tensor:
    """The usual recipe of one micro-step: forward, loss, backward."""
    out = model(**tokens(step, rank, micro_step))
    loss = out if isinstance(out, Tensor) else out.loss
    backward(loss)
    return loss


def train(
    rank: int,
    world_size: int,
    build: str,
    args: tuple[Any, ...],
    config: dict[str, Any],
    steps: int,
    recipe: str = "any_model:plain",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Losses and norms of this rank, and the whole final parameters."""
    run = find(recipe)
    engine, *_ = initialize(model=find(build)(*args), config=config, **{"checked": True, **(options or {})})
    losses, norms = [], []
    for step in range(steps):
        for k in range(engine.choice.accumulation):
            losses.append(run(engine, engine.backward, step, rank, k).item())
            engine.step()
        norms.append(engine.grad_norm.item())
    out = {"losses": losses, "norms": norms, "params": whole(engine), "units": [u.name for u in engine.units]}
    out["ringed"] = [u.name for u in engine.units if u.placement.ringed]
    engine.close()
    return out


def train_each(rank: int, world_size: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """`train` for several cases in one start of the ranks: starting costs more than a tiny training."""
    return {name: train(rank, world_size, *case) for name, case in cases.items()}


def whole(engine: Engine) -> dict[str, Any]:
    with engine.summon():
        return {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}


def reference(
    build: str,
    args: tuple[Any, ...],
    *,
    steps: int,
    world_size: int,
    accumulation: int = 1,
    recipe: str = "any_model:plain",
) -> dict[str, Any]:
    """The same in one process, fp32, plain torch: mean over ranks and micro-steps, clip, AdamW."""
    run, model = find(recipe), find(build)(*args)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    count = world_size * accumulation
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for k in range(accumulation):
            for rank in range(world_size):
                total += run(model, lambda loss, **keep: (loss / count).backward(**keep), step, rank, k).item()
        for p in params:
            # A parameter that no rank used has a zero gradient here, not none: weight decay acts on it alike.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return {"losses": losses, "norms": norms, "params": {n: p.detach().numpy() for n, p in model.named_parameters()}}


def equal(results: list[dict[str, Any]], expected: dict[str, Any], *, relative: float = 1e-6) -> None:
    """Losses, norms and final parameters of every rank against the reference."""
    steps = len(expected["losses"])
    losses = np.mean([r["losses"] for r in results], axis=0).reshape(steps, -1).mean(axis=1)
    np.testing.assert_allclose(losses, expected["losses"], rtol=relative)
    for r in results:
        np.testing.assert_allclose(r["norms"], expected["norms"], rtol=5 * relative)
        assert r["params"].keys() == expected["params"].keys()
        for name, value in expected["params"].items():
            np.testing.assert_allclose(r["params"][name], value, rtol=1e-5, atol=2e-6, err_msg=name)
