"""What was asked for, parsed and checked: the one place where flags, Python arguments and `--config` files meet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

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
    ZeroSizes,
)
from zplan.planner.cost import Goal
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.interval import Margin, parse_margin
from zplan.planner.peer_rules import PARALLEL, check_request
from zplan.planner.units import parse_bytes, parse_count

MOST = 10**9
"""Largest whole number that an option takes; beyond it a search by divisors would not end."""

MOST_ELEMENTS = 10**12
"""Largest reduce bucket; configs use absurdly large ones to say: all at once."""

ELEMENTS = ("piece_numel", "persist_numel")
"""Choices that count elements."""

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


def flag_of(name: str) -> str:
    """The command-line option of an argument.

    Examples
    --------
    >>> flag_of("cross_entropy"), flag_of("host_mem")
    ('--loss', '--host-mem')
    """
    known = OPTION.get(name, "")
    return known if known.startswith("--") else "--" + name.replace("_", "-")


class Tuning(NamedTuple):
    """Adapters that were asked for, before the model is known."""

    rank: int
    targets: str
    embeddings: bool = False
    quantized: bool = False


@dataclass(frozen=True)
class Request:
    """Everything that was asked for. None means: left open, zplan chooses."""

    model: str | None = None
    params: int | None = None
    gpus: int | None = None
    """Over all nodes."""
    mem_bytes: int | None = None
    """Per GPU."""
    gpu: str | None = None
    nodes: int = 1
    host_mem_bytes: int | None = None
    """Per node."""
    nvme_bytes: int | None = None
    """Per node."""
    margin: Margin = Margin()
    """What stays free beyond the interval."""
    efficiency: float | None = None
    """Share of the card's peak that matrix products reach; None for the usual."""
    network: int | None = None
    """Bytes a second that a node sends to others."""
    goal: Goal = Goal()
    """How much is to be trained, and what a GPU costs."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Choices that were made, by the names of `OPTION`."""
    fixed_by: Mapping[str, str] = field(default_factory=dict)
    """Who made them: `--stage`, or the config's name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Learning rate and the like, from a config."""
    tuning: Tuning | None = None
    """Train adapters instead of the model itself."""
    offline: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The arguments as they were given, without those left out; JSON values."""
    notes: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """A choice that was made, or None."""
        return self.fixed.get(name)


_SHORT = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}
"""Arguments that are called otherwise in a choice."""

ARGUMENTS = (
    *("model", "params", "gpus", "mem", "gpu", "nodes", "host_mem", "nvme", "margin"),
    *("efficiency", "network", "tokens", "epochs", "examples", "price"),
    *("offload_params", "offload_ratio", "config", "offline"),
    *("lora", "lora_targets", "lora_embeddings", "qlora"),
    *_SHORT,
    *(name for name in OPTION if name not in _SHORT.values()),
)
"""Names that `make_request` knows."""


def make_request(given: Mapping[str, Any]) -> Request:
    """Parse and check what was asked for.

    Parameters
    ----------
    given
        Arguments by the names of `ARGUMENTS`; None leaves one open. `model` and `params` are what `sources.model_from`
        takes, the latter also as text (`7e9`). `gpus` counts over all `nodes`. `mem` (per GPU), `host_mem` and `nvme`
        (per node) are GiB when bare, and so is `margin`, which may be a share (`15%`) too. `offload` says where the
        optimizer lies, `offload_params` where the parameters do, `offload_ratio` for which share of the elements.
        `config` is a DeepSpeed config, a path or a mapping, and fixes what it names. `offline` forbids the network.
        `efficiency` is a share, `network` in GB/s a node; `tokens`, or `epochs` of `examples`, say how much is trained,
        and `price` what a GPU costs an hour. `lora` and its like are about adapters. The rest fix a choice.
    """
    given = {k: v for k, v in given.items() if v is not None and v is not False}
    for name in given:
        if name not in ARGUMENTS:
            raise ZplanError(f"unknown argument `{name}`", did_you_mean(name, ARGUMENTS) or "see the documentation")
    given = {name: _of_type(name, value) for name, value in given.items()}
    asked = {name: _plain(given[name]) for name in ARGUMENTS if name in given}
    given = {_SHORT.get(name, name): value for name, value in given.items()}
    _refuse_unbuilt(given)
    fixed = {name: _check(name, given[name]) for name in OPTION if name in given and name != "offload"}
    if {"offload", "offload_params", "offload_ratio"} & set(given):
        fixed["offload"] = read_offload(given)
    fixed_by = {name: OPTION[name] for name in fixed}
    if "offload" in fixed and fixed["offload"].params != "none" and "stage" not in fixed:
        fixed["stage"], fixed_by["stage"] = 3, "--offload-params"
    settings, notes = _merge_config(given["config"], fixed, fixed_by) if "config" in given else ({}, ())
    _settle_checkpointing(fixed, fixed_by)
    tuning = _tuning(given)
    if {"runtime", *PARALLEL} & set(fixed):
        check_request(fixed)
        _drop_zplans_own(fixed, fixed_by, settings)
        if fixed.get("runtime") == "deepspeed" and "config" in given:
            fixed["zero"] = _sizes(given["config"])
            notes = _still_true(notes)
        if tuning is not None and fixed.get("runtime", "zplan") != "zplan":
            raise ZplanError(f"`--lora` is not counted with --runtime {fixed['runtime']}", "use --runtime zplan")
    return Request(
        model=given.get("model"),
        params=parse_count(given["params"], "--params") if "params" in given else None,
        gpus=_whole("--gpus", given["gpus"]) if "gpus" in given else None,
        mem_bytes=parse_bytes(given["mem"], "--mem") if "mem" in given else None,
        gpu=given.get("gpu"),
        nodes=_whole("--nodes", given.get("nodes", 1)),
        host_mem_bytes=parse_bytes(given["host_mem"], "--host-mem") if "host_mem" in given else None,
        nvme_bytes=parse_bytes(given["nvme"], "--nvme") if "nvme" in given else None,
        margin=parse_margin(given["margin"]) if "margin" in given else Margin(),
        efficiency=_number("--efficiency", given["efficiency"], most=1) if "efficiency" in given else None,
        network=round(10**9 * _number("--network", given["network"], most=10**6)) if "network" in given else None,
        goal=_goal(given),
        fixed=fixed,
        fixed_by=fixed_by,
        settings=settings,
        tuning=tuning,
        offline=bool(given.get("offline")),
        asked=asked,
        notes=notes,
    )


def _drop_zplans_own(fixed: dict[str, Any], fixed_by: dict[str, str], settings: dict[str, Any]) -> None:
    """Another runtime has none of what only zplan's does; a note has told so (`planner/peer_keys.py`)."""
    from zplan.planner.peer_keys import ZPLAN_ONLY

    if fixed.get("runtime", "zplan") != "zplan":
        settings.pop("max_live", None)
        for name in (*ZPLAN_ONLY, "piece_numel", "persist_numel"):
            fixed.pop(name, None)
            fixed_by.pop(name, None)


