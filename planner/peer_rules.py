"""What can be asked of another runtime, and what can't: every refusal names the field and the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zplan.planner.batch import nearest_multiples
from zplan.planner.config import Choice, Offload
from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture

NAMES = {"zplan": "zplan's runtime", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP"}

STAGES = {"zplan": (0, 1, 2, 3), "deepspeed": (0, 1, 2, 3), "fsdp2": (2, 3), "ddp": (0,)}
"""ZeRO stages that a runtime has. FSDP2's two are `reshard_after_forward` off and on."""

PARALLEL = {"tensor_parallel": "--tp", "pipeline_parallel": "--pp", "context_parallel": "--cp", "hpz": "--hpz"}

UNCOUNTED = {
    "optimizer": ("--optimizer", "adamw"),
    "cross_entropy": ("--loss", "plain"),
    "checkpoint_every": ("--checkpoint-every", 1),
    "checkpoint_offload": ("--checkpoint-offload", False),
    "padded": ("--padded", False),
    "compile": ("--compile", False),
    "deterministic": ("deterministic", False),
    "check_replicas_every": ("check_replicas_every", 0),
    "optimizer_in_backward": ("optimizer_in_backward", False),
    "kernels": ("kernels", "torch"),
    "saving": ("--saving", "foreground"),
}
"""Counted for zplan's runtime alone: field -> its flag, and the one value that other runtimes are counted with."""


def allowed_stages(fixed: Mapping[str, Any]) -> tuple[int, ...]:
    """Stages that a request leaves open, or that it fixes; at least one, else the request is refused.

    Parameters
    ----------
    fixed
        Fields of the choice that were asked for.
    """
    runtime, offload = fixed.get("runtime", "zplan"), fixed.get("offload", Offload())
    stages = STAGES[runtime]
    if runtime == "deepspeed":
        if fixed.get("pipeline_parallel", 1) > 1:
            stages = (0, 1)
        if offload.optimizer != "none":
            stages = tuple(s for s in stages if s >= (3 if "nvme" in (offload.optimizer, offload.params) else 1))
    if runtime != "zplan" and (offload.params != "none" or fixed.get("hpz", 1) > 1):
        stages = tuple(s for s in stages if s == 3)
    return stages


def check_request(fixed: Mapping[str, Any]) -> None:
    """Refuse what the runtime asked for does not have, or what is not counted for it."""
    runtime = fixed.get("runtime", "zplan")
    name = NAMES[runtime]
    for field, flag in PARALLEL.items():
        if fixed.get(field, 1) == 1:
            continue
        if runtime == "zplan":
            raise ZplanError(
                f"`{flag} {fixed[field]}`: {name} is data-parallel only", "add --runtime deepspeed or fsdp2"
            )
        if runtime == "ddp":
            raise ZplanError(f"`{flag} {fixed[field]}`: DDP replicates the whole model", "use --runtime fsdp2")
    if runtime == "zplan":
        return
    _check_features(fixed, runtime, name)
    stages = allowed_stages(fixed)
    if not stages:
        raise ZplanError(f"{name} has no stage that pipelines and offloads like that", "drop --pp, --hpz or --offload")
    if fixed.get("stage", stages[0]) not in stages:
        can = " or ".join(map(str, stages))
        raise ZplanError(
            f"`--stage {fixed['stage']}`: {name} has stage {can} for what is asked", f"use --stage {stages[-1]}"
        )


