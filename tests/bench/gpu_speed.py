"""Tokens a second and peak memory of zplan and its peers on the same decoder, in alternating order in one job.

torchrun --standalone --nproc-per-node N tests/bench/gpu_speed.py MODEL MICRO_BATCH SEQ
    [full] [stageN] [rounds=2] [compile] [fsdp2] [deepspeed]
"""

from __future__ import annotations

import gc
import sys
import time

import torch
import torch.distributed as dist
from job import join_job
from peers import ADAMW, CLIP, Made, Step, deepspeed_step, fsdp2_step
from shapes import SHAPES

from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import Mesh

WARM_UP, STEPS = 4, 8


def zplan_step(name: str, micro_batch: int, checkpointing: str, stage: int, *, compiled: bool, **extras: str) -> Made:
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": stage},
        "zplan": extras,
    }
    with torch.device("meta"):
        model = Decoder(SHAPES[name], checkpointing=checkpointing)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    engine, *_ = initialize(model=model, config=config, init=lambda n, t: init_parameter(n, t, 0))

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine.close


def measure(step: Step, name: str, micro_batch: int, seq: int, mesh: Mesh) -> tuple[float, float, float, list[float]]:
    g = torch.Generator(device=mesh.device).manual_seed(mesh.rank)
    data = torch.randint(
        0, SHAPES[name].vocab, (WARM_UP + STEPS, micro_batch, seq + 1), device=mesh.device, generator=g
    )
    torch.cuda.empty_cache()
    losses = []
    for i in range(WARM_UP + STEPS):
        if i == WARM_UP:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        losses.append(step(data[i, :, :-1].contiguous(), data[i, :, 1:].contiguous()))
    torch.cuda.synchronize()
    dist.barrier()
    rate = micro_batch * seq * STEPS / (time.perf_counter() - start)
    peaks = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    return rate, *peaks, [x.item() for x in losses[:4]]


def make(
    runtime: str, name: str, micro_batch: int, checkpointing: str, mesh: Mesh, *, stage: int, compiled: bool
) -> Made:
    if runtime == "zplan":
        return zplan_step(name, micro_batch, checkpointing, stage, compiled=compiled)
    if runtime == "fsdp2":
        return fsdp2_step(name, checkpointing, mesh, compiled=compiled)
    return deepspeed_step(name, micro_batch, checkpointing, mesh, stage, compiled=compiled)


def main() -> None:
    name, micro_batch, seq, rest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    checkpointing, compiled = "full" if "full" in rest else "none", "compile" in rest
    stage = next((int(x[5:]) for x in rest if x.startswith("stage")), 3)
    rounds = next((int(x[7:]) for x in rest if x.startswith("rounds=")), 2)
    peers = [x for x in ("fsdp2", "deepspeed") if x in rest] or ["fsdp2"]
    mesh = join_job()
    rates: dict[str, list[float]] = {}
    for i in range(rounds):
        for runtime in ["zplan", *peers][:: 1 if i % 2 == 0 else -1]:
            step, close = make(runtime, name, micro_batch, checkpointing, mesh, stage=stage, compiled=compiled)
            rate, allocated, reserved, losses = measure(step, name, micro_batch, seq, mesh)
            close()
            del step, close
            gc.collect()
            torch.cuda.empty_cache()
            rates.setdefault(runtime, []).append(rate)
            if mesh.rank == 0:
                how = f"{checkpointing}{' compiled' if compiled else ''}"
                sys.stdout.write(
                    f"{runtime:9} {name} mb {micro_batch} seq {seq} {how}: {rate:7,.0f} tok/s/GPU, "
                    f"allocated {allocated:6.2f} "
                    f"reserved {reserved:6.2f} GiB, losses {[round(x, 4) for x in losses]}\n"
                )
                sys.stdout.flush()
    if mesh.rank == 0:
        for peer in peers:
            sys.stdout.write(f"RATIO zplan stage {stage} / {peer}: {max(rates['zplan']) / max(rates[peer]):.3f}\n")
    dist.barrier()
    mesh.close()


if __name__ == "__main__":
    main()
