"""Does a rank that dies, raises or runs apart end the others within 30 s, without a process or GPU memory left behind?

python tests/bench/gpu_failfast.py

One rank on each GPU, two at most, over NCCL; a single GPU has one rank, which cannot run apart from others.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import failfast
import torch

SLACK_MIB = 16
"""By which the driver's own use may differ."""


def smi(query: str, field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def used_mib() -> list[int]:
    return [int(x) for x in smi("gpu", "memory.used")]


def held(before: list[int]) -> list[int]:
    """MiB a GPU more than before, once the driver has had ten seconds to take it back."""
    end = time.monotonic() + 10
    while True:
        more = [b - a for a, b in zip(before, used_mib(), strict=True)]
        if max(more) <= SLACK_MIB or time.monotonic() > end:
            return more
        time.sleep(0.5)


def main() -> None:
    before = used_mib()
    ranks = min(2, torch.cuda.device_count())
    bad = 0
    for how in ("kill", "raise", "diverge") if ranks > 1 else ("kill", "raise"):
        with tempfile.TemporaryDirectory() as folder:
            end = failfast.fail(Path(folder), how, world_size=ranks, cpu=False)
        more = held(before)
        at_work = smi("compute-apps", "pid")
        good = end.seconds < failfast.LIMIT_S and end.ranks == ranks and not end.left and max(more) <= SLACK_MIB
        bad += not good
        sys.stdout.write(
            f"{'ok ' if good else 'BAD'} {how:7} {ranks} ranks ended after {end.seconds:5.1f} s, "
            f"{len(end.left)} processes left, {more} MiB held, {len(at_work)} in nvidia-smi: {end.message}\n"
        )
    sys.stdout.write(f"{bad} bad\n")


main()
