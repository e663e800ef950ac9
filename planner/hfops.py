"""Parts that Hugging Face decoders (transformers 5.24) share: norms, rotation, activations, line by line.

See [Note: lifetimes] in `planner/tape.py`.
"""

from __future__ import annotations

from typing import Literal

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32
from zplan.planner.families import Params
from zplan.planner.graph import Value

Norm = Literal["rms", "gemma", "olmo", "mixed", "mixed_olmo", "layer"]
"""`rms`: normed in fp32, cast, times the weight. `gemma`: times (1 + weight) in fp32, cast. `olmo`: times the weight in
fp32, cast. `mixed`, `mixed_olmo`: the same two, of the input as it is and an fp32 root. `layer`: torch's LayerNorm."""


def norm(op: Aten, x: Value, p: Params, name: str, kind: Norm) -> Value:
    """The norm whose parameters are `name.weight` and perhaps `name.bias`."""
    weight = p[f"{name}.weight"]
    if kind == "layer":
        return op.named("normed", op.layer_norm(x, weight, p[f"{name}.bias"]))
    return op.named("normed", _NORMS[kind](op, x, weight))


def rms_norm(op: Aten, x: Value, weight: Value) -> Value:
    up = op.to(x, FP32)
    variance = op.mean(op.square(up))
    up = op.mul(up, op.rsqrt(op.add_number(variance)))
    return op.mul(op.to(up, x.itemsize), weight)


def olmo_norm(op: Aten, x: Value, weight: Value) -> Value:
    up = op.to(x, FP32)
    variance = op.mean(op.square(up))
    up = op.mul(up, op.rsqrt(op.add_number(variance)))
    return op.to(op.mul(up, weight), x.itemsize)


def mixed_norm(op: Aten, x: Value, weight: Value) -> Value:
    variance = op.mean(op.square(op.to(x, FP32)))
    hidden = op.mul(x, op.rsqrt(op.add_number(variance)))
    hidden = op.to(hidden, x.itemsize)
    return op.mul(hidden, weight)


def mixed_olmo_norm(op: Aten, x: Value, weight: Value) -> Value:
    variance = op.mean(op.square(op.to(x, FP32)))
    hidden = op.mul(x, op.rsqrt(op.add_number(variance)))
    return op.to(op.mul(hidden, weight), x.itemsize)


def gemma_norm(op: Aten, x: Value, weight: Value) -> Value:
    normed = _gemma_normed(op, op.to(x, FP32))
    normed = op.mul(normed, op.add_number(op.to(weight, FP32)))
    return op.to(normed, x.itemsize)


def _gemma_normed(op: Aten, x: Value) -> Value:
    return op.mul(x, op.rsqrt(op.add_number(op.mean(op.square(x)))))


_NORMS = {
    "rms": rms_norm,
    "gemma": gemma_norm,
    "olmo": olmo_norm,
    "mixed": mixed_norm,
    "mixed_olmo": mixed_olmo_norm,
}


def activate(op: Aten, x: Value, kind: str) -> Value:
    """`gelu_new` is written in Python; the others are one kernel, which saves its input, or for relu its output."""
    if kind == "gelu_new":
        return op.mul(op.scale(x), op.add_number(op.tanh(op.scale(op.add(x, op.scale(op.square(x)))))))
    return op.relu(x) if kind == "relu" else op.unary(x, kind)


def rotary_tables(op: Aten, wide: int, seq: int, itemsize: int) -> tuple[Value, Value]:
    """cos and sin (1, T, wide) from the frequencies, which are a buffer."""
    freqs = _freqs(op, op.tape.new((1, seq, 1), FP32, "rotary"), wide)
    both = op.tape.new((1, seq, wide), FP32, "rotary")
    cos = op.like(op.like(both, "rotary"), "rotary")
    sin = op.like(op.like(both, "rotary"), "rotary")
    del freqs
    return op.to(cos, itemsize), op.to(sin, itemsize)


