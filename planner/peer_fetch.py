"""Which parameters DeepSpeed's stage 3 holds gathered, moment by moment: its coordinator, run on integers.

Semantics of DeepSpeed 0.19.8, `zero/partitioned_param_coordinator.py` with a complete trace (from the third step on)
and `zero/partition_parameters.py`:

- a module's parameters are fetched before it runs, in forward and again in backward; then the next ones of the trace
  are prefetched until `prefetch_bucket_size` elements are on their way or `max_live_parameters` are there
  (`fetch_sub_module`);
- after a module they are released unless the trace needs them again within `max_reuse_distance` elements
  (`__params_to_release`);
- several parameters fetched at once arrive in one buffer from which each is copied; the buffer goes with the last of
  them (`AllGatherCoalescedHandle.wait`); one alone is a view of its buffer (`_all_gather_sequential`); on one rank
  nothing is copied unless it comes from the host (`NoGatherCoalescedHandle`);
- parameters of at most `param_persistence_threshold` elements never leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from zplan.planner.config import ZeroSizes
from zplan.planner.models import Unit
from zplan.planner.peer_sizes import per_rank


@dataclass(frozen=True)
class Event:
    """A module is entered (`fetch`) or left, in forward or backward; `params` are its own, by number."""

    phase: str
    fetch: bool
    params: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module with parameters of its own, or one around such."""

    params: tuple[int, ...]
    children: tuple[Module, ...] = ()


def module_tree(unit: Unit, first: int) -> Module:
    """Modules of a unit from the dotted names of its parameters, which are numbered from `first`."""
    paths = [p.name.split(".")[:-1] for p in unit.params]
    shared = min(len(p) for p in paths) - (len(set(map(tuple, paths))) > 1)
    depth = 0
    while depth < shared and len({tuple(p[: depth + 1]) for p in paths}) == 1:
        depth += 1
    return _module([(tuple(path[depth:]), first + i) for i, path in enumerate(paths)])


def _module(rows: Sequence[tuple[tuple[str, ...], int]]) -> Module:
    own = tuple(i for path, i in rows if not path)
    groups: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for path, i in rows:
        if path:
            groups.setdefault(path[0], []).append((path[1:], i))
    return Module(own, tuple(_module(found) for found in groups.values()))


def _forward(m: Module, phase: str) -> Iterator[Event]:
    yield Event(phase, fetch=True, params=m.params)
    for child in m.children:
        yield from _forward(child, phase)
    yield Event(phase, fetch=False, params=m.params)


def _backward(m: Module, phase: str) -> Iterator[Event]:
    yield Event(phase, fetch=True, params=m.params)
    for child in reversed(m.children):
        yield from _backward(child, phase)
    yield Event(phase, fetch=False, params=m.params)


def _recomputed(m: Module, phase: str) -> Iterator[Event]:
    """Backward of a checkpointed block: its last module's gradient comes, the block runs again up to there."""
    back = list(_backward(m, phase))
    last = next(i for i, e in enumerate(back) if not e.fetch)
    again = list(_forward(m, phase))
    # The recompute stops at the last value that was saved, so the modules around it are never left.
    while again and not again[-1].fetch:
        again.pop()
    return iter([*back[:last], *again, *back[last:]])


def trace(units: Sequence[Unit], *, checkpointed: bool) -> list[Event]:
    """Modules entered and left in one forward and backward. The root has no parameters of its own.

    The first unit's inputs are ids, which have no gradient, so it is never left in backward.
    """
    modules, first = [], 0
    for u in units:
        if u.params:
            modules.append((u, module_tree(u, first)))
            first += len(u.params)
    out = [Event("forward.embed", fetch=True, params=())]
    for u, m in modules:
        out += _forward(m, f"forward.{u.name}")
    out += [Event("loss", fetch=False, params=()), Event("backward.loss", fetch=True, params=())]
    for u, m in reversed(modules):
        phase = f"backward.{u.name}"
        events = list(_recomputed(m, phase) if checkpointed and u.kind == "block" else _backward(m, phase))
        out += [e for e in events if e.fetch] if u.kind == "embed" else events
    return out


@dataclass
class _Buffer:
    """One gather of several parameters: the buffer they arrive in, until each has been asked for."""

    params: frozenset[int]
    nbytes: int
    waiting: set[int] = field(default_factory=set)
    copies: bool = True
    """Whether each parameter is copied out of it."""
    complete: bool = False


