"""Losses that take the head's input: in chunks of tokens, each of which is run again in backward, on a tape.

The module that this follows, line by line, is `ChunkedHead` of `tests/test_losses.py`: the tokens are split evenly, and
head and cross-entropy of each chunk are one call of `torch.utils.checkpoint`, so that whole logits never exist.
"""

from __future__ import annotations

from functools import partial

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32
from zplan.planner.graph import Value

LOSS_CHUNKS = 8
"""Chunks of tokens; torchtune's default."""


def chunked_cross_entropy(op: Aten, x: Value, weight: Value, labels: Value) -> Value:
    """The mean loss of features (N, C), a head (V, C) and labels (N,), chunk by chunk."""
    size = -(-x.shape[0] // LOSS_CHUNKS)
    sizes = [min(size, x.shape[0] - i) for i in range(0, x.shape[0], size)]
    parts = op.split_rows(x, sizes)
    losses = [
        op.tape.checkpoint(partial(_part, op, weight), part, labels.view((n,), (1,)))
        for part, n in zip(parts, sizes, strict=True)
    ]
    return op.scale(op.sum(op.stack(losses), 0))


def _part(op: Aten, weight: Value, x: Value, target: Value) -> Value:
    return cross_entropy(op, op.to(op.linear(x, weight), FP32), target)


def cross_entropy(op: Aten, x: Value, target: Value) -> Value:
    """Of logits (N, V), which the caller's argument keeps until it returns."""
    return op.nll_loss(op.softmax(x, "log_softmax"), target)
