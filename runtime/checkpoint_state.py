"""What a checkpoint holds besides tensors: random states, the caller's own state, the model's description."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture
from zplan.runtime.decoder import Decoder
from zplan.runtime.groups import numbers
from zplan.runtime.optimizer import ShardedOptimizer


def random_state(device: torch.device) -> dict[str, Any]:
    """States of this rank's generators: Python's, NumPy's old one where NumPy is loaded, torch's on host and device."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, at, has_gauss, cached = numpy.random.get_state(legacy=True)
        found["numpy"] = [kind, keys.tolist(), int(at), int(has_gauss), float(cached)]
    return found


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo whatever drew random numbers since `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    if "numpy" in state:
        import numpy as np

        kind, keys, at, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), at, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def groups_to_save(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The numbers of every parameter group, as they were made and as a schedule or a hand has left them."""
    return {"made": optimizer.made, "now": [numbers(g) for g in optimizer.param_groups]}


def restore_groups(optimizer: ShardedOptimizer, saved: Mapping[str, Any]) -> bool:
    """Take over each number that was made as it is now; a new config's value wins. False where groups differ."""
    if len(saved["made"]) != len(optimizer.made):
        return False
    rows = zip(optimizer.param_groups, optimizer.made, saved["made"], saved["now"], strict=True)
    for group, mine, theirs, now in rows:
        for name in mine:
            if name in now and theirs.get(name) == mine[name]:
                group[name] = tuple(now[name]) if isinstance(group[name], tuple) else now[name]
    return True


def plain(client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's state as a reader will see it.

    Raises
    ------
    ZplanError
        When it holds what JSON can't.
    """
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ZplanError(f"`client_state` is a {type(client_state).__name__}", "give a mapping with string keys")
    state = dict(client_state or {})
    try:
        if not _string_keys(state):
            raise ZplanError("`client_state` has a key that is no string, and JSON has only those", "use string keys")
        return dict(json.loads(json.dumps(state, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ZplanError(
            f"`client_state` can't be saved: {error}",
            "checkpoints hold no pickles: give numbers, strings, lists and objects with string keys",
        ) from None


def _string_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _string_keys(v) for k, v in value.items())
    return all(map(_string_keys, value)) if isinstance(value, (list, tuple)) else True


def describe_training(training: TrainingConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return {**asdict(training), "given": sorted(training.given), "betas": list(training.betas)}


def describe_model(module: nn.Module) -> dict[str, Any]:
    """What a model folder's `config.json` can be made from; `kind` is `module` where nothing is known.

    `buffers` names those that `state_dict` has and a checkpoint has not.
    """
    names = buffer_names(module)
    return {**_kind(module), **({"buffers": names} if names else {})}


def buffer_names(module: nn.Module) -> list[str]:
    """Persistent buffers, such as running statistics."""
    return [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name, _ in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def _kind(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, Decoder):
        arch = asdict(module.arch)
        return {"kind": "decoder", "architecture": {**arch, "rope_scaling": dict(module.arch.rope_scaling)}}
    # Of the class: what wraps such a model often passes its `config` on, and has other names for its parameters.
    if any(c.__name__ == "PreTrainedModel" for c in type(module).__mro__):
        config: Any = module.config
        return {"kind": "transformers", "config": json.loads(config.to_json_string()), "class": type(module).__name__}
    return {"kind": "module", "class": type(module).__name__}


def architecture(model: Mapping[str, Any]) -> Architecture:
    """The shape of a model of kind `decoder`."""
    raw = dict(model["architecture"])
    return Architecture(**{**raw, "rope_scaling": tuple(sorted(raw["rope_scaling"].items()))})


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the first."""
    first: dict[int, str] = {}
    found = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if id(p) in first:
            found[name] = first[id(p)]
        first.setdefault(id(p), name)
    return found
