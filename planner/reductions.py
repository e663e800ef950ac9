"""What ATen's sum over rows, which makes the gradient of a bias, holds on CUDA beside its result.

A few thousand columns keep too few blocks busy, so several blocks share a column, and their partial sums meet in a
staging buffer. It has room for every thread and every element of its vector, not for what is written: four times the
bytes of the 16-bit rows themselves up to 17 million elements, from there some 138 MB, and above 277 million a quarter.
"""

from __future__ import annotations

FP32, INT32 = 4, 4
MAX_THREADS, WARP = 512, 32
FEW_VALUES, MANY_VALUES = 16, 256
"""What a thread adds up at least where a column is shared, and from how many values on it is."""

INDEX_REACH = 2**31 - 1
"""Bytes that 32-bit offsets reach. More rows than that are summed half by half."""

SMS, THREADS_PER_SM = 132, 2048
"""Of H100 SXM, H200 and GH200. They say how many blocks fill the GPU, and matter from 17 million elements on: there an
A100 (108) takes 18 % less than counted here, a B200 (148) 12 % more, an RTX 4090 (128 of 1,536 threads) 27 % less.
"""


def row_sum_bytes(rows: int, columns: int, itemsize: int, sms: int = SMS, threads_per_sm: int = THREADS_PER_SM) -> int:
    """Bytes beside the result while a row-major (rows, columns) is summed to (columns,).

    `setReduceConfig`, `global_memory_size`, `semaphore_size` and `gpu_reduce_kernel` in torch's
    `aten/src/ATen/native/cuda/Reduce.cuh`; to the byte what torch 2.11 requests on an H200.

    Parameters
    ----------
    itemsize
        Of the rows; sums are of fp32. Rows begin at a multiple of four elements, or of what divides `columns`.
    sms, threads_per_sm
        Multiprocessors of the GPU, and threads that one holds.
    """
    part = _summed_at_once(rows, columns, itemsize)
    # Sums of parts are added up in fp32, for which a 16-bit result has no room.
    apart = FP32 * columns if part < rows and itemsize < FP32 else 0
    return apart + _staging_bytes(part, columns, sms * threads_per_sm)


def _summed_at_once(rows: int, columns: int, itemsize: int) -> int:
    """Rows of the largest part."""
    if rows <= 1 or (rows * columns - 1) * itemsize + 1 <= INDEX_REACH:
        return rows
    return max(_summed_at_once(n, columns, itemsize) for n in (rows // 2, rows - rows // 2))


def _staging_bytes(rows: int, columns: int, threads: int) -> int:
    """The buffer of partial sums, and a counter for each group of columns."""
    if columns == 1:
        # Lies together in memory, so that all threads of a block add up the same column and leave one sum.
        shared = _blocks_sharing(-(-rows // MAX_THREADS), 1, threads // MAX_THREADS)
        return FP32 * shared + INT32 if shared > 1 else 0
    # Threads side by side take a vector of columns each, those above one another different rows. Blocks for fewer rows
    # than they have threads look otherwise, but share no column.
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    block = MAX_THREADS // vector
    width = min(_last_power_of_2(columns // vector), WARP)
    groups = -(-columns // (vector * width))
    shared = _blocks_sharing(-(-rows // (block // width)), groups, threads // block)
    return FP32 * columns * shared * width * vector + INT32 * groups if shared > 1 else 0


def _blocks_sharing(values: int, groups: int, resident: int) -> int:
    """Blocks for one group of columns, whose threads would have `values` each, where so many fit onto the GPU."""
    if values < MANY_VALUES or groups > resident:
        return 1
    return max(min(-(-resident // groups), -(-values // FEW_VALUES)), -(-values // MANY_VALUES))


def _last_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)
