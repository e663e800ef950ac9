"""DistributedDataParallel: fp32 parameters and moments, and buckets that gradients are views of.

Semantics of torch 2.11: `torch/csrc/distributed/c10d/reducer.cpp` with `gradient_as_bucket_view=True`. In 16 bits the
forward runs under autocast, whose casts of weights are activation lines. AdamW is fused.
"""

from __future__ import annotations

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec
from zplan.planner.peer_sizes import FP32, MOMENTS, line, numel_of, trained
from zplan.planner.timeline import Timeline


def ddp_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """All lines but activations; nothing is sharded."""
    numel, whole = numel_of(trained(spec.units)), numel_of(spec.units)
    always = [time.always]
    return [
        line("params.whole", FP32 * whole, always, "states", "fp32, which the optimizer updates in place"),
        *(line(name, FP32 * numel, always, "states", "torch.optim.AdamW, fused") for name in MOMENTS),
        line("grads.buckets", FP32 * numel, always, "buffers", "torch reducer.cpp: gradients are views of the buckets"),
    ]
