"""The op lists of the classes of GPT-J and Falcon (transformers 5.24), line by line; BLOOM: `planner/hfbloom.py`.

See [Note: lifetimes] in `planner/tape.py`. What they share with other decoders is in `planner/hfblocks.py` and
`planner/hftape.py`; what each does in its own way is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32, INT64, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hfops import first_of, one_of, rotate, rotate_half
from zplan.planner.hftape import ClassTape


class GptjBlock(Block):
    """Both branches start from one norm. Positions rotate neighbours of (B, T, H, D), by tables made anew each time."""

    def attention(self, x: Value, cos: Value, sin: Value, *mask: Value) -> tuple[Value, Value | None]:
        op, heads, wide = self.op, self.arch.heads, int(self.arch.trait("rotary"))
        q, k = (self._apart(self.linear(x, f"attn.{n}_proj"), heads) for n in "qk")
        v = op.transpose(self._apart(self.linear(x, "attn.v_proj"), heads), 1, 2)
        k_front, k_rest = op.narrow(k, 0, wide), op.narrow(k, wide, self.arch.head_dim - wide)
        q_front, q_rest = op.narrow(q, 0, wide), op.narrow(q, wide, self.arch.head_dim - wide)
        k_front = self._rotated(k_front, sin, cos)
        q_front = self._rotated(q_front, sin, cos)
        k = op.named("k, rotated", op.cat((k_front, k_rest)))
        q = op.named("q, rotated", op.cat((q_front, q_rest)))
        out, weights = self.attend(op.transpose(q, 1, 2), op.transpose(k, 1, 2), v, *mask)
        return self.drop(out), weights

    def _apart(self, x: Value, heads: int) -> Value:
        return self.op.view(x, (*x.shape[:2], heads, self.arch.head_dim))

    def _rotated(self, x: Value, sin: Value, cos: Value) -> Value:
        op = self.op
        sin = self._doubled(sin)
        cos = self._doubled(cos)
        return op.add(op.mul(x, cos), op.mul(rotate_half(op, x), sin))

    def _doubled(self, table: Value) -> Value:
        return self.op.tape.new((1, table.shape[1], 1, 2 * table.shape[2]), table.itemsize, "rotary, doubled")

    def _eager(self, q: Value, k: Value, v: Value, mask: Value) -> tuple[Value, Value | None]:
        """Scores are a product in fp32."""
        op = self.op
        scores = op.scale(op.matmul(op.to(q, FP32), op.transpose(op.to(k, FP32), 2, 3)))
        scores = op.add(scores, mask)
        scores = op.to(op.softmax(scores, "softmax"), v.itemsize)
        if self.arch.trait("attention_dropout"):
            scores = op.dropout(scores)
        out = op.named("attention output", op.matmul(scores, v))
        return op.contiguous(op.transpose(out, 1, 2)), scores

    def feed(self, x: Value) -> Value:
        return self.drop(super().feed(x))

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        residual = x
        hidden = self.norm(x, 0)
        attended, _weights = self.attention(hidden, *given)
        fed = self.feed(hidden)
        return self.op.named("output", self.op.add(self.op.add(attended, fed), residual))


class GptjTape(ClassTape):
    """The tables are rows of one buffer."""

    block = GptjBlock

    def tables(self, seq: int) -> list[tuple[Value, ...]]:
        wide = int(self.arch.trait("rotary"))
        both = self.tape.new((1, seq, wide), self.itemsize, "rotary")
        half = both.view((1, seq, wide // 2), both.strides)
        return [(half, half.alias())]


class PairBlock(Block):
    """A layer that returns its probabilities too, where they were written."""

    outputs: list[Value]
    """What the layer before returned: a local of the model's forward, which the next layer's result replaces."""

    def returned(self, out: Value, weights: Value | None) -> Value:
        self.op.named("output", out)
        if not self.op.tape.recomputing:
            self.outputs[:] = [x.alias() for x in (out, weights) if x is not None]
        return out


class PairTape(ClassTape):
    """A model that keeps the last layer's results until its forward returns."""

    def make_block(self, i: int) -> Block:
        made = super().make_block(i)
        assert isinstance(made, PairBlock)
        made.outputs = self.outputs
        return made

    def forward(self, ids: Value, labels: Value) -> Value:
        self.outputs: list[Value] = []
        return super().forward(ids, labels)

    def layers(
        self, start: list[Value], positions: Value, tables: Sequence[tuple[Value, ...]], masks: Sequence[Value]
    ) -> Value:
        out = super().layers(start, positions, tables, masks)
        self.outputs.clear()
        return out