class Coordinator:
    """`PartitionedParameterCoordinator` on sizes alone; `live_bytes` is what it holds on the device."""

    def __init__(
        self, numels: Sequence[int], events: Sequence[Event], sizes: ZeroSizes, *, itemsize: int, ranks: int, host: bool
    ) -> None:
        self.numels, self.events, self.sizes = numels, events, sizes
        self.itemsize, self.ranks, self.host = itemsize, ranks, host
        self.order = [e.params for e in events if e.fetch]
        self.passed = [sum(numels[i] for i in params) for params in self.order]
        self.persistent = {i for i, n in enumerate(numels) if n <= sizes.stage3_param_persistence_threshold}
        self.available = set(self.persistent)
        self.inflight: dict[int, _Buffer] = {}
        self.live_bytes = self.highest = 0
        self.start()

    def start(self) -> None:
        """`reset_step`: a new forward."""
        for i in list(self.inflight):
            self._wait(i)
            self._release(i)
        self.step = self.live_numel = 0
        self.fetched_for: dict[int, int] = {}
        self.queue = deque((i, step) for step, params in enumerate(self.order) for i in params)

    def _take(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.highest = max(self.highest, self.live_bytes)

    def _param_bytes(self, i: int) -> int:
        """Of a gathered parameter; on one rank it is the shard itself, unless that lies on the host."""
        return self.itemsize * self.numels[i] if self.ranks > 1 or self.host else 0

    def _gather(self, params: list[int]) -> None:
        """`__all_gather_params`."""
        params = [i for i in params if i not in self.available and i not in self.inflight]
        if not params:
            return
        self.live_numel += sum(self.numels[i] for i in params)
        if self.ranks == 1 or len(params) == 1:
            buffer = _Buffer(frozenset(params), 0, set(params), copies=False)
            padded = self.ranks * self.itemsize if self.ranks > 1 else 0
            self._take(sum(padded * per_rank(self.numels[i], self.ranks) or self._param_bytes(i) for i in params))
        else:
            nbytes = self.itemsize * self.ranks * sum(per_rank(self.numels[i], self.ranks) for i in params)
            buffer = _Buffer(frozenset(params), nbytes, set(params))
            self._take(nbytes)
        for i in params:
            self.inflight[i] = buffer

    def _wait(self, i: int) -> None:
        """The first parameter of a gather that is asked for makes all of them available."""
        buffer = self.inflight.pop(i)
        if not buffer.complete:
            if buffer.copies:
                self._take(sum(self._param_bytes(j) for j in buffer.params))
            self.available |= buffer.params
            buffer.complete = True
        buffer.waiting.discard(i)
        if not buffer.waiting:
            self.live_bytes -= buffer.nbytes

    def _release(self, i: int) -> None:
        if i in self.available:
            self.available.discard(i)
            self.live_numel -= self.numels[i]
            self.live_bytes -= self._param_bytes(i)

    def fetch(self, params: tuple[int, ...]) -> None:
        """`fetch_sub_module`."""
        self._gather(list(params))
        for i in params:
            if i in self.inflight:
                self._wait(i)
        new = {i for i in params if self.fetched_for.get(i, -1) < self.step}
        for _ in new:
            i, step = self.queue.popleft()
            self.fetched_for[i] = step
        room = min(self.sizes.stage3_max_live_parameters - self.live_numel, self.sizes.stage3_prefetch_bucket_size)
        chosen: list[int] = []
        numel = 0
        while self.queue and numel < room:
            i, step = self.queue.popleft()
            self.fetched_for[i] = max(self.fetched_for.get(i, -1), step)
            if i not in self.available and i not in self.inflight and i not in chosen:
                chosen.append(i)
                numel += self.numels[i]
        self._gather(chosen)
        self.step += 1

    def leave(self, params: tuple[int, ...]) -> None:
        """`release_sub_module`."""
        going = {i for i in params if i not in self.persistent and self.fetched_for.get(i, -1) <= self.step}
        passed = 0
        at = self.step
        while going and at < len(self.order) and passed < self.sizes.stage3_max_reuse_distance:
            going.difference_update(self.order[at])
            passed += self.passed[at]
            at += 1
        for i in going:
            self._release(i)


@lru_cache(maxsize=32)
def gathered(
    units: tuple[Unit, ...], sizes: ZeroSizes, *, itemsize: int, ranks: int, host: bool, checkpointed: bool, again: bool
) -> dict[str, int]:
    """Most bytes that gathered parameters and the buffers they arrive in hold in each phase, persistent ones apart.

    Parameters
    ----------
    units
        Of the whole model, in forward order.
    itemsize, ranks
        Bytes of an element, and of how many ranks each holds a part.
    host
        Whether parts lie on the host.
    again
        A later micro-step than the first, which starts with what the one before has left.
    """
    numels = [p.numel for u in units for p in u.params]
    events = trace(units, checkpointed=checkpointed)
    c = Coordinator(numels, events, sizes, itemsize=itemsize, ranks=ranks, host=host)
    levels: dict[str, int] = {}
    for _ in range(2 if again else 1):
        levels = {}
        c.start()
        for e in events:
            c.highest = c.live_bytes
            (c.fetch if e.fetch else c.leave)(e.params)
            levels[e.phase] = max(levels.get(e.phase, 0), c.highest)
            levels[f"after.{e.phase}"] = c.live_bytes
    return levels
