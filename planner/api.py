"""`zplan.estimate` and `zplan.plan`: one keyword for each option, a question in, one frozen answer out. Never torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zplan.planner.answer import Estimate, answer, make_plan
from zplan.planner.request import make_request

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan


def estimate(  # noqa: PLR0913 - one keyword for each option, so that editors can show them
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    nvme: int | float | str | None = None,
    margin: int | float | str | None = None,
    efficiency: float | None = None,
    network: float | None = None,
    tokens: int | float | str | None = None,
    epochs: int | None = None,
    examples: int | float | str | None = None,
    price: float | None = None,
    stage: int | None = None,
    offload: str | None = None,
    offload_params: str | None = None,
    offload_ratio: float | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offload: bool = False,
    attention: str | None = None,
    cross_entropy: str | None = None,
    reduce_dtype: str | None = None,
    beyond_limit: bool = False,
    padded: bool = False,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    saving: str | None = None,
    runtime: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    hpz: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_embeddings: bool = False,
    qlora: bool = False,
) -> Estimate:
    """Say whether a training fits and how zplan would run it.

    Parameters
    ----------
    model
        A name that `zplan models` lists, a folder, a `config.json`, or a hub id. Or `params` instead.
    params
        A count alone, such as `7e9` or `"7B"`: a Llama-like shape is assumed and shown.
    gpus, nodes
        GPUs over all nodes. Left out: one where a card is described, else this machine's.
    mem, gpu
        Memory per GPU (a bare number is GiB), or a name that `zplan gpus` lists. Left out: this machine's.
    host_mem, nvme
        Per node; what the ranks of a node take together is held against them.
    margin
        What stays free of a card beyond the interval of the total: a share (`"15%"`) or a size.
    efficiency
        Share of the card's dense peak that matrix products reach in a step; 0.5 where left out, 0.7 on A100.
    network
        GB/s that a node sends to others.
    tokens, epochs, examples
        How much is trained: so many tokens, or so many times so many sequences.
    price
        Of one GPU for one hour.
    stage, accumulation, micro_batch, global_batch, seq, precision, checkpointing, attention, device, compile, saving
        Fix a choice; what is left out is chosen and marked so.
    runtime
        Whose buffers are counted: `zplan`, `deepspeed`, `fsdp2` or `ddp`. Only the first can be run by zplan.
    tp, pp, cp, hpz
        Ranks of tensor, pipeline and context parallelism and of hpZ's second shard; DeepSpeed and FSDP2 only.
    offload, offload_params
        Where the optimizer and the parameters lie between their uses: `none`, `cpu` or `nvme`.
    offload_ratio
        Share of the elements that is offloaded, the first units of the schedule.
    optimizer
        A name of `planner/optimizers.py`: what zplan does not step with is answered as `estimate only`.
    checkpoint_every, checkpoint_offload
        Blocks in one checkpointed segment; whether a segment's input waits in host memory.
    cross_entropy
        `plain` from whole logits in fp32, `bf16` from them as they are, `chunked` or `fused` without whole ones.
    beyond_limit
        `seq` may be more than the model is made for, as where rotary positions are scaled.
    padded
        Sequences are padded to `seq` and attention takes a mask; otherwise they are packed, and none is needed.
    reduce_dtype
        `fp32` or `bf16`: in which gradients are reduced and accumulated.
    config
        A DeepSpeed config, a path or a mapping; fixes what it names.
    offline
        Never touch the network.
    lora, lora_targets, lora_embeddings, qlora
        Freeze the model and train adapters of this rank beside its linear maps: `q,v`, `attention`, `all-linear` or
        names with commas; embedding and head in full beside them; the frozen linear maps in 4 bits.

    Examples
    --------
    >>> answer = estimate(params="7e9", gpus=8, mem=24)
    >>> answer.fits, answer.row.choice.stage
    (True, 3)
    """
    return answer(make_request(locals()))


def plan(  # noqa: PLR0913 - as `estimate`
    model: str | None = None,
    *,
    params: int | float | str | None = None,
    gpus: int | None = None,
    mem: int | float | str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    host_mem: int | float | str | None = None,
    nvme: int | float | str | None = None,
    margin: int | float | str | None = None,
    efficiency: float | None = None,
    network: float | None = None,
    tokens: int | float | str | None = None,
    epochs: int | None = None,
    examples: int | float | str | None = None,
    price: float | None = None,
    stage: int | None = None,
    offload: str | None = None,
    offload_params: str | None = None,
    offload_ratio: float | None = None,
    optimizer: str | None = None,
    accumulation: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    checkpointing: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offload: bool = False,
    attention: str | None = None,
    cross_entropy: str | None = None,
    reduce_dtype: str | None = None,
    beyond_limit: bool = False,
    padded: bool = False,
    device: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    saving: str | None = None,
    runtime: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    hpz: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    offline: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_embeddings: bool = False,
    qlora: bool = False,
) -> Plan:
    """Choose as `estimate` does and return the plan that `zplan run` and `zplan.initialize` take.

    The parameters are those of `estimate`. With `params`, the plan is for the assumed shape itself.

    Raises
    ------
    DoesNotFit
        When no choice fits; the hint names the nearest change that would.

    Examples
    --------
    >>> p = plan("smollm2-135m", gpus=2, mem=8, seq=256, global_batch=8)
    >>> p.choice.global_batch
    8
    """
    return make_plan(make_request(locals()))