def _freqs(op: Aten, positions: Value, wide: int) -> Value:
    return op.tape.new((1, positions.shape[1], wide // 2), FP32, "rotary")


def sigmoid(op: Aten, x: Value) -> Value:
    """Saves its output."""
    node = op.tape.node([x], lambda g, s: [op.like(g[0], "sigmoid.grad")])
    out = op.like(x, "sigmoid")
    op.tape.finish(node, out, saved=[out])
    return out


def split_sizes(op: Aten, x: Value, *sizes: int) -> list[Value]:
    """Parts of the last dim; their gradients are concatenated."""
    node = op.tape.node([x], lambda g, s: [op.cat(g)])
    out = [x.view((*x.shape[:-1], n), x.strides) for n in sizes]
    op.tape.finish(node, *out)
    return out


def every_other(op: Aten, x: Value) -> Value:
    """`x[..., i::2]`; its gradient is written into zeros."""
    shape, itemsize = x.shape, x.itemsize
    node = op.tape.node([x], lambda g, s: [op.tape.new(shape, itemsize, "slice.grad")])
    out = x.view((*shape[:-1], shape[-1] // 2), (*x.strides[:-1], 2 * x.strides[-1]))
    op.tape.finish(node, out)
    return out


def first_of(op: Aten, x: Value, length: int) -> Value:
    """The first of the last dim but one; its gradient is written into zeros."""
    shape, itemsize = x.shape, x.itemsize
    node = op.tape.node([x], lambda g, s: [op.tape.new(shape, itemsize, "slice.grad")])
    out = x.view((*shape[:-2], length, shape[-1]), x.strides)
    op.tape.finish(node, out)
    return out


def one_of(op: Aten, x: Value) -> Value:
    """`x[..., i, :]`: a view; its gradient is written into zeros."""
    shape, itemsize = x.shape, x.itemsize
    node = op.tape.node([x], lambda g, s: [op.tape.new(shape, itemsize, "select.grad")])
    out = x.view((*shape[:-2], shape[-1]), (*x.strides[:-2], x.strides[-1]))
    op.tape.finish(node, out)
    return out


def rotate_half(op: Aten, x: Value) -> Value:
    half = x.shape[-1] // 2
    first, second = op.narrow(x, 0, half), op.narrow(x, half, half)
    return op.cat((op.neg(second), first))


def rotate(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Rotates (B, H, T, D) over all of D."""
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    q_rotated = op.add(op.mul(q, cos), op.mul(rotate_half(op, q), sin))
    k_rotated = op.add(op.mul(k, cos), op.mul(rotate_half(op, k), sin))
    return op.named("q, rotated", q_rotated), op.named("k, rotated", k_rotated)


def rotate_in_fp32(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """As `rotate`, with tables in fp32."""
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    q_rotated = op.add(op.mul(q, cos), op.mul(rotate_half(op, q), sin))
    k_rotated = op.add(op.mul(k, cos), op.mul(rotate_half(op, k), sin))
    return op.named("q, rotated", op.to(q_rotated, q.itemsize)), op.named("k, rotated", op.to(k_rotated, k.itemsize))


def rotate_front(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Rotates the front of each head, which may be all of it, and always copies the rest behind it."""
    q_rotated, k_rotated, *_ = rotate_front_here(op, q, k, cos, sin)
    return q_rotated, k_rotated


def rotate_front_here(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, ...]:
    """As `rotate_front` in the attention's own frame, whose names keep the four parts until it returns."""
    wide, all_of = cos.shape[-1], q.shape[-1]
    q_front, q_rest = op.narrow(q, 0, wide), op.narrow(q, wide, all_of - wide)
    k_front, k_rest = op.narrow(k, 0, wide), op.narrow(k, wide, all_of - wide)
    q_front, k_front = rotate(op, q_front, k_front, cos, sin)
    q, k = op.cat((q_front, q_rest)), op.cat((k_front, k_rest))
    return op.named("q, rotated", q), op.named("k, rotated", k), q_front, q_rest, k_front, k_rest


def rotate_front_at_once(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """As `rotate_front`, without a name for the rotated queries."""
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    wide, all_of = cos.shape[-1], q.shape[-1]
    q_front, q_rest = op.narrow(q, 0, wide), op.narrow(q, wide, all_of - wide)
    k_front, k_rest = op.narrow(k, 0, wide), op.narrow(k, wide, all_of - wide)
    q_rotated = op.cat((op.add(op.mul(q_front, cos), op.mul(rotate_half(op, q_front), sin)), q_rest))
    k_rotated = op.cat((op.add(op.mul(k_front, cos), op.mul(rotate_half(op, k_front), sin)), k_rest))
    return op.named("q, rotated", q_rotated), op.named("k, rotated", k_rotated)


def rotate_pairs(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Rotates neighbours, and leaves the first ones of all pairs before the second ones. Tables repeat their half."""
    half = cos.shape[-1] // 2
    cos, sin = op.unsqueeze(op.narrow(cos, 0, half), 1), op.unsqueeze(op.narrow(sin, 0, half), 1)
    q1, q2 = every_other(op, q), every_other(op, q)
    k1, k2 = every_other(op, k), every_other(op, k)
    q_rotated = op.cat((op.sub(op.mul(q1, cos), op.mul(q2, sin)), op.add(op.mul(q2, cos), op.mul(q1, sin))))
    k_rotated = op.cat((op.sub(op.mul(k1, cos), op.mul(k2, sin)), op.add(op.mul(k2, cos), op.mul(k1, sin))))
    return op.named("q, rotated", q_rotated), op.named("k, rotated", k_rotated)


def rotate_halves(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """As `rotate`, from tables of half a head."""
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    q_rotated = _rotated_halves(op, q, cos, sin)
    return op.named("q, rotated", q_rotated), op.named("k, rotated", _rotated_halves(op, k, cos, sin))


def _rotated_halves(op: Aten, x: Value, cos: Value, sin: Value) -> Value:
    first, second = op.split(x, 2)
    turned = op.sub(op.mul(first, cos), op.mul(second, sin))
    other = op.add(op.mul(second, cos), op.mul(first, sin))
    return op.cat((turned, other))
