"""DeepSpeed's config keys as data: which ones zplan honours, and when the others ask for nothing.

Names and defaults are those of DeepSpeed 0.19. A key is in one of four tables:

- honoured: `dsconfig.py` reads it into a `TrainingConfig`;
- neutral: not built yet, accepted only while its value asks for nothing;
- mapped: zplan knows one way only, which gives the same training; the other is accepted with a note;
- inert: steers a mechanism that zplan does not have, so no value of it can change a run; accepted with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zplan.planner.batch import KEYS

Neutral = Callable[[Any], bool]


def absent(value: Any) -> bool:
    return value is None or value == {} or value == []


def false(value: Any) -> bool:
    return value is None or value is False


def true(value: Any) -> bool:
    return value is None or value is True


def either(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def disabled(value: Any) -> bool:
    """A block that is off: missing, empty, false, or `enabled` false."""
    return absent(value) or value is False or (isinstance(value, Mapping) and value.get("enabled", False) is False)


def all_off(value: Any) -> bool:
    """A block in which no single value asks for anything."""
    return absent(value) or (isinstance(value, Mapping) and all(v is None or v is False for v in value.values()))


def one_of(*values: Any) -> Neutral:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def number(n: float) -> Neutral:
    return lambda value: value is None or (not isinstance(value, bool) and value == n)


def fp32_accumulation(value: Any) -> bool:
    """`data_types` that ask for what zplan does anyway: gradients accumulated in fp32."""
    return absent(value) or (
        isinstance(value, Mapping)
        and set(value) <= {"grad_accum_dtype"}
        and value.get("grad_accum_dtype") in (None, "fp32")
    )


TOP_HONOURED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "zero_optimization",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "communication_data_type",
    "wall_clock_breakdown",
    "zplan",
)

OLD_BF16 = "bfloat16"
"""The old name of the block `bf16`, which DeepSpeed still reads."""

TOP_NEUTRAL: dict[str, Neutral] = {
    "amp": disabled,
    "torch_autocast": disabled,
    "seq_parallel_communication_data_type": one_of(None, "fp32"),
    "data_types": fp32_accumulation,
    "gradient_allreduce_op": one_of(None, "mean"),
    "sparse_gradients": false,
    "memory_breakdown": false,
    "dump_state": false,
    "disable_allgather": false,
    "disable_python_gc": false,
    "managed_gradient_accumulation": true,
    "checkpoint": all_off,
    "load_universal_checkpoint": false,
    "dataloader_drop_last": false,
    "flops_profiler": disabled,
    "comms_logger": disabled,
    "autotuning": disabled,
    "elasticity": disabled,
    "hybrid_engine": disabled,
    "tensorboard": disabled,
    "wandb": disabled,
    "csv_monitor": disabled,
    "comet": disabled,
    "compile": disabled,
    "nebula": disabled,
    "eigenvalue": disabled,
    "progressive_layer_drop": disabled,
    "curriculum_learning": disabled,
    "data_efficiency": disabled,
    "quantize_training": disabled,
    "compression_training": absent,
    "pipeline": absent,
    "tensor_parallel": absent,
    "sequence_parallel_size": number(1),
    "zero_force_ds_cpu_optimizer": either,
    "zero_allow_untested_optimizer": either,
}
"""The last two say what DeepSpeed may do with optimizers it does not know; either value asks for nothing here."""

_AFTER = "zplan adds up in fp32 and divides once, in the step"
TOP_MAPPED: dict[str, str] = {"prescale_gradients": _AFTER, "gradient_predivide_factor": _AFTER}
"""When to divide by the ranks: any value gives the same training but for rounding."""

TOP_INERT: dict[str, str] = {
    "aio": "it tunes DeepSpeed's own NVMe transfers",
    "activation_checkpointing": "it steers a function of DeepSpeed's that models must call; what the model itself "
    "checkpoints is checkpointed, the built-in decoder with `--checkpointing full`",
    "sparse_attention": "it describes attention modules of DeepSpeed's that models must call",
}

BF16_NEUTRAL: dict[str, Neutral] = {
    "check_grad_overflow": either,
    "immediate_grad_update": false,
    "bf16_master_weights_and_grads": false,
    "bf16_optimizer_states": false,
}

OLD_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Old key -> the block that it is short for, with device cpu."""

OFFLOAD_HONOURED = ("device", "ratio")
_IO = "it tunes DeepSpeed's own transfers"
_BUFFERS = "zplan has host buffers of its own; with --runtime deepspeed these are counted"
OFFLOAD_INERT: dict[str, str] = {
    "nvme_path": "bytes are counted, not placed",
    "pin_memory": "zplan pins what is offloaded to the host, at its exact size",
    **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), _BUFFERS),
    **dict.fromkeys(("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"), _IO),
}
"""Of both offload blocks; `ratio` is the optimizer's."""

