"""What one rank keeps of each unit, and where: the decisions that states, buffers and the runtime share.

[Note: resident and ringed] At stage 3 on several ranks, blocks of equal size share a ring of K slots and hold no 16-bit
copy between uses (*ringed*). Every other unit (embedding, final norm, head, a size class with no more than K units, and
anything tied) is *resident*: its flat buffer in the compute dtype is always there. At stages 0 to 2 all units are
resident. On one rank nothing is sharded, whatever the stage.

[Note: masters] In bf16 a rank keeps fp32 master weights of its slices. In fp32 the resident flat buffer's own slices
*are* the master weights; only a ringed unit keeps them apart, since its slot holds other blocks in between.

[Note: frozen] Frozen parameters are units of their own beside the trainable ones of the same module: no master, no
moments, no gradient. A ringed one is cast from a shard in its own dtype (the compute dtype), so at stage 3 a frozen
base costs 2P/N in bf16. A resident one (stages 0 to 2, embedding, head, integers) is whole on every rank and never
gathered again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from zplan.planner.config import Choice
from zplan.planner.layout import UnitLayout, lay_out
from zplan.planner.models import ModelSpec, Unit
from zplan.planner.optimizers import kind_of


@dataclass(frozen=True)
class Placement:
    """One unit on one rank. Sizes in elements; see [Note: resident and ringed] and [Note: masters]."""

    unit: Unit
    layout: UnitLayout
    size_class: str
    """Units of one class have equal sizes: `block`, `embed`, ...; ledger lines carry it as their last part."""
    ringed: bool
    slot: int
    """Index of the ring slot; meaningless when resident."""
    owned_numel: int
    """Elements whose master weights and moments this rank keeps: the shard, or everything at stage 0."""
    has_master: bool
    """Whether it keeps fp32 master weights apart from the buffer that compute reads."""

    @property
    def frozen(self) -> bool:
        return self.unit.frozen

    @property
    def has_shard(self) -> bool:
        """Frozen and ringed: a shard in its own dtype from which the slot is filled."""
        return self.frozen and self.ringed

    @property
    def closes(self) -> bool:
        """On sharded states: whether its parameters are ever shown as NaN placeholders."""
        return not self.frozen or self.ringed

    def buffer_bytes(self, choice: Choice) -> int:
        """Of the whole unit as compute reads it."""
        return self.layout.padded_numel * (self.unit.itemsize or choice.itemsize)


def shards_states(choice: Choice) -> bool:
    """Whether each rank updates only its own slices."""
    return choice.stage >= 1 and choice.world_size > 1


def place(spec: ModelSpec, choice: Choice) -> tuple[Placement, ...]:
    """Placement of every unit that has parameters, in forward order."""
    # A search asks for many choices that differ only in what moves no parameter.
    return _place(
        spec,
        replace(
            choice,
            micro_batch=1,
            accumulation=1,
            seq=1,
            checkpointing="none",
            attention="sdpa",
            cross_entropy="plain",
            checkpoint_every=1,
            checkpoint_offload=False,
        ),
    )


@lru_cache(maxsize=64)
def _place(spec: ModelSpec, choice: Choice) -> tuple[Placement, ...]:
    return place_units([u for u in spec.units if u.params], choice, tied=frozenset())


def place_units(units: Sequence[Unit], choice: Choice, *, tied: frozenset[str]) -> tuple[Placement, ...]:
    """As `place`, for units of any module; `tied` names units that other units read from."""
    layouts = _lay_out_all(units, choice)
    names = _size_classes(units, layouts)
    count = Counter(names)
    out, seen = [], Counter[str]()
    for u, lay, name in zip(units, layouts, names, strict=True):
        in_ring = u.kind == "block" and u.name not in tied and u.itemsize is None and count[name] > choice.ring_slots
        # Parameters that lie off the device come through a ring, on one rank too.
        fetched = choice.runtime == "zplan" and choice.stage == 3 and choice.offload.params != "none"
        ringed = (choice.sharded or fetched) and in_ring
        shares = ringed if u.frozen else shards_states(choice)
        owned = lay.shard_numel if shares else lay.padded_numel
        has_master = not u.frozen and kind_of(choice.optimizer).master and (choice.precision != "fp32" or ringed)
        out.append(Placement(u, lay, name, ringed, seen[name] % choice.ring_slots, owned, has_master))
        seen[name] += 1
    return tuple(out)


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
        size = (lay.padded_numel, lay.numel, u.itemsize)
        known = sizes[u.frozen]
        if size not in known:
            known.append(size)
        at = known.index(size)
        out.append(("frozen" if u.frozen else "block") + (f"{at + 1}" if at else ""))
    return out
