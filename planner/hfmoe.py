"""The op list of a mixture of experts (transformers 5.24, its grouped matrix products), line by line.

Every token passes `experts_per_token` experts, whichever they are, so a layer holds as many rows on any routing: the
grouped products need no padding, and imbalance costs time but no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32, INT64
from zplan.planner.families import Params
from zplan.planner.graph import Value
from zplan.planner.models import Architecture

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


def _gate(op: Aten, x: Value) -> Value:
    gate, up = op.split(x, 2)
    return op.mul(op.named("experts.act", op.unary(gate, "silu")), up)


@dataclass(frozen=True)
class Experts:
    """How a class keeps and runs its experts.

    Attributes
    ----------
    gate
        Of the rows (S, 2F) of both first projections, what goes into the last one.
    turned
        Weights are (E, in, out) instead of (E, out, in).
    """

    gate: Callable[[Aten, Value], Value] = _gate
    turned: bool = False


PLAIN = Experts()


def run_experts(  # noqa: PLR0913  (the router's results, and what they are used with)
    op: Aten, p: Params, arch: Architecture, x: Value, weights: Value, chosen: Value, kind: Experts = PLAIN
) -> Value:
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
    bias = _bias(op, p, "gate_up_proj", ids)
    out = op.named("experts.gate_up", _grouped(op, picked, p["mlp.experts.gate_up_proj"], offsets, bias, kind))
    out = op.named("experts.act * up", kind.gate(op, out))
    bias = _bias(op, p, "down_proj", ids)
    out = op.named("experts.output", _grouped(op, out, p["mlp.experts.down_proj"], offsets, bias, kind))
    weighted = op.mul(out, op.unsqueeze_last(flat))
    inverse = tape.new((rows,), INT64, "experts.inverse")
    _arange(op, rows)
    weighted = op.index(weighted, inverse)
    total = op.sum(op.view(weighted, (x.shape[0], k, x.shape[1])), 1)
    del histogram_input, chosen
    return op.to(total, x.itemsize)


def _bias(op: Aten, p: Params, name: str, ids: Value) -> Value | None:
    """A row for each row, of its expert."""
    table = p.get(f"mlp.experts.{name}_bias")
    return None if table is None else op.named("experts.bias", op.index(table, ids))


def _grouped(  # noqa: PLR0913  (a product's operands)
    op: Aten, x: Value, weight: Value, offsets: Value, bias: Value | None, kind: Experts
) -> Value:
    out = op.grouped_mm(x, weight if kind.turned else op.transpose(weight, 1, 2), offsets)
    return out if bias is None else op.add_(out, bias)


def _arange(op: Aten, rows: int) -> None:
    op.tape.new((rows,), INT64, "experts.arange")
