"""DeepSpeed's config schema as data, for the linter: names, types, defaults, and where a key has an effect.

Names and defaults are those of DeepSpeed 0.19. What zplan's own runtime does with a key is in `dskeys.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zplan.planner import dskeys

Type = Literal["bool", "int", "number", "text", "object", "list", "any"]

CURRENT = (0, 19, 8)
"""The release whose rules are checked unless another is asked for."""


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    type: Type
    default: object = None
    auto: bool = False
    """Trainers fill in "auto" here."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages at which it has an effect."""
    least: float | None = None
    instead: str = ""
    """Deprecated: what to write now."""
    since: tuple[int, ...] = ()
    """First release that knows it."""
    numel: bool = False
    """Counts elements, not bytes."""
    why: str = ""
    """Why it has no effect outside `stages`."""


_3 = (3,)
_12 = (1, 2)
_ZERO_ON = (1, 2, 3)
_ONLY_3 = "parameters are not sharded below stage 3"
_NOT_3 = "stage 3 gathers parameters one by one as they are needed"
_QUANTISED = Key("bool", default=False, since=(0, 10), stages=_ZERO_ON)

ZERO: dict[str, Key] = {
    "stage": Key("int", 0, least=0),
    "contiguous_gradients": Key("bool", default=True, stages=_ZERO_ON),
    "reduce_scatter": Key("bool", default=True, stages=_ZERO_ON),
    "reduce_bucket_size": Key("int", 500_000_000, auto=True, stages=_ZERO_ON, least=1, numel=True),
    "use_multi_rank_bucket_allreduce": Key("bool", default=True, stages=_12, since=(0, 14)),
    "allgather_partitions": Key("bool", default=True, stages=_12, why=_NOT_3),
    "allgather_bucket_size": Key("int", 500_000_000, stages=_12, least=0, numel=True, why=_NOT_3),
    "overlap_comm": Key("bool", stages=_ZERO_ON),
    "compute_grad_norm": Key("bool", default=True, since=(0, 19)),
    "load_from_fp32_weights": Key("bool", default=True, stages=_ZERO_ON),
    "elastic_checkpoint": Key(
        "bool", default=False, stages=_12, why="only stages 1 and 2 have that kind of checkpoint"
    ),
    "offload_param": Key("object"),
    "offload_optimizer": Key("object", stages=_ZERO_ON),
    "zenflow": Key("object", since=(0, 17)),
    "sub_group_size": Key("int", 1_000_000_000, stages=_3, least=0, numel=True, why="only stage 3 steps in tiles"),
    "cpu_offload": Key("bool", instead='"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": Key("bool", instead='"offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": Key("bool", instead="`pin_memory` in the offload blocks"),
    "stage3_prefetch_bucket_size": Key("int", 50_000_000, auto=True, stages=_3, least=0, numel=True, why=_ONLY_3),
    "stage3_param_persistence_threshold": Key("int", 100_000, auto=True, stages=_3, least=0, numel=True, why=_ONLY_3),
    "stage3_model_persistence_threshold": Key("int", stages=_3, least=0, numel=True, why=_ONLY_3),
    "stage3_max_live_parameters": Key("int", 1_000_000_000, stages=_3, least=0, numel=True, why=_ONLY_3),
    "stage3_max_reuse_distance": Key("int", 1_000_000_000, stages=_3, least=0, numel=True, why=_ONLY_3),
    "stage3_gather_16bit_weights_on_model_save": Key("bool", default=False, auto=True, stages=_3, why=_ONLY_3),
    "stage3_gather_fp16_weights_on_model_save": Key(
        "bool", instead="`stage3_gather_16bit_weights_on_model_save`", stages=_3, why=_ONLY_3
    ),
    "stage3_module_granularity_threshold": Key("int", 0, stages=_3, numel=True, since=(0, 15), why=_ONLY_3),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", default=False, stages=_3, since=(0, 15), why=_ONLY_3),
    "stage3_allgather_sequential": Key("bool", default=False, stages=_3, since=(0, 18), why=_ONLY_3),
    "ignore_unused_parameters": Key("bool", default=True, stages=_12, why="stage 3 reduces what has a gradient"),
    "legacy_stage1": Key("bool", default=False),
    "round_robin_gradients": Key("bool", default=False, stages=_12, why="it orders the flat buffers of stages 1 and 2"),
    "parameter_alignment": Key("bool", default=False, stages=_12, since=(0, 19), why="stage 3 has no flat buffers"),
    "zero_hpz_partition_size": Key("int", 1, least=0, since=(0, 10), stages=_3, why=_ONLY_3),
    "zero_quantized_weights": _QUANTISED,
    "zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_quantized_gradients": _QUANTISED,
    "memory_efficient_linear": Key("bool", default=True, stages=_3, why=_ONLY_3),
    "pipeline_loading_checkpoint": Key("bool", default=False),
    "override_module_apply": Key("bool", default=True),
    "log_trace_cache_warnings": Key("bool", default=False),
    "enable_sanity_checks": Key("bool", default=False),
    "save_muon_momentum_buffer_in_memory": Key("bool", default=False, since=(0, 18)),
    "leaf_module": Key("object", since=(0, 18)),
}

UNPREFIXED = {name.removeprefix("stage3_"): name for name in ZERO if name.startswith("stage3_") and "fp16" not in name}
"""Field names, which DeepSpeed takes as well as the prefixed ones."""

_OFFLOAD: dict[str, Key] = {
    "device": Key("text", "none"),
    "nvme_path": Key("text"),
    "buffer_count": Key("int", least=0),
    "pin_memory": Key("bool", default=True),
}
OFFLOAD_PARAM: dict[str, Key] = {
    **_OFFLOAD,
    "buffer_size": Key("int", 100_000_000, least=0, numel=True),
    "max_in_cpu": Key("int", 1_000_000_000, least=0, numel=True),
}
OFFLOAD_OPTIMIZER: dict[str, Key] = {
    **_OFFLOAD,
    "pipeline_read": Key("bool", default=False),
    "pipeline_write": Key("bool", default=False),
    "fast_init": Key("bool", default=False),
    "ratio": Key("number", 1.0, least=0),
    "super_offload": Key("bool", default=False, since=(0, 18)),
    "cpuadam_cores_perc": Key("number", 0.8, least=0, since=(0, 18)),
}
LEAF_MODULE: dict[str, Key] = {name: Key("any") for name in ("classes", "names", "name_suffixes")}

FP16: dict[str, Key] = {
    "enabled": Key("bool", default=False, auto=True),
    "auto_cast": Key("bool", default=False, auto=True),
    "loss_scale": Key("number", 0, least=0),
    "initial_scale_power": Key("int", 16),
    "loss_scale_window": Key("int", 1000, least=1),
    "hysteresis": Key("int", 2),
    "consecutive_hysteresis": Key("bool", default=False),
    "min_loss_scale": Key("int", 1, least=1),
    "fp16_master_weights_and_grads": Key("bool", default=False),
}
BF16: dict[str, Key] = {
    "enabled": Key("bool", default=False, auto=True),
    "immediate_grad_update": Key("bool", default=False),
    "check_grad_overflow": Key("bool", default=True, since=(0, 17)),
    "bf16_master_weights_and_grads": Key("bool", default=False, since=(0, 18)),
    "bf16_optimizer_states": Key("bool", default=False, since=(0, 18)),
}

STRICT: dict[tuple[str, ...], dict[str, Key]] = {
    ("zero_optimization",): ZERO,
    ("zero_optimization", "offload_param"): OFFLOAD_PARAM,
    ("zero_optimization", "offload_optimizer"): OFFLOAD_OPTIMIZER,
    ("zero_optimization", "leaf_module"): LEAF_MODULE,
    ("fp16",): FP16,
    ("bf16",): BF16,
}
"""Blocks in which DeepSpeed refuses keys that it does not know. At the top level it ignores them without a word."""

TOP: dict[str, Key] = {
    "train_batch_size": Key("int", auto=True, least=1),
    "train_micro_batch_size_per_gpu": Key("int", auto=True, least=1),
    "gradient_accumulation_steps": Key("int", auto=True, least=1),
    "gradient_clipping": Key("number", 1.0, auto=True, least=0),
    "steps_per_print": Key("number", least=1),
    "wall_clock_breakdown": Key("bool", default=False),
    "memory_breakdown": Key("bool", default=False),
    "prescale_gradients": Key("bool", default=False),
    "gradient_predivide_factor": Key("number", 1.0),
    "gradient_allreduce_op": Key("text", "mean"),
    "communication_data_type": Key("text"),
    "seq_parallel_communication_data_type": Key("text", "fp32"),
    "zero_allow_untested_optimizer": Key("bool", default=False),
    "zero_force_ds_cpu_optimizer": Key("bool", default=True),
    "dump_state": Key("bool", default=False),
    "disable_allgather": Key("bool", default=False),
    "managed_gradient_accumulation": Key("bool", default=True),
    **{
        name: Key("object")
        for name in ("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", "aio", "data_types")
    },
    "activation_checkpointing": Key("object"),
}

_MORE_TOP = (
    *("weight_quantization", "log_level", "expert_parallel", "use_data_before_expert_parallel_", "vocabulary_size"),
    *("data_parallel_size", "mesh", "checkpoint", "compression", "timers", "zero_optimization_init"),
)
KNOWN_TOP = frozenset({*TOP, *dskeys.TOP_NEUTRAL, *dskeys.TOP_INERT, *_MORE_TOP} - {"nebula"})
"""Keys that DeepSpeed reads, whether they are checked further here or not."""

REMOVED: dict[str, str] = {
    "nebula": "checkpoints are written as usual",
    "compression_training": "the compression library is gone",
    "amp": "use `bf16` or `fp16`",
    "quantize_training": "quantised training is gone",
    "sparse_gradients": "embeddings with sparse=True need no flag",
    "eigenvalue": "quantised training is gone",
    "sparse_attention": "use an attention of the model's own",
    "elasticity": "give the batch sizes",
    "graph_harvesting": "there is no such option any more",
    "curriculum_learning": "use `data_efficiency`",
    "progressive_layer_drop": "the feature is gone",
}
"""Top-level blocks that releases since mid-2026 refuse, even when they are off."""

REMOVED_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")

FOREIGN: dict[str, str] = {
    "pipe_parallel_size": "GPT-NeoX reads it; 0 is read as 1",
    "pipe-parallel-size": "GPT-NeoX reads it; 0 is read as 1",
    "model_parallel_size": "GPT-NeoX reads it; 0 is read as 1",
    "model-parallel-size": "GPT-NeoX reads it; 0 is read as 1",
}
"""Top-level keys that another program reads from the same file."""

SCHEDULERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "WarmupLR": (("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"), ()),
    "WarmupDecayLR": (
        ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
        ("total_num_steps",),
    ),
    "WarmupCosineLR": (
        ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        ("total_num_steps",),
    ),
    "OneCycle": (
        (
            *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
            *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
            *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
        ),
        ("cycle_min_lr", "cycle_max_lr"),
    ),
    "LRRangeTest": (
        tuple(f"lr_range_test_{x}" for x in ("min_lr", "step_size", "step_rate", "staircase")),
        (),
    ),
}
"""Type -> its parameters, and those that it can't do without. `last_batch_iteration` is for all."""

OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    *("Adam", "AdamW", "Adagrad"),
)
"""Matched as they are written."""

LEAF_CLASSES_BUILT_IN = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Model types whose experts current DeepSpeed gathers as one unit without being told."""
