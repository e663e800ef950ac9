"""How long a save takes: a raw write, foreground, background, and torch.distributed.checkpoint beside them.

    bash tests/bench/run_gpu.sh N tests/bench/checkpoint_speed.py --folder DISK [--million 250] [--device cpu]

One rank or more under torchrun, stage 3; every number is the slowest rank's, over rounds in which the order turns.
`raw` writes each rank's share of the very bytes of the states from host memory, all ranks at once, with fsync, through
the page cache; `raw direct` does it past the page cache. `blocked` is how long training waits for a save in the
background. Before each the disk is idle, and old files are deleted outside of all times. What was written is read back:
every crc32, and a load into scrambled states. A table goes to stdout, then JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import shutil
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import join_job

from zplan.planner.models import Architecture
from zplan.runtime.checkpoint_frozen import bit_sum
from zplan.runtime.checkpoint_ranges import state_tensor, states_of
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine
from zplan.runtime.halves import Halves
from zplan.runtime.initialize import initialize, meta_init
from zplan.runtime.rendezvous import Rendezvous

SHAPE = Architecture("llama", 8, 1024, 16, 16, 64, 2816, 32000, 512, tied=True)
BLOCK = 16 * 2**20


def start(million: int) -> Engine:
    """A Llama shape of about that many parameters after one step at stage 3, with room for background saves."""
    layers = max(1, round((million * 1e6 - SHAPE.vocab * SHAPE.hidden) / (4 * 1024**2 + 3 * 1024 * 2816)))
    arch = replace(SHAPE, layers=layers)
    with meta_init():
        model = Decoder(arch)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zplan": {"saving": "background", "seq": 64},
    }
    engine, *_ = initialize(model=model, config=config, init=lambda n, t: init_parameter(n, t, 0))
    ids = torch.randint(0, arch.vocab, (1, 64), device=engine.device)
    engine.backward(engine(ids, ids))
    engine.step()
    return engine


def states(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's states under names of its own, so that torch.distributed.checkpoint writes them all."""
    found = {}
    for u in engine.trained:
        for s in states_of(u):
            kept = state_tensor(u, s)
            parts = (kept.low, *kept.high) if isinstance(kept, Halves) else (kept,)
            found |= {f"{engine.rank}.{u.name}.{s}.{i}": t.detach() for i, t in enumerate(parts)}
    return found


def on_host(engine: Engine) -> memoryview:
    """The bytes that this rank saves, page after page."""
    tensors = list(states(engine).values())
    whole = mmap.mmap(-1, sum(t.nbytes for t in tensors))
    torch.cat([t.cpu().view(torch.uint8) for t in tensors], out=torch.frombuffer(whole, dtype=torch.uint8))
    return memoryview(whole)


def raw_write(path: Path, values: memoryview, flags: int = 0) -> None:
    """`flags` hold for all but what the last block lacks of a whole one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for at in range(0, len(values), BLOCK):
        if at + BLOCK > len(values):
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        assert os.write(fd, values[at : at + BLOCK]) == len(values[at : at + BLOCK])
    os.fsync(fd)
    os.close(fd)


class Clock:
    """Times calls that every rank makes: from a moment at which all are ready, to the end of the slowest."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.runs = engine, dict[str, list[float]]()
        self.meeting = Rendezvous(engine.rank, engine.world_size)  # a save in the background uses the engine's own

    def __call__(self, name: str, call: Callable[[], Any]) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        os.sync()
        self.meeting.all_say(str)
        begin = time.perf_counter()
        call()
        spent = time.perf_counter() - begin
        self.runs.setdefault(name, []).append(max(map(float, self.meeting.all_say(lambda: str(spent)))))


