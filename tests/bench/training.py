"""zplan's own step of what the scripts about speed train, and how a step is timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shapes import SHAPES, Case

from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import Mesh
from zplan.runtime.symmetric import outside_bytes

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A whole optimizer step of ids and labels (K, B, T); returns the last micro-batch's loss."""
Made = tuple[Step, Callable[[], None]]
"""A step, and what ends it."""


def zplan_engine(case: Case, *, world: int | None = None, **config: Any) -> Engine:
    """An engine on random weights; `config` goes over what the case says."""
    kinds = {"cross_entropy": "fused", "kernels": "torch" if case.compiled else "fused"} if case.fused else {}
    full = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": case.stage},
        **config,
        "zplan": {"compile": case.compiled, "deterministic": case.deterministic, **kinds, **config.get("zplan", {})},
    }
    with torch.device("meta"):
        model = Decoder(SHAPES[case.model], checkpointing=case.checkpointing, **kinds)
    return initialize(model=model, config=full, init=lambda n, t: init_parameter(n, t, 0), world=world)[0]


def step_of(engine: Engine) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for x, y in zip(ids.unbind(), labels.unbind(), strict=True):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


def batches(case: Case, count: int, device: torch.device, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels (K, B, T) of `count` steps."""
    g = torch.Generator(device=device).manual_seed(rank)
    shape = (count, case.accumulation, case.micro_batch, case.seq + 1)
    data = torch.randint(0, SHAPES[case.model].vocab, shape, device=device, generator=g)
    return [(x[..., :-1].contiguous(), x[..., 1:].contiguous()) for x in data.unbind()]


def wait_for_all(mesh: Mesh) -> None:
    torch.cuda.synchronize()
    if mesh.world_size > 1 and dist.is_initialized():
        dist.barrier()


def time_steps(
    step: Step, case: Case, mesh: Mesh, *, warm_up: int = 4, steps: int = 8, begin: Callable[[], None] = lambda: None
) -> tuple[float, list[float], tuple[float, float]]:
    """Seconds of one step, the first four losses, and GiB allocated and reserved at the peak, shared memory included.

    `begin` is called when warm-up is over.
    """
    data, losses, start = batches(case, warm_up + steps, mesh.device, mesh.rank), [], 0.0
    torch.cuda.empty_cache()
    for i, (ids, labels) in enumerate(data):
        if i == warm_up:
            wait_for_all(mesh)
            torch.cuda.reset_peak_memory_stats()
            begin()
            start = time.perf_counter()
        losses.append(step(ids, labels))
    wait_for_all(mesh)
    seconds = (time.perf_counter() - start) / steps
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    shared = outside_bytes()
    return seconds, [x.item() for x in losses[:4]], ((peaks[0] + shared) / 2**30, (peaks[1] + shared) / 2**30)


def say(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
