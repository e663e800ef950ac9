"""What the memory-efficient attention kernel holds for itself in backward on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.graph import Value
from zplan.planner.layout import ceil_to
from zplan.planner.monomials import TILE_64, TILE_128, TOKENS
from zplan.planner.tape import Tape

FP32, BF16 = 4, 2
KEYS = 64
"""Keys of a block where heads are wider than 128."""
LOCK = 16
"""Bytes of lock, counter and padding before a block of sums: `GradQTempStorage`."""


def row_products(tape: Tape, q: Sequence[int], width: int, itemsize: int) -> Value:
    """fp32 sums over a head of output times its gradient, (B, H, T).

    In 16 bits the kernel takes them itself. In fp32 torch does before it (`attention_backward.cu`): the products whole,
    their sums token by token, and these again head by head.
    """
    b, h, t, _ = q
    if itemsize == BF16:
        return tape.workspace(b * h * t * FP32, "attention.delta")
    products = tape.workspace(b * h * t * width * FP32, "attention.products")
    by_token = tape.workspace(b * h * t * FP32, "attention.delta")
    delta = tape.workspace(b * h * t * FP32, "attention.delta")
    del products, by_token
    return delta


def gradient_sums(tape: Tape, q: Sequence[int], width: int, itemsize: int) -> list[Value]:
    """Gradients that many blocks of keys add to (torch 2.11, `mem_eff_attention/kernel_backward.h`, `cutlassB.h`).

    Those of the queries are summed in fp32 in blocks of 64 tokens where heads are up to 64 wide and else of 128, by 128
    elements of a head in 16 bits where it is 65 to 128 wide and else by 64, each behind a lock. Where a head is wider
    than 128 no registers hold what 16 bits make of keys and values: one block of each for every head and sequence.
    Left out: further blocks of keys, less than 20 MiB, where sequences and heads are few. Those are the kernels that
    torch takes where a block may have 160 KiB of shared memory (A100, H100, H200, B200).

    Parameters
    ----------
    tape
        Where they are live until the caller lets go of them.
    q
        Shape (B, H, T, D) of the queries.
    width
        Of a value's head.
    itemsize
        Of queries, keys and values.
    """
    b, h, _, d = q
    widest = max(d, width)
    tile = TILE_64 if widest <= 64 else TILE_128
    columns = 128 if itemsize == BF16 and 64 < widest <= 128 else 64
    block = LOCK + FP32 * TOKENS[tile] * columns
    sums = [tape.tiles(h * -(-d // columns) * block, tile, "attention.dq_sum", kernel=True)]
    if itemsize == BF16 and widest > 128:
        sums += [tape.workspace(b * h * FP32 * KEYS * ceil_to(n, 128), "attention.dk_dv_sum") for n in (d, width)]
    return sums
