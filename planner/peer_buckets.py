"""DeepSpeed's gradient buckets (IPG) over one backward: when one is full, and what reducing it takes beside it.

A gradient that does not fit into what is left of a bucket sends the bucket off first; one larger than a whole bucket is
never copied and stays where it is until the next one comes (`stage_1_and_2.py:
reduce_independent_p_g_buckets_and_remove_grads`, `stage3.py: __add_grad_to_ipg_bucket`; DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zplan.planner.models import Unit
from zplan.planner.peer_sizes import Arrival, arrivals, trained
from zplan.planner.timeline import Timeline


@dataclass(frozen=True)
class Flush:
    """A bucket that is sent off in a phase."""

    phase: int
    params: tuple[Arrival, ...]
    large: bool
    """One gradient alone, too large to be copied."""

    @property
    def numel(self) -> int:
        return sum(a.param.numel for a in self.params)


def flushes(units: Sequence[Unit], bucket_numel: int, time: Timeline) -> list[Flush]:
    """All reductions of one backward in their order."""
    out: list[Flush] = []
    held: list[Arrival] = []
    numel = 0

    def send(phase: int) -> None:
        nonlocal held, numel
        out.append(Flush(phase, tuple(held), len(held) == 1 and held[0].param.numel > bucket_numel))
        held, numel = [], 0

    for a in arrivals(units):
        if held and numel + a.param.numel > bucket_numel:
            send(time.at(f"backward.{a.unit.name}"))
        held.append(a)
        numel += a.param.numel
    if held:
        send(time.last_backward)
    return out


def large_spans(found: Sequence[Flush], time: Timeline) -> dict[int, list[tuple[int, int]]]:
    """`{elements: lifetimes}` of gradients that fit into no bucket: from when they are there to when they are sent."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for f in found:
        if f.large:
            (a,) = f.params
            spans.setdefault(a.param.numel, []).append((time.at(f"reduce.{a.unit.name}"), f.phase))
    return spans


@dataclass(frozen=True)
class Parts:
    """How the flat parameters of stages 1 and 2 are cut into one contiguous part a rank."""

    offsets: dict[str, int]
    part_numel: int
    world_size: int

    def ranks(self, a: Arrival) -> range:
        """Ranks that own a piece of a parameter."""
        start = self.offsets[a.param.name]
        return range(start // self.part_numel, (start + a.param.numel - 1) // self.part_numel + 1)

    def owned(self, a: Arrival, rank: int) -> int:
        """Elements of a parameter that a rank owns."""
        start = self.offsets[a.param.name]
        first, last = max(start, rank * self.part_numel), min(start + a.param.numel, (rank + 1) * self.part_numel)
        return max(0, last - first)

    def pieces(self, f: Flush) -> int:
        """Runs of one owner in a bucket; several are copied together before they are reduced, one is not."""
        owners = [rank for a in f.params for rank in self.ranks(a)]
        return 1 + sum(a != b for a, b in zip(owners, owners[1:], strict=False))


def cut(units: Sequence[Unit], flat_numel: int, world_size: int) -> Parts:
    """Parts of a flat buffer of all trained parameters in the model's order."""
    offsets, at = {}, 0
    for u in trained(units):
        for p in u.params:
            offsets[p.name] = at
            at += p.numel
    return Parts(offsets, flat_numel // world_size, world_size)