ZERO_COUNTS = {
    "stage3_prefetch_bucket_size": "prefetch_numel",
    "stage3_param_persistence_threshold": "persist_numel",
}
"""Key -> field of `TrainingConfig`; in elements, 0 allowed."""

ZERO_HONOURED = (
    *("stage", "reduce_bucket_size", "stage3_max_live_parameters", "overlap_comm", *ZERO_COUNTS),
    *("offload_optimizer", "offload_param", *OLD_OFFLOADS),
)

ZERO_NEUTRAL: dict[str, Neutral] = {
    "zenflow": absent,
    "legacy_stage1": false,
    "zero_hpz_partition_size": number(1),
    "zero_quantized_weights": false,
    "zero_quantized_nontrainable_weights": false,
    "zero_quantized_gradients": false,
    "mics_shard_size": number(-1),
    "mics_hierarchical_params_gather": false,
    "pipeline_loading_checkpoint": false,
    "save_muon_momentum_buffer_in_memory": false,
    "enable_sanity_checks": false,
    "compute_grad_norm": true,
    "load_from_fp32_weights": true,
}

_SAVING = "`zplan.summon` gives whole weights to save"
ZERO_MAPPED: dict[str, tuple[bool, str]] = {
    "contiguous_gradients": (True, "zplan's gradients are always contiguous"),
    "reduce_scatter": (True, "zplan always reduce-scatters"),
    "allgather_partitions": (True, "zplan always gathers"),
    "round_robin_gradients": (False, "zplan's shards are even already"),
    "stage3_gather_16bit_weights_on_model_save": (False, _SAVING),
    "stage3_gather_fp16_weights_on_model_save": (False, _SAVING),
}
"""Key -> the one value that zplan knows, and why."""

_RING = "zplan gathers one whole block at a time into its ring"
_FLAT = "zplan's units are flat and aligned already"
ZERO_INERT: dict[str, str] = {
    "allgather_bucket_size": "zplan gathers each unit in one piece",
    "use_multi_rank_bucket_allreduce": "zplan always sends a true reduce-scatter",
    "sub_group_size": "zplan's step goes unit by unit",
    "stage3_model_persistence_threshold": _RING,
    "stage3_max_reuse_distance": _RING,
    "stage3_module_granularity_threshold": _RING,
    "stage3_use_all_reduce_for_fetch_params": _RING,
    "stage3_allgather_sequential": _RING,
    "leaf_module": "zplan gathers whole blocks, experts and all",
    "elastic_checkpoint": "every checkpoint of zplan's loads at any number of ranks",
    "parameter_alignment": _FLAT,
    "ignore_unused_parameters": "zplan closes a unit with zeros where a parameter has no gradient",
    "memory_efficient_linear": "zplan patches no torch function",
    "override_module_apply": "zplan patches no torch function",
    "log_trace_cache_warnings": "zplan has no trace cache",
    "cpu_offload_use_pin_memory": "zplan pins what is offloaded",
}

OPTIMIZER_PARAMS: dict[str, tuple[str, ...]] = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay", "adam_w_mode"),
    "sgd": ("lr", "momentum", "nesterov", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay"),
}
"""Parameters that are honoured, by the lower-case type."""

OPTIMIZER_HONOURED = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
OPTIMIZER_NEUTRAL: dict[str, Neutral] = {
    "adam_w_mode": true,
    "bias_correction": true,
    "amsgrad": false,
    "maximize": false,
    "differentiable": false,
    "fp32_optimizer_states": true,
}
OPTIMIZER_INERT: dict[str, str] = {
    name: "it picks an implementation; zplan has its own" for name in ("torch_adam", "fused", "foreach", "capturable")
}

OTHER_OPTIMIZERS = ("muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")
"""Lower case; known to the field and not built yet."""

INSTEAD: dict[str, str] = {
    "adam_w_mode": 'of "Adam": false adds the decay to the gradient; "AdamW" always decouples it',
}
"""What to write instead, where that is more than leaving the key out."""

MEANT: dict[str, str] = {
    "micro_batch_size": KEYS.micro,
    "micro_batch_size_per_gpu": KEYS.micro,
    "micro_batch": KEYS.micro,
    "batch_size": KEYS.train,
    "global_batch_size": KEYS.train,
    "accumulation_steps": KEYS.accumulation,
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization",
    "lr_scheduler": "scheduler",
}
"""Top-level keys that people write and that spelling alone would match with the wrong one."""
