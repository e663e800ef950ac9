"""What one rank keeps of each unit, and where: the decisions that states, buffers and the runtime share.

[Note: resident and ringed] At stage 3 on several ranks, blocks of equal size share a ring of K slots and hold no 16-bit
copy between uses (*ringed*). Every other unit (final norm, a size class with no more than K units, and anything tied)
is *resident*: its flat buffer in the compute dtype is always there. At stages 0 to 2 all units are resident. On one
rank nothing is sharded, whatever the stage.

[Note: guests] An embedding and a head whose weights are read in their own forward alone borrow slots of the largest
ring: in forward order the members of a ring take its slots in turn, so the embedding's is free again for the second
block, and the head's was the last block's but one. Slots grow where a guest is larger than a block, as long as that
costs less than the flat buffers that it saves.

[Note: masters] In 16 bits a rank keeps fp32 master weights of its slices. In fp32 the resident flat buffer's own slices
*are* the master weights; only a ringed unit keeps them apart, since its slot holds other blocks in between. In bf16
with AdamW the masters are *split*: the bf16 weights of the rank's slices are their upper halves, and only the lower
halves are kept beside them (`cuda_ops/halves.py`), 2 bytes instead of 4. A ringed unit keeps both as shards.

[Note: single gradients] On one rank with one micro-step nothing is added to a gradient: in fp32 it would be autograd's
bf16 one with zeros behind. Where masters are split it stays in bf16 from reduce to step, and the update reads that.
Whatever changes it after all (another backward, a penalty, a write through `summon`) makes all of them fp32 until the
step, 2 bytes a parameter more than the ledger says. An fp32 gradient that a fused head leaves is rounded, as it is
where it travels in bf16.

[Note: frozen] Frozen parameters are units of their own beside the trainable ones of the same module: no master, no
moments, no gradient. A ringed one is cast from a shard in its own dtype (the compute dtype), so at stage 3 a frozen
base costs 2P/N in bf16. A resident one (stages 0 to 2, embedding, head, integers) is whole on every rank and never
gathered again. Weights of 4 bits are resident everywhere, like integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from zplan.planner.config import Choice
from zplan.planner.layout import UnitLayout, lay_out
from zplan.planner.models import ModelSpec, Unit
from zplan.planner.optimizers import kind_of
from zplan.planner.units import MIB

NF4_CLASS = "nf4"
"""Size class of weights of 4 bits."""

SHARED = "in symmetric memory, outside torch's allocator"

SHARED_FROM = 64 * MIB
"""Bytes of a flat buffer beside which the rest of its last page, at most 2 MiB, is small."""


class Placement(NamedTuple):
    """One unit on one rank. Sizes in elements; see [Note: resident and ringed] and [Note: masters]."""

    unit: Unit
    layout: UnitLayout
    size_class: str
    """Units of one class have equal sizes: `block`, `embed`, ...; ledger lines carry it as their last part."""
    ringed: bool
    slot: int
    """Index of the ring slot; meaningless when resident."""
    ring: str
    """Size class of the blocks whose ring it is in; empty when resident."""
    slot_numel: int
    """Elements of that ring's slots: its largest member's."""
    owned_numel: int
    """Elements whose master weights and moments this rank keeps: the shard, or everything at stage 0."""
    has_master: bool
    """Whether it keeps fp32 master weights apart from the buffer that compute reads."""
    split: bool = False
    """Whether the weights in bf16 are the upper halves of the masters, with the lower halves beside them."""

    @property
    def frozen(self) -> bool:
        return self.unit.frozen

    @property
    def has_shard(self) -> bool:
        """Ringed, and frozen or split: a shard in the compute dtype from which the slot is filled."""
        return self.ringed and (self.frozen or self.split)

    @property
    def closes(self) -> bool:
        """On sharded states: whether its parameters are ever shown as NaN placeholders."""
        return not self.frozen or self.ringed

    def buffer_bytes(self, choice: Choice) -> int:
        """Of the whole unit as compute reads it; of a quantized one as it is kept."""
        if self.unit.quantized:
            from zplan.planner.adapters import nf4_bytes

            return sum(nf4_bytes(p.numel) for p in self.unit.params)
        return self.layout.padded_numel * (self.unit.itemsize or choice.itemsize)

    @property
    def reads_in_backward(self) -> bool:
        """Whether the unit's backward reads its values: an embedding's needs the token ids alone."""
        return not (self.ringed and self.unit.kind == "embed")


def shards_states(choice: Choice) -> bool:
    """Whether each rank updates only its own slices."""
    return choice.stage >= 1 and choice.world_size > 1


def shares_flat(placement: Placement, choice: Choice) -> bool:
    """Whether other GPUs read a resident unit's flat buffer, to gather it by copies after each step."""
    gathered = shards_states(choice) and not (placement.ringed or placement.frozen)
    return choice.copies and gathered and placement.buffer_bytes(choice) >= SHARED_FROM


def splits_masters(choice: Choice) -> bool:
    """Whether masters are kept in two halves. See [Note: masters]; on the host an offloaded step has them whole."""
    offloads = choice.offload.optimizer != "none" or choice.offload.params != "none"
    return choice.runtime == "zplan" and choice.precision == "bf16" and choice.optimizer == "adamw" and not offloads


def single_gradients(choice: Choice) -> bool:
    """Whether gradients stay in the compute dtype until the step. See [Note: single gradients]."""
    return choice.world_size == 1 and choice.accumulation == 1 and splits_masters(choice)


