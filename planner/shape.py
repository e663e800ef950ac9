"""A plausible Llama-like shape for a parameter count alone.

[Note: assumed shape] The rules, so that anyone can redo them by hand:

- heads of 128 (64 below a width of 1024), as many key-value heads as heads;
- two untied tables of 32,000 tokens; where those would be more than three tenths of the count, one tied table of
  32,000; where that would be, two of 256 (bytes);
- width a multiple of 128 (of 256 from 2048 on, of 512 from 4096 on), layers even from 8 on and a multiple of 4 from 24
  on, near width / ratio; the ratio follows the field from 64 at 1e8 to 128 at 7e9 and up;
- the feed-forward width is what is left, near 8/3 of the width, in steps that cost at most a hundredth of the count.

Among all shapes that stay within the count and miss it by at most 1 %, the one nearest to these proportions wins.
7e9 gives 32 layers of 4096.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture
from zplan.planner.sequence import NO_LIMIT
from zplan.planner.units import format_count

SMALLEST, LARGEST = 10**6, 2 * 10**12

_TABLES = ((32000, False), (32000, True), (256, False))
"""`(vocabulary, tied)`, in order of preference."""


def solve_shape(count: int) -> Architecture:
    """The shape assumed for a count; see [Note: assumed shape].

    Parameters
    ----------
    count
        Parameters, 1e6 to 2e12. The shape's own count is at most this and at least 99 % of it.

    Examples
    --------
    >>> a = solve_shape(7_000_000_000)
    >>> a.layers, a.hidden, a.ffn, a.vocab
    (32, 4096, 11648, 32000)
    """
    if not SMALLEST <= count <= LARGEST:
        raise ZplanError(
            f"no shape is assumed for {format_count(count)} parameters",
            "give a count from 1M to 2T, or a config.json with --model",
        )
    ratio = _aspect(count)
    return min(_candidates(count, ratio), key=lambda found: found[0])[1]


def _aspect(count: int) -> float:
    """Width per layer that the field uses at this size."""
    return 128.0 * min(1.0, math.exp(math.log(count / 7e9) / 6))


def _candidates(count: int, ratio: float) -> Iterator[tuple[float, Architecture]]:
    """`(distance from the proportions, shape)` of every shape that misses the count by at most 1 %."""
    around = int(math.exp(math.log(count * ratio / 12) / 3))
    for hidden in _widths(around // 2, around * 7 // 4 + 256):
        vocab, tied = _tables(count, hidden)
        rest = count - vocab * hidden * (1 if tied else 2) - hidden
        # Layers for which the feed-forward width comes out at 8/3 of the width: 4 C^2 + 3 C F + 2 C = 12 C^2 + 2 C.
        near = rest // (12 * hidden * hidden + 2 * hidden)
        step = 1 if near < 8 else 2 if near < 24 else 4
        for layers in range(max(1, near // step * step - step), near + 2 * step, step):
            found = _fill(count, rest, hidden=hidden, layers=layers, vocab=vocab, tied=tied)
            if found is not None:
                shape = math.log(hidden / layers / ratio) ** 2
                width = math.log(3 * found.ffn / (8 * hidden)) ** 2
                yield shape + 4 * width, found


def _widths(first: int, last: int) -> Iterator[int]:
    hidden = max(128, first // 512 * 512)
    while hidden <= last:
        yield hidden
        hidden += 128 if hidden < 2048 else 256 if hidden < 4096 else 512


def _tables(count: int, hidden: int) -> tuple[int, bool]:
    for vocab, tied in _TABLES:
        if vocab * hidden * (1 if tied else 2) * 10 <= 3 * count:
            return vocab, tied
    return _TABLES[-1]


def _fill(count: int, rest: int, *, hidden: int, layers: int, vocab: int, tied: bool) -> Architecture | None:
    """Give what is left to the feed-forward width; None when that is out of proportion or misses by more than 1 %."""
    per_unit = 3 * hidden * layers
    step = 256
    while step > 1 and step * per_unit * 100 > count:
        step //= 2
    left = rest - layers * (4 * hidden * hidden + 2 * hidden)
    ffn = left // per_unit // step * step
    if not hidden <= ffn <= 5 * hidden or (left - ffn * per_unit) * 100 > count:
        return None
    head_dim = 128 if hidden >= 1024 else 64
    heads = hidden // head_dim
    return Architecture(
        "llama", layers, hidden, heads, heads, head_dim, ffn, vocab, max_seq=NO_LIMIT, tied=tied, norm_eps=1e-5
    )
