"""Do transformers' own modules of 15 kinds train on GPUs like one plain process, in checked mode?

torchrun --standalone --nproc-per-node N tests/bench/gpu_models.py [MODEL ...] [stageS] [small]

At stage 3, or the one that is named.

In fp32 beside a plain loop over all ranks' micro-batches, with and without checkpointing; in bf16 beside stage 0 with
the same checkpointing (T5 takes its loss in bf16, where another order of two sums is 0.7 % of it).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from hf_models import ALL, SMALL, WIDE, Sizes, batch, build
from job import join_job
from torch import nn

from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import Mesh

STEPS, MICRO_BATCH, CLIP = 5, 4, 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.1}
"""eps as in the matrix on the CPU: a gradient that is zero but for rounding would be blown up by a smaller one."""
RUNS = (("fp32", "none"), ("fp32", "plain"), ("bf16", "none"), ("bf16", "plain"))
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (2e-3, 5e-2)}
"""Largest relative distance of losses and of gradient norms."""

Curve = tuple[list[float], list[float]]


def data(model: nn.Module, sizes: Sizes, step: int, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    found = batch(model, (MICRO_BATCH, sizes.positions // 2), 100 * step + rank, sizes)
    return {k: v.to(device) for k, v in found.items()}


def plain(name: str, sizes: Sizes, mesh: Mesh) -> Curve:
    """One process, fp32: mean over all ranks' micro-batches, clip, AdamW. Every rank runs it for itself."""
    model = build(name, sizes=sizes).to(mesh.device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(mesh.world_size):
            loss = model(**data(model, sizes, step, rank, mesh.device)).loss / mesh.world_size
            loss.backward()
            total += loss.item()
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def trained(name: str, sizes: Sizes, precision: str, stage: int, checkpointing: str) -> Curve:
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 65536},
    }
    engine, *_ = initialize(model=build(name, checkpointing, sizes), config=config, checked=True)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**data(engine.module, sizes, step, engine.rank, engine.device)).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        if engine.world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
        norms.append(engine.grad_norm.item())
    engine.close()
    return losses, norms


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    mesh, sizes = join_job(), SMALL if "small" in sys.argv else WIDE
    names = [w for w in sys.argv[1:] if w in ALL] or ALL
    stage = next((int(w[5:]) for w in sys.argv[1:] if w.startswith("stage")), 3)
    bad = 0
    for name in names:
        reference = plain(name, sizes, mesh)
        for precision, checkpointing in RUNS:
            expected = reference if precision == "fp32" else trained(name, sizes, precision, 0, checkpointing)
            got = trained(name, sizes, precision, stage, checkpointing)
            off = [worst(a, b) for a, b in zip(got, expected, strict=True)]
            good = all(x < bound for x, bound in zip(off, BOUNDS[precision], strict=True))
            bad += not good
            if mesh.rank == 0:
                sys.stdout.write(
                    f"{'ok ' if good else 'BAD'} {name:10} {precision} stage {stage} checkpointing {checkpointing:5}: "
                    f"loss off {off[0]:.1e}, norm off {off[1]:.1e}\n"
                )
                sys.stdout.flush()
    if mesh.rank == 0:
        sys.stdout.write(f"{bad} of {len(names) * len(RUNS)} bad on {mesh.world_size} ranks\n")
    mesh.close()
    sys.exit(1 if bad else 0)


main()