def _sizes(config: str | os.PathLike[str] | Mapping[str, Any]) -> ZeroSizes:
    """DeepSpeed's own sizes, as its config says them."""
    from zplan.planner.peer_plan import read_sizes
    from zplan.planner.relaxed import read_config

    if isinstance(config, Mapping):
        return read_sizes(config, "config")
    return read_sizes(read_config(config)[0], os.path.basename(os.fspath(config)))


def _still_true(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Without the notes on keys that change nothing in zplan's runtime and are counted for DeepSpeed."""
    from zplan.planner.peer_plan import counted_here

    return tuple(note for note in notes if not counted_here(note))


def _settle_checkpointing(fixed: dict[str, Any], fixed_by: dict[str, str]) -> None:
    """Segments and offload are kinds of full checkpointing, which they ask for."""
    for name in ("checkpoint_every", "checkpoint_offload"):
        if fixed.get(name, 1) in (1, False) and fixed.get(name) is not True:
            continue
        how = fixed.setdefault("checkpointing", "full")
        fixed_by.setdefault("checkpointing", fixed_by[name])
        if how != "full":
            raise ZplanError(
                f"{fixed_by[name]} is about checkpointed blocks, and checkpointing is `{how}`",
                "use --checkpointing full",
            )


def _tuning(given: Mapping[str, Any]) -> Tuning | None:
    """What the four options about adapters say together. QLoRA's paper adapts every linear map, LoRA's q and v."""
    for name in ("lora_targets", "lora_embeddings", "qlora"):
        if name in given and "lora" not in given:
            raise ZplanError(f"`--{name.replace('_', '-')}` needs the rank of the adapters", "add --lora 16")
    if "lora" not in given:
        return None
    quantized = bool(given.get("qlora"))
    words = given.get("lora_targets", "all-linear" if quantized else "q,v")
    if not isinstance(words, str):
        raise ZplanError(f"`lora_targets` is {words!r}", 'give text, such as "q,v"')
    rank = _whole("--lora", given["lora"])
    return Tuning(rank, words, embeddings=bool(given.get("lora_embeddings")), quantized=quantized)


def _goal(given: Mapping[str, Any]) -> Goal:
    return Goal(
        tokens=parse_count(given["tokens"], "--tokens") if "tokens" in given else None,
        epochs=_whole("--epochs", given["epochs"]) if "epochs" in given else None,
        examples=parse_count(given["examples"], "--examples") if "examples" in given else None,
        price=_number("--price", given["price"], most=10**6) if "price" in given else None,
    )


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, os.PathLike), "a name, a path or a hub id"),
    "gpu": ((str,), "a name that `zplan gpus` lists"),
    "config": ((str, os.PathLike, Mapping), "a path or a mapping"),
}
"""Arguments that a command line gives as text, and what Python may give; the rest is checked where it is parsed."""


