"""Searches along one axis, in as few evaluations as halving takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def largest_multiple(
    spare: Callable[[int], int], step: int, *, below: int, near: int, below_spare: int | None = None
) -> int:
    """Largest multiple of `step` with `spare(x) >= 0`, for a falling `spare`; 0 when there is none.

    Parameters
    ----------
    spare
        Nearly linear, so that a straight line between the two sides finds the place in a few calls; where it is not,
        halving takes over.
    below
        A value that is known not to fit.
    near
        Where to look first.
    below_spare
        `spare(below)` where that is known: then one straight line leads there at once.

    Examples
    --------
    >>> largest_multiple(lambda x: 1000 - x, 128, below=10**6, near=2048)
    896
    """
    low, high = 0, -(-below // step)
    low_spare: int | None = None
    high_spare = below_spare
    at, calls = min(max(1, near // step), high - 1), 0
    while high - low > 1:
        found = spare(at * step)
        calls += 1
        if found >= 0:
            low, low_spare = at, found
        else:
            high, high_spare = at, found
        if low_spare is not None and high_spare is not None and calls < 8:
            at = low + (high - low) * low_spare // (low_spare - high_spare)
        elif low_spare is not None and high_spare is None:
            at = low * 8
        else:
            at = (low + high) // 2
        at = min(max(at, low + 1), high - 1)
    return low * step


def last_good(choices: Sequence[A], row: Callable[[A], B], good: Callable[[B], bool]) -> B | None:
    """The row of the last choice whose row is good, given that none is good after one that is not.

    Rows are evaluated only as far as halving has to.
    """
    low, high = -1, len(choices)
    at = high - 1  # Most often the largest fits.
    while high - low > 1:
        if good(row(choices[at])):
            low = at
        else:
            high = at
        at = (low + high) // 2
    return row(choices[low]) if low >= 0 else None
