"""Predicted against measured bytes on a GPU, by phase.

torchrun --standalone --nproc-per-node N tests/bench/gpu_memory.py MODEL STAGE MICRO_BATCH SEQ [full] [bf16|fp32] [K]
    [worldN] [in_backward]
"""

from __future__ import annotations

import sys

import torch
from shapes import SHAPES, spec

from zplan.planner.hardware import hardware_from
from zplan.planner.overhead import overhead_lines, workspace_lines
from zplan.planner.predict import predict
from zplan.planner.timeline import timeline
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import own_device
from zplan.runtime.preflight import OUTSIDE
from zplan.runtime.symmetric import outside_bytes
from zplan.runtime.verify import Meter


def main() -> None:
    name, stage, micro_batch, seq = sys.argv[1], *(int(x) for x in sys.argv[2:5])
    rest = sys.argv[5:]
    accumulation = next((int(x) for x in rest if x.isdigit()), 1)
    world = next((int(x[5:]) for x in rest if x.startswith("world")), None)
    early = "in_backward" in rest
    arch, checkpointing = SHAPES[name], "full" if "full" in rest else "none"
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": "fp32" not in rest},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0 if early else 1.0,
        "zplan": {"seq": seq, "checkpointing": checkpointing, "optimizer_in_backward": early},
    }
    device = own_device()
    with Meter(device) as meter:
        with torch.device("meta"):
            model = Decoder(arch, checkpointing=checkpointing)
        engine, *_ = initialize(model=model, config=config, init=lambda n, t: init_parameter(n, t, 0), world=world)
        meter.attach(engine)
        for _ in range(3):
            for _ in range(accumulation):
                ids = torch.randint(0, arch.vocab, (micro_batch, seq), device=device)
                labels = torch.randint(0, arch.vocab, (micro_batch, seq), device=device)
                loss = engine(ids, labels)
                engine.backward(loss)
                engine.step()
                del ids, labels, loss
        time = timeline(spec(name).units)
        lines = workspace_lines("{}.{}".format(*torch.cuda.get_device_capability()), time.phases, biased="gpt2" in name)
        ledger = predict(spec(name), engine.choice, overheads=lines)
        c = meter.compare(ledger)
    if engine.rank == 0:
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        beside = total - free - stats["reserved_bytes.all.current"] - outside_bytes()
        constants = overhead_lines(hardware_from(gpus=engine.world_size), engine.choice, time.phases)
        told = sum(x.total_bytes for x in constants if x.id.startswith(OUTSIDE))
        out = sys.stdout.write
        out(
            f"== {name} stage {stage} mb {micro_batch} seq {seq} k {accumulation} {checkpointing} "
            f"{'optimizer in backward ' if early else ''}world {engine.world_size}\n"
        )
        wrong = [r for r in (*c.lines, *c.peaks) if r.difference]
        for r in sorted(wrong, key=lambda r: -abs(r.difference))[:14]:
            out(f"  {r.where:42} {r.name[:60]:60} {r.predicted:>15,} {r.measured:>15,} {r.difference:>+13,}\n")
        top = c.peak
        out(
            f"  {len(wrong)} of {len(c.lines) + len(c.peaks)} rows differ; peak {top.where}: predicted "
            f"{max(r.predicted for r in c.peaks):,} measured {top.measured:,} "
            f"({(max(r.predicted for r in c.peaks) / top.measured - 1) * 100:+.3f} %)\n"
            f"  allocated peak {stats['allocated_bytes.all.peak']:,} "
            f"reserved peak {stats['reserved_bytes.all.peak']:,} device used {total - free:,}\n"
            f"  beside allocator and shared buffers {beside / 2**20:,.0f} MiB, by the ledger's constants "
            f"{told / 2**20:,.0f}\n"
        )
    engine.close()


main()