def _check_features(fixed: Mapping[str, Any], runtime: str, name: str) -> None:
    for field, (flag, counted) in UNCOUNTED.items():
        if fixed.get(field, counted) != counted:
            word = flag if fixed[field] is True else f"{flag} {fixed[field]}"
            instead = "leave it out" if counted is False else f"use {counted}"
            raise ZplanError(f"`{word}` is not counted with --runtime {runtime}", f"{instead}, or --runtime zplan")
    if fixed.get("checkpointing") == "selective":
        raise ZplanError(f"`--checkpointing selective` is not counted with --runtime {runtime}", "use none or full")
    offload = fixed.get("offload", Offload())
    if offload != Offload() and runtime != "deepspeed":
        raise ZplanError(
            f"`--offload {offload.told()}` is not counted with --runtime {runtime}", "use --runtime deepspeed or zplan"
        )
    if offload.ratio != 1:
        raise ZplanError(f"`--offload-ratio {offload.ratio:g}` is not counted with --runtime {runtime}", "use 1")
    own = fixed.get("precision", "bf16") if runtime == "deepspeed" else "fp32"
    if fixed.get("reduce_dtype", own) != own:
        raise ZplanError(
            f"`--reduce-dtype {fixed['reduce_dtype']}` is not counted with --runtime {runtime}, only {own} is",
            "leave it out",
        )


_UNEVEN = ("vit", "t5", "gemma3")
"""Models of several stacks, or whose sequences do not split."""


def check_shape(arch: Architecture, choice: Choice) -> None:
    """Refuse what does not divide: heads and widths by `--tp`, tokens by `--cp`, blocks by `--pp`, ranks by `--hpz`."""
    tp, pp, cp = choice.tensor_parallel, choice.pipeline_parallel, choice.context_parallel
    uncounted = {"tp": arch.family not in ("llama", "gpt2"), "pp": arch.family in _UNEVEN, "cp": arch.family in _UNEVEN}
    for name, size in (("tp", tp), ("pp", pp), ("cp", cp)):
        if size > 1 and uncounted[name]:
            raise ZplanError(f"`--{name} {size}` is not counted for model_type `{arch.family}`", f"use --{name} 1")
    sizes = (("heads", arch.heads), ("key-value heads", arch.kv_heads), ("feed-forward columns", arch.ffn))
    for what, value in sizes:
        if value % tp:
            raise ZplanError(f"`--tp {tp}` does not divide {value} {what}", f"use --tp {_divisor(value, tp)}")
    if choice.seq % cp:
        raise ZplanError(f"`--cp {cp}` does not divide {choice.seq} tokens", f"use --cp {_divisor(choice.seq, cp)}")
    if cp > 1 and arch.heads % (tp * cp) and choice.runtime == "deepspeed":
        raise ZplanError(
            f"`--cp {cp}`: DeepSpeed's sequence parallelism splits {arch.heads // tp} heads over {cp} ranks",
            f"use --cp {_divisor(arch.heads // tp, cp)}",
        )
    if arch.layers % pp:
        raise ZplanError(f"`--pp {pp}` does not divide {arch.layers} layers", f"use --pp {_divisor(arch.layers, pp)}")
    shards = choice.world_size * cp
    if shards % choice.hpz:
        raise ZplanError(
            f"`--hpz {choice.hpz}` does not divide {shards} ranks", f"use --hpz {_divisor(shards, choice.hpz)}"
        )


def _divisor(value: int, near: int) -> int:
    """The largest divisor up to a number."""
    return next(d for d in range(min(near, value), 0, -1) if not value % d)


def model_ranks(fixed: Mapping[str, Any]) -> int:
    """GPUs that share one copy of the model."""
    return math.prod(fixed.get(field, 1) for field in list(PARALLEL)[:3])


def data_parallel(num_gpus: int, fixed: Mapping[str, Any]) -> int:
    """Data-parallel ranks of a number of GPUs: what tensor, pipeline and context ranks leave."""
    each = model_ranks(fixed)
    if num_gpus % each:
        sizes = {field: fixed.get(field, 1) for field in list(PARALLEL)[:3]}
        words = " x ".join(f"{PARALLEL[f]} {n}" for f, n in sizes.items() if n > 1)
        near = nearest_multiples(num_gpus, each)
        raise ZplanError(f"`--gpus {num_gpus}` does not split into groups of {words} = {each}", f"use --gpus {near}")
    return num_gpus // each
