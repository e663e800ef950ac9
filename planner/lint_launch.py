"""Configs of accelerate: its own keys, its DeepSpeed and FSDP blocks, and the DeepSpeed config it makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zplan.planner.costs import activation_costs, fsdp_costs
from zplan.planner.lint import Finding, Report, Subject, View, check_deepspeed, nearest, whole
from zplan.planner.lint_model import states_fit
from zplan.planner.reading import kind_of
from zplan.planner.relaxed import Document, Path

TOP = (
    *(
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
        "machine_rank",
    ),
    *("num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
    *("main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
    *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone"),
    *("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config"),
    *("fp16", "dynamo_backend"),
)
"""accelerate refuses all others."""

DEEPSPEED = (
    *("deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile", "deepspeed_inclusion_filter"),
    *("deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher", "gradient_accumulation_steps"),
    *("gradient_clipping", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device"),
    *("offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "zero_stage"),
)
IN_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "zero3_save_16bit_model"),
)
"""What a `deepspeed_config_file` says instead; accelerate refuses both together."""

_V1 = ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states")
FSDP = (
    *_V1,
    *("fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_reshard_after_forward"),
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_state_dict_type", "fsdp_use_orig_params"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
)
"""Keys of both versions; the first five words of `_V1` and `fsdp_use_orig_params` mean nothing in version 2."""

_BOOLEANS = (
    *("debug", "use_cpu", "same_network", "enable_cpu_affinity", "zero3_init_flag", "zero3_save_16bit_model"),
    *("fsdp_offload_params", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"),
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def is_accelerate(value: Mapping[str, Any]) -> bool:
    """Whether a file is accelerate's, by the keys that only it has."""
    return any(key in value for key in ("distributed_type", "compute_environment", "fsdp_config", "num_processes"))


def check_accelerate(document: Document, source: str, subject: Subject) -> Report:
    """Check accelerate's own keys, then what its blocks ask DeepSpeed or FSDP for."""
    config = document.value
    processes = whole(config.get("num_processes"))
    subject = replace(
        subject,
        consumer="accelerate" if subject.consumer == "any" else subject.consumer,
        gpus=subject.gpus or processes or None,
        nodes=max(subject.nodes, whole(config.get("num_machines")) or 1),
    )
    view = View(document, config, (), subject)
    own = [*_keys(view), *_booleans(view), *_fsdp(view), *_processes(view, processes)]
    block = config.get("deepspeed_config")
    if isinstance(block, Mapping) and block:
        made = replace(view, config=_as_deepspeed(config, block), prefix=("deepspeed_config",))
        own += [*_deepspeed(view, block)]
        report = check_deepspeed(made, source, "accelerate config with DeepSpeed", own)
        # What accelerate adds by itself is not the user's, so its absence is nothing to tell.
        findings = tuple(f for f in report.findings if f.rule not in ("no-batch-size", "clipping-default"))
        return replace(report, findings=findings)
    from zplan.planner.lint_keys import syntax

    found = (*syntax(view), *own)
    fsdp = config.get("fsdp_config")
    if not isinstance(fsdp, Mapping) or not fsdp:
        return Report(source, "accelerate config", _headline(config), found)
    costs = (*fsdp_costs(view, fsdp), *activation_costs(view))
    fits = states_fit(view, costs, "more GPUs, or `fsdp_offload_params: true`")
    return Report(source, "accelerate config with FSDP", _headline(config), (*found, *fits), costs)


def _headline(config: Mapping[str, Any]) -> str:
    fsdp = config.get("fsdp_config")
    strategy = fsdp.get("fsdp_sharding_strategy", "version 2") if isinstance(fsdp, Mapping) else ""
    parts = [str(config.get("distributed_type", "no distributed type")), str(strategy)]
    return ", ".join(p for p in (*parts, f"mixed precision {config.get('mixed_precision', 'no')}") if p)


