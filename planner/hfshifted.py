"""The loss as remote code takes it: of logits without their last token, (B, T - 1, V).

Rows are written as (B T, V), whose storages have B rows less beside them (`Tape.extend`).
"""

from __future__ import annotations

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import INT64, Grads, Outs
from zplan.planner.graph import Value


def but_last(op: Aten, logits: Value) -> Value:
    """`logits[:, :-1].contiguous().view(-1, V)`; of one sequence the slice is contiguous."""
    (b, t, vocab), itemsize = logits.shape, logits.itemsize
    node = op.tape.node([logits], lambda g, s: [op.tape.new((b, t, vocab), itemsize, "slice.grad")])
    out = logits.alias()
    op.tape.finish(node, out)
    return op.view(_copied(op, out) if b > 1 else out, (b * t, vocab))


def labels_from_second(op: Aten, labels: Value) -> Value:
    """`labels[:, 1:].contiguous().view(-1)`, likewise."""
    flat = labels.view((labels.numel,), (1,))
    return _shorter(op, flat, "labels.shifted", labels.shape[0]) if labels.shape[0] > 1 else flat


def entropy(op: Aten, rows: Value, target: Value, missing: int) -> Value:
    """Cross-entropy of all rows but `missing` ones."""
    return _nll(op, _log_softmax(op, rows, missing), target, missing)


def squared_maxima(op: Aten, rows: Value, missing: int) -> Value:
    """A number times the mean of the squares of each row's maximum, whose gradient is scattered into zeros."""
    shape, itemsize = rows.shape, rows.itemsize

    def zeros() -> Value:
        out = op.tape.new(shape, itemsize, "max.grad")
        op.tape.extend(out, (-missing, shape[1]))
        return out

    def backward(g: Grads, s: Grads) -> Outs:
        out = zeros()
        return [out if op.table.in_place_accumulation else zeros()]

    largest = op.tape.new(shape[:1], itemsize, "max")
    op.tape.extend(largest, (-missing,))
    indices = _shorter(op, largest, "max.indices", missing, INT64)
    node = op.tape.node([rows], backward, largest, indices)
    out = op.tape.new((), itemsize, "loss")
    op.tape.finish(node, out)
    return out


def _shorter(op: Aten, x: Value, label: str, missing: int, itemsize: int | None = None) -> Value:
    """A new value like `x`, without so many of its rows."""
    out = op.like(x, label, itemsize)
    op.tape.extend(out, (-missing, *x.shape[1:]))
    return out


def _copied(op: Aten, x: Value) -> Value:
    node = op.tape.node([x], lambda g, s: [g[0].alias()])
    out = op.tape.new(x.shape, x.itemsize, "clone")
    op.tape.extend(out, (-x.shape[0], x.shape[-1]))
    op.tape.finish(node, out)
    return out


def _log_softmax(op: Aten, rows: Value, missing: int) -> Value:
    node = op.tape.node([rows], lambda g, s: [_shorter(op, g[0], "log_softmax.grad", missing)])
    out = _shorter(op, rows, "log_softmax", missing)
    op.tape.finish(node, out, saved=[out])
    return out


def _nll(op: Aten, x: Value, target: Value, missing: int) -> Value:
    node = op.tape.node([x], lambda g, s: [_shorter(op, s[0], "nll.grad", missing)], x, target)
    out = op.tape.new((), x.itemsize, "loss")
    weight = op.tape.new((), x.itemsize, "loss.total_weight")
    op.tape.finish(node, out, saved=[weight])
    return out
