"""Tokens a second, MFU and peak memory of zplan and its peers on the same decoder, in alternating order in one job.

torchrun --standalone --nproc-per-node N tests/bench/gpu_speed.py MODEL MICRO_BATCH SEQ
    [full] [compile] [fused] [deterministic] [stageN] [accum=K] [rounds=3] [fsdp2] [fsdp2-keep] [deepspeed]
    [unclipped] [in-backward]

`fsdp2-keep` is FSDP2 without resharding after forward, the peer of stages 1 and 2; `fused` puts our own kernels into
its model. `unclipped` is zplan without clipping, `in-backward` that with the optimizer in backward. Ratios are of runs
side by side: their median, and the least and the largest.
"""

from __future__ import annotations

import gc
import statistics
import sys

import torch
import torch.distributed as dist
from job import join_job
from peers import deepspeed_step, fsdp2_step
from shapes import Case, number, read_case
from training import Made, say, step_of, time_steps, zplan_engine

from zplan.runtime.mesh import Mesh

PEERS = ("fsdp2", "fsdp2-keep", "deepspeed", "unclipped", "in-backward")


def make(runtime: str, case: Case, mesh: Mesh) -> Made:
    if runtime == "zplan":
        engine = zplan_engine(case)
        return step_of(engine), engine.close
    if runtime in ("unclipped", "in-backward"):
        early = {"optimizer_in_backward": runtime == "in-backward"}
        engine = zplan_engine(case, gradient_clipping=0.0, zplan=early)
        return step_of(engine), engine.close
    if runtime == "deepspeed":
        return deepspeed_step(case, mesh)
    return fsdp2_step(case, mesh, keep=runtime == "fsdp2-keep")


def measure(runtime: str, case: Case, mesh: Mesh) -> float:
    """Tokens a second on one GPU."""
    step, close = make(runtime, case, mesh)
    seconds, losses, (allocated, reserved) = time_steps(step, case, mesh)
    close()
    del step, close
    gc.collect()
    torch.cuda.empty_cache()
    rate = case.micro_batch * case.seq * case.accumulation / seconds
    say(
        mesh,
        f"{runtime:10} {case}: {rate:7,.0f} tok/s/GPU, MFU {case.mfu(rate):.1%}, allocated {allocated:6.2f} "
        f"reserved {reserved:6.2f} GiB, losses {[round(x, 4) for x in losses]}",
    )
    return rate


def main() -> None:
    case, rest = read_case(sys.argv[1:])
    peers = [x for x in PEERS if x in rest] or ["fsdp2"]
    mesh = join_job()
    rates: dict[str, list[float]] = {}
    for i in range(number(rest, "rounds=", 3)):
        for runtime in ["zplan", *peers][:: 1 if i % 2 == 0 else -1]:
            rates.setdefault(runtime, []).append(measure(runtime, case, mesh))
    for runtime, found in rates.items():
        middle = statistics.median(found)
        say(
            mesh,
            f"MEDIAN {runtime:10} {middle:,.0f} tok/s/GPU ({min(found):,.0f} to {max(found):,.0f}), "
            f"MFU {case.mfu(middle):.1%}",
        )
    for peer in peers:
        pairs = [a / b for a, b in zip(rates["zplan"], rates[peer], strict=True)]
        say(
            mesh,
            f"RATIO zplan stage {case.stage} / {peer}: {statistics.median(pairs):.3f} "
            f"({min(pairs):.3f} to {max(pairs):.3f})",
        )
    if dist.is_initialized():
        dist.barrier()
    mesh.close()


if __name__ == "__main__":
    main()
