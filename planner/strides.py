"""Shapes and strides in elements: when torch copies, and in which memory order it allocates.

Extents of 1 have no stride that matters.
"""

from __future__ import annotations

from collections.abc import Sequence

Ints = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Ints:
    """Strides of a contiguous tensor.

    Examples
    --------
    >>> row_major((2, 3, 5))
    (15, 5, 1)
    """
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def is_dense(shape: Ints, strides: Ints) -> bool:
    """Whether the elements fill their extent without gaps or overlap, in any order of dims."""
    expected = 1
    for s, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if s != expected:
            return False
        expected *= n
    return True


def dense_like(shape: Ints, strides: Ints) -> Ints:
    """Strides of a new tensor in the same memory order: torch's `preserve_format`.

    Examples
    --------
    A slice of a transposed matrix keeps the transposed order and loses the gap.

    >>> dense_like((4, 3), (1, 10))
    (1, 4)
    """
    if is_dense(shape, strides):
        return strides
    out, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d], -d)):
        out[d] = step
        step *= shape[d]
    return tuple(out)


def view_strides(shape: Ints, strides: Ints, new: Sequence[int]) -> Ints | None:
    """Strides of a view in another shape, or None when that needs a copy. The rule of `aten::view`.

    Examples
    --------
    Heads of (B, T, H, D), transposed to (B, H, T, D), do not flatten; untransposed they do.

    >>> view_strides((2, 3, 5, 4), (60, 4, 12, 1), (2, 3, 20)) is None
    True
    >>> view_strides((2, 5, 3, 4), (60, 12, 4, 1), (2, 5, 12))
    (60, 12, 1)
    """
    # Runs of dims that are contiguous among themselves: [elements, innermost stride, outermost stride].
    runs: list[list[int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][2] == n * s:
            runs[-1] = [runs[-1][0] * n, s, s]
        else:
            runs.append([n, s, s])
    if not runs:
        return row_major(new)
    out = [0] * len(new)
    at = len(runs) - 1
    left, stride = runs[at][:2]
    for d in reversed(range(len(new))):
        n = new[d]
        if left == 1 and n != 1:
            at -= 1
            left, stride = runs[at][:2]
        if left % n:
            return None
        out[d] = stride
        stride, left = stride * n, left // n
    return tuple(out)
