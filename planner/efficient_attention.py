"""What the memory-efficient attention kernel holds for itself in backward on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.graph import Value
from zplan.planner.layout import ceil_to
from zplan.planner.monomials import TILE_128
from zplan.planner.tape import Tape

FP32, BF16 = 4, 2
KEYS = 64
"""Keys of a block where heads are wider than 128."""


def gradient_sums(tape: Tape, q: Sequence[int], width: int, itemsize: int) -> list[Value]:
    """Sums in fp32 of what is handed out in 16 bits (torch 2.13, `mem_eff_attention/kernel_backward.h`).

    Those of the queries are whole, in blocks of 128 tokens (of 64 where heads are up to 64 wide, which is counted as
    128) and of 64 or 128 elements of a head. Where a head is wider than 128 no registers hold those of keys and values:
    one block of each for every head and sequence. Left out: 16 bytes a block for locks, and further blocks of keys,
    less than 20 MiB, where sequences and heads are few.

    Parameters
    ----------
    tape
        Where they are live until the caller lets go of them.
    q
        Shape (B, H, T, D) of the queries.
    width
        Of a value's head.
    itemsize
        Of queries, keys and values. fp32 needs no sums beside its gradients.
    """
    if itemsize != BF16:
        return []
    b, h, _, d = q
    sums = [tape.padded(h * FP32 * ceil_to(d, 128 if 64 < d <= 128 else 64), TILE_128, "attention.dq_sum", kernel=True)]
    if max(d, width) > 128:
        sums += [tape.workspace(b * h * FP32 * KEYS * ceil_to(n, 128), "attention.dk_dv_sum") for n in (d, width)]
    return sums
