"""How long a save takes: a raw write, foreground, background, and torch.distributed.checkpoint beside them.

    python tests/bench/checkpoint_speed.py --folder DISK --million 300 [--device cpu]

One rank; every number is the median of a few. `raw` writes the same number of bytes with fsync; `blocked` is how long
training waits for a save in the background. Results go to stdout as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from zplan.planner.models import Architecture
from zplan.runtime.checkpoint_frozen import bit_sum
from zplan.runtime.checkpoint_ranges import state_tensor
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize, meta_init

REPEATS = 3
SHAPE = Architecture("llama", 8, 1024, 16, 16, 64, 2816, 32000, 512, tied=True)


def architecture(million: int) -> Architecture:
    """A Llama shape of about that many parameters."""
    layers = max(1, round((million * 1e6 - SHAPE.vocab * SHAPE.hidden) / (4 * 1024**2 + 3 * 1024 * 2816)))
    return replace(SHAPE, layers=layers)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def raw_write(folder: Path, nbytes: int) -> None:
    block = os.urandom(1 << 20) * 16
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, nbytes, len(block)):
        os.write(fd, block[: nbytes - at])
    os.fsync(fd)
    os.close(fd)
    (folder / "raw").unlink()


def states(engine: Engine) -> dict[str, torch.Tensor]:
    """The same bytes as a checkpoint's, for torch.distributed.checkpoint."""
    names = ("weight", "exp_avg", "exp_avg_sq")
    return {f"{u.name}.{s}": state_tensor(u, s).detach() for u in engine.trained for s in names}


def bits(engine: Engine) -> list[int]:
    return [bit_sum(t) for t in states(engine).values()]


@torch.no_grad()
def scramble(engine: Engine) -> None:
    for t in states(engine).values():
        t.add_(1.0)
    torch.rand(100, device=engine.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--million", type=int, default=300)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    os.environ["ZPLAN_DEVICE"] = args.device
    args.folder.mkdir(parents=True, exist_ok=True)
    arch = architecture(args.million)
    with meta_init():
        model = Decoder(arch)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zplan": {"saving": "background", "seq": 64},
    }
    engine, *_ = initialize(model=model, config=config, init=lambda n, t: init_parameter(n, t, 0))
    ids = torch.randint(0, arch.vocab, (1, 64), device=engine.device)
    engine.backward(engine(ids, ids))
    engine.step()
    device, out = engine.device, args.folder / "saved"
    engine.save_checkpoint(out, "warm", background=False)
    with Checkpoint(out / "warm") as checkpoint:
        nbytes = checkpoint.manifest.nbytes
    runs: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        runs.setdefault(name, []).append(seconds)

    for i in range(REPEATS):
        note("raw", timed(lambda: raw_write(args.folder, nbytes), device))
        note("foreground", timed(partial(engine.save_checkpoint, out, f"f{i}", keep=1, background=False), device))
        note("blocked", timed(partial(engine.save_checkpoint, out, f"b{i}", keep=1), device))
        note("behind", timed(engine.wait_for_checkpoint, device))
        note("dcp", timed(partial(dcp.save, states(engine), checkpoint_id=args.folder / f"dcp{i}"), device))
        shutil.rmtree(args.folder / f"dcp{i}")
        sums, drawn = bits(engine), torch.rand(3, device=device)
        scramble(engine)
        note("load", timed(lambda: engine.load_checkpoint(out), device))
        assert bits(engine) == sums, "a load gave other states"
        assert torch.equal(torch.rand(3, device=device), drawn), "a load gave another random state"
    engine.close()
    median = {name: statistics.median(times) for name, times in runs.items()}
    found = {"bytes": nbytes, "device": str(device), "torch": torch.__version__, "seconds": median, "all": runs}
    found["foreground_of_raw"] = median["raw"] / median["foreground"]
    found["blocked_of_foreground"] = median["blocked"] / median["foreground"]
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
