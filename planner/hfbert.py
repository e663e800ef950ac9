"""One training step of `BertForMaskedLM` (transformers 5.24) on a tape, line by line.

See [Note: lifetimes] in `planner/tape.py`. Batches are unpadded, so there is no mask, and the loss is taken of the
scores in compute dtype, as that class does.
"""

from __future__ import annotations

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import INT64
from zplan.planner.config import Attention
from zplan.planner.families import Params, StepTape
from zplan.planner.graph import Value
from zplan.planner.models import Architecture


class BertTape(StepTape):
    """Embeddings, encoder and head."""

    def embed(self, ids: Value) -> Value:
        op, p, (batch, seq) = self.op, self.params, ids.shape
        name = "bert.embeddings"
        # Positions are a slice of a buffer; types are gathered for one row and shown for all.
        positions = op.tape.buffer((1, seq), INT64)
        types = op.expand(op.tape.new((1, seq), INT64, "types.ids"), (batch, seq))
        words = op.embedding(p[f"{name}.word_embeddings.weight"], ids)
        if self.recipe.checkpointing != "none":
            op.tape.require_gradient(words)  # As the class does with checkpointing.
        typed = op.embedding(p[f"{name}.token_type_embeddings.weight"], types, table="types")
        out = op.add(words, typed)
        placed = op.embedding(p[f"{name}.position_embeddings.weight"], positions, table="positions")
        out = op.add(out, placed)
        out = _layer_norm(op, p, f"{name}.LayerNorm", out)
        return op.dropout(out) if self.arch.trait("dropout") else out

    def layer(self, i: int) -> Block:
        return Block(self.op, self.params, self.arch, f"bert.encoder.layer.{i}.", self.recipe.attention)

    def head_weight(self) -> Value:
        own = self.params.get("cls.predictions.decoder.weight")
        return self.params["bert.embeddings.word_embeddings.weight"] if own is None else own

    def head(self, x: Value) -> Value:
        op, p, name = self.op, self.params, "cls.predictions.transform"
        x = op.linear(x, p[f"{name}.dense.weight"], p[f"{name}.dense.bias"])
        x = op.unary(x, "gelu")
        x = _layer_norm(op, p, f"{name}.LayerNorm", x)
        return op.linear(x, self.head_weight(), p["cls.predictions.bias"])

    def features(self, ids: Value) -> Value:
        # Every layer is called in a phase of its own; the embedding's output keeps its name, as in the class.
        embedded = self.starts(self.embed(ids), "backward.embed")
        padding = self.padding_mask(*ids.shape)
        out = self.blocks([embedded], [(f"blocks.{i}", self.layer(i).run, ()) for i in range(self.arch.layers)])
        del padding
        return out

    def forward(self, ids: Value, labels: Value) -> Value:
        hidden = self.features(ids)
        scores = self.op.named("logits", self.unit("head", self.head, hidden))
        self.tape.enter("loss")
        tokens = labels.numel
        flat = self.op.view(scores, (tokens, self.arch.vocab))
        return self.op.nll_loss(self.op.softmax(flat, "log_softmax"), labels.view((tokens,), (1,)))


class Block:
    """One encoder layer: norms behind attention and feed-forward part."""

    def __init__(self, op: Aten, p: Params, arch: Architecture, prefix: str, kind: Attention) -> None:
        self.op, self.p, self.arch, self.prefix, self.kind = op, p, arch, prefix, kind

    def run(self, x: Value) -> Value:
        attended, _weights = self._attention(x)
        up = self._up(attended)
        return self.op.named("output", self._output(up, attended, "output"))

    def _linear(self, x: Value, name: str) -> Value:
        return self.op.linear(x, self.p[f"{self.prefix}{name}.weight"], self.p[f"{self.prefix}{name}.bias"])

    def _up(self, x: Value) -> Value:
        up = self.op.named("up", self._linear(x, "intermediate.dense"))
        return self.op.named("gelu(up)", self.op.unary(up, "gelu"))

    def _output(self, x: Value, given: Value, name: str) -> Value:
        x = self._linear(x, f"{name}.dense")
        x = self.op.dropout(x) if self.arch.trait("dropout") else x
        return _layer_norm(self.op, self.p, f"{self.prefix}{name}.LayerNorm", self.op.add(x, given))

    def _attention(self, x: Value) -> tuple[Value, Value | None]:
        out, weights = self._attend(x)
        return self.op.named("after attention", self._output(out, x, "attention.output")), weights

    def _heads(self, x: Value, name: str) -> Value:
        projected = self._linear(x, f"attention.self.{name}")
        return self.op.transpose(self.op.view(projected, (*x.shape[:2], self.arch.heads, self.arch.head_dim)), 1, 2)

    def _attend(self, x: Value) -> tuple[Value, Value | None]:
        op = self.op
        q, k, v = self._heads(x, "query"), self._heads(x, "key"), self._heads(x, "value")
        out, weights = self._eager(q, k, v) if self.kind == "eager" else (self._fused(q, k, v), None)
        return op.reshape(out, (*x.shape[:2], self.arch.heads * self.arch.head_dim)), weights

    def _fused(self, q: Value, k: Value, v: Value) -> Value:
        return self.op.contiguous(self.op.transpose(self.op.sdpa(q, k, v, causal=False), 1, 2))

    def _eager(self, q: Value, k: Value, v: Value) -> tuple[Value, Value]:
        op = self.op
        scores = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        scores = op.softmax(scores, "softmax")
        if self.arch.trait("attention_dropout"):
            scores = op.dropout(scores)
        out = op.named("attention output", op.matmul(scores, v))
        return op.contiguous(op.transpose(out, 1, 2)), scores


def _layer_norm(op: Aten, p: Params, name: str, x: Value) -> Value:
    return op.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])