class FalconBlock(PairBlock):
    """Heads in groups, of which each has its own keys and values; or one pair for all heads; or as many as heads."""

    def linear(self, x: Value, name: str) -> Value:
        out, bias = self.op.linear(x, self.p[f"{name}.weight"]), self.p.get(f"{name}.bias")
        return out if bias is None else self.op.add(out, bias)

    def _split(self, fused: Value) -> tuple[Value, Value, Value]:
        """Queries, keys and values (B, T, H or 1, D)."""
        op, a, groups = self.op, self.arch, self.arch.kv_heads
        b, t, _ = fused.shape
        if not a.trait("grouped"):
            if groups > 1:
                parts = op.view(fused, (b, t, a.heads, 3, a.head_dim))
                q, k, v = (one_of(op, parts) for _ in range(3))
                return q, k, v
            parts = op.view(fused, (b, t, a.heads + 2, a.head_dim))
            return first_of(op, parts, a.heads), _picked(op, parts), _picked(op, parts)
        each = a.heads // groups
        parts = op.view(fused, (b, t, groups, each + 2, a.head_dim))
        query = first_of(op, parts, each)
        key, value = _picked(op, parts), _picked(op, parts)
        key, value = op.expand(key, query.shape), op.expand(value, query.shape)
        query, key, value = [op.reshape(x, (b, t, a.heads, a.head_dim)) for x in (query, key, value)]
        return query, key, value

    def attention(self, x: Value, cos: Value, sin: Value, *mask: Value) -> tuple[Value, Value | None]:
        op, a = self.op, self.arch
        fused = op.named("q, k, v", self.linear(x, "self_attention.query_key_value"))
        q, k, v = self._split(fused)
        q, k, v = op.transpose(q, 1, 2), op.transpose(k, 1, 2), op.transpose(v, 1, 2)
        q, k = rotate(op, q, k, cos, sin)
        if self.kind == "eager":
            out, weights = self._scored(q, k, v, *mask)
        else:
            out, weights = op.sdpa(q, k, v, causal=False), None
        out = op.transpose(out, 1, 2)
        out = op.reshape(out, (*x.shape[:2], a.heads * a.head_dim))
        out = self.linear(out, "self_attention.dense")
        return out, weights

    def _scored(self, q: Value, k: Value, v: Value, mask: Value) -> tuple[Value, Value]:
        """Softmax in the compute dtype."""
        op = self.op
        k = op.transpose(k, 2, 3)
        scores = op.scale_(op.matmul(q, op.expand(k, (*q.shape[:2], *k.shape[2:]))))
        scores = op.softmax(op.add(scores, mask), "softmax")
        out = op.named("attention output", op.matmul(scores, op.expand(v, (*q.shape[:2], *v.shape[2:]))))
        return out, scores

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        op, arch = self.op, self.arch
        residual = x
        if arch.trait("two_norms"):
            hidden = self.norm_of(x, "ln_attn")
            fed_with = self.norm_of(x, "ln_mlp")
        else:
            hidden = fed_with = self.norm_of(x, "input_layernorm")
        attended, _weights = self.attention(hidden, *given)
        if arch.trait("serial"):
            residual = op.named("after attention", op.add(residual, self._branch(attended)))
            fed_with = self.norm_of(residual, "post_attention_layernorm")
        fed = self.feed(fed_with)
        if not arch.trait("serial"):
            fed = op.add_(fed, attended)
        return self.returned(op.add(residual, self.drop(fed)), _weights)

    def _branch(self, x: Value) -> Value:
        return self.op.dropout(x) if self.arch.trait("branch_dropout") else x

    def norm_of(self, x: Value, name: str) -> Value:
        return self.op.named("normed", self.op.layer_norm(x, self.p[f"{name}.weight"], self.p[f"{name}.bias"]))


def _picked(op: Aten, x: Value) -> Value:
    """`x[..., [i], :]`: a copy, by an index of one int64; its gradient is added into zeros as in `Aten.index`."""
    shape, itemsize = x.shape, x.itemsize

    def backward(g: Grads, s: Grads) -> Outs:
        zeros = op.tape.new(shape, itemsize, "index.grad")
        if not op.table.in_place_accumulation:
            zeros = op.tape.new(shape, itemsize, "index.grad")
        return [zeros]

    node = op.tape.node([x], backward, op.tape.new((1,), INT64, "index"))
    out = op.tape.new((*shape[:-2], 1, shape[-1]), itemsize, "index")
    op.tape.finish(node, out)
    return out


class FalconTape(PairTape):
    """Fused attention takes a mask always, which every layer turns into one that is added."""

    block = FalconBlock

    def _masks(self, ids: Value) -> list[Value]:
        if self.recipe.attention == "eager" or self.recipe.padded:
            return super()._masks(ids)
        self.op.masked = True
        return [self._future(*ids.shape)]
