"""The op list of the class of BLOOM (transformers 5.24), line by line.

See [Note: lifetimes] in `planner/tape.py`. What it shares with Falcon's is in `planner/hfgpts.py`.
"""

from __future__ import annotations

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32, INT64, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfgpts import PairBlock, PairTape
from zplan.planner.hfops import one_of

INT32 = 4


class BloomBlock(PairBlock):
    """Positions are numbers added to the scores, (B * H, 1, T); dropout and residuals are added in the branches."""

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        normed = self.norm(x, 0)
        residual = normed if self.arch.trait("normed_residual") else x
        attended, _weights = self._attention(normed, residual, positions, *given)
        normed = self.norm(attended, 1)
        residual = normed if self.arch.trait("normed_residual") else attended
        return self.returned(self._feed(normed, residual), _weights)

    def _attention(self, x: Value, residual: Value, alibi: Value, mask: Value) -> tuple[Value, Value]:
        op, a = self.op, self.arch
        b, t, _ = x.shape
        rows = b * a.heads
        fused = op.named("q, k, v", self.linear(x, "self_attention.query_key_value"))
        q, k, v = self._heads_of(fused)
        q = op.reshape(q, (rows, t, a.head_dim))
        k = op.transpose(op.reshape(k, (rows, t, a.head_dim)), 1, 2)
        v = op.reshape(v, (rows, t, a.head_dim))
        scores = _baddbmm(op, q, k)
        weights = op.view(scores, (b, a.heads, t, t))
        weights = op.add(weights, mask)
        probabilities = op.to(op.softmax(op.to(weights, FP32), "softmax"), x.itemsize)
        if a.trait("attention_dropout"):
            probabilities = op.dropout(probabilities)
        context = op.named("attention output", op.bmm(op.view(probabilities, (rows, t, t)), v))
        context = self._merged(context, b)
        out = self.linear(context, "self_attention.dense")
        out = op.named("after attention", op.add(residual, self.drop(out)))
        return out, probabilities

    def _heads_of(self, fused: Value) -> tuple[Value, Value, Value]:
        a = self.arch
        parts = self.op.view(fused, (*fused.shape[:2], a.heads, 3, a.head_dim))
        q, k, v = (self.op.transpose(one_of(self.op, parts), 1, 2) for _ in range(3))
        return q, k, v

    def _merged(self, x: Value, batch: int) -> Value:
        op, a, t = self.op, self.arch, x.shape[1]
        x = op.transpose(op.view(x, (batch, a.heads, t, a.head_dim)), 1, 2)
        return op.reshape(x, (batch, t, a.heads * a.head_dim))

    def _feed(self, x: Value, residual: Value) -> Value:
        op = self.op
        hidden = op.named("gelu(up)", _gelu(op, op.named("up", self.linear(x, "mlp.dense_h_to_4h"))))
        made = self.linear(hidden, "mlp.dense_4h_to_h")
        return op.add(residual, self.drop(made))


def _baddbmm(op: Aten, q: Value, k: Value) -> Value:
    """The product times a number, plus what needs no gradient; each factor's gradient is a product times the number."""
    tape, q_shape, k_shape = op.tape, q.shape, k.shape

    def backward(g: Grads, s: Grads) -> Outs:
        tape.multiply(*q_shape, k_shape[2], times=2)
        first = op.like(tape.new(q_shape, g[0].itemsize, "bmm"), "mul")
        second = op.like(tape.new(k_shape, g[0].itemsize, "bmm"), "mul")
        return [first, second]

    node = tape.node([q, k], backward, q, k)
    tape.multiply(*q_shape, k_shape[2])
    out = tape.new((*q_shape[:2], k_shape[2]), q.itemsize, "bmm")
    tape.finish(node, out)
    return out


def _gelu(op: Aten, x: Value) -> Value:
    """A function of its own, written in Python without autograd: it saves its input, and makes the rest again."""

    def new(like: Value, *_operands: Value) -> Value:
        return op.like(like, "bloom.gelu")

    def tanh(y: Value) -> Value:
        return new(new(y, new(y), new(y, new(y, new(y)))))

    def backward(g: Grads, s: Grads) -> Outs:
        y = s[0]
        t = tanh(y)
        slope = new(y, new(y, new(y), new(y, new(y, new(y, t)), new(y, new(y, new(y))))), new(y, new(y, t)))
        return [new(slope, slope)]

    node = op.tape.node([x], backward, x)
    out = new(x, new(x), new(x, tanh(x)))
    op.tape.finish(node, out)
    return out


class BloomTape(PairTape):
    """Embeddings have a norm, and there is no other attention than the eager one."""

    block = BloomBlock

    def embed_words(self, ids: Value) -> Value:
        words = self.op.embedding(self.head_or_table(), ids)
        if self.recipe.checkpointing != "none":
            self.tape.require_gradient(words)
        return words

    def head_or_table(self) -> Value:
        return self.params["transformer.word_embeddings.weight"]

    def head_weight(self) -> Value:
        own = self.by_unit["head"].get("weight")
        return self.head_or_table() if own is None else own

    def features(self, ids: Value) -> Value:
        words, (batch, seq) = self.embed_words(ids), ids.shape
        norm = [self.params[f"transformer.word_embeddings_layernorm.{n}"] for n in ("weight", "bias")]
        start = [self.starts(self.op.layer_norm(words, *norm), "backward.embed")]
        slopes = self._slopes()
        alibi = self._times_positions(self.tape.new((seq,), INT64, "positions.ids"))
        alibi = self.op.to(self._repeated(alibi, batch), self.itemsize)
        masks = self._masks(ids)
        out = self.layers(start, alibi, [()], masks)
        del words, slopes
        return out

    def _slopes(self) -> Value:
        """A power of a number for each head, in two series where heads are no power of two."""
        tape, heads = self.tape, self.arch.heads
        closest = 1 << (heads.bit_length() - 1)
        _base, _powers = tape.new((), FP32, "positions.base"), tape.new((closest,), INT32, "positions.powers")
        slopes = tape.new((closest,), FP32, "positions.slopes")
        if closest != heads:
            more = heads - closest
            _base2, _powers2 = tape.new((), FP32, "positions.base"), tape.new((more,), INT32, "positions.powers")
            slopes = self._joined(slopes, tape.new((more,), FP32, "positions.slopes"))
        return slopes

    def _joined(self, *parts: Value) -> Value:
        return self.tape.new((self.arch.heads,), FP32, "positions.slopes")

    def _times_positions(self, positions: Value) -> Value:
        return self.tape.new((self.arch.heads, 1, *positions.shape), FP32, "positions.ids")

    def _repeated(self, alibi: Value, batch: int) -> Value:
        return self.tape.new((batch * self.arch.heads, *alibi.shape[1:]), FP32, "positions.ids")