def _of_type(name: str, value: Any) -> Any:
    types, need = _TYPES.get(name, ((object,), ""))
    if not isinstance(value, types):
        raise ZplanError(f"`{name}` is {value!r}", f"give {need}")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _plain(value: Any) -> Any:
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


def _refuse_unbuilt(given: Mapping[str, Any]) -> None:
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


def _check(name: str, value: Any) -> Any:
    """One choice, checked for type and range."""
    flag = OPTION[name]
    if name in _WORDS:
        if value not in _WORDS[name]:
            near = did_you_mean(str(value), _WORDS[name])
            raise ZplanError(f"`{flag} {value}` is unknown", near or f"use one of {', '.join(_WORDS[name])}")
        return value
    if name in ("checkpoint_offload", "padded"):
        if not isinstance(value, bool):
            raise ZplanError(f"`{name}` is {value!r}", "give True or False")
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
    return _whole(flag, value, least={"ring_slots": 2, "persist_numel": 0}.get(name, 1))


def _number(flag: str, value: Any, *, most: int) -> float:
    """A positive number, given as one or as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most:
        raise ZplanError(f"`{flag} {value}` is not a number above 0 and up to {most:,}", f"such as {flag} 0.5")
    return number


def _whole(flag: str, value: Any, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ZplanError(f"`{flag} {value}` is not a whole number of at least {least}", f"use {least} or more")
    if value > MOST:
        raise ZplanError(f"`{flag} {value}` is beyond anything zplan plans for", f"use {MOST:,} or less")
    return value


_CONFIG_NAMES = {"train_batch_size": "global_batch"}


def _merge_config(
    config: str | os.PathLike[str] | Mapping[str, Any], fixed: dict[str, Any], fixed_by: dict[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add to `fixed` what a config names; return its other settings and notes. Flags and config must agree."""
    from zplan.planner.dsconfig import read_settings
    from zplan.planner.relaxed import read_config

    source = "config" if isinstance(config, Mapping) else os.path.basename(os.fspath(config))
    mapping, loose = (config, ()) if isinstance(config, Mapping) else read_config(config)
    found, notes = read_settings(mapping, source=source, runtime=fixed.get("runtime", "zplan"))
    notes = (*loose, *notes)
    batch = {"train_batch_size", "micro_batch", "accumulation"}
    if batch & set(found) == {"train_batch_size"} and not {"micro_batch", "accumulation"} & set(fixed):
        found["accumulation"] = 1  # DeepSpeed's rule for the train batch alone.
        notes += (f"`{source}` gives `train_batch_size` alone: one micro-step, as in DeepSpeed",)
    settings = {}
    for name, value in found.items():
        own = _CONFIG_NAMES.get(name, name)
        if own not in OPTION:
            settings[name] = value
        elif isinstance(value, int) and value > (MOST_ELEMENTS if own in ELEMENTS else MOST):
            raise ZplanError(f"`{source}` asks for {value:,} as {own.replace('_', '-')}", "check that number")
        elif own in fixed and fixed[own] != value:
            raise ZplanError(f"`{OPTION[own]} {fixed[own]}` and `{source}` ({value}) disagree", "drop one of the two")
        elif own not in fixed:
            fixed[own], fixed_by[own] = value, f"`{source}`"
    return settings, notes