def rounds(engine: Engine, folder: Path, count: int) -> dict[str, list[float]]:
    """Every way of saving, `count` times, each time in another order; and loads that must give the same bits."""
    out, clock, values = folder / "saved", Clock(engine), on_host(engine)
    raw = folder / f"raw{engine.rank}"
    gloo = dist.new_group(backend="gloo")

    def background(i: int) -> None:
        clock("blocked", partial(engine.save_checkpoint, out, f"b{i}"))
        clock("behind", engine.wait_for_checkpoint)

    def dcp_async(i: int) -> None:
        futures: list[Any] = []
        target = folder / f"dcp{i}a"
        clock(
            "dcp blocked",
            lambda: futures.append(dcp.async_save(states(engine), checkpoint_id=target, process_group=gloo)),
        )
        clock("dcp behind", lambda: futures[0].result())

    ways: list[Callable[[int], None]] = [
        lambda i: clock("raw", lambda: raw_write(raw, values)),
        lambda i: clock("raw direct", lambda: raw_write(raw, values, os.O_DIRECT)),
        lambda i: clock("foreground", partial(engine.save_checkpoint, out, f"f{i}", background=False)),
        background,
        lambda i: clock("dcp", partial(dcp.save, states(engine), checkpoint_id=folder / f"dcp{i}")),
        dcp_async,
    ]
    for i in range(count):
        for k in range(len(ways)):
            ways[(k + i) % len(ways)](i)
            raw.unlink(missing_ok=True)
            dist.barrier()
            if engine.rank == 0:
                newest = (out / "latest").read_text().split()[0]
                for left in (*folder.glob("dcp*"), *(p for p in out.iterdir() if p.is_dir() and p.name != newest)):
                    shutil.rmtree(left)
        sums, drawn = [bit_sum(t) for t in states(engine).values()], torch.get_rng_state()
        with torch.no_grad():
            for t in states(engine).values():
                t.add_(1)
        torch.rand(100)
        clock("load", lambda: engine.load_checkpoint(out))
        assert [bit_sum(t) for t in states(engine).values()] == sums, "a load gave other states"
        assert torch.equal(torch.get_rng_state(), drawn), "a load gave another random state"
    return clock.runs


def crc32_speed() -> float:
    """Of one thread, in 1e9 bytes a second."""
    block = bytearray(BLOCK)
    begin = time.perf_counter()
    for _ in range(8):
        zlib.crc32(block)
    return 8 * BLOCK / (time.perf_counter() - begin) / 1e9


def table(found: dict[str, Any]) -> str:
    """For people."""
    gb = found["bytes"] / 1e9
    lines = [f"{gb:.2f} GB on {found['ranks']} ranks ({found['device']}), torch {found['torch']}", ""]
    lines += [f"{'':12} {'median s':>9} {'least':>8} {'most':>8} {'GB/s':>7}"]
    for name, times in found["all"].items():
        s = statistics.median(times)
        lines.append(f"{name:12} {s:9.3f} {min(times):8.3f} {max(times):8.3f} {gb / s:7.2f}")
    return "\n".join(
        [
            *lines,
            "",
            f"one thread sums {found['crc32_gb_per_s']:.2f} GB/s",
            f"foreground is {found['foreground_of_raw']:.2f} of raw (wanted: at least 0.80)",
            f"blocked is {found['blocked_of_foreground']:.1%} of foreground (wanted: below 10 %)",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--million", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    os.environ["ZPLAN_DEVICE"] = args.device
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    args.folder.mkdir(parents=True, exist_ok=True)
    join_job()
    engine = start(args.million)
    out = args.folder / "saved"
    engine.save_checkpoint(out, "warm", background=False)
    engine.save_checkpoint(out, "warm2", keep=1)
    engine.wait_for_checkpoint()
    runs = rounds(engine, args.folder, args.rounds)
    if engine.rank == 0:
        with Checkpoint(out / (out / "latest").read_text().split()[0]) as checkpoint:
            nbytes, wrong = checkpoint.manifest.nbytes, list(checkpoint.verify())
        assert not wrong, wrong
        median = {name: statistics.median(times) for name, times in runs.items()}
        how = {"bytes": nbytes, "ranks": engine.world_size, "device": str(engine.device), "torch": torch.__version__}
        found = {**how, "seconds": median, "all": runs, "crc32_gb_per_s": crc32_speed()}
        found["foreground_of_raw"] = median["raw"] / median["foreground"]
        found["blocked_of_foreground"] = median["blocked"] / median["foreground"]
        sys.stdout.write(table(found) + "\n\n" + json.dumps(found) + "\n")
        shutil.rmtree(args.folder)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
