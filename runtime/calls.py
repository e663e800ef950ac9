"""Which calls of units still wait for their backward, and the order in which a training pass makes them.

[Note: time] Autograd runs the nodes that are ready in the reverse of the order in which they were made. So when the
gradient of a call's output is there, everything that was made after that output has run: every call that began later
has ended its backward, whether all of its parameters were used or none. That closes a unit whose parameters got no
gradient, and a frozen one, without waiting for the end of backward.

[Note: hidden calls] Reentrant checkpointing runs a module under `no_grad` inside a training pass and again in backward.
Such a call has no output to hook; its backward begins at the forward of the recompute, and the time of that is known to
be past only for calls that have begun. One checkpoint may hold several calls, which are recomputed in the order in
which they were made, the last checkpoint first. Its calls have one sequence number of autograd's, which stands still
under `no_grad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch

from zplan.planner.errors import ZplanError

NEVER = 2**62


@dataclass(eq=False)
class Call:
    """One run of a unit's module in a training forward; `enter` and `exit` are ticks of one clock."""

    unit: str
    enter: int
    hidden: bool
    group: int
    """Which checkpoint a hidden call is in."""
    siblings: list[Call] = field(repr=False)
    """Calls of the same forward, itself among them."""
    exit: int = NEVER
    begun: bool = False
    """Its backward has begun."""


class Calls:
    """The calls that wait for their backward, by unit. See [Note: time]."""

    def __init__(self) -> None:
        self.clock = 0
        self.waiting: dict[str, list[Call]] = {}
        self.current: list[Call] = []
        self.begun: list[Call] = []

    def start_forward(self) -> None:
        """Calls from here on are of another forward."""
        self.current = []

    def begin(self, unit: str, *, hidden: bool) -> Call:
        self.clock += 1
        return Call(unit, self.clock, hidden, torch.autograd._get_sequence_nr() if hidden else 0, self.current)

    def end(self, call: Call) -> None:
        """The forward of a call ended, and its backward may come."""
        self.clock += 1
        call.exit = self.clock
        call.siblings.append(call)
        self.waiting.setdefault(call.unit, []).append(call)

    def recomputed(self, unit: str) -> Call | None:
        """The hidden call that a recompute stands for: the first that has not begun, of the latest checkpoint."""
        left = [c for c in self.waiting.get(unit, ()) if c.hidden and not c.begun]
        return next((c for c in left if c.group == left[-1].group), None)

    def begin_backward(self, call: Call) -> None:
        """Mark a call as begun, and forget those that are over by now."""
        if call not in self.waiting.get(call.unit, ()):
            # An earlier backward, of another forward or of the same graph, has forgotten these.
            for c in call.siblings:
                self.waiting.setdefault(c.unit, []).append(c)
        call.begun = True
        self.begun.append(call)
        for waiting in self.waiting.values():
            waiting[:] = [c for c in waiting if c.enter < call.exit or (call.hidden and not c.begun)]

    def active(self, unit: str) -> bool:
        """Whether a call of the unit is in the middle of its backward."""
        return any(c.begun for c in self.waiting.get(unit, ()))

    def unbegun(self, unit: str) -> bool:
        """Whether a call of the unit has its backward before it."""
        return any(not c.begun for c in self.waiting.get(unit, ()))

    def over(self, unit: str) -> bool:
        return not self.waiting.get(unit)

    def clear(self) -> None:
        """A backward ended. Whatever waits on is taken up again when its own backward begins."""
        for call in self.begun:
            call.begun = False
        self.begun.clear()
        self.waiting.clear()
        self.current = []


