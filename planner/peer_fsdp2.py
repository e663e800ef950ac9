"""FSDP2 (`fully_shard` of each block, then of the root): what is gathered, reduced and kept.

Semantics of `torch/distributed/fsdp/_fully_shard` (torch 2.11 to 2.13): `_fsdp_param_group.py` says when, and
`_fsdp_collectives.py` how much. fp32 shards are the master weights; compute is in 16 bits and gradients are reduced in
fp32 (`MixedPrecisionPolicy`); with accumulation only the last micro-step reduces (`set_requires_gradient_sync`);
AdamW is fused, which takes nothing beside its states. Stage 3 is `reshard_after_forward=True`, stage 2 `False`.

The root group is all that is in no block: embedding, last norm, head. It is gathered through the whole micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zplan.planner.config import ITEMSIZE, Choice
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec, Unit
from zplan.planner.peer_sizes import FP32, MOMENTS, Span, line, per_rank, trained
from zplan.planner.timeline import Timeline

_GROUP, _COLLECTIVES = "torch _fully_shard/_fsdp_param_group.py", "torch _fully_shard/_fsdp_collectives.py"


def padded_numel(units: Sequence[Unit], ranks: int) -> int:
    """Elements of all parameters, each padded in its first dim to a multiple of the ranks (`_get_dim0_padded_size`)."""
    total = 0
    for u in units:
        for p in u.params:
            rows = p.shape[0] if p.shape else 1
            total += per_rank(rows, ranks) * ranks * (p.numel // rows)
    return total


@dataclass(frozen=True)
class Group:
    """One `fully_shard` call; sizes in elements, padded."""

    name: str
    first: str
    """Its first unit in forward: the last one in backward."""
    numel: int
    trained_numel: int


@dataclass(frozen=True)
class Wrapped:
    """A model as FSDP2 sees it, on one rank."""

    choice: Choice
    time: Timeline
    root: Group
    blocks: tuple[Group, ...]

    @property
    def ranks(self) -> int:
        return self.choice.world_size

    @property
    def reshards(self) -> bool:
        return self.choice.stage == 3

    @property
    def reduce_itemsize(self) -> int:
        return ITEMSIZE[self.choice.reduce_dtype]


def wrap(spec: ModelSpec, choice: Choice, time: Timeline) -> Wrapped:
    def group(name: str, units: Sequence[Unit]) -> Group:
        n = choice.world_size
        return Group(name, units[0].name, padded_numel(units, n), padded_numel(trained(units), n))

    modules: dict[str, list[Unit]] = {}
    rest = []
    for u in spec.units:
        if u.kind == "block":
            # Frozen parameters of a block are a unit beside its trained ones; the group has both.
            modules.setdefault(u.name.removesuffix(".frozen"), []).append(u)
        elif u.params:
            rest.append(u)
    return Wrapped(choice, time, group("root", rest), tuple(group("block", found) for found in modules.values()))


def fsdp2_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """All lines but activations. A unit's 16-bit gradients are among those: `grads.block`, `grads.embed`."""
    w = wrap(spec, choice, time)
    return [*_states(w), *_gradients(w), *_unsharded(w), *_gathers(w), *_scatters(w)]


def _states(w: Wrapped) -> Iterator[Line]:
    groups = (w.root, *w.blocks)
    shard = sum(g.numel for g in groups) // w.ranks
    trained_shard = sum(g.trained_numel for g in groups) // w.ranks
    always = [w.time.always]
    yield line(
        "params.shard", FP32 * shard, always, "states", f"{_GROUP}: sharded parameters, which are the fp32 masters"
    )
    for name in MOMENTS:
        yield line(name, FP32 * trained_shard, always, "states", "torch.optim.AdamW on the shards, fused")


def _lines_of(
    w: Wrapped, line_id: str, itemsize: int, spans: Sequence[tuple[Group, Span]], note: str
) -> Iterator[Line]:
    """One line a kind and size of groups."""
    found: dict[tuple[str, int], list[Span]] = {}
    for g, span in spans:
        found.setdefault((g.name, itemsize * g.numel), []).append(span)
    seen: dict[str, int] = {}
    for (name, nbytes), places in found.items():
        seen[name] = seen.get(name, 0) + 1
        suffix = "" if seen[name] == 1 else f".other{seen[name] - 1}"
        yield line(f"{line_id}.{name}{suffix}", nbytes, places, "buffers", note)


