"""Plans for another runtime: a DeepSpeed config with exactly the sizes that were counted, and the choice in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from zplan.planner.config import Choice, Offload, ZeroSizes
from zplan.planner.dsschema import UNPREFIXED
from zplan.planner.errors import ZplanError
from zplan.planner.peer_rules import NAMES
from zplan.planner.reading import check_keys, refuse_type

OWN = ("tensor_parallel", "sequence_parallel_size")
"""Top-level keys that only a plan for DeepSpeed has."""

OFFLOAD_SIZES: dict[str, dict[str, str]] = {
    "offload_optimizer": {"buffer_count": "optimizer_buffer_count"},
    "offload_param": {
        "buffer_count": "param_buffer_count",
        "buffer_size": "param_buffer_size",
        "max_in_cpu": "param_max_in_cpu",
    },
}
"""Block -> its keys -> fields of `ZeroSizes`."""
OF_OFFLOAD = ("pin_memory", *(name for block in OFFLOAD_SIZES.values() for name in block.values()))


def deepspeed_config(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """A config of zplan's with DeepSpeed's own sizes, offload and parallelism, every value explicit.

    Gradients are reduced and accumulated in the compute dtype, DeepSpeed's default, which is what the ledger counts.
    """
    z, off = choice.zero, choice.offload
    zero = {
        **config["zero_optimization"],
        **{f.name: getattr(z, f.name) for f in fields(ZeroSizes) if f.name not in OF_OFFLOAD},
        "allgather_bucket_size": z.reduce_bucket_size,
        "stage3_param_persistence_threshold": z.stage3_param_persistence_threshold,
        "offload_optimizer": _place(off.optimizer, z, "offload_optimizer"),
        "offload_param": _place(off.params, z, "offload_param"),
        **({"zero_hpz_partition_size": choice.hpz} if choice.hpz > 1 else {}),
    }
    return {
        **config,
        "communication_data_type": None,
        "data_types": {"grad_accum_dtype": None},
        "zero_optimization": zero,
        **({"tensor_parallel": {"autotp_size": choice.tensor_parallel}} if choice.tensor_parallel > 1 else {}),
        **({"sequence_parallel_size": choice.context_parallel} if choice.context_parallel > 1 else {}),
    }


def _place(device: str, sizes: ZeroSizes, block: str) -> dict[str, Any]:
    if device == "none":
        return {"device": "none"}
    found: dict[str, Any] = {"device": device, "pin_memory": sizes.pin_memory}
    if device == "nvme":
        found["nvme_path"] = "/local_nvme"
        found |= {key: getattr(sizes, name) for key, name in OFFLOAD_SIZES[block].items()}
    return found


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what only DeepSpeed's reader takes."""
    zero = {k: v for k, v in config["zero_optimization"].items() if k != "zero_hpz_partition_size"}
    for key in ("offload_optimizer", "offload_param"):
        zero[key] = {"device": zero[key]["device"]}
    return {**{k: v for k, v in config.items() if k not in OWN}, "zero_optimization": zero}


def choice_json(choice: Choice) -> dict[str, Any]:
    return asdict(choice)


def read_choice(block: Mapping[str, Any], where: str) -> Choice:
    """A choice from `choice_json`: every field there and of its type."""
    names = [f.name for f in fields(Choice)]
    check_keys(block, names, where)
    values = dict(block)
    pattern = choice_json(Choice(0, 1))
    for name in names:
        if name not in values:
            raise ZplanError(f"{where} has no `{name}`", "it is not a whole plan: plan again")
        _same_type(name, where, values[name], pattern[name])
    return Choice(**{**values, "offload": Offload(**values["offload"]), "zero": ZeroSizes(**values["zero"])})


def _same_type(name: str, where: str, value: Any, pattern: Any) -> None:
    if isinstance(pattern, dict):
        if not isinstance(value, Mapping) or set(value) != set(pattern):
            raise refuse_type(name, where, value, f"an object of {', '.join(pattern)}")
        for key, inner in pattern.items():
            _same_type(f"{name}.{key}", where, value[key], inner)
    elif type(value) is not type(pattern) and not (isinstance(pattern, float) and type(value) is int):
        raise refuse_type(name, where, value, type(pattern).__name__)


def refuse_format(choice: Choice, form: str) -> None:
    """Refuse to write a plan as a config of a runtime that it was not counted for."""
    fits = {"deepspeed": ("deepspeed", "accelerate", "hf"), "fsdp2": ("fsdp2",), "ddp": ()}[choice.runtime]
    if form not in fits:
        ways = f"use --format {' or '.join(fits)}" if fits else "plan with --runtime zplan, deepspeed or fsdp2"
        raise ZplanError(f"the plan is for `--runtime {choice.runtime}`, whose buffers `{form}` does not have", ways)
    if form == "fsdp2" and choice.num_gpus > choice.world_size:
        raise ZplanError("the FSDP2 script is data-parallel only", "plan without --tp, --pp and --cp")


def told(choice: Choice) -> str:
    """A note on an emitted file."""
    return f"the ledger is that of {NAMES[choice.runtime]} with these sizes"


def read_sizes(config: Mapping[str, Any], source: str) -> ZeroSizes:
    """DeepSpeed's own sizes as a config says them; what it leaves out, or leaves to a trainer, is DeepSpeed's default.

    Raises
    ------
    ZplanError
        Where gradients are accumulated in a dtype that is not counted, or reduced without the buckets that are.
    """
    accumulated = dict(config.get("data_types") or {}).get("grad_accum_dtype")
    if accumulated is not None:
        raise ZplanError(
            f"`grad_accum_dtype` of `{source}` is {accumulated}, and DeepSpeed is counted with the compute dtype alone",
            "leave `data_types` out, or use --runtime zplan",
        )
    block = {UNPREFIXED.get(key, key): value for key, value in dict(config.get("zero_optimization") or {}).items()}
    if block.get("contiguous_gradients") is False:
        raise ZplanError(
            f"`contiguous_gradients` of `{source}` is false, and DeepSpeed is counted with contiguous buckets alone",
            "set it to true, with a `reduce_bucket_size` as small as the largest gradient where memory is short",
        )
    found: dict[str, Any] = {}
    for item in fields(ZeroSizes):
        value = block.get(item.name)
        if value is None or value == "auto" or item.name in OF_OFFLOAD:
            continue
        found[item.name] = _size(item.name, item.name, value, f"`zero_optimization` of `{source}`")
    for key, sizes in OFFLOAD_SIZES.items():
        inner = block.get(key)
        if not isinstance(inner, Mapping):
            continue
        if isinstance(inner.get("pin_memory"), bool):
            found["pin_memory"] = inner["pin_memory"]
        for own, name in sizes.items():
            if inner.get(own) is not None:
                found[name] = _size(own, name, inner[own], f"`{key}` of `{source}`")
    return ZeroSizes(**found)


def _size(key: str, name: str, value: Any, where: str) -> Any:
    """A value of the type that a field of `ZeroSizes` has; `1e8` is whole."""
    whole = int(value) if isinstance(value, float) and value == int(value) else value
    _same_type(key, where, whole, getattr(ZeroSizes(), name))
    return whole


def counted_here(note: str) -> bool:
    """Whether a note says of a key that zplan's runtime takes nothing from it, and DeepSpeed's ledger does."""
    keys = ("pin_memory", *(key for block in OFFLOAD_SIZES.values() for key in block))
    return note.startswith(tuple(f"`{key}` of `{block}`" for key in keys for block in OFFLOAD_SIZES))
