"""Do all stages train like one process on GPUs, and do checked mode and the optimizer in backward change nothing?

torchrun --standalone --nproc-per-node N tests/bench/gpu_check.py [fp32|bf16]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import workload as w
from job import join_job

from zplan.runtime.initialize import initialize

STEPS = 6


def train(config: dict, checked: bool, arch_name: str) -> tuple[list[float], list[float], list[torch.Tensor]]:
    arch, k = w.ARCHS[arch_name], config["gradient_accumulation_steps"]
    with torch.device("meta"):
        model = w.Decoder(arch, checkpointing=config["zplan"]["checkpointing"])
    engine, *_ = initialize(model=model, config=config, init=w.fill, checked=checked)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), device=engine.device)
        for micro_step in range(k):
            batch = [x.to(engine.device) for x in w.batch(arch.vocab, step, engine.rank, micro_step)]
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / k
        if engine.world_size > 1:
            dist.all_reduce(total)
            total /= engine.world_size
        losses.append(total.item())
        norms.append(engine.grad_norm.item())
    with engine.summon():
        params = [p.detach().clone() for p in engine.module.parameters()]
    engine.close()
    return losses, norms, params


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def same_in_backward(stage: int, precision: str) -> bool:
    """Whether losses, norms and parameters are those of ordinary steps, bit for bit."""
    found = []
    for early in (False, True):
        config = w.config(stage, precision=precision, clip=0.0, piece=16384, optimizer_in_backward=early)
        found.append(train(config, False, "llama4"))
    plain, early = found
    return plain[:2] == early[:2] and all(torch.equal(a, b) for a, b in zip(plain[2], early[2], strict=True))


def main() -> None:
    mesh = join_job()
    bad = 0
    for precision in sys.argv[1:] or ("fp32", "bf16"):
        for k in (1, 3):
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            expected = w.reference(
                w.ARCHS["llama4"],
                steps=STEPS,
                world_size=mesh.world_size,
                accumulation=k,
                dtype=dtype,
                device=mesh.device,
            )
            for stage in range(4):
                for checkpointing in ("full",) if k == 1 else ("none",):
                    config = w.config(stage, k, precision=precision, checkpointing=checkpointing, piece=16384)
                    losses, norms, params = train(config, False, "llama4")
                    _, _, checked = train(config, True, "llama4")
                    off = worst(losses, [x for x, _ in expected]), worst(norms, [x for _, x in expected])
                    same = all(torch.equal(a, b) for a, b in zip(params, checked, strict=True))
                    bound = (1e-5, 1e-4) if precision == "fp32" else (1e-3, 1e-2)
                    good = off[0] < bound[0] and off[1] < bound[1] and same
                    bad += not good
                    if mesh.rank == 0:
                        sys.stdout.write(
                            f"{'ok ' if good else 'BAD'} {precision} stage {stage} k {k} {checkpointing:4}: "
                            f"loss off {off[0]:.1e}, norm off {off[1]:.1e}, "
                            f"checked mode {'same bits' if same else 'DIFFERS'}\n"
                        )
        for stage in range(4):
            good = same_in_backward(stage, precision)
            bad += not good
            if mesh.rank == 0:
                sys.stdout.write(
                    f"{'ok ' if good else 'BAD'} {precision} stage {stage}: "
                    f"optimizer in backward {'same bits' if good else 'DIFFERS'}\n"
                )
    if mesh.rank == 0:
        sys.stdout.write(f"{bad} bad\n")
    dist.barrier()
    mesh.close()


main()
