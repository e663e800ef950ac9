"""What was asked for, parsed and checked: the one place where flags, Python arguments and `--config` files meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zplan.planner.cost import Goal
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.interval import Margin, parse_margin
from zplan.planner.peer_rules import PARALLEL, check_request
from zplan.planner.request_checks import (
    OPTION,
    check_choice,
    number,
    of_type,
    plain,
    read_offload,
    refuse_unbuilt,
    whole,
)
from zplan.planner.units import parse_bytes, parse_count


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
    beyond_limit: bool = False
    """A sequence may be longer than the model is made for."""
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
    *("offload_params", "offload_ratio", "config", "offline", "beyond_limit"),
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
        `config` is a DeepSpeed config, a path or a mapping, and fixes what it names. `offline` forbids the network,
        `beyond_limit` allows a sequence longer than the model is made for.
        `efficiency` is a share, `network` in GB/s a node; `tokens`, or `epochs` of `examples`, say how much is trained,
        and `price` what a GPU costs an hour. `lora` and its like are about adapters. The rest fix a choice.
    """
    given = {k: v for k, v in given.items() if v is not None and v is not False}
    for name in given:
        if name not in ARGUMENTS:
            raise ZplanError(f"unknown argument `{name}`", did_you_mean(name, ARGUMENTS) or "see the documentation")
    given = {name: of_type(name, value) for name, value in given.items()}
    asked = {name: plain(given[name]) for name in ARGUMENTS if name in given}
    given = {_SHORT.get(name, name): value for name, value in given.items()}
    refuse_unbuilt(given)
    fixed = {name: check_choice(name, given[name]) for name in OPTION if name in given and name != "offload"}
    if {"offload", "offload_params", "offload_ratio"} & set(given):
        fixed["offload"] = read_offload(given)
    fixed_by = {name: OPTION[name] for name in fixed}
    if "offload" in fixed and fixed["offload"].params != "none" and "stage" not in fixed:
        fixed["stage"], fixed_by["stage"] = 3, "--offload-params"
    settings: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if "config" in given:
        from zplan.planner.request_config import merge_config

        settings, notes = merge_config(given["config"], fixed, fixed_by)
    _settle_checkpointing(fixed, fixed_by)
    tuning = _tuning(given)
    if {"runtime", *PARALLEL} & set(fixed):
        check_request(fixed)
        _drop_zplans_own(fixed, fixed_by, settings)
        if fixed.get("runtime") == "deepspeed" and "config" in given:
            from zplan.planner.request_config import still_true, zero_sizes

            fixed["zero"] = zero_sizes(given["config"])
            notes = still_true(notes)
        if tuning is not None and fixed.get("runtime", "zplan") != "zplan":
            raise ZplanError(f"`--lora` is not counted with --runtime {fixed['runtime']}", "use --runtime zplan")
    return Request(
        model=given.get("model"),
        params=parse_count(given["params"], "--params") if "params" in given else None,
        gpus=whole("--gpus", given["gpus"]) if "gpus" in given else None,
        mem_bytes=parse_bytes(given["mem"], "--mem") if "mem" in given else None,
        gpu=given.get("gpu"),
        nodes=whole("--nodes", given.get("nodes", 1)),
        host_mem_bytes=parse_bytes(given["host_mem"], "--host-mem") if "host_mem" in given else None,
        nvme_bytes=parse_bytes(given["nvme"], "--nvme") if "nvme" in given else None,
        margin=parse_margin(given["margin"]) if "margin" in given else Margin(),
        efficiency=number("--efficiency", given["efficiency"], most=1) if "efficiency" in given else None,
        network=round(10**9 * number("--network", given["network"], most=10**6)) if "network" in given else None,
        goal=_goal(given),
        fixed=fixed,
        fixed_by=fixed_by,
        settings=settings,
        tuning=tuning,
        offline=bool(given.get("offline")),
        beyond_limit=bool(given.get("beyond_limit")),
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
    rank = whole("--lora", given["lora"])
    return Tuning(rank, words, embeddings=bool(given.get("lora_embeddings")), quantized=quantized)


def _goal(given: Mapping[str, Any]) -> Goal:
    return Goal(
        tokens=parse_count(given["tokens"], "--tokens") if "tokens" in given else None,
        epochs=whole("--epochs", given["epochs"]) if "epochs" in given else None,
        examples=parse_count(given["examples"], "--examples") if "examples" in given else None,
        price=number("--price", given["price"], most=10**6) if "price" in given else None,
    )