def grad_itemsize(choice: Choice) -> int:
    """Bytes of one element of the gradients that a rank keeps from reduce to step."""
    return choice.itemsize if single_gradients(choice) else choice.reduce_itemsize


def place(spec: ModelSpec, choice: Choice) -> tuple[Placement, ...]:
    """Placement of every unit that has parameters, in forward order."""
    # A search asks for many choices that differ only in what moves no parameter.
    return _place(spec, replace(choice, **_MOVES_NO_PARAMETER))


_MOVES_NO_PARAMETER: dict[str, Any] = {
    **{"micro_batch": 1, "accumulation": 1, "seq": 1, "attention": "sdpa", "padded": False},
    **{"checkpointing": "none", "checkpoint_every": 1, "checkpoint_offload": False},
    **{"cross_entropy": "plain", "kernels": "torch", "optimizer_in_backward": False},
}
"""Fields of a choice, at any value."""


@lru_cache(maxsize=64)
def _place(spec: ModelSpec, choice: Choice) -> tuple[Placement, ...]:
    return place_units([u for u in spec.units if u.params], choice, tied=frozenset())


def place_units(units: Sequence[Unit], choice: Choice, *, tied: frozenset[str]) -> tuple[Placement, ...]:
    """As `place`, for units of any module; `tied` names units that other units read from."""
    layouts = _lay_out_all(units, choice)
    names = _size_classes(units, layouts)
    # Parameters that lie off the device come through a ring, on one rank too.
    fetched = choice.runtime == "zplan" and choice.stage == 3 and choice.offload.params != "none"
    rings = _rings(units, layouts, names, choice, tied) if choice.sharded or fetched else {}
    numel: dict[str, int] = {}
    for u, lay in zip(units, layouts, strict=True):
        if u.name in rings:
            numel[rings[u.name]] = max(numel.get(rings[u.name], 0), lay.padded_numel)
    out, seen = [], Counter[str]()
    for u, lay, name in zip(units, layouts, names, strict=True):
        ring = rings.get(u.name, "")
        shares = bool(ring) if u.frozen else shards_states(choice)
        owned = lay.shard_numel if shares else lay.padded_numel
        split = not u.frozen and splits_masters(choice)
        has_master = not (u.frozen or split) and kind_of(choice.optimizer).master
        has_master = has_master and (choice.precision != "fp32" or bool(ring))
        slot = seen[ring] % choice.ring_slots if ring else 0
        out.append(Placement(u, lay, name, bool(ring), slot, ring, numel.get(ring, 0), owned, has_master, split))
        seen[ring] += 1
    return tuple(out)


def _compute_dtype(u: Unit) -> bool:
    """Whether a unit is kept in the dtype of compute: not integers, and not 4 bits."""
    return u.itemsize is None and not u.quantized


def _rings(
    units: Sequence[Unit], layouts: Sequence[UnitLayout], names: Sequence[str], choice: Choice, tied: frozenset[str]
) -> dict[str, str]:
    """Unit name -> the size class whose ring it is in, for ringed units. See [Note: guests]."""
    count = Counter(names)
    rings = {
        u.name: name
        for u, name in zip(units, names, strict=True)
        if u.kind == "block" and u.name not in tied and _compute_dtype(u) and count[name] > choice.ring_slots
        if u.numel >= choice.persist_numel
    }
    sizes = {
        name: lay.padded_numel
        for u, lay, name in zip(units, layouts, names, strict=True)
        if u.name in rings and not u.frozen
    }
    guests = [
        (u.name, lay.padded_numel)
        for u, lay in zip(units, layouts, strict=True)
        if u.guest and u.params and not u.frozen and u.name not in tied and u.numel >= choice.persist_numel
    ]
    if not sizes or not guests:
        return rings
    host = max(sizes, key=lambda name: sizes[name])
    growth = max(0, max(n for _, n in guests) - sizes[host]) * choice.ring_slots
    if growth >= sum(n for _, n in guests):
        guests = [(name, n) for name, n in guests if n <= sizes[host]]
    return {**rings, **{name: host for name, _ in guests}}


def _lay_out_all(units: Sequence[Unit], choice: Choice) -> list[UnitLayout]:
    """Layouts of all units; blocks of one shape are laid out once."""
    done: dict[tuple[int, ...], UnitLayout] = {}
    out = []
    for u in units:
        sizes = tuple(p.numel for p in u.params)
        if sizes not in done:
            params = [(p.name, p.numel) for p in u.params]
            done[sizes] = lay_out(u.name, params, world_size=choice.world_size, piece_numel=choice.piece_numel)
        out.append(done[sizes].renamed(u.name, [p.name for p in u.params]))
    return out


def _size_classes(units: Sequence[Unit], layouts: Sequence[UnitLayout]) -> list[str]:
    """A block's class is `block` for the first size met, `block2` for the next; where frozen `frozen`, `frozen2`.

    Other units are classes of their own.
    """
    sizes: dict[bool, list[tuple[int, int, int | None]]] = {False: [], True: []}
    out = []
    for u, lay in zip(units, layouts, strict=True):
        if u.kind != "block":
            out.append(u.name)
            continue
        if u.quantized:
            out.append(NF4_CLASS)
            continue
        size = (lay.padded_numel, lay.numel, u.itemsize)
        known = sizes[u.frozen]
        if size not in known:
            known.append(size)
        at = known.index(size)
        out.append(("frozen" if u.frozen else "block") + (f"{at + 1}" if at else ""))
    return out
