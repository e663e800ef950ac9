"""Op lists of three models whose code comes with their weights: InternLM2, Baichuan2 and ChatGLM3.

No class of the transformers package exists to check these lists against. They follow the published remote code
(`modeling_internlm2.py`, `modeling_baichuan.py` of the 7B, `modeling_chatglm.py`) in what a layer saves and makes;
`tests/test_hfremote.py` holds them to modules of ours that take the same steps. Caches are off. The loss is taken of
logits without the last token (`planner/hfshifted.py`).

See [Note: lifetimes] in `planner/tape.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hfops import first_of, one_of, rotary_tables, rotate, rotate_half, split_sizes
from zplan.planner.hfshifted import but_last, entropy, labels_from_second, squared_maxima
from zplan.planner.hftape import ClassTape


class RemoteTape(ClassTape):
    """Tables of positions are made by each layer."""

    def tables(self, seq: int) -> Sequence[tuple[Value, ...]]:
        return [()]

    def _look_for_packing(self, batch: int, seq: int) -> None:
        """Nobody does."""

    def forward(self, ids: Value, labels: Value) -> Value:
        hidden = self.features(ids)
        if self.recipe.cross_entropy in ("fused", "chunked"):
            return self.loss_in_head(hidden, self._shifted_labels(labels))
        logits = self.op.named("logits", self.unit("head", self._head, hidden))
        self.tape.enter("loss")
        logits = self.arranged(logits)
        return self.loss(logits, labels)

    def arranged(self, logits: Value) -> Value:
        """(B, T, V) in the loss's dtype."""
        return self.op.to(logits, self.loss_itemsize)

    def loss(self, logits: Value, labels: Value) -> Value:
        return self.entropy(but_last(self.op, logits), labels)

    def entropy(self, rows: Value, labels: Value) -> Value:
        return entropy(self.op, rows, labels_from_second(self.op, labels), labels.shape[0])


# InternLM2


