"""The op lists of the classes of DeepSeek V2 and V3 (transformers 5.24), line by line.

Queries, keys and values come from low-rank latents (multi-head latent attention, DeepSeek-V2 report 2024, section 2.1);
only a part of each head is rotated, and that part of the keys is one for all heads. Values are narrower than keys. A
sparse layer has shared experts beside the routed ones of `planner/hfmoe.py`.

See [Note: lifetimes] in `planner/tape.py`. The router's weight is taken to be in the compute dtype, as it is once a
runtime has cast the model; the class casts it to fp32 in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hfmoe import run_experts
from zplan.planner.hfops import norm, rotary_tables, rotate, rotate_pairs, sigmoid, split_sizes
from zplan.planner.hftape import ClassTape

COMPLEX = 8


class MlaBlock(Block):
    """A layer of DeepSeek V3; V2's differs in rotation and router."""

    tables = 2
    """How many the rotation takes."""

    def attention(self, x: Value, *given: Value) -> tuple[Value, Value | None]:
        op, a, (b, t, _) = self.op, self.arch, x.shape
        rope, rank = a.trait("rope"), a.trait("kv_rank")
        q = self.heads(self._queries(x), a.heads)
        q_pass, q_front = split_sizes(op, q, a.head_dim - rope, rope)
        compressed = op.named("latent of k, v", self.linear(x, "self_attn.kv_a_proj_with_mqa"))
        latent, k_front = split_sizes(op, compressed, rank, rope)
        latent = op.view(self._normed(latent, "kv_a_layernorm"), (b, 1, t, rank))
        k_front = op.view(k_front, (b, 1, t, rope))
        q_front, k_front = self.rotated(q_front, k_front, *given[: self.tables])
        query = op.named("q, rotated", op.cat((q_pass, q_front)))
        key, value = self._expanded(latent, k_front)
        return self.attend(query, key, value, *given[self.tables :])

    def _queries(self, x: Value) -> Value:
        if not self.arch.trait("q_low"):
            return self.linear(x, "self_attn.q_proj")
        latent = self._normed(self.op.named("latent of q", self.linear(x, "self_attn.q_a_proj")), "q_a_layernorm")
        return self.linear(latent, "self_attn.q_b_proj")

    def _normed(self, x: Value, name: str) -> Value:
        return norm(self.op, x, self.p, f"self_attn.{name}", "rms")

    def rotated(self, q: Value, k: Value, *tables: Value) -> tuple[Value, Value]:
        return (rotate_pairs if self.arch.trait("pairs") else rotate)(self.op, q, k, *tables)

    def _expanded(self, latent: Value, front: Value) -> tuple[Value, Value]:
        """Keys and values of all heads; keys are copied into one tensor, part by part."""
        op, a, (b, _, t, rope) = self.op, self.arch, front.shape
        wide, values = a.head_dim - rope, a.value_dim
        both = op.view(self.linear(latent, "self_attn.kv_b_proj"), (b, t, a.heads, wide + values))
        both = op.named("k, v", op.transpose(both, 1, 2))
        own, value = split_sizes(op, both, wide, values)
        front = op.expand(front, (b, a.heads, t, rope))
        key = op.tape.new((b, a.heads, t, a.head_dim), both.itemsize, "k")
        _copy_into(op, key, own)
        _copy_into(op, key, front)
        return key, value

    def _fused(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        if self.op.table.kernels or q.shape == v.shape:
            return super()._fused(q, k, v, *mask)
        return self.op.contiguous(self.op.transpose(attend_plain(self.op, q, k, v, *mask), 1, 2)), None

    def feed(self, x: Value) -> Value:
        if "mlp.experts.down_proj" not in self.p:
            return self.gated(x, "mlp")
        op, shape = self.op, x.shape
        # The router's logits have a name and no reader.
        _logits, weights, chosen = self.routed(x)
        rows = op.view(x, (shape[0] * shape[1], shape[2]))
        rows = op.view(run_experts(op, self.p, self.arch, rows, weights, chosen), shape)
        return op.add(rows, self.gated(x, "mlp.shared_experts"))

    def logits(self, x: Value) -> Value:
        """Of the router, (N, experts), in fp32."""
        op = self.op
        return op.linear(op.to(x, FP32), op.to(self.p["mlp.gate.weight"], FP32))

    def routed(self, x: Value) -> tuple[Value, Value, Value]:
        """Logits; weights and numbers of the chosen experts, (N, k) each. Groups of experts are chosen first."""
        op, a = self.op, self.arch
        x = op.view(x, (x.shape[0] * x.shape[1], x.shape[2]))
        logits = self.logits(x)
        scores = op.named("router.scores", sigmoid(op, logits))
        ranked = op.add_number(scores)
        best = op.sum(op.topk(self._grouped(ranked), 2)[0], -1)
        group = op.topk(best, a.trait("top_groups"))[1]
        mask = op.like(best, "router.groups")
        wide = self._per_expert(mask)
        ranked = op.masked_fill(ranked, _not(op, op.like(wide, "router.mask", BOOL)))
        chosen = op.topk(ranked, a.trait("experts_per_token"))[1]
        weights = _gather(op, scores, chosen)
        if a.trait("scores_summed"):
            total = op.add_number(op.sum(weights, -1, keep=True))
            weights = op.divide_(weights, total)
        weights = op.scale(weights)
        del group
        return logits, weights, chosen

    def _grouped(self, x: Value) -> Value:
        groups = self.arch.trait("groups")
        return self.op.view(x, (x.shape[0], groups, x.shape[1] // groups))

    def _per_expert(self, mask: Value) -> Value:
        """A number for each group as one for each expert."""
        op, each = self.op, self.arch.trait("experts") // self.arch.trait("groups")
        wide = op.expand(op.unsqueeze_last(mask), (*mask.shape, each))
        return op.reshape(wide, (mask.shape[0], mask.shape[1] * each))


class MlaTape(ClassTape):
    """Tables are for the rotated part of a head."""

    block = MlaBlock

    def tables(self, seq: int) -> Sequence[tuple[Value, ...]]:
        return [rotary_tables(self.op, self.arch.trait("rope"), seq, self.itemsize)]


class Mla2Block(MlaBlock):
    """A layer of DeepSeek V2: rotation is a product of complex numbers, and the router takes a softmax."""

    tables = 1

    def rotated(self, q: Value, k: Value, *tables: Value) -> tuple[Value, Value]:
        op, itemsize = self.op, q.itemsize
        q_numbers = _as_complex(op, op.to(q, FP32))
        k_numbers = _as_complex(op, op.to(k, FP32))
        turns = op.unsqueeze(tables[0], 1)
        q_rotated = op.to(_as_real(op, _turned(op, q_numbers, turns)), itemsize)
        k_rotated = op.to(_as_real(op, _turned(op, k_numbers, turns)), itemsize)
        return q_rotated, k_rotated

    def routed(self, x: Value) -> tuple[Value, Value, Value]:
        op, a = self.op, self.arch
        x = op.view(x, (x.shape[0] * x.shape[1], x.shape[2]))
        logits = self.logits(x)
        scores = op.softmax(logits, "router.softmax")
        if a.trait("groups"):
            best = op.topk(self._grouped(scores), 1)[0]
            best = best.view(best.shape[:2], best.strides[:2])
            group = op.topk(best, a.trait("top_groups"))[1]
            mask = op.like(best, "router.groups")
            wide = self._per_expert(mask)
            scores = op.masked_fill(scores, _not(op, op.like(wide, "router.mask", BOOL)))
            del group
        weights, chosen = op.topk(scores, a.trait("experts_per_token"))
        weights = op.scale(weights)
        return logits, weights, chosen


class Mla2Tape(ClassTape):
    """One table of complex numbers."""

    block = Mla2Block

    def tables(self, seq: int) -> Sequence[tuple[Value, ...]]:
        angles = self._angles(self.tape.new((1, seq, 1), FP32, "rotary"))
        turns = self._polar(self.op.like(angles, "rotary"))
        return [(self.op.like(turns, "rotary"),)]

    def _angles(self, positions: Value) -> Value:
        return self.tape.new((1, positions.shape[1], self.arch.trait("rope") // 2), FP32, "rotary")

    def _polar(self, ones: Value) -> Value:
        return self.op.like(ones, "rotary", COMPLEX)


def attend_plain(op: Aten, q: Value, k: Value, v: Value, *mask: Value, dropout: bool = False) -> Value:
    """torch's fused attention where no kernel takes it, such as on a CPU where values are narrower than keys: a chain
    of products in fp32 (`_scaled_dot_product_attention_math`, torch 2.13). A mask is of bytes, or of numbers to add.
    """
    t = q.shape[2]
    wide_q, key, value = op.to(q, FP32), op.to(k, FP32), op.to(v, FP32)
    query = op.scale(wide_q)
    added: Value | None = None
    if mask or t > 1:
        added = _as_added(op, mask[0], q.itemsize) if mask else _causal_mask(op, t)
    scores = op.matmul(query, op.scale(op.transpose(key, 2, 3)))
    if added is not None:
        # In place, but not under the dispatch mode that measures: [Note: observer effect] in `runtime/meter.py`.
        scores = op.add(scores, added)
    scores = op.softmax(scores, "softmax")
    scores = op.dropout(scores) if dropout else scores
    rounded = op.to(scores, q.itemsize)
    out = op.to(op.matmul(scores, value), q.itemsize)
    del rounded
    return op.named("attention output", out)


def _as_added(op: Aten, mask: Value, itemsize: int) -> Value:
    return _added_mask(op, mask, itemsize) if mask.itemsize == BOOL else mask


def _causal_mask(op: Aten, seq: int) -> Value:
    return _added_mask(op, _lower(op, op.tape.new((seq, seq), BOOL, "mask")), FP32)


def _added_mask(op: Aten, allowed: Value, itemsize: int) -> Value:
    """0 or -inf, of a mask of bytes."""
    numbers = [op.tape.new((), itemsize, "mask") for _ in range(2)]
    out = op.like(allowed, "mask", itemsize)
    del numbers
    return out


def _lower(op: Aten, ones: Value) -> Value:
    return op.like(ones, "mask")


def _not(op: Aten, mask: Value) -> Value:
    return op.like(mask, "router.mask")


def _copy_into(op: Aten, x: Value, part: Value) -> None:
    """`x[..., i:j].copy_(part)`: a node that takes the place of what made `x` so far."""
    tape, shape, small = op.tape, x.shape, part.shape
    first = x.node is not None

    def backward(g: Grads, s: Grads) -> Outs:
        whole = tape.new(shape, g[0].itemsize, "copy.grad")
        own = tape.new(small, g[0].itemsize, "copy.grad")
        zeros = tape.new(small, g[0].itemsize, "copy.grad") if first else None
        del zeros
        return [whole if first else None, own]

    node = tape.node([x, part], backward)
    tape.finish(node, x)


def _gather(op: Aten, x: Value, chosen: Value) -> Value:
    """`x.gather(1, chosen)`; the gradient is added into zeros, out of place where `Aten.index` does so."""
    shape, itemsize = x.shape, x.itemsize

    def backward(g: Grads, s: Grads) -> Outs:
        zeros = op.tape.new(shape, itemsize, "gather.grad")
        if not op.table.in_place_accumulation:
            zeros = op.tape.new(shape, itemsize, "gather.grad")
        return [zeros]

    node = op.tape.node([x], backward, x, chosen)
    out = op.tape.new(chosen.shape, itemsize, "gather")
    op.tape.finish(node, out)
    return out


def _as_complex(op: Aten, x: Value) -> Value:
    """Neighbours of the last dim as one number each: a view."""
    node = op.tape.node([x], lambda g, s: [_real(g[0])])
    out = _complex(x)
    op.tape.finish(node, out)
    return out


def _as_real(op: Aten, x: Value) -> Value:
    node = op.tape.node([x], lambda g, s: [_complex(op.contiguous(g[0]))])
    out = _real(x)
    op.tape.finish(node, out)
    return out


def _complex(x: Value) -> Value:
    strides = (*(n // 2 for n in x.strides[:-1]), 1)
    return Value(x.tape, x.storage, (*x.shape[:-1], x.shape[-1] // 2), strides, COMPLEX)


def _real(x: Value) -> Value:
    strides = (*(2 * n for n in x.strides[:-1]), 1)
    return Value(x.tape, x.storage, (*x.shape[:-1], 2 * x.shape[-1]), strides, FP32)


def _turned(op: Aten, x: Value, turns: Value) -> Value:
    """Times complex numbers that need no gradient; backward conjugates them first."""

    def backward(g: Grads, s: Grads) -> Outs:
        conjugates = op.like(s[0], "rotary")
        out = op.like(g[0], "mul")
        del conjugates
        return [out]

    node = op.tape.node([x], backward, turns)
    out = op.like(x, "mul")
    op.tape.finish(node, out)
    return out
