"""What a DeepSpeed config costs in bytes before any activation: buckets, gathered parameters, host buffers, states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zplan.planner.textbook import TEXTBOOK, Rate

if TYPE_CHECKING:
    from zplan.planner.lint import View

Memory = Literal["GPU", "host", "NVMe"]
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Cost:
    """One amount of memory that a config asks for."""

    name: str
    nbytes: int
    tier: Memory
    formula: str
    upper: bool = False
    """An upper bound."""


def overlaps(view: View) -> bool:
    """`overlap_comm`; where it is left out, DeepSpeed turns it on at stage 3."""
    value = view.zero.get("overlap_comm")
    return view.stage == 3 if value in (None, "auto") else value in (True, "true", "True")


def reduce_numel(view: View) -> int | None:
    """Elements of one reduce bucket; None where it is "auto" and no model is named."""
    return size_of(view, "reduce_bucket_size")


def size_of(view: View, key: str) -> int | None:
    """Elements that a key of the zero block stands for, "auto" resolved where a model is named."""
    from zplan.planner.autofill import auto_size
    from zplan.planner.dsschema import ZERO
    from zplan.planner.lint import whole

    value = view.zero.get(key, ZERO[key].default)
    return auto_size(key, view.subject.hidden) if value == "auto" else whole(value)


def costs(view: View) -> tuple[Cost, ...]:
    """Every amount that can be told from the config and what is known of the model."""
    found = [*_buckets(view), *_gathered(view), *_nvme(view)]
    if view.subject.num_params is not None:
        found += _states(view, view.subject.num_params)
    return (*found, *activation_costs(view))


LOGITS_RATE = 4
"""Bytes a logit of the fp32 copy that the loss is taken from."""
PER_RANK_ACTIVATIONS = ("block inputs, checkpointed", "logits", "logits in fp32", "their gradient")


def activation_costs(view: View) -> tuple[Cost, ...]:
    """What even full checkpointing keeps of one rank's tokens, where the sequence and the model's shape are known.

    A loss over whole logits holds them in the compute dtype, in fp32, and as an fp32 gradient, all at once.
    """
    from zplan.planner.batch import KEYS
    from zplan.planner.lint import whole

    s = view.subject
    if s.seq is None:
        return ()
    micro = s.micro_batch or whole(view.config.get(KEYS.micro)) or 1
    tokens = micro * s.seq
    found = []
    if s.layers is not None and s.hidden is not None:
        formula = f"{s.layers} blocks x {tokens:,} tokens x {s.hidden:,} x {view.itemsize} B"
        found.append(Cost(PER_RANK_ACTIVATIONS[0], s.layers * tokens * s.hidden * view.itemsize, "GPU", formula))
    if s.vocab is not None:
        for name, itemsize in zip(PER_RANK_ACTIVATIONS[1:], (view.itemsize, LOGITS_RATE, LOGITS_RATE), strict=True):
            found.append(Cost(name, s.vocab * tokens * itemsize, "GPU", f"{tokens:,} x {s.vocab:,} x {itemsize} B"))
    return tuple(found)


FSDP_STRATEGY_RANKS = {"NO_SHARD": "one", "HYBRID_SHARD": "node", "HYBRID_SHARD_ZERO2": "node"}
"""Over which ranks a sharding strategy splits, where that is not all."""


def fsdp_rate(mixed_precision: str, itemsize: int) -> Rate:
    """Bytes a trained parameter under accelerate's FSDP, split over the ranks.

    With mixed precision accelerate keeps the shards in fp32: weights, gradients and both moments are 16 bytes. Without
    it all four are in the dtype that the model was loaded in: 8 bytes for bf16, and no fp32 master weights.
    """
    return Rate(0, 16 if mixed_precision in ("bf16", "fp16", "fp8") else 4 * itemsize)


def fsdp_costs(view: View, block: Mapping[str, Any]) -> tuple[Cost, ...]:
    """Model states of an accelerate config with FSDP; `view.config` is the whole file."""
    s = view.subject
    if s.num_params is None or s.gpus is None:
        return ()
    precision = str(view.config.get("mixed_precision", "no"))
    itemsize = 2 if s.dtype in ("bfloat16", "float16", "bf16", "fp16") else 4
    rate = fsdp_rate(precision, itemsize)
    over = FSDP_STRATEGY_RANKS.get(str(block.get("fsdp_sharding_strategy")), "all")
    ranks = {"one": 1, "node": s.gpus // s.nodes or 1, "all": s.gpus}[over]
    trained = s.num_params if s.trainable is None else s.trainable
    # Frozen weights have neither gradients nor moments: a quarter of the rate.
    nbytes = -(-(rate.split * trained + rate.split // 4 * (s.num_params - trained)) // ranks)
    offloaded = block.get("fsdp_offload_params") in (True, "true", "True")
    formula = f"{rate.split} B x {trained:,} trained of {s.num_params:,} / {ranks}"
    on_node = s.gpus // s.nodes
    if offloaded:
        formula += f" x {on_node} ranks of a node"
    if precision not in ("bf16", "fp16", "fp8"):
        formula += f", everything in {'16 bits' if itemsize == 2 else 'fp32'} as loaded, without fp32 master weights"
    if offloaded:
        return (Cost("model states", nbytes * on_node, "host", formula),)
    return (Cost("model states", nbytes, "GPU", formula),)


def _buckets(view: View) -> list[Cost]:
    """[Note: buckets] Stages 1 and 2 copy gradients into a bucket, and into a second one while the first is reduced."""
    if view.stage == 0 or view.zero.get("contiguous_gradients", True) in (False, "false"):
        return []
    numel = reduce_numel(view)
    if numel is None:
        return []
    dtype = view.config.get("communication_data_type")
    itemsize = DTYPE_BYTES.get(dtype, view.itemsize) if isinstance(dtype, str) else view.itemsize
    copies = 2 if overlaps(view) and view.stage < 3 else 1
    name = "reduce buckets" if copies == 2 else "reduce bucket"
    formula = f"{'2 x ' * (copies == 2)}{numel:,} elements x {itemsize} B"
    return [Cost(name, copies * numel * itemsize, "GPU", formula)]


def _gathered(view: View) -> list[Cost]:
    if view.stage < 3:
        return []
    found = []
    for key, name in (
        ("stage3_max_live_parameters", "gathered parameters"),
        ("stage3_prefetch_bucket_size", "of these prefetched"),
    ):
        numel = size_of(view, key)
        if numel:
            numel = min(numel, view.subject.num_params or numel)
            formula = f"{numel:,} elements x {view.itemsize} B"
            found.append(Cost(name, numel * view.itemsize, "GPU", formula, upper=True))
    return found


def _nvme(view: View) -> list[Cost]:
    from zplan.planner.dsschema import OFFLOAD_PARAM
    from zplan.planner.lint import whole

    if view.stage < 3 or view.offload("param") != "nvme":
        return []
    block = view.block("zero_optimization", "offload_param")
    count = whole(block.get("buffer_count", 5))
    size = whole(block.get("buffer_size", OFFLOAD_PARAM["buffer_size"].default))
    if count is None or size is None:
        return []
    formula = f"{count} x {size:,} elements x {view.itemsize} B"
    return [Cost("NVMe buffers, pinned", count * size * view.itemsize, "host", formula)]


def bf16_savings(view: View) -> int:
    """Bytes a parameter that master weights (2) and moments (4) in bf16 are smaller than in fp32."""
    block = view.block("bf16")
    if block.get("bf16_master_weights_and_grads") is not True:
        return 0
    return 6 if block.get("bf16_optimizer_states") is True else 2


def gpu_rate(view: View, stage: int) -> Rate:
    """Bytes a trained parameter where nothing is offloaded: the textbook's row, less what is kept in bf16."""
    rate, less = TEXTBOOK[stage], bf16_savings(view)
    return Rate(rate.whole, rate.split - less) if rate.split else Rate(rate.whole - less, 0)