class InternLm2Block(Block):
    """One projection, group by group: the queries of a group, its key, its value."""

    def attention(self, x: Value, *mask: Value) -> tuple[Value, Value | None]:
        op, a, (b, t, _) = self.op, self.arch, x.shape
        fused = op.named("q, k, v", self.linear(x, "attention.wqkv"))
        each = a.heads // a.kv_heads
        parts = op.view(fused, (b, t, a.kv_heads, each + 2, a.head_dim))
        q = op.transpose(op.reshape(first_of(op, parts, each), (b, t, a.heads, a.head_dim)), 1, 2)
        k, v = op.transpose(one_of(op, parts), 1, 2), op.transpose(one_of(op, parts), 1, 2)
        cos, sin = rotary_tables(op, a.head_dim, t, x.itemsize)
        q, k = rotate(op, q, k, cos, sin)
        return self.attend(q, k, v, *mask)[0], None

    def _fused(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        times = self.arch.heads // self.arch.kv_heads
        if times > 1:
            k, v = self._repeated(k, times), self._repeated(v, times)
        return self.op.contiguous(self.op.transpose(self.op.sdpa(q, k, v), 1, 2)), None

    def feed(self, x: Value) -> Value:
        op = self.op
        gated = op.mul(
            op.named("act(gate)", op.unary(op.named("gate", self.linear(x, "feed_forward.w1")), "silu")),
            op.named("up", self.linear(x, "feed_forward.w3")),
        )
        return self.linear(op.named("act(gate) * up", gated), "feed_forward.w2")


class InternLm2Tape(RemoteTape):
    block = InternLm2Block


# Baichuan2


class BaichuanBlock(Block):
    """One projection for queries, keys and values, rotation in fp32, and fused attention under a mask."""

    def attention(self, x: Value, *mask: Value) -> tuple[Value, Value | None]:
        op, a, (b, t, c) = self.op, self.arch, x.shape
        parts = op.view(op.named("q, k, v", self.linear(x, "self_attn.W_pack")), (b, t, 3, c))
        q = self.heads(one_of(op, parts), a.heads)
        k = self.heads(one_of(op, parts), a.heads)
        v = self.heads(one_of(op, parts), a.heads)
        q, k = self._turned(q, k)
        return self.attend(q, k, v, *mask)

    def _turned(self, q: Value, k: Value) -> tuple[Value, Value]:
        op, wide = self.op, self.arch.head_dim
        cos, sin = (op.tape.new((1, 1, q.shape[2], wide), FP32, "rotary") for _ in range(2))
        q_turned = op.add(op.mul(op.to(q, FP32), cos), op.mul(rotate_half(op, op.to(q, FP32)), sin))
        k_turned = op.add(op.mul(op.to(k, FP32), cos), op.mul(rotate_half(op, op.to(k, FP32)), sin))
        return op.named("q, rotated", op.to(q_turned, q.itemsize)), op.named("k, rotated", op.to(k_turned, k.itemsize))

    def _fused(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        return self.op.transpose(self.op.sdpa(q, k, v, added=mask[0]), 1, 2), None


class BaichuanTape(RemoteTape):
    """The head's rows are normed in every pass; the loss is taken in the compute dtype, with that of its maxima."""

    block = BaichuanBlock

    def _masks(self, ids: Value) -> list[Value]:
        batch, seq = ids.shape
        causal = self.tape.new((seq, seq), self.itemsize, "mask")
        expanded = self._expanded(batch, seq)
        out = self.op.like(expanded, "mask")
        del causal, expanded
        return [out]

    def _expanded(self, batch: int, seq: int) -> Value:
        """The mask of tokens, which is all ones, as one that is added."""
        ones = self.tape.new((batch, 1, seq, seq), self.itemsize, "mask")
        inverted = self.op.like(ones, "mask")
        del ones
        where = self.op.like(inverted, "mask", BOOL)
        out = self.op.like(inverted, "mask")
        del inverted, where
        return out

    def _head(self, x: Value) -> Value:
        weight = self.head_weight()
        if self.arch.trait("normed_head"):
            weight = self.op.named("head, normed", _normed_rows(self.op, weight))
        return self.op.linear(x, weight)

    def arranged(self, logits: Value) -> Value:
        return logits

    def entropy(self, rows: Value, labels: Value) -> Value:
        if not self.arch.trait("normed_head"):
            return super().entropy(rows, labels)
        other = squared_maxima(self.op, rows, labels.shape[0])
        return self.op.named("loss", self.op.add(super().entropy(rows, labels), other))


def _normed_rows(op: Aten, weight: Value) -> Value:
    """`torch.nn.functional.normalize(weight)`."""
    by = _lengths(op, weight)
    node = op.tape.node([by], lambda g, s: [op.like(g[0], "clamp.grad")], by)
    limited = op.like(by, "head.lengths")
    op.tape.finish(node, limited)
    return _divided(op, weight, limited)


def _lengths(op: Aten, x: Value) -> Value:
    node = op.tape.node([x], lambda g, s: [op.like(s[0], "head.lengths.grad")], x)
    out = op.tape.new((x.shape[0], 1), x.itemsize, "head.lengths")
    op.tape.finish(node, out, saved=[out])
    return out


def _divided(op: Aten, x: Value, by: Value) -> Value:
    def backward(g: Grads, s: Grads) -> Outs:
        first = op.like(g[0], "div")
        negative = op.like(g[0], "neg")
        quotient = op.like(op.like(g[0], "div"), "div")
        second = op.like(g[0], "mul")
        del negative, quotient
        return [first, second]

    node = op.tape.node([x, by], backward, x, by)
    out = op.like(x, "div")
    op.tape.finish(node, out)
    return out


# ChatGLM3


class ChatGlmBlock(Block):
    """Hidden states are (T, B, C). Half of each head is rotated; keys and values are spread over all heads."""

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        op = self.op
        normed = self.norm(x, 0)
        attended = self._attended(normed, *given)
        hidden = op.named("after attention", op.add(x, attended))
        normed = self.norm(hidden, 1)
        fed = self._fed(normed)
        return op.named("output", op.add(hidden, fed))

    def _attended(self, x: Value, table: Value) -> Value:
        op, a, (t, b, _) = self.op, self.arch, x.shape
        fused = op.named("q, k, v", self.linear(x, "self_attention.query_key_value"))
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        q, k, v = split_sizes(op, fused, wide, narrow, narrow)
        q = op.view(q, (t, b, a.heads, a.head_dim))
        k = op.view(k, (t, b, a.kv_heads, a.head_dim))
        v = op.view(v, (t, b, a.kv_heads, a.head_dim))
        q = op.named("q, rotated", _front_turned(op, q, table))
        k = _front_turned(op, k, table)
        k, v = self._spread(k), self._spread(v)
        return self.linear(self._core(q, k, v), "self_attention.dense")

    def _spread(self, x: Value) -> Value:
        op, (t, b, g, d) = self.op, x.shape
        wide = op.expand(op.unsqueeze(x, 3), (t, b, g, self.arch.heads // g, d))
        return op.view(op.contiguous(wide), (t, b, self.arch.heads, d))

    def _core(self, q: Value, k: Value, v: Value) -> Value:
        op, (t, b, h, d) = self.op, q.shape
        q, k, v = (op.transpose(op.transpose(x, 0, 1), 1, 2) for x in (q, k, v))
        out = op.sdpa(q, k, v)
        return op.reshape(op.transpose(op.transpose(out, 1, 2), 0, 1), (t, b, h * d))

    def _fed(self, x: Value) -> Value:
        return self.linear(self._gated(self.linear(x, "mlp.dense_h_to_4h")), "mlp.dense_4h_to_h")

    def _gated(self, x: Value) -> Value:
        gate, up = self.op.split(self.op.named("gate, up", x), 2)
        gated = self.op.mul(self.op.named("act(gate)", self.op.unary(gate, "silu")), up)
        return self.op.named("act(gate) * up", gated)


def _front_turned(op: Aten, x: Value, table: Value) -> Value:
    """Neighbours in the front half of (T, B, H, D) by a table (T, 1, 1, D / 4, 2)."""
    t, b, h, d = x.shape
    front, rest = op.narrow(x, 0, d // 2), op.narrow(x, d // 2, d // 2)
    pairs = op.reshape(front, (t, b, h, d // 4, 2))
    cos = table.view(table.shape[:-1], table.strides[:-1])
    sin = cos.alias()
    first = op.sub(op.mul(_either(op, pairs), cos), op.mul(_either(op, pairs), sin))
    second = op.add(op.mul(_either(op, pairs), cos), op.mul(_either(op, pairs), sin))
    turned = op.view(_paired(op, first, second), (t, b, h, d // 2))
    return op.cat((turned, rest))


def _either(op: Aten, x: Value) -> Value:
    """`x[..., i]`; its gradient is written into zeros."""
    shape, itemsize = x.shape, x.itemsize
    node = op.tape.node([x], lambda g, s: [op.tape.new(shape, itemsize, "select.grad")])
    out = x.view(shape[:-1], x.strides[:-1])
    op.tape.finish(node, out)
    return out


def _paired(op: Aten, a: Value, b: Value) -> Value:
    """Stacked along a new last dim; the gradients are views."""
    shape = a.shape
    node = op.tape.node([a, b], lambda g, s: [g[0].view(shape, g[0].strides[:-1]) for _ in range(2)])
    out = op.tape.new((*shape, 2), a.itemsize, "stack")
    op.tape.finish(node, out)
    return out


class ChatGlmTape(RemoteTape):
    """Embeddings are turned to (T, B, C), logits back to (B, T, V)."""

    block = ChatGlmBlock

    def features(self, ids: Value) -> Value:
        embedded = self._turned_embeddings(ids)
        table = self._table(ids.shape[1])
        out = self.layers([embedded], table, [(table,)], ())
        del embedded
        return out

    def _turned_embeddings(self, ids: Value) -> Value:
        words = self.op.embedding(self.by_unit["embed"]["weight"], ids)
        if self.recipe.checkpointing != "none":
            self.tape.require_gradient(words)
        return self.starts(self.op.contiguous(self.op.transpose(words, 0, 1)), "backward.embed")

    def _table(self, seq: int) -> Value:
        cached = self._cached()
        return self.op.tape.new((seq, 1, 1, *cached.shape[1:]), self.itemsize, "rotary")

    def _cached(self) -> Value:
        """Of all positions that the model has."""
        angles = self.tape.new((self.arch.max_seq, self.arch.head_dim // 4), FP32, "rotary")
        both = [self.op.like(angles, "rotary"), self.op.like(angles, "rotary")]
        out = self.tape.new((*angles.shape, 2), FP32, "rotary")
        del both
        return self.op.to(out, self.itemsize)

    def arranged(self, logits: Value) -> Value:
        logits = self.op.contiguous(self.op.transpose(logits, 0, 1))
        return self.op.to(logits, self.loss_itemsize)
