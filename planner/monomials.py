"""Sizes for every batch and sequence at once.

[Note: symbols] Sizes are exact for *every* batch and sequence at once. The tape runs with two huge primes as B and T.
No other extent of a model is a multiple of them, so the exponents of B and T in a size can be read off by division:
every storage is `c * B**i * T**j` bytes, and a level is one coefficient for each monomial of `BASIS`. A batch or
sequence of 1 changes which reshapes copy, so 1 is run as 1, not as a prime.
"""

from __future__ import annotations

from typing import NamedTuple

PRIME_B, PRIME_T = 2**31 - 1, 2**61 - 1
BASIS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
"""Exponents of (B, T) of every size that occurs."""
TILE_32, TILE_64, TILE_128, SORT, SORT_POSITIONS, SORT_TYPES, CHUNK = range(len(BASIS), len(BASIS) + 7)
"""Indices of more monomials: B times the number of tiles of so many tokens that T takes, as attention kernels cut it;
bytes that the backward of an embedding of tokens takes to sort their ids, of one of positions, and of one of types;
tokens whose logits exist at once."""
TOKENS = {TILE_32: 32, TILE_64: 64, TILE_128: 128}
"""Of a tile."""
WIDTH = len(BASIS) + 7

Level = tuple[int, ...]
"""Coefficients of live bytes: `WIDTH` for what tensors hold, as many for what kernels hold for themselves, and one for
each shape of rows that a kernel sums.
"""


class RowSum(NamedTuple):
    """A sum of rows to one row: extents as exponents of B and T with a coefficient, and bytes of an element."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    itemsize: int

    def at(self, b: int, t: int) -> tuple[int, int, int]:
        """Rows, columns and itemsize at batch `b` and sequence `t`."""
        rows, columns = (n * b**i * t**j for i, j, n in (self.rows, self.columns))
        return rows, columns, self.itemsize


def monomials(b: int, t: int, sort_bytes: tuple[int, int, int], chunk: int) -> tuple[int, ...]:
    """Values of all monomials, those of the kernels' half included, at batch `b` and sequence `t`."""
    tiles = (b * -(-t // n) for n in TOKENS.values())
    values = (*(b**i * t**j for i, j in BASIS), *tiles, *sort_bytes, chunk)
    return values + values


def factor(size: int) -> tuple[int, int, int]:
    """Exponents of B and T in a size, and what is left."""
    i = j = 0
    while size and size % PRIME_B == 0:
        size, i = size // PRIME_B, i + 1
    while size and size % PRIME_T == 0:
        size, j = size // PRIME_T, j + 1
    return i, j, size


def split(nbytes: int) -> tuple[int, int]:
    """`(monomial index, coefficient)` of a size in bytes."""
    i, j, coefficient = factor(nbytes)
    return BASIS.index((i, j)), coefficient
