"""T5's learned bias of the distance between two tokens (transformers 5.24, `T5Attention.compute_bias`), line by line.

Distances are sorted into buckets, whose numbers (T, T) an embedding of one value a head is looked up by.
"""

from __future__ import annotations

import math

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64, Grads, Outs
from zplan.planner.graph import Value


def bias_of_distance(op: Aten, table: Value, seq: int, *, both_ways: bool) -> Value:
    """(1, H, T, T), a view of (T, T, H), from a table (buckets, H). `both_ways`: tokens behind count too."""
    context = _shifted(op, _integers(op, seq))
    memory = _integers(op, seq)
    distance = op.tape.new((seq, seq), INT64, "bias.distance")
    bucket = _buckets(op, distance, both_ways=both_ways)
    del context, memory
    return _turned(op, _looked_up(op, table, bucket))


def masked_bias(op: Aten, bias: Value, allowed: Value) -> Value:
    """The bias, and the lowest number where a mask of bytes, (T, T) or (B, 1, T, T), does not allow: `torch.where`."""
    batch = allowed.shape[0] if len(allowed.shape) > 2 else 1
    shape, itemsize = (batch, *bias.shape[1:]), bias.itemsize
    strides = (math.prod(bias.shape), *bias.strides[1:])

    def backward(g: Grads, s: Grads) -> Outs:
        zero = op.tape.new((), itemsize, "bias.number")
        out = op.like(g[0], "where.grad")
        del zero
        return [out]

    node = op.tape.node([bias], backward, allowed)
    lowest = op.tape.new((), itemsize, "bias.number")
    out = op.tape.new(shape, itemsize, "where", strides=strides)
    op.tape.finish(node, out)
    del lowest
    return out


def _integers(op: Aten, *shape: int) -> Value:
    return op.tape.new(shape, INT64, "bias.positions")


def _shifted(op: Aten, x: Value) -> Value:
    return op.like(x, "bias.positions")


def causal_mask(op: Aten, seq: int) -> Value:
    """(T, T), whether a token is no later than another."""
    _rows, _columns = _integers(op, seq), _integers(op, seq)
    return op.tape.new((seq, seq), BOOL, "causal mask")


def _buckets(op: Aten, distance: Value, *, both_ways: bool) -> Value:
    """`_relative_position_bucket`: near distances have a bucket each, far ones share some by their logarithm."""

    def new(x: Value, itemsize: int = INT64, *_operands: Value) -> Value:
        return op.like(x, "bias.buckets", itemsize)

    if both_ways:
        buckets = _plus_zero(op, _times_number(op, _as_integers(op, new(distance, BOOL))))
        distance = new(distance)
    else:
        distance = _negative(op, _smaller(op, distance, new(distance)))
    small = new(distance, BOOL)
    large = _times_number(op, _times_number(op, _times_number(op, _times_number(op, new(distance, FP32)))))
    large = _plus_zero(op, _as_integers(op, large))
    large = _smaller(op, large, new(large))
    chosen = new(distance)
    if not both_ways:
        buckets = new(chosen)
    del small, large
    return buckets


def _times_number(op: Aten, x: Value) -> Value:
    return op.like(x, "bias.buckets")


_plus_zero = _negative = _times_number


def _as_integers(op: Aten, x: Value) -> Value:
    return op.like(x, "bias.buckets", INT64)


def _smaller(op: Aten, x: Value, y: Value) -> Value:
    return op.like(x, "bias.buckets")


def _looked_up(op: Aten, table: Value, ids: Value) -> Value:
    """An embedding whose gradient comes with heads first, so that a GPU copies it before it sorts the buckets."""
    shape, itemsize = table.shape, table.itemsize
    out_shape = (*ids.shape, shape[1])

    def backward(g: Grads, s: Grads) -> Outs:
        if not op.table.kernels:
            return [op.tape.new(shape, itemsize, "embedding.weight")]
        copy = op.tape.workspace(g[0].numel * itemsize, "bias.grad")
        work = op.tape.sort_workspace("positions", "embedding.sort")
        out = op.tape.new(shape, itemsize, "embedding.weight")
        del copy, work
        return [out]

    node = op.tape.node([table], backward, ids)
    out = op.tape.new(out_shape, itemsize, "position bias")
    op.tape.finish(node, out)
    return out


def _turned(op: Aten, x: Value) -> Value:
    """(T, T, H) as (1, H, T, T)."""
    t, _, h = x.shape
    node = op.tape.node([x], lambda g, s: [g[0].view((t, t, h), (g[0].strides[2], g[0].strides[3], g[0].strides[1]))])
    first, second, last = x.strides
    out = x.view((1, h, t, t), (x.shape[0] * first, last, first, second))
    op.tape.finish(node, out)
    return out
