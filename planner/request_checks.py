"""Checks of single arguments: their types, words, ranges, and what is not built yet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, get_args

from zplan.planner.config import (
    Attention,
    Checkpointing,
    CrossEntropy,
    Device,
    Kernels,
    Offload,
    Place,
    Precision,
    Reduce,
    Runtime,
    Saving,
    Transport,
)
from zplan.planner.errors import ZplanError, did_you_mean

MOST = 10**9
"""Largest whole number that an option takes; beyond it a search by divisors would not end."""

OPTION = {
    "stage": "--stage",
    "micro_batch": "--micro-batch",
    "accumulation": "--accumulation",
    "global_batch": "--global-batch",
    "seq": "--seq",
    "precision": "--precision",
    "checkpointing": "--checkpointing",
    "attention": "--attention",
    "device": "--device",
    "optimizer": "--optimizer",
    "reduce_dtype": "--reduce-dtype",
    "checkpoint_every": "--checkpoint-every",
    "checkpoint_offload": "--checkpoint-offload",
    "padded": "--padded",
    "offload": "--offload",
    "ring_slots": "`ring_slots`",
    "compile": "--compile",
    "deterministic": "`deterministic`",
    "check_replicas_every": "`check_replicas_every`",
    "optimizer_in_backward": "`optimizer_in_backward`",
    "reduce": "`reduce`",
    "transport": "`transport`",
    "cross_entropy": "--loss",
    "kernels": "`kernels`",
    "saving": "--saving",
    "piece_numel": "`reduce_bucket_size`",
    "persist_numel": "`stage3_param_persistence_threshold`",
    "runtime": "--runtime",
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "context_parallel": "--cp",
    "hpz": "--hpz",
}
"""What fixes a choice, and what it is called."""


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, os.PathLike), "a name, a path or a hub id"),
    "gpu": ((str,), "a name that `zplan gpus` lists"),
    "config": ((str, os.PathLike, Mapping), "a path or a mapping"),
    **dict.fromkeys(
        ("offline", "beyond_limit", "lora_embeddings", "qlora", "checkpoint_offload", "padded"),
        ((bool,), "True or False"),
    ),
}
"""What Python may give for arguments that nobody parses; the rest is checked where it is parsed."""


def of_type(name: str, value: Any) -> Any:
    types, need = _TYPES.get(name, ((object,), ""))
    if not isinstance(value, types):
        raise ZplanError(f"`{name}` is {value!r}", f"give {need}")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def plain(value: Any) -> Any:
    """A JSON value of an argument."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        import json

        return json.loads(json.dumps(value))
    return value


def read_offload(given: Mapping[str, Any]) -> Offload:
    """What `offload`, `offload_params` and `offload_ratio` say together."""
    places = get_args(Place)
    for name in ("offload", "offload_params"):
        value, flag = given.get(name, "none"), "--" + name.replace("_", "-")
        if value not in places:
            hint = f"use {flag} {', '.join(places[:-1])} or {places[-1]}"
            raise ZplanError(f"`{flag} {value}` is unknown", did_you_mean(str(value), places) or hint)
    offload = Offload(given.get("offload", "none"), given.get("offload_params", "none"), _ratio(given))
    if offload.params != "none" and offload.optimizer == "none":
        raise ZplanError(
            f"`--offload-params {offload.params}` leaves the larger optimizer on the GPU",
            f"add --offload {offload.params}",
        )
    if offload.ratio != 1 and offload.optimizer == "none":
        raise ZplanError(f"`--offload-ratio {offload.ratio:g}` offloads nothing", "add --offload cpu")
    if offload.params != "none" and given.get("stage", 3) != 3:
        raise ZplanError(
            f"`--offload-params {offload.params}` needs parameters in shards, which stage {given['stage']} keeps whole",
            "use --stage 3, or drop --offload-params",
        )
    return offload


def _ratio(given: Mapping[str, Any]) -> float:
    """The share of elements that is offloaded, above 0 and up to 1."""
    value = given.get("offload_ratio", 1.0)
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else -1
    if not 0 < number <= 1:
        raise ZplanError(f"`--offload-ratio {value}` is no share of the elements", "use a number above 0 and up to 1")
    return float(number)


_UNBUILT: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "precision": ("--precision", ("bf16", "fp16", "fp32"), ("fp8", "int8"), "use --precision bf16, fp16 or fp32"),
}
"""Option -> its flag, what is built, what the field knows and is not built yet, and what to do."""


def refuse_unbuilt(given: Mapping[str, Any]) -> None:
    for name, (flag, built, known, hint) in _UNBUILT.items():
        value = given.get(name, built[0])
        if value in built:
            continue
        if value in known:
            raise ZplanError(f"`{flag} {value}` is not built yet", hint)
        raise ZplanError(f"`{flag} {value}` is unknown", did_you_mean(str(value), [*built, *known]) or hint)


_WORDS = {
    "precision": get_args(Precision),
    "checkpointing": get_args(Checkpointing),
    "attention": get_args(Attention),
    "device": get_args(Device),
    "reduce": get_args(Reduce),
    "transport": get_args(Transport),
    "cross_entropy": get_args(CrossEntropy),
    "kernels": get_args(Kernels),
    "saving": get_args(Saving),
    "reduce_dtype": ("fp32", "bf16"),
    "runtime": get_args(Runtime),
}


def check_choice(name: str, value: Any) -> Any:
    """One choice, checked for type and range."""
    flag = OPTION[name]
    if name in _WORDS:
        if value not in _WORDS[name]:
            near = did_you_mean(str(value), _WORDS[name])
            raise ZplanError(f"`{flag} {value}` is unknown", near or f"use one of {', '.join(_WORDS[name])}")
        return value
    if name in _TYPES:
        return value
    if name == "optimizer":
        from zplan.planner.optimizers import find_kind

        return find_kind(str(value)).name
    if name in ("compile", "optimizer_in_backward"):
        if not isinstance(value, bool):
            raise ZplanError(f"`{name}` is {value!r}", "use true or false")
        return value
    if name == "stage":
        if value not in (0, 1, 2, 3) or isinstance(value, bool):
            raise ZplanError(f"`{flag} {value}` is no ZeRO stage", "use 0, 1, 2 or 3")
        return int(value)
    return whole(flag, value, least={"ring_slots": 2, "persist_numel": 0}.get(name, 1))


def number(flag: str, value: Any, *, most: int) -> float:
    """A positive number, given as one or as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most:
        raise ZplanError(f"`{flag} {value}` is not a number above 0 and up to {most:,}", f"such as {flag} 0.5")
    return number


def whole(flag: str, value: Any, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ZplanError(f"`{flag} {value!r}` is not a whole number of at least {least}", f"use {least} or more")
    if value > MOST:
        raise ZplanError(f"`{flag} {value}` is beyond anything zplan plans for", f"use {MOST:,} or less")
    return value
