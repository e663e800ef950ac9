"""One training step of a Hugging Face decoder (transformers 5.24) on a tape: what its forward does around the layers.

A model's forward keeps its locals until it returns. The loss is taken as `loss = model(input_ids, labels=labels).loss`,
so the logits in compute dtype die before backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64
from zplan.planner.families import Params, Recipe, StepTape
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hfops import norm, rotary_tables
from zplan.planner.hfstyles import STYLES
from zplan.planner.models import Architecture, Unit


class ClassTape(StepTape):
    """A decoder of `STYLES`."""

    block = Block

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int, recipe: Recipe) -> None:
        super().__init__(op, arch, units, itemsize, recipe)
        self.style = STYLES[arch.family]
        self.by_unit: dict[str, Params] = {"head": {}}
        for u in units:
            found = self.by_unit.setdefault(u.base_name, {})
            found.update((_short(u, p.name), self.params[p.name]) for p in u.params)

    def layers(
        self,
        start: list[Value],
        positions: Value,
        tables: Sequence[tuple[Value, ...]],
        masks: Sequence[Value],
    ) -> Value:
        """All layers and the last norm."""
        calls = []
        for i in range(self.arch.layers):
            run = self.make_block(i).run
            # What a kind of layers shares lives until its first layer's backward, so one of the other kind tells all.
            kind = -1 if i == self.other_layer else 0
            calls.append((f"blocks.{i}", run, (positions, *tables[kind], *(masks and [masks[kind]]))))
        return self.unit("norm", self._norm, self.blocks(start, calls))

    @property
    def other_layer(self) -> int | None:
        """Number of the first layer of another kind than the first one, where there are two kinds."""
        return number if 0 < (number := self.arch.trait("other_layer")) < self.arch.layers else None

    @property
    def num_masks(self) -> int:
        """Masks of eager attention: one for each kind of layers that the class knows."""
        return self.style.masks

    def make_block(self, i: int) -> Block:
        return self.block(self.op, self.by_unit[f"blocks.{i}"], self.arch, self.style, self.recipe.attention)

    def embed(self, ids: Value) -> Value:
        out = self.op.embedding(self.by_unit["embed"]["weight"], ids)
        # The factor is a buffer of the model.
        out = self.op.scale(out) if self.style.scaled else out
        if self.recipe.checkpointing != "none":
            self.tape.require_gradient(out)  # The class does so with checkpointing, for the sake of a frozen embedding.
        return self.starts(out, "backward.embed")

    def features(self, ids: Value) -> Value:
        if self.style.rotation is None:
            return self._learned_positions(ids)
        embedded, seq = self.embed(ids), ids.shape[1]
        positions = self._positions(seq)
        for _ in range(self.style.masks):
            self._look_for_packing(*ids.shape)
        masks = self._masks(ids)
        start = [self._dropped(embedded)]
        if self.arch.family == "phi":
            embedded = start[0]  # There the dropped one takes over the name, which lives until the forward returns.
        tables = self.tables(seq)
        out = self.layers(start, positions, tables, masks)
        del embedded
        return out

    def tables(self, seq: int) -> Sequence[tuple[Value, ...]]:
        """cos and sin, once for each kind of layer that there is."""
        wide = self.arch.trait("rotary") or self.arch.head_dim
        itemsize = FP32 if self.style.rotary_fp32 else self.itemsize
        kinds = 1 if self.other_layer is None else self.style.tables
        return [rotary_tables(self.op, wide, seq, itemsize) for _ in range(kinds)]

    def _dropped(self, embedded: Value) -> Value:
        return self.op.dropout(embedded) if self.arch.trait("embed_dropout") else embedded

    def _look_for_packing(self, batch: int, seq: int) -> None:
        """Whether positions start again anywhere: their differences, and how often they are not 1."""
        first = self.tape.new((batch,), INT64, "positions.first")
        differences = self._differences(first, batch, seq)
        _restarts = self._count_others(differences)

    def _differences(self, first: Value, batch: int, seq: int) -> Value:
        padded = [self.tape.new((batch, seq), INT64, "positions.padded"), self.op.like(first, "positions.padded")]
        out = self.tape.new((batch, seq), INT64, "positions.differences")
        del padded
        return out

    def _count_others(self, differences: Value) -> Value:
        others = self.op.like(differences, "positions.others", BOOL)
        out = self.op.like(differences, "positions.count")
        del others
        return out

    def _masks(self, ids: Value) -> list[Value]:
        """Fused attention of whole sequences needs none. Otherwise each is (B, 1, T, T), in the compute dtype."""
        padding = self.padding_mask(*ids.shape)
        if self.recipe.attention == "eager":
            return [self._mask(*ids.shape) for _ in range(self.num_masks)]
        return [] if padding is None else [padding]

    def _mask(self, batch: int, seq: int) -> Value:
        future = self._future(batch, seq)
        chosen = [self.tape.new((), self.itemsize, "mask") for _ in ("zero", "lowest")]
        out = self.tape.new((batch, 1, seq, seq), self.itemsize, "mask")
        del future, chosen
        return out

    def _future(self, batch: int, seq: int) -> Value:
        _indices = [self.tape.new((n,), INT64, "mask.indices") for n in (batch, 1, seq, seq)]
        return self.tape.new((1, 1, seq, seq), BOOL, "mask")

    def _positions(self, seq: int) -> Value:
        """`arange(T) + 0`."""
        counted = self.tape.new((seq,), INT64, "positions.ids")
        return self.op.like(counted, "positions.ids")

    def _learned_positions(self, ids: Value) -> Value:
        """OPT counts the ones of an fp32 mask, and looks the counts up two rows further down."""
        tape, embedded = self.tape, self.embed(ids)
        mask = None if self.recipe.padded else tape.new(ids.shape, FP32, "positions.mask")
        positions = tape.new(ids.shape, FP32, "positions.ids")
        positions = self._shifted(self.op.like(positions, "positions.ids"))
        masks = self._masks(ids)
        table = partial(self.op.embedding, self.by_unit["positions"]["weight"], table="positions")
        rows = self.unit("positions", lambda x: table(self.op.like(x, "positions.ids")), positions)
        # The sum has no name here: a layer that does not save its input lets it go.
        out = self.layers([self.op.add(embedded, rows)], positions, [()], masks)
        del mask
        return out

    def _shifted(self, counted: Value) -> Value:
        """`(counted - 1).long()` of a value that nobody else has."""
        less = self.op.like(counted, "positions.ids")
        del counted
        return self.tape.new(less.shape, INT64, "positions.ids")

    def _norm(self, x: Value) -> Value:
        return norm(self.op, x, {f"norm.{k}": v for k, v in self.by_unit["norm"].items()}, "norm", self.style.norm)

    def head_weight(self) -> Value:
        own = self.by_unit["head"].get("weight")
        return self.by_unit["embed"]["weight"] if own is None else own

    def _head(self, x: Value) -> Value:
        return self.op.linear(x, self.head_weight(), self.by_unit["head"].get("bias"))

    def forward(self, ids: Value, labels: Value) -> Value:
        hidden = self.features(ids)
        if self.recipe.cross_entropy in ("fused", "chunked"):
            return self.loss_in_head(hidden, self._shifted_labels(labels))
        logits = self.op.named("logits", self.unit("head", self._head, hidden))
        self.tape.enter("loss")
        if self.arch.trait("capped_logits"):
            logits = self.op.scale(logits)
            logits = self.op.tanh(logits)
            logits = self.op.scale(logits)
        return self._loss(logits, labels)

    def _shifted_labels(self, labels: Value) -> Value:
        return self.op.like(labels, "labels.shifted")

    def _loss(self, logits: Value, labels: Value) -> Value:
        op, tape = self.op, self.tape
        up = op.to(logits, self.loss_itemsize)
        b, t = labels.shape
        # Labels are padded by one and cut by one: (B, T + 1), which is two terms, then (B, T).
        padded = [tape.new((b, t), INT64, "labels.padded"), tape.new((b,), INT64, "labels.padded")]
        # One sequence is contiguous without its first label.
        shifted = tape.new((b, t), INT64, "labels.shifted") if b > 1 else padded[0]
        up = op.view(up, (b * t, self.arch.vocab))
        loss = op.nll_loss(op.softmax(up, "log_softmax"), shifted.view((b * t,), (1,)))
        del padded
        return loss


def _short(unit: Unit, name: str) -> str:
    """A parameter's name within its block; in other units, its last part."""
    if unit.kind == "block":
        return name.split(f".{unit.base_name.rpartition('.')[2]}.", 1)[1]
    return name.rpartition(".")[2]
