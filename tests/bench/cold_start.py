"""How long `zplan estimate` and `zplan plan` take from a cold process: `make bench`.

Files are in the page cache (one run goes ahead unmeasured). Prints the median of ten runs beside its limit and leaves
with 1 when one is over.
"""

import statistics
import subprocess
import sys
import tempfile
import time

RUNS = 10

COMMANDS = {
    "estimate --params 7e9 --gpus 8 --mem 24": 0.200,
    "estimate --model llama-3-8b --gpus 8 --mem 24": 0.200,
    "plan --model smollm2-135m --gpus 2 --mem 8 --seq 256 --global-batch 8 -o plan.json": 0.300,
}
"""Command to limit in seconds."""


def seconds(command: str, folder: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "zplan", *command.split()],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def main() -> int:
    over = 0
    with tempfile.TemporaryDirectory() as folder:
        for command, limit in COMMANDS.items():
            seconds(command, folder)
            median = statistics.median(seconds(command, folder) for _ in range(RUNS))
            over += median > limit
            print(f"{median * 1000:6.0f} ms of {limit * 1000:.0f}  zplan {command}")  # noqa: T201
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
