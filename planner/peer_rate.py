"""Bytes a parameter that other runtimes hold between backward and step, and bytes that their ranks send."""

from __future__ import annotations

from zplan.planner.comm import Traffic
from zplan.planner.config import Choice
from zplan.planner.models import ModelSpec
from zplan.planner.textbook import Rate

FP32, MOMENTS = 4, 8


def peer_rate(choice: Choice) -> Rate:
    """States and gradients, working buffers apart.

    Examples
    --------
    >>> [peer_rate(Choice(s, 8, runtime="deepspeed")).formula() for s in range(4)]
    ['16P', '2P + 14P/N', '2P + 14P/N', '16P/N']
    >>> peer_rate(Choice(3, 8, runtime="fsdp2")).formula(), peer_rate(Choice(0, 8, runtime="ddp")).formula()
    ('16P/N', '16P')
    """
    c, master = choice.itemsize, 0 if choice.precision == "fp32" else FP32
    if choice.runtime == "ddp":
        return Rate(FP32 + MOMENTS + FP32, 0)
    if choice.runtime == "fsdp2":
        whole = choice.reduce_itemsize if choice.accumulation > 1 else 0
        return Rate(whole, FP32 + MOMENTS + FP32)
    moved = choice.offload.optimizer != "none"
    states = 0 if moved else FP32 + MOMENTS + c
    if choice.stage == 0:
        return Rate(c + master + MOMENTS + c, 0)
    if choice.stage == 3:
        return Rate(0, states + (c if choice.offload.params == "none" else 0))
    return Rate(2 * c if choice.stage == 1 and choice.accumulation > 1 else c, states)


def peer_traffic(spec: ModelSpec, choice: Choice) -> Traffic:
    """What one rank sends to its data-parallel peers, whole parameters, padding and tensor ranks left out.

    DeepSpeed reduces in the compute dtype: stage 0 once a step; stages 1 and 2 by all-reduce, which is twice a
    reduce-scatter, stage 2 in every micro-step (`stage_1_and_2.py: average_tensor`); stage 3 by reduce-scatter in every
    micro-step, gathering for forward and for backward. FSDP2 gathers as often, and reduces in fp32 once a step. DDP
    all-reduces fp32 gradients in every micro-step.
    """
    n, k, c = choice.world_size * choice.context_parallel, choice.accumulation, choice.itemsize
    if n == 1:
        return Traffic(0, 0)
    numel = spec.num_params // (choice.tensor_parallel * choice.pipeline_parallel)
    trained = sum(u.numel for u in spec.units if not u.frozen) // (choice.tensor_parallel * choice.pipeline_parallel)
    share = (n - 1) / n
    if choice.runtime == "ddp":
        gathered, reduced = 0, 2 * FP32 * trained * k
    elif choice.runtime == "fsdp2":
        gathered, reduced = c * numel * k * (2 if choice.stage == 3 else 1), choice.reduce_itemsize * trained
    elif choice.stage == 3:
        gathered, reduced = 2 * c * numel * k, c * trained * k
    else:
        gathered = 0 if choice.stage == 0 else c * trained
        reduced = 2 * c * trained * (k if choice.stage == 2 else 1)
    return Traffic(round(gathered * share), round(reduced * share))
