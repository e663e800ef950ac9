"""Live bytes of many choices of one model, quickly: parts that choices share are evaluated once, deep models folded.

[Note: folding] Equal blocks hold equal bytes. So in a phase counted from the front (`forward.blocks.0`) or from the
back (`backward.blocks.<last>`) every line is affine in the number of blocks, and two models of a few blocks tell the
total of a model of many, exactly. Between front and back the total is affine in the block's index, so it is largest at
one of the two ends. A model of 126 blocks therefore costs what one of 6 costs. `tests/test_folding.py` holds the result
to the whole ledger.

[Note: parts] Of the lines of zplan's runtime, states and buffers do not depend on the batch, the sequence or
checkpointing, nor activations on the stage or the ranks. A search that crosses both evaluates each part once and adds.

What is neither affine nor split that way, such as the lines of other runtimes or of an offloaded share, is evaluated
whole: `foldable` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from zplan.planner.config import Choice, Offload
from zplan.planner.ledger import Ledger, Line
from zplan.planner.models import Adapters, ModelSpec, decoder_units
from zplan.planner.predict import batch_lines, shard_lines
from zplan.planner.timeline import Timeline, timeline

FRONT = 3
"""Blocks counted from the front; the rest of a shallow model counts from the back."""

Part = Literal["states", "buffers", "activations", "overhead", "low", "high", "host", "nvme"]
Vectors = dict[Part, list[int]]
"""Live bytes by phase: of each kind on the device; by how much all of these may be less or more; of the host, pinned or
not, and of NVMe, at their most.
"""

ENDS: tuple[Part, Part] = ("low", "high")

_NOT_OF_SHARDS: dict[str, Any] = {
    "micro_batch": 1,
    "seq": 1,
    "attention": "sdpa",
    "checkpointing": "none",
    "checkpoint_offload": False,
}
"""Fields of a choice on which what follows the shards does not depend, at any value."""

_NOT_OF_BATCHES: dict[str, Any] = {
    **{"stage": 0, "world_size": 1, "accumulation": 1, "ring_slots": 2, "piece_numel": 1},
    **{"saving": "foreground", "offload": Offload(), "optimizer_in_backward": False},
}
"""And those on which what follows the batch does not."""


def foldable(choice: Choice) -> bool:
    """Whether the lines of a choice are affine in the blocks, and split into parts."""
    return choice.runtime == "zplan" and choice.offload.ratio == 1 and choice.checkpoint_every == 1


@dataclass
class Folding:
    """One model, and its vectors so far.

    Attributes
    ----------
    specs
        Two models that differ by one block; the model itself where it has too few or unequal blocks.
    extra
        Blocks that the model has beyond the first of `specs`.
    phases
        Names in the model of the phases of the first of `specs`: the first and the last ones of each pass.
    """

    specs: tuple[ModelSpec, ...]
    extra: int
    phases: tuple[str, ...]
    partner: tuple[int, ...]
    """Index of each of `phases` in the second of `specs`."""
    times: tuple[Timeline, ...]
    memo: dict[Choice, Vectors] = field(default_factory=dict)

    def vectors(self, choice: Choice, further: Callable[[Sequence[str]], Iterable[Line]]) -> Vectors:
        """Live bytes of a choice in each of `phases`.

        Parameters
        ----------
        choice
            One for which `foldable` is true.
        further
            Lines beside those of `predict`, for given phases.
        """
        shard = replace(choice, accumulation=min(2, choice.accumulation), **_NOT_OF_SHARDS)
        batch = replace(choice, **_NOT_OF_BATCHES)
        if shard not in self.memo:
            self.memo[shard] = self._sum(lambda spec, time: shard_lines(spec, shard, time))
        if batch not in self.memo:
            self.memo[batch] = self._sum(lambda spec, time: batch_lines(spec, batch, time))
        rest = self._sum(lambda spec, time: further(time.phases))
        return add(add(self.memo[shard], self.memo[batch]), rest)

    def affine(self, number_of: Callable[[ModelSpec], int]) -> int:
        """A number of the model, of which only affine dependence on the blocks is known, from the shallow ones'."""
        first, *second = map(number_of, self.specs)
        return first + self.extra * (second[0] - first) if second else first

    def _sum(self, lines_of: Callable[[ModelSpec, Timeline], Iterable[Line]]) -> Vectors:
        """Live bytes of the lines that a function gives, unfolded to the model."""
        first, *second = (by_part(lines_of(s, t), t.phases) for s, t in zip(self.specs, self.times, strict=True))
        if not second:
            return first
        nothing = [0] * len(self.phases)
        out: Vectors = {}
        for kind, deeper in second[0].items():
            shallow = first.get(kind, nothing)
            out[kind] = [a + self.extra * (deeper[j] - a) for a, j in zip(shallow, self.partner, strict=True)]
        return out


