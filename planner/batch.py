"""The batch identity: train = micro x accumulation x world, and what follows when some of the three are left out."""

from __future__ import annotations

import math
from typing import NamedTuple

from zplan.planner.errors import ZplanError


class Batch(NamedTuple):
    """Sequences: `micro` per rank and micro-step, `accumulation` micro-steps per optimizer step."""

    micro: int
    accumulation: int
    world_size: int

    @property
    def train(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro * self.accumulation * self.world_size


class BatchNames(NamedTuple):
    """What the three numbers are called where the user wrote them."""

    train: str
    micro: str
    accumulation: str


FLAGS = BatchNames("--global-batch", "--micro-batch", "--accumulation")
KEYS = BatchNames("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def nearest_batches(value: int, step: int) -> tuple[int, ...]:
    """The multiples of `step` around `value`, none below one step.

    Examples
    --------
    >>> nearest_batches(256, 14), nearest_batches(3, 8)
    ((252, 266), (8,))
    """
    below = value // step * step
    return (below, below + step) if below else (step,)


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, in words.

    Examples
    --------
    >>> nearest_multiples(100, 8), nearest_multiples(3, 8)
    ('96 or 104', '8')
    """
    return " or ".join(map(str, nearest_batches(value, step)))


def divisors(number: int) -> list[int]:
    """All divisors, rising.

    Examples
    --------
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def solve_batch(
    *, train: int | None, micro: int | None, accumulation: int | None, world_size: int, names: BatchNames
) -> Batch:
    """Fill in what is left out of the batch triple, by DeepSpeed's rules.

    Any two give the third; the train batch alone means one micro-step; the micro-batch alone means one micro-step. A
    division with a rest is an error that names the nearest train batches that work.
    """
    gpus = f"{world_size} GPU{'s' * (world_size > 1)}"
    if train is None:
        if micro is None:
            raise ZplanError(
                f"neither `{names.train}` nor `{names.micro}` is given", f"give one of them, such as `{names.micro}` 1"
            )
        return Batch(micro, accumulation or 1, world_size)
    if micro is not None and accumulation is not None:
        got = Batch(micro, accumulation, world_size)
        if got.train != train:
            raise ZplanError(
                f"`{names.train}` {train} is not {micro} x {accumulation} x {gpus} = {got.train}",
                f"use {got.train}, or leave one of the three out",
            )
        return got
    per_rank, rest = divmod(train, world_size)
    if rest:
        fixed = world_size * (micro or accumulation or 1)
        raise ZplanError(
            f"`{names.train} {train}` does not split over {gpus}: "
            f"{train} / {world_size} = {train / world_size:g} sequences a GPU",
            f"use {nearest_multiples(train, fixed)}",
        )
    fixed_name, fixed = (names.micro, micro) if micro is not None else (names.accumulation, accumulation or 1)
    other, rest = divmod(per_rank, fixed)
    if rest:
        raise ZplanError(
            f"`{names.train} {train}` gives {per_rank} sequences a GPU, which `{fixed_name} {fixed}` does not divide",
            f"use {nearest_multiples(train, fixed * world_size)}",
        )
    return Batch(micro, other, world_size) if micro is not None else Batch(other, fixed, world_size)
