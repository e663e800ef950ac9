"""What sums over rows hold beside their result on one GPU, against `planner/reductions.py`; one line per shape.

python tests/bench/gpu_row_sums.py
"""

from __future__ import annotations

import gc
import sys
from itertools import product

import torch

from zplan.planner.reductions import row_sum_bytes

SHAPES = [
    *product((1020, 2048, 4096, 16384), (512, 1001, 1002, 1600, 4800, 11008)),
    # A vocabulary, one column and a few, a sum in parts for want of offsets.
    *((4096, 50257), (2048, 151936), (200_000, 1), (200_000, 2), (65536, 40), (131_072, 11008)),
]


def held(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Most bytes requested during the sum, less rows and result."""
    x = torch.zeros(rows, columns, dtype=dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    result = x.sum(0)
    stats = torch.cuda.memory_stats()
    del result
    return int(stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])


def main() -> None:
    gpu = torch.cuda.get_device_properties(0)
    sms, threads = gpu.multi_processor_count, gpu.max_threads_per_multi_processor
    print(f"{gpu.name}: {sms} multiprocessors of {threads} threads, torch {torch.__version__}")  # noqa: T201
    wrong = 0
    for (rows, columns), dtype in product(SHAPES, (torch.bfloat16, torch.float32)):
        predicted = row_sum_bytes(rows, columns, dtype.itemsize, sms, threads)
        measured = held(rows, columns, dtype)
        gc.collect()
        torch.cuda.empty_cache()
        wrong += predicted != measured
        off = "equal" if predicted == measured else f"{measured - predicted:+,}"
        print(f"{rows:>8} x {columns:>6} {dtype!s:14} {predicted:>13,} {measured:>13,} {off}", flush=True)  # noqa: T201
    sys.exit(f"{wrong} of {2 * len(SHAPES)} sums differ" if wrong else 0)


main()