def _as_deepspeed(config: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config that accelerate makes of its own block."""
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        device = block.get(f"offload_{what}_device", "none")
        path = block.get(f"offload_{what}_nvme_path")
        zero[f"offload_{what}"] = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = block.get("zero3_save_16bit_model", False)
    if block.get("deepspeed_moe_layer_cls_names"):
        zero["leaf_module"] = {"classes": str(block["deepspeed_moe_layer_cls_names"]).split(",")}
    precision = config.get("mixed_precision")
    made = {"zero_optimization": zero, "gradient_accumulation_steps": block.get("gradient_accumulation_steps", "auto")}
    for name in ("bf16", "fp16"):
        made[name] = {"enabled": precision == name}
    return made


def _keys(view: View) -> Iterator[Finding]:
    for path, known in (((), TOP), (("deepspeed_config",), DEEPSPEED), (("fsdp_config",), FSDP)):
        for key in view.block(*path) if path else view.config:
            if key in known or (path == ("fsdp_config",) and f"fsdp_{key}" in known):
                continue
            here: Path = (*path, key)
            if path:
                message = f"accelerate silently ignores `{key}` of `{path[0]}`"
                yield view.find("ignored-key", "error", here, message, nearest(key, known) or "delete it")
            else:
                message = f"unknown key `{key}`: accelerate refuses the file"
                yield view.find("unknown-key", "error", here, message, nearest(key, known) or "delete it", refused=True)
    if "distributed_type" not in view.config:
        message = "no `distributed_type`: accelerate refuses the file"
        yield view.find(
            "distributed-type", "error", (), message, 'add "distributed_type": "DEEPSPEED" or "FSDP"', refused=True
        )


def _booleans(view: View) -> Iterator[Finding]:
    for path in view.document.places:
        if path[-1] in _BOOLEANS:
            value: Any = view.config
            for part in path:
                value = value[part]
            if isinstance(value, str) and value.lower() in ("true", "false"):
                message = f'`{path[-1]}` is the string "{value}"'
                yield view.find("string-boolean", "error", path, message, f"write {value.lower()} without quotes")


def _processes(view: View, processes: int | None) -> Iterator[Finding]:
    machines = view.config.get("num_machines", 1)
    if "num_processes" in view.config and processes is None:
        message = f"`num_processes` is {kind_of(view.config['num_processes'])}"
        yield view.find(
            "wrong-type", "error", ("num_processes",), message, "write the number of GPUs over all machines"
        )
    elif processes is not None and isinstance(machines, int) and machines > 0 and processes % machines:
        message = f"{processes} processes do not split over {machines} machines"
        yield view.find("out-of-range", "error", ("num_processes",), message, f"use a multiple of {machines}")
    if processes and view.document.value.get("num_processes") != view.subject.gpus:
        message = f"`num_processes` is {processes}, but {view.subject.gpus} GPUs are asked for"
        yield view.find("launcher-mismatch", "warning", ("num_processes",), message, "make both equal")


def _deepspeed(view: View, block: Mapping[str, Any]) -> Iterator[Finding]:
    path: Path = ("deepspeed_config",)
    if "deepspeed_config_file" in block:
        for key in IN_FILE:
            if key in block:
                message = f"`{key}` beside `deepspeed_config_file`: accelerate refuses both together"
                yield view.find("launcher-mismatch", "error", (*path, key), message, "write it in that file alone")
    elif "gradient_accumulation_steps" not in block:
        message = "no `gradient_accumulation_steps`: the script's own number counts, 1 where it has none"
        yield view.find("accumulation-elsewhere", "note", path, message, "write it")
    else:
        message = f"accumulation {block['gradient_accumulation_steps']} is set here; a script's flag must agree with it"
        yield view.find("accumulation-elsewhere", "note", (*path, "gradient_accumulation_steps"), message)
    if block.get("zero3_init_flag") is True and block.get("zero_stage", 2) != 3:
        message = f"`zero3_init_flag` has no effect at stage {block.get('zero_stage', 2)}"
        yield view.find("no-effect-at-stage", "warning", (*path, "zero3_init_flag"), message, "delete it")
    if view.config.get("fsdp_config"):
        yield view.find("two-engines", "error", ("fsdp_config",), "both DeepSpeed and FSDP are configured", "keep one")


def _fsdp(view: View) -> Iterator[Finding]:
    block = view.block("fsdp_config")
    if not block:
        return
    path: Path = ("fsdp_config",)
    version = block.get("fsdp_version", 1)
    strategy = block.get("fsdp_sharding_strategy")
    if version == 1 and isinstance(strategy, str) and strategy not in STRATEGIES:
        here = (*path, "fsdp_sharding_strategy")
        fix = nearest(strategy, STRATEGIES) or f"use one of {', '.join(STRATEGIES)}"
        yield view.find("fsdp-strategy", "error", here, f"there is no sharding strategy `{strategy}`", fix)
    if version == 2:
        for key in (*_V1, "fsdp_use_orig_params"):
            if key in block:
                fix = "write fsdp_reshard_after_forward" if key == "fsdp_sharding_strategy" else "delete it"
                message = f"`{key}` has no effect in FSDP version 2"
                yield view.find("no-effect", "warning", (*path, key), message, fix)
    if block.get("fsdp_cpu_ram_efficient_loading") is True and block.get("fsdp_sync_module_states") is False:
        message = (
            "`fsdp_cpu_ram_efficient_loading` without `fsdp_sync_module_states`: all ranks but the first train on noise"
        )
        yield view.find("fsdp-sync", "error", path, message, "write fsdp_sync_module_states: true")
    wrap = block.get("fsdp_auto_wrap_policy")
    if wrap in ("TRANSFORMER_BASED_WRAP", None) and "fsdp_transformer_layer_cls_to_wrap" not in block:
        message = "no layer class is named: accelerate takes the model's own `_no_split_modules`"
        yield view.find("fsdp-wrap", "note", path, message)
    if view.config.get("mixed_precision", "no") in ("no", None):
        message = "no mixed precision: the model is sharded in the dtype that it is loaded in"
        fix = "with 4-bit weights set bnb_4bit_quant_storage to the compute dtype, or they are not sharded"
        yield view.find("fsdp-dtype", "note", ("mixed_precision",), message, fix)


__all__ = ["DEEPSPEED", "FSDP", "TOP", "check_accelerate", "is_accelerate"]
