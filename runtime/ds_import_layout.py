"""Where the elements of each parameter lie in what DeepSpeed's ranks saved. Integers only.

[Note: flat groups] Stages 1 and 2 lay the parameters of an optimizer group one after the other, with padding between
some of them in newer versions, and cut the whole into one slice per rank; the padding at the end is cut off the last
slices. Stage 3 cuts each parameter into one slice per rank, the last ones padded, and lays a rank's slices one after
the other in sub-groups, over whose ends a slice may reach. (`runtime/zero/stage_1_and_2.py`, `stage3.py` and
`utils/zero_to_fp32.py` of DeepSpeed 0.19.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zplan.planner.errors import ZplanError

Shapes = Mapping[str, tuple[int, ...]]
"""Of one optimizer group's parameters, in the order in which they lie."""


@dataclass(frozen=True)
class Part:
    """Elements `[start, start + numel)` of a parameter: those from `at` on in flat tensor `group` of one rank."""

    name: str
    start: int
    numel: int
    group: int
    at: int


def whole_groups(
    shapes: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None, lengths: Sequence[Sequence[int]]
) -> list[list[Part]]:
    """Stages 1 and 2: parts by rank.

    Parameters
    ----------
    paddings
        Elements after each parameter of each group; None where there are none.
    lengths
        Elements of each rank's slice of each group: `lengths[rank][group]`.

    Examples
    --------
    >>> whole_groups([{"a": (3,), "b": (2,)}], None, [[3], [2]])[1]
    [Part(name='b', start=0, numel=2, group=0, at=0)]
    """
    parts: list[list[Part]] = [[] for _ in lengths]
    for group, members in enumerate(shapes):
        after = [0] * len(members) if paddings is None else paddings[group]
        if len(after) != len(members):
            raise _odd(f"group {group} has {len(members)} parameters and {len(after)} paddings")
        at = 0
        for (name, shape), gap in zip(members.items(), after, strict=True):
            begin = 0
            for rank, row in enumerate(lengths):
                lo, hi = max(at, begin), min(at + prod(shape), begin + row[group])
                if lo < hi:
                    parts[rank].append(Part(name, lo - at, hi - lo, group, lo - begin))
                begin += row[group]
            at += prod(shape) + gap
        held = sum(row[group] for row in lengths)
        if not 0 <= held - at + (after[-1] if after else 0) < 2 * len(lengths) + max(after, default=0):
            raise _odd(f"the ranks hold {held:,} elements of group {group} and its parameters have {at:,}")
    return parts


def sliced_parameters(shapes: Sequence[Shapes], lengths: Sequence[Sequence[int]]) -> list[list[Part]]:
    """Stage 3: parts by rank. `lengths[rank][sub_group]`, equal on all ranks.

    Examples
    --------
    >>> sliced_parameters([{"a": (3,), "b": (1,)}], [[3], [3]])[1]
    [Part(name='a', start=2, numel=1, group=0, at=0)]
    """
    world_size = len(lengths)
    if any(row != lengths[0] for row in lengths):
        raise _odd("the ranks hold slices of unequal size")
    parts: list[list[Part]] = [[] for _ in lengths]
    group, at = 0, 0
    for name, shape in [row for members in shapes for row in members.items()]:
        numel = prod(shape)
        done, per_rank = 0, slice_numel(numel, world_size)
        while done < per_rank:
            while group < len(lengths[0]) and at == lengths[0][group]:
                group, at = group + 1, 0
            if group == len(lengths[0]):
                raise _odd(f"a rank holds {sum(lengths[0]):,} elements, which end in `{name}`")
            count = min(per_rank - done, lengths[0][group] - at)
            for rank in range(world_size):
                start = rank * per_rank + done
                real = min(count, numel - start)  # none where a late rank has padding only
                if real > 0:
                    parts[rank].append(Part(name, start, real, group, at))
            done, at = done + count, at + count
    if left := sum(lengths[0][group:]) - at:
        raise _odd(f"a rank holds {left:,} elements more than its parameters have")
    return parts


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's slice of a parameter at stage 3."""
    return -(-numel // world_size)


def _odd(what: str) -> ZplanError:
    return ZplanError(
        f"this is not the layout of a DeepSpeed checkpoint as zplan knows it: {what}",
        "move the weights over instead: `zero_to_fp32.py --safe_serialization`, then `zplan run --weights`",
    )
