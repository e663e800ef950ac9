"""One training step of a Hugging Face decoder (transformers 5.24) on a tape: what its forward does around the layers.

A model's forward keeps its locals until it returns. The loss is taken as `loss = model(input_ids, labels=labels).loss`,
so the logits in compute dtype die before backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zplan.planner.aten import BOOL, FP32, INT64, Aten
from zplan.planner.config import Attention, Checkpointing
from zplan.planner.families import Params, StepTape
from zplan.planner.hfblocks import STYLES, Block
from zplan.planner.hfops import norm, rotary_tables
from zplan.planner.models import Architecture, Unit
from zplan.planner.tape import Value


class ClassTape(StepTape):
    """A decoder of `STYLES`."""

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int) -> None:
        super().__init__(op, arch, units, itemsize)
        self.style = STYLES[arch.family]
        self.by_unit: dict[str, Params] = {
            u.name: {_short(u, p.name): self.params[p.name] for p in u.params} for u in units
        }

    def layers(
        self,
        hidden: Value,
        checkpointing: Checkpointing,
        attention: Attention,
        positions: Value,
        tables: Sequence[tuple[Value, ...]],
        masks: Sequence[Value],
    ) -> Value:
        """All layers and the last norm."""
        for i in range(self.arch.layers):
            run = Block(self.op, self.by_unit[f"blocks.{i}"], self.arch, self.style, attention).run
            block = partial(self.tape.checkpoint, run) if checkpointing == "full" else run
            # Where there are two kinds of layers the first one stands for those of the other kind.
            kind = -1 if i == 0 else 0
            hidden = self.unit(f"blocks.{i}", block, hidden, positions, *tables[kind], *(masks and [masks[kind]]))
        return self.unit("norm", self._norm, hidden)

    def embed(self, ids: Value) -> Value:
        out = self.op.embedding(self.by_unit["embed"]["weight"], ids)
        # The factor is a buffer of the model.
        out = self.op.scale(out) if self.style.scaled else out
        self.starts(out, "backward.embed")
        return out

    def features(self, ids: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        if self.style.rotation is None:
            return self._learned_positions(ids, checkpointing, attention)
        embedded, seq = self.embed(ids), ids.shape[1]
        positions = self._positions(seq)
        for _ in range(self.style.masks):
            self._look_for_packing(*ids.shape)
        masks = self._masks(ids, attention)
        wide = self.arch.trait("rotary") or self.arch.head_dim
        itemsize = FP32 if self.style.rotary_fp32 else self.itemsize
        tables = [rotary_tables(self.op, wide, seq, itemsize) for _ in range(self.style.tables)]
        return self.layers(embedded, checkpointing, attention, positions, tables, masks)

    def _look_for_packing(self, batch: int, seq: int) -> None:
        """Whether positions start again anywhere: their differences, and how often they are not 1."""
        differences = self._differences(batch, seq)
        _restarts = self._count_others(differences)

    def _differences(self, batch: int, seq: int) -> Value:
        first = self.tape.new((batch,), INT64, "positions.first")
        padded = [self.tape.new((batch, seq), INT64, "positions.padded"), self.op.like(first, "positions.padded")]
        out = self.tape.new((batch, seq), INT64, "positions.differences")
        del padded
        return out

    def _count_others(self, differences: Value) -> Value:
        others = self.op.like(differences, "positions.others", BOOL)
        out = self.op.like(differences, "positions.count")
        del others
        return out

    def _masks(self, ids: Value, attention: Attention) -> list[Value]:
        """Fused attention of whole sequences needs none. Otherwise each is (B, 1, T, T), in the compute dtype."""
        return [self._mask(*ids.shape) for _ in range(self.style.masks)] if attention == "eager" else []

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

    def _learned_positions(self, ids: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        """OPT counts the ones of an fp32 mask, and looks the counts up two rows further down."""
        tape, embedded = self.tape, self.embed(ids)
        mask = tape.new(ids.shape, FP32, "positions.mask")
        positions = tape.new(ids.shape, FP32, "positions.ids")
        positions = self._shifted(self.op.like(positions, "positions.ids"))
        masks = self._masks(ids, attention)
        table = partial(self.op.embedding, self.by_unit["positions"]["weight"], table="positions")
        rows = self.unit("positions", lambda x: table(self.op.like(x, "positions.ids")), positions)
        hidden = self.op.add(embedded, rows)
        out = self.layers(hidden, checkpointing, attention, positions, [()], masks)
        del mask
        return out

    def _shifted(self, counted: Value) -> Value:
        """`(counted - 1).long()` of a value that nobody else has."""
        less = self.op.like(counted, "positions.ids")
        del counted
        return self.tape.new(less.shape, INT64, "positions.ids")

    def _norm(self, x: Value) -> Value:
        return norm(self.op, x, {f"norm.{k}": v for k, v in self.by_unit["norm"].items()}, "norm", self.style.norm)

    def _head(self, x: Value) -> Value:
        own = self.by_unit["head"].get("weight")
        weight = self.by_unit["embed"]["weight"] if own is None else own
        return self.op.linear(x, weight, self.by_unit["head"].get("bias"))

    def forward(self, ids: Value, labels: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        hidden = self.features(ids, checkpointing, attention)
        logits = self.op.named("logits", self.unit("head", self._head, hidden))
        self.tape.enter("loss")
        if self.arch.trait("capped_logits"):
            logits = self.op.scale(logits)
            logits = self.op.tanh(logits)
            logits = self.op.scale(logits)
        return self._loss(logits, labels)

    def _loss(self, logits: Value, labels: Value) -> Value:
        op, tape = self.op, self.tape
        up = op.to(logits, FP32)
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
        return name.split(f".{unit.name.rpartition('.')[2]}.", 1)[1]
    return name.rpartition(".")[2]