def places(view: View, stage: int) -> tuple[Memory, Memory]:
    """Where optimizer states and 16-bit weights lie between their uses.

    Stage 0 offloads nothing and only stage 3 offloads parameters; below it NVMe means host memory
    (DeepSpeed `zero/stage_1_and_2.py`: `cpu_offload` is true for any device).
    """
    memories: dict[str, Memory] = {"none": "GPU", "cpu": "host", "nvme": "NVMe" if stage == 3 else "host"}
    states = memories[view.offload("optimizer")] if stage else "GPU"
    return states, memories[view.offload("param")] if stage == 3 else "GPU"


def state_rates(view: View, stage: int) -> dict[Memory, Rate]:
    """Bytes a trained parameter in each memory, as textbooks count them, with what is offloaded moved over.

    Offloaded states are master weights, both moments and gradients in the masters' dtype, which go down as they are
    reduced; offloaded parameters are the weights in the compute dtype.
    """
    states, params = places(view, stage)
    rates: dict[Memory, Rate] = {"GPU": gpu_rate(view, stage), "host": Rate(0, 0), "NVMe": Rate(0, 0)}
    weights = view.itemsize
    if states != "GPU":
        less, weights = bf16_savings(view), 2
        rates["GPU"] = Rate(0, 2) if stage == 3 else Rate(2 if stage == 2 else 4, 0)
        rates[states] = Rate(0, 16 - less - (2 if less else 0))
    if params != "GPU":
        rates["GPU"] = Rate(0, rates["GPU"].split - weights)
        rates[params] = Rate(0, rates[params].split + weights)
    return rates


def states_bytes(view: View, stage: int) -> dict[Memory, int]:
    """Bytes of the model states on one GPU, and in a node's host memory and disks."""
    s = view.subject
    assert s.num_params is not None
    trained = s.num_params if s.trainable is None else s.trainable
    frozen, kept = s.num_params - trained, places(view, stage)[1]
    found = {}
    for memory, rate in state_rates(view, stage).items():
        ranks = (s.gpus or 1) if memory == "GPU" else s.nodes
        beside = Rate(0, view.itemsize) if stage == 3 else Rate(view.itemsize, 0)
        found[memory] = rate.of(trained, ranks) + (beside.of(frozen, ranks) if memory == kept else 0)
    return found


def _states(view: View, num_params: int) -> list[Cost]:
    s, rates = view.subject, state_rates(view, view.stage)
    found = []
    for memory, nbytes in states_bytes(view, view.stage).items():
        rate, gpu = rates[memory], memory == "GPU"
        if not nbytes or (gpu and rate.split and s.gpus is None and s.trainable is None):
            continue
        if s.trainable is not None:
            formula = f"{s.trainable:,} of {num_params:,} parameters trained"
        elif gpu:
            formula = f"{rate.formula()}, P = {num_params:,}, N = {s.gpus or 1}"
        else:
            formula = f"{rate.split}P{f' / {s.nodes} nodes' * (s.nodes > 1)}"
        found.append(Cost("model states" if gpu else "offloaded states", nbytes, memory, formula))
    if view.stage == 3 and view.zero.get("stage3_gather_16bit_weights_on_model_save") is True:
        found.append(Cost("gathered model on each save", 2 * num_params, "host", "2P on rank 0"))
    return found
