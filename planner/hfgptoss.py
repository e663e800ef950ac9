"""The op lists of the class of gpt-oss (transformers 5.24), line by line.

Each head has a sink, a score of its own that takes part in the softmax and is dropped behind it, so scores are (B, H,
T, T + 1) and their softmax stays in the compute dtype. Experts have biases, and a gate that is clamped.

See [Note: lifetimes] in `planner/tape.py`. A value (B, H, T, T + 1) is written as (B, H, T, T), whose storage has the
rest beside it (`Tape.extend`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hfmoe import Experts, run_experts
from zplan.planner.hfops import every_other, sigmoid
from zplan.planner.hftape import ClassTape


class GptOssBlock(Block):
    """Norm, attention, norm, experts; what attention and router returned beside is kept by name."""

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        op, residual = self.op, x
        hidden = self.norm(x, 0)
        hidden, _other = self.attention(hidden, *given)
        hidden = op.named("after attention", op.add(residual, hidden))
        residual = hidden
        hidden = self.norm(hidden, 1)
        hidden, _other = self._fed(hidden)
        return op.named("output", op.add(residual, hidden))

    def _eager(self, q: Value, k: Value, v: Value, mask: Value) -> tuple[Value, Value | None]:
        op, times = self.op, self.arch.heads // self.arch.kv_heads
        if times > 1:
            k, v = self._repeated(k, times), self._repeated(v, times)
        weights = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        weights = op.add(weights, mask)
        b, h, t, _ = q.shape
        sinks = op.expand(op.reshape(self.p["self_attn.sinks"], (1, h, 1, 1)), (b, h, t, 1))
        scores = _with_sinks(op, weights, sinks)
        scores = _minus(op, scores, _largest(op, scores))
        probabilities = _softmax(op, scores)
        dropped = _without_sinks(op, probabilities)
        weights = op.dropout(dropped) if self.arch.trait("attention_dropout") else dropped
        out = op.named("attention output", op.matmul(weights, v))
        return op.contiguous(op.transpose(out, 1, 2)), weights

    def _fed(self, x: Value) -> tuple[Value, Value]:
        op, shape = self.op, x.shape
        rows = op.reshape(x, (shape[0] * shape[1], shape[2]))
        # The router's logits have a name and no reader.
        _logits, weights, chosen = self._routed(rows)
        rows = run_experts(op, self.p, self.arch, rows, weights, chosen, EXPERTS)
        return op.reshape(rows, shape), weights

    def _routed(self, x: Value) -> tuple[Value, Value, Value]:
        op = self.op
        logits = self.linear(x, "mlp.router")
        top, chosen = op.topk(logits, self.arch.trait("experts_per_token"))
        return logits, op.softmax(top, "router.softmax"), chosen


class GptOssTape(ClassTape):
    """Tables are of half a head; masks do not look for packed sequences."""

    block = GptOssBlock

    def tables(self, seq: int) -> Sequence[tuple[Value, ...]]:
        op = self.op
        angles = self._angles(self.tape.new((1, seq, 1), FP32, "rotary"))
        cos = op.like(op.like(angles, "rotary"), "rotary")
        sin = op.like(op.like(angles, "rotary"), "rotary")
        return [(op.to(cos, self.itemsize), op.to(sin, self.itemsize))]

    def _angles(self, positions: Value) -> Value:
        return self.tape.new((1, positions.shape[1], self.arch.head_dim // 2), FP32, "rotary")

    def _look_for_packing(self, batch: int, seq: int) -> None:
        """Positions are not handed on."""


def _clamped_gate(op: Aten, x: Value) -> Value:
    gate, up = every_other(op, x), every_other(op, x)
    gate = _clamp(op, gate, 1)
    up = _clamp(op, up, 2)
    glu = op.named("experts.act", op.mul(gate, sigmoid(op, op.scale(gate))))
    return op.mul(op.add_number(up), glu)


EXPERTS = Experts(_clamped_gate, turned=True)


def _clamp(op: Aten, x: Value, sides: int) -> Value:
    """Between so many bounds; backward compares with each again."""

    def backward(g: Grads, s: Grads) -> Outs:
        zero = op.tape.new((), g[0].itemsize, "clamp.zero")
        within = [op.like(s[0], "clamp.within", BOOL) for _ in range(sides)]
        out = op.like(g[0], "clamp.grad")
        del zero, within
        return [out]

    node = op.tape.node([x], backward, x)
    out = op.like(x, "clamp")
    op.tape.finish(node, out)
    return out


# Scores with sinks


def _wide(op: Aten, like: Value, label: str) -> Value:
    """A new (B, H, T, T + 1)."""
    out = op.tape.new(like.shape, like.itemsize, label)
    op.tape.extend(out, (*like.shape[:3], 1))
    return out


def _with_sinks(op: Aten, scores: Value, sinks: Value) -> Value:
    """Concatenation; the gradients are slices."""
    shapes = [scores.shape, sinks.shape]
    node = op.tape.node([scores, sinks], lambda g, s: [g[0].view(n, g[0].strides) for n in shapes])
    out = _wide(op, scores, "scores, sinks")
    op.tape.finish(node, out)
    return out


def _without_sinks(op: Aten, x: Value) -> Value:
    node = op.tape.node([x], lambda g, s: [_wide(op, g[0], "slice.grad")])
    out = x.alias()
    op.tape.finish(node, out)
    return out


def _largest(op: Aten, x: Value) -> Value:
    """`x.max(dim=-1, keepdim=True).values`; its gradient is scattered into zeros as in `Aten.topk`."""

    def backward(g: Grads, s: Grads) -> Outs:
        like = g[0].view((*g[0].shape[:3], g[0].shape[2]), g[0].strides)
        zeros = _wide(op, like, "max.grad")
        if not op.table.in_place_accumulation:
            zeros = _wide(op, like, "max.grad")
        return [zeros]

    node = op.tape.node([x], backward)
    out = op.tape.new((*x.shape[:3], 1), x.itemsize, "max")
    indices = op.tape.new(out.shape, INT64, "max.indices")
    op.tape.finish(node, out, saved=[indices])
    return out


def _minus(op: Aten, x: Value, largest: Value) -> Value:
    node = op.tape.node([x, largest], lambda g, s: [g[0].alias(), _wide(op, g[0], "neg")])
    out = _wide(op, x, "scores")
    op.tape.finish(node, out)
    return out


def _softmax(op: Aten, x: Value) -> Value:
    """As `Aten.softmax`."""

    def backward(g: Grads, s: Grads) -> Outs:
        nbytes = g[0].numel * g[0].itemsize
        sizes = (nbytes, nbytes // g[0].shape[3]) if op.table.kernels else ()
        product = [op.tape.workspace(n, "softmax.product") for n in sizes]
        out = _wide(op, g[0], "softmax.grad")
        del product
        return [out]

    node = op.tape.node([x], backward)
    out = _wide(op, x, "softmax")
    op.tape.finish(node, out, saved=[out])
    return out