class Schedule:
    """The order of calls in a training pass: guessed from the module tree at first, then as the first pass ran.

    Collectives follow the schedule and not the calls: where a rank skips a unit, it goes through the unit's gathers and
    reduces all the same when it reaches the next one, so that ranks which route differently stay together.

    Parameters
    ----------
    names
        Units in module order.
    around
        Those whose module contains other units. Their backward begins before that of what they contain, so they have
        no place in the way back; they are always resident.
    lowest
        The first unit with something to train, where the way back ends.
    """

    def __init__(self, names: Sequence[str], around: frozenset[str], lowest: str) -> None:
        self.order = list(names)
        self.around, self.lowest = around, lowest
        self.recording = True
        self.ran: list[str] = []
        self.at = 0
        self.back = -1
        self.first: dict[str, int] = {}
        self._index()

    def _index(self) -> None:
        self.first = {name: i for i, name in reversed(list(enumerate(self.order)))}

    def start_forward(self) -> None:
        self.at = 0
        self.ran.clear()

    def start_backward(self) -> None:
        self.back = len(self.order) - 1

    def forward_to(self, name: str) -> list[str] | None:
        """A call begins: the units that this rank has skipped on the way to it; None where it is not ahead."""
        if self.recording:
            self.ran.append(name)
        if name not in self.order[self.at :]:
            return None
        position = self.order.index(name, self.at)
        skipped, self.at = self.order[self.at : position], position + 1
        return skipped

    def way_back(self, name: str | None) -> Iterator[tuple[str, int]]:
        """Every unit down to a call whose backward begins (or to the end), the call itself left out, with its position.

        The pointer moves along, so that `next_backward` is right at each.
        """
        if self.recording or name in self.around:
            return
        if name is None:
            end = self.first.get(self.lowest, 0) - 1
        elif name in self.order[: self.back + 1]:
            end = self.back - self.order[: self.back + 1][::-1].index(name)
        else:
            return
        while self.back > end:
            self.back -= 1
            if self.order[self.back + 1] not in self.around:
                yield self.order[self.back + 1], self.back + 1
        if name is not None:
            self.back = end - 1

    def rest_of_forward(self) -> list[str]:
        rest, self.at = self.order[self.at :], len(self.order)
        return rest

    def next_forward(self) -> Sequence[str]:
        """Units to come in this forward, the next one first."""
        return () if self.recording else self.order[self.at :]

    def next_backward(self) -> Sequence[str]:
        """Units to come in this backward, the next one first."""
        if self.recording:
            return ()
        way = (self.order[i] for i in range(self.back, self.first.get(self.lowest, 0) - 1, -1))
        return [name for name in way if name not in self.around]

    def settle(self, seen: Sequence[Sequence[str]], rank: int) -> None:
        """End of the first training forward: fix the order, given what every rank ran.

        Where ranks skipped different units, the module order stands, which all of them followed; else one that has the
        orders of all of them in it.
        """
        mine = list(seen[rank])
        if any(list(other) != mine for other in seen):
            together = _merged(seen)
            for other, ran in enumerate(seen):
                if not _is_subsequence(ran, self.order):
                    if together is not None:
                        self.order = together + [name for name in self.order if name not in together]
                        break
                    odd = next(i for i, name in enumerate(ran) if not _is_subsequence(ran[: i + 1], self.order))
                    raise ZplanError(
                        "ranks ran units in different orders in the first step: "
                        f"rank {other} ran `{ran[odd]}` as number {odd}",
                        "every rank must run the same modules in the same order; skipping some is fine",
                    )
        elif not _is_subsequence(mine, self.order):
            self.order = mine + [name for name in self.order if name not in mine]
        self.recording = False
        self.at = len(self.order)
        self._index()


def _merged(seen: Sequence[Sequence[str]]) -> list[str] | None:
    """The shortest order that has all of these in it, where none contradicts another."""
    merged: list[str] = []
    for ran in seen:
        both: list[str] = []
        for _, i, j, k, n in SequenceMatcher(None, merged, ran, autojunk=False).get_opcodes():
            both += merged[i:j]
            both += [] if merged[i:j] == list(ran[k:n]) else ran[k:n]
        merged = both
    counts, most = Counter(merged), Counter[str]()
    for ran in seen:
        most |= Counter(ran)
    return merged if counts == most else None


def _is_subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    rest = iter(whole)
    return all(name in rest for name in part)