def fold(spec: ModelSpec, *, ring_slots: int) -> Folding:
    """Fold a model; see [Note: folding].

    Parameters
    ----------
    spec
        A model of known architecture.
    ring_slots
        Of the ring; shallow models have more blocks than that, so that they too have one.
    """
    shallow = max(2 * FRONT, ring_slots + 1)
    arch = spec.arch
    if arch is None or arch.layers <= shallow + 1 or not _alike(spec, arch.layers):
        return unfolded(spec)
    specs = []
    for layers in (shallow, shallow + 1):
        small = replace(arch, layers=layers)
        specs.append(_adapted(ModelSpec(spec.name, decoder_units(small), small), spec.adapters))
    times = tuple(timeline(s.units) for s in specs)
    own, extra = times[0].phases, arch.layers - shallow
    partner = tuple(times[1].at(_renamed(p, 1)) for p in own)
    return Folding(tuple(specs), extra, tuple(_renamed(p, extra) for p in own), partner, times)


def unfolded(spec: ModelSpec) -> Folding:
    """A model that stands for itself."""
    time = timeline(spec.units)
    return Folding((spec,), 0, time.phases, tuple(range(len(time.phases))), (time,))


def _adapted(spec: ModelSpec, adapters: Adapters | None) -> ModelSpec:
    if adapters is None:
        return spec
    from zplan.planner.adapters import adapt

    return adapt(spec, adapters)


def _alike(spec: ModelSpec, layers: int) -> bool:
    """Whether the blocks are numbered through and all of one shape, their frozen parts included."""
    found: dict[str, list[tuple[bool, int | None, list[tuple[int, ...]]]]] = {}
    for u in spec.units:
        if u.kind == "block":
            found.setdefault(u.base_name, []).append((u.frozen, u.itemsize, [p.shape for p in u.params]))
    if list(found) != [f"blocks.{i}" for i in range(layers)]:
        return False
    frozen = any(part[0] for part in found["blocks.0"])
    return all(parts == found["blocks.0"] for parts in found.values()) and frozen == (spec.adapters is not None)


def _renamed(phase: str, further: int) -> str:
    """A phase's name in a model with so many further blocks: those past the front move back."""
    pass_, dot, k = phase.partition("blocks.")
    return f"{pass_}blocks.{int(k) + further}" if dot and int(k) >= FRONT else phase


def by_part(lines: Iterable[Line], phases: tuple[str, ...]) -> Vectors:
    """The parts of lines over their phases."""
    whole = Ledger(phases, tuple(lines))
    device = whole.by_tier.get("device", ())
    out: Vectors = {kind: list(whole.per_phase(kind=kind)) for kind in dict.fromkeys(x.kind for x in device)}
    if not all(x.exact for x in device):
        out["low"], out["high"] = whole.offsets()
    if "host" in whole.by_tier or "pinned" in whole.by_tier:
        out["host"] = [a + b for a, b in zip(whole.at_most("host"), whole.at_most("pinned"), strict=True)]
    if "nvme" in whole.by_tier:
        out["nvme"] = whole.at_most("nvme")
    return out


def add(a: Vectors, b: Vectors) -> Vectors:
    """Kind by kind."""
    out = dict(a)
    for kind, values in b.items():
        out[kind] = [x + y for x, y in zip(out[kind], values, strict=True)] if kind in out else values
    return out
