"""Stacks of alike blocks, of which a tape runs a first, a middle and a last one.

Most models are one stack, `blocks`. An encoder-decoder is two, and what lives in one may end in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from zplan.planner.models import Architecture

BEFORE_ALL = ("embed", "positions")
"""Units in front of every stack."""


def stacks_of(arch: Architecture) -> dict[str, int]:
    """Blocks of each stack that a step runs, by name in forward order."""
    if arch.family == "t5":
        return {"encoder": arch.layers, "decoder": arch.trait("decoder_layers")}
    return {"blocks": arch.layers}


def shallow(arch: Architecture, depth: Callable[[int], int]) -> Architecture:
    """The same shape with `depth(n)` blocks in a stack of n."""
    small = replace(arch, layers=depth(arch.layers))
    if arch.family != "t5":
        return small
    traits = {**dict(arch.traits), "decoder_layers": depth(arch.trait("decoder_layers"))}
    return replace(small, traits=tuple(sorted(traits.items())))


def kind(unit: str) -> str:
    """What lines call a unit: one word for all blocks of a stack."""
    stack, _, number = unit.rpartition(".")
    if not number.isdigit():
        return unit
    return "block" if stack == "blocks" else stack


@dataclass(frozen=True)
class Stacks:
    """The stacks of a model, and of the shallow one on the tape.

    Attributes
    ----------
    names
        In forward order.
    layers, run
        Blocks of each: of the model, and on the tape.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    run: tuple[int, ...]

    @classmethod
    def of(cls, arch: Architecture, small: Architecture) -> Stacks:
        layers, run = stacks_of(arch), stacks_of(small)
        return cls(tuple(layers), tuple(layers.values()), tuple(run.values()))

    def place(self, unit: str) -> tuple[int, int] | None:
        """Stack and number of a block; None for units that are none."""
        stack, _, number = unit.rpartition(".")
        return (self.names.index(stack), int(number)) if stack in self.names else None

    def stands_for(self, unit: str) -> bool:
        """Whether a block is the one that stands for most of its stack."""
        at = self.place(unit)
        return at is not None and at[1] == max(0, self.run[at[0]] - 2)

    def instances(self, unit: str) -> range:
        """The real blocks that a unit of the tape stands for; one dummy for units that are no block."""
        at = self.place(unit)
        if at is None:
            return range(1)
        stack, k = at
        layers, blocks = self.layers[stack], self.run[stack]
        if k == blocks - 1:
            return range(layers - 1, layers)
        return range(k, layers - 1 if k == blocks - 2 else k + 1)

    def phase(self, phase: str, unit: str, instance: int) -> str:
        """Name in the real model of a phase of the tape, seen from instance `instance` of a unit of the tape.

        A middle block sees its neighbours; what lies before a stack counts from its front, what lies behind from its
        back.
        """
        pass_, _, name = phase.partition(".")
        at = self.place(name)
        if at is None or self.layers[at[0]] == self.run[at[0]]:
            return phase
        stack, k = at
        layers, blocks, last = self.layers[stack], self.run[stack], self.run[stack] - 1
        if self.place(unit) == (stack, last - 1):
            return f"{pass_}.{self.names[stack]}.{k + instance - last + 1}"
        from_front = k < last if self._in_front(unit, stack) else k == 0
        return f"{pass_}.{self.names[stack]}.{k if from_front else layers - blocks + k}"

    @lru_cache(maxsize=4096)  # noqa: B019  (a key is three tuples of small numbers and names)
    def phases(self, phase: str, unit: str) -> tuple[str, ...]:
        """`phase` of every instance of a unit. Searches ask again and again, for other batches and sequences."""
        return tuple(self.phase(phase, unit, i) for i in self.instances(unit))

    def _in_front(self, unit: str, stack: int) -> bool:
        """Whether a unit lies before a stack's last block."""
        own = self.place(unit)
        if own is not None:
            return own[0] < stack or (own[0] == stack and own[1] < self.run[stack] - 1)
        # `encoder_norm` and its like follow their stack.
        return unit in BEFORE_ALL or unit.rpartition("_")[0] in self.names[:stack]