def _gradients(w: Wrapped) -> Iterator[Line]:
    """Sharded gradients, views of what each reduce-scatter gave; and whole ones between micro-steps."""
    at, end = w.time.at, len(w.time.phases) - 1
    # The root is reduced when all of backward is over.
    born = [*((g, at(f"reduce.{g.first}")) for g in w.blocks), (w.root, w.time.last_backward)]
    shards = [(_part(g, w.ranks), (phase, end)) for g, phase in born]
    yield from _lines_of(w, "grads.shard", FP32, shards, f"{_COLLECTIVES}: foreach_reduce, views of its output")
    if w.choice.accumulation > 1:
        whole = [(_of_trained(g), (0, phase)) for g, phase in born]
        note = f"{_GROUP}: unsharded_accumulated_grad, in the reduce dtype until the last micro-step"
        yield from _lines_of(w, "grads.accumulated", w.reduce_itemsize, whole, note)


def _part(g: Group, ranks: int) -> Group:
    return Group(g.name, g.first, g.trained_numel // ranks, g.trained_numel // ranks)


def _of_trained(g: Group) -> Group:
    return Group(g.name, g.first, g.trained_numel, g.trained_numel)


def _unsharded(w: Wrapped) -> Iterator[Line]:
    """Whole parameters in the compute dtype: a block's while it runs, the root's from start to end."""
    at, time = w.time.at, w.time
    spans: list[tuple[Group, Span]] = [(w.root, (at("forward.embed"), time.last_backward))]
    for i, g in enumerate(w.blocks):
        # The last block's is gone when its gradients are copied for the first reduce; later the copy of the one before
        # goes at the same moment, so the phase before that moment holds more.
        end = f"backward.{g.first}" if i == len(w.blocks) - 1 else f"reduce.{g.first}"
        if w.reshards:
            spans += [(g, (at(f"forward.{g.first}"),) * 2), (g, (at(f"backward.{g.first}"), at(end)))]
        else:
            spans.append((g, (at(f"forward.{g.first}"), at(end))))
    note = f"{_GROUP}: unsharded parameters, reshard_after_forward {w.reshards}"
    yield from _lines_of(w, "params.unsharded", w.choice.itemsize, spans, note)


def _gathers(w: Wrapped) -> Iterator[Line]:
    """Outputs of all-gathers, from which parameters are copied out. One rank gathers nothing.

    In forward one is kept until the next has been made; in backward the next one's is fetched ahead.
    """
    if w.ranks == 1:
        return
    at = w.time.at
    first = w.blocks[0]
    spans: list[tuple[Group, Span]] = [(w.root, (at("forward.embed"), at(f"forward.{first.first}")))]
    for i, g in enumerate(w.blocks):
        start = at(f"forward.{g.first}")
        # At the start of a block its own comes while the one before it is still kept, and only then its parameters.
        last = i == len(w.blocks) - 1
        spans.append((g, (start, at("loss") if last else start)))
        if w.reshards:
            fetched = "backward.loss" if last else f"backward.{w.blocks[i + 1].first}"
            until = at(f"backward.{g.first}") - 1
            spans.append((g, (at(fetched), until)))
    note = f"{_COLLECTIVES}: foreach_all_gather, one group ahead in backward"
    yield from _lines_of(w, "params.gather", w.choice.itemsize, spans, note)


def _scatters(w: Wrapped) -> Iterator[Line]:
    """Inputs of reduce-scatters in the reduce dtype: one waits until the next group has computed its gradients."""
    at, time = w.time.at, w.time
    order = [*reversed(w.blocks), w.root]
    spans: list[tuple[Group, Span]] = []
    for i, g in enumerate(order):
        if g is w.root:
            spans.append((g, (time.last_backward,) * 2))
            continue
        done = at(f"reduce.{g.first}")
        follower = order[i + 1]
        until = time.last_backward - 1 if follower is w.root else at(f"reduce.{follower.first}")
        spans.append((g, (done if i == 0 else done + 1, until)))
    note = f"{_COLLECTIVES}: foreach_reduce, reduce_scatter_input in {w.choice.reduce_dtype}"
    trained_spans = [(_of_trained(g), span) for g, span in spans]
    yield from _lines_of(w, "grads.scatter", w.reduce_itemsize, trained_spans, note)
