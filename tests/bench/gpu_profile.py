"""Where a step's time goes on the stream that computes: busy, idle, and the kernels that take most.

torchrun --standalone --nproc-per-node N tests/bench/gpu_profile.py MODEL MICRO_BATCH SEQ [full] [stageN] [zplan|fsdp2]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_speed import zplan_step
from job import join_job
from peers import fsdp2_step
from shapes import SHAPES

STEPS = 3


def main() -> None:
    name, micro_batch, seq, rest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    checkpointing = "full" if "full" in rest else "none"
    stage = next((int(x[5:]) for x in rest if x.startswith("stage")), 3)
    mesh = join_job()
    if "fsdp2" in rest:
        step, close = fsdp2_step(name, checkpointing, mesh, compiled=False)
    else:
        step, close = zplan_step(name, micro_batch, checkpointing, stage, compiled=False)
    data = torch.randint(0, SHAPES[name].vocab, (2, micro_batch, seq), device=mesh.device)
    for _ in range(4):
        step(*data)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step(*data)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    if mesh.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            report(json.loads(path.read_text())["traceEvents"])
    close()
    dist.barrier()
    mesh.close()


def report(events: list[dict]) -> None:
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_stream: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for e in kernels:
        by_stream[e["args"].get("stream", -1)].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    begin, end = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    out = sys.stdout.write
    out(f"step {(end - begin) / STEPS / 1e3:.2f} ms\n")
    for stream, rows in sorted(by_stream.items(), key=lambda kv: -sum(b - a for a, b, _ in kv[1])):
        rows.sort()
        busy = sum(b - a for a, b, _ in rows) / STEPS / 1e3
        out(f" stream {stream}: busy {busy:.2f} ms a step, {len(rows) // STEPS} kernels\n")
        total: dict[str, list[float]] = defaultdict(list)
        for a, b, n in rows:
            total[n[:90]].append(b - a)
        for n, times in sorted(total.items(), key=lambda kv: -sum(kv[1]))[:9]:
            out(f"    {sum(times) / STEPS / 1e3:8.2f} ms {len(times) // STEPS:5} x {n}\n")
    main_rows = sorted(max(by_stream.values(), key=len))
    gaps = [
        (b[0] - a[1], a[2][:50], b[2][:50]) for a, b in zip(main_rows, main_rows[1:], strict=False) if b[0] - a[1] > 30
    ]
    out(
        f" gaps over 30 us on the main stream: {len(gaps) // STEPS} a step, "
        f"{sum(g[0] for g in gaps) / STEPS / 1e3:.2f} ms\n"
    )
    for g in sorted(gaps, reverse=True)[:12]:
        out(f"    {g[0] / 1e3:7.2f} ms between {g[1]} and {g[2]}\n")


main()
