"""Tokens a second and peak memory of zplan and FSDP2 on the same decoder, in alternating order in one job.

torchrun --standalone --nproc-per-node N tests/bench/gpu_speed.py MODEL MICRO_BATCH SEQ [full] [stageN] [rounds=2] [compile]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from shapes import SHAPES
from torch import nn

from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import initialize
from zplan.runtime.mesh import Mesh, join

WARM_UP, STEPS = 4, 8
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def zplan_step(name: str, micro_batch: int, checkpointing: str, stage: int, compiled: bool) -> tuple[Step, Callable[[], None]]:
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": stage},
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


def fsdp2_step(name: str, checkpointing: str, mesh: Mesh, compiled: bool) -> tuple[Step, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = init_device_mesh("cuda", (mesh.world_size,))
    with torch.device(mesh.device):
        model = Decoder(SHAPES[name], checkpointing=checkpointing)
    for pname, p in model.named_parameters():
        init_parameter(pname, p.data, 0)
    if compiled:
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block, mesh=where, mp_policy=policy)
    fully_shard(model, mesh=where, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: None


def measure(step: Step, name: str, micro_batch: int, seq: int, mesh: Mesh) -> tuple[float, float, float, list[float]]:
    g = torch.Generator(device=mesh.device).manual_seed(mesh.rank)
    data = torch.randint(0, SHAPES[name].vocab, (WARM_UP + STEPS, micro_batch, seq + 1), device=mesh.device, generator=g)
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


def main() -> None:
    name, micro_batch, seq, rest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    checkpointing, compiled = "full" if "full" in rest else "none", "compile" in rest
    stage = next((int(x[5:]) for x in rest if x.startswith("stage")), 3)
    rounds = next((int(x[7:]) for x in rest if x.startswith("rounds=")), 2)
    mesh = join()
    rates: dict[str, list[float]] = {"zplan": [], "fsdp2": []}
    for i in range(rounds):
        for runtime in ("zplan", "fsdp2") if i % 2 == 0 else ("fsdp2", "zplan"):
            if runtime == "zplan":
                step, close = zplan_step(name, micro_batch, checkpointing, stage, compiled)
            else:
                step, close = fsdp2_step(name, checkpointing, mesh, compiled)
            rate, allocated, reserved, losses = measure(step, name, micro_batch, seq, mesh)
            close()
            del step, close
            gc.collect()
            torch.cuda.empty_cache()
            rates[runtime].append(rate)
            if mesh.rank == 0:
                sys.stdout.write(
                    f"{runtime:6} {name} mb {micro_batch} seq {seq} {checkpointing}{' compiled' if compiled else ''}: {rate:9,.0f} tok/s/GPU, "
                    f"allocated {allocated:6.2f} reserved {reserved:6.2f} GiB, losses {[round(x, 4) for x in losses]}\n"
                )
                sys.stdout.flush()
    if mesh.rank == 0:
        ratio = max(rates["zplan"]) / max(rates["fsdp2"])
        sys.stdout.write(f"RATIO zplan stage {stage} / fsdp2: {ratio:.3f}\n")
    dist.barrier()
    mesh.close()


if __name__ == "__main__":
    main()
