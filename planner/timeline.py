"""The phases of one training step, in order, and where in it things are born and die."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zplan.planner.models import Unit


class Timeline(NamedTuple):
    """Named phases of one micro-step and the optimizer step that follows it.

    With accumulation all micro-steps look the same, since their gradients persist, so one stands for all.
    """

    phases: tuple[str, ...]
    index_of: dict[str, int]

    def at(self, phase: str) -> int:
        return self.index_of[phase]

    @property
    def always(self) -> tuple[int, int]:
        return 0, len(self.phases) - 1

    @property
    def last_backward(self) -> int:
        """The phase before the optimizer step."""
        return len(self.phases) - 2

    def reducing(self, last: str) -> tuple[int, int]:
        """From the reduce of the last trained unit, which comes first, to the end of backward."""
        return self.index_of[f"reduce.{last}"], self.last_backward

    def from_reduce(self, unit: str) -> tuple[int, int]:
        """From a unit's reduce to the optimizer step: the life of a gradient shard that is born late."""
        return self.index_of[f"reduce.{unit}"], len(self.phases) - 1


def timeline(units: Sequence[Unit]) -> Timeline:
    """Phases for units in forward order. A unit without trained parameters of its own is never reduced.

    Examples
    --------
    >>> from zplan.planner.models import Param
    >>> timeline([Unit("embed", "embed", (Param("w", (2, 2)),)), Unit("head", "head", ())]).phases
    ('idle', 'forward.embed', 'forward.head', 'loss', 'backward.loss', 'backward.head', 'backward.embed',
    'reduce.embed', 'step')
    """
    trained = {u.name for u in units if u.params and not u.frozen}
    names = list(dict.fromkeys(u.base_name for u in units))
    phases = ["idle", *(f"forward.{name}" for name in names), "loss", "backward.loss"]
    for name in reversed(names):
        phases.append(f"backward.{name}")
        if name in trained:
            phases.append(f"reduce.{name}")
    phases.append("step")
    return Timeline(tuple(phases), {p: i for i, p in enumerate(phases)})
