"""The op list of a mixture of experts (transformers 5.24, its grouped matrix products), line by line.

Every token passes `experts_per_token` experts, whichever they are, so a layer holds as many rows on any routing: the
grouped products need no padding, and imbalance costs time but no bytes.
"""

from __future__ import annotations

from zplan.planner.aten import FP32, INT64, Aten
from zplan.planner.families import Params
from zplan.planner.models import Architecture
from zplan.planner.tape import Value

INT32 = 4


def experts(op: Aten, p: Params, arch: Architecture, x: Value) -> Value:
    """`mlp(x)` of a sparse layer."""
    shape = x.shape
    rows = op.view(x, (shape[0] * shape[1], shape[2]))
    # The router's logits have a name and no reader.
    routed = _route(op, p["mlp.gate.weight"], arch, rows)
    return op.reshape(run_experts(op, p, arch, rows, *routed[1:]), shape)


def _route(op: Aten, weight: Value, arch: Architecture, x: Value) -> tuple[Value, Value, Value]:
    """The logits (N, E); weights and numbers of the chosen experts, (N, k) each."""
    x = op.reshape(x, x.shape)
    logits = op.linear(x, weight)
    probabilities = op.softmax(op.to(logits, FP32), "router.softmax")
    top, chosen = op.topk(probabilities, arch.trait("experts_per_token"))
    if arch.trait("scores_summed"):
        top = op.divide_(top, op.sum(top, -1, keep=True))
    return logits, op.to(top, x.itemsize if arch.trait("scores_cast") else FP32), chosen


def run_experts(op: Aten, p: Params, arch: Architecture, x: Value, weights: Value, chosen: Value) -> Value:
    """What rows (N, C) become in the experts `chosen` for them, (N, k), summed with the `weights` of these."""
    tape, k = op.tape, arch.trait("experts_per_token")
    rows = x.shape[0] * k
    flat = op.reshape(weights, (rows,))
    ids, perm = tape.new((rows,), INT64, "experts.sorted"), tape.new((rows,), INT64, "experts.perm")
    picked = op.named("experts.input", op.index(x, op.like(perm, "experts.rows")))
    flat = op.index(flat, perm)
    histogram_input = tape.new((rows,), INT32, "experts.ids")
    counts = tape.new((arch.trait("experts"),), INT32, "experts.counts")
    offsets = op.like(counts, "experts.offsets")
    out = op.named("experts.gate_up", op.grouped_mm(picked, p["mlp.experts.gate_up_proj"], offsets))
    out = op.named("experts.act * up", _gate(op, out))
    out = op.named("experts.output", op.grouped_mm(out, p["mlp.experts.down_proj"], offsets))
    weighted = op.mul(out, op.unsqueeze_last(flat))
    inverse = tape.new((rows,), INT64, "experts.inverse")
    _arange(op, rows)
    weighted = op.index(weighted, inverse)
    total = op.sum(op.view(weighted, (x.shape[0], k, x.shape[1])), 1)
    del ids, histogram_input, chosen
    return op.to(total, x.itemsize)


def _arange(op: Aten, rows: int) -> None:
    op.tape.new((rows,), INT64, "experts.arange")


def _gate(op: Aten, x: Value) -> Value:
    gate, up = op.split(x, 2)
    return op.mul(op.named("experts.act", op.unary(gate, "silu")), up)
