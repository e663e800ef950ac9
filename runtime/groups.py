"""What users ask of the optimizer: a config's kind, parameter groups, or an optimizer of torch's own shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn

from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.runtime.foreign import Foreign
from zplan.runtime.mesh import say_once

Parameters = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]
Asked = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
"""An optimizer over the model's parameters, or what makes one from parameter groups."""

BUILT_IN: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
}
"""Classes that run as zplan's own, while they ask for nothing beside `KNOWN`."""

KNOWN = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (None, False, True) for name in ("foreach", "capturable", "fused")},
    **{name: (False, None) for name in ("amsgrad", "maximize", "differentiable")},
    "dampening": (0, 0.0),
    "decoupled_weight_decay": (True, False),
}
"""Options of torch's classes with the values that change nothing."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """One optimizer, as the engine will run it."""

    name: str
    """Of `planner/optimizers.py`, or spelled out."""
    groups: list[dict[str, Any]]
    """Parameters and numbers of each group, every number explicit."""
    foreign: Foreign | None = None
    """An optimizer that the user brought."""
    group_of: dict[nn.Parameter, int] = field(init=False)

    def __post_init__(self) -> None:
        found = {p: i for i, g in enumerate(self.groups) for p in g["params"]}
        object.__setattr__(self, "group_of", found)


def read_optimizer(
    model: nn.Module, training: TrainingConfig, optimizer: Asked, parameters: Parameters | None, *, sharded: bool
) -> Wanted:
    """Settle what runs and on which groups.

    Parameters
    ----------
    optimizer
        None for the config's. One that was given stands before the config's.
    parameters
        Parameters or groups of them, as torch's optimizers take them; None for all that require gradients.
    sharded
        Whether ranks hold slices only, which optimizers that look at whole tensors can't work on.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        return Wanted(training.optimizer, _own_groups(model, training, trained, parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ZplanError(
                f"`optimizer` is a {type(optimizer).__name__}",
                "pass a torch optimizer, or what makes one from groups",
            )
        optimizer = optimizer(list(parameters) if parameters is not None else trained)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ZplanError(f"`optimizer` made a {type(optimizer).__name__}", "return a torch.optim.Optimizer")
    elif parameters is not None:
        raise ZplanError("both an optimizer and `model_parameters` were given", "put the groups into the optimizer")
    _check_cover(model, optimizer.param_groups)
    if any(float(state.get("step", 0)) > 0 for state in optimizer.state.values()):
        raise ZplanError("the optimizer that was given has stepped already", "pass a fresh one")
    if (name := _built_in(optimizer)) is not None:
        keys = ("params", *KNOWN)
        return Wanted(name, [{k: v for k, v in g.items() if k in keys} for g in optimizer.param_groups])
    foreign = Foreign(optimizer, sharded=sharded)
    say_once(f"`optimizer=` ({type(optimizer).__name__}) stands for the config's {training.optimizer}")
    return Wanted(foreign.name, optimizer.param_groups, foreign)


def _own_groups(
    model: nn.Module, training: TrainingConfig, trained: list[nn.Parameter], parameters: Parameters | None
) -> list[dict[str, Any]]:
    start: dict[str, Any] = {name: getattr(training, name) for name in KNOWN}
    if parameters is None:
        return [{"params": trained, **start}]
    rows = list(parameters)
    if not all(isinstance(row, Mapping) for row in rows):
        rows = [{"params": rows}]
    groups = []
    for row in rows:
        assert isinstance(row, Mapping)
        for key in row:
            if key not in ("params", "name", *KNOWN):
                hint = did_you_mean(key, KNOWN) or f"a group knows {', '.join(KNOWN)}"
                raise ZplanError(f"a parameter group of `model_parameters` has the unknown key `{key}`", hint)
        params = row["params"]
        params = [params] if isinstance(params, nn.Parameter) else [p for p in params if p.requires_grad]
        groups.append({**start, **row, "params": params})
    _check_cover(model, groups)
    return [g for g in groups if g["params"]]


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter group is numbers, as JSON gives them back."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
    return {
        k: v
        for k, v in plain.items()
        if all(type(x) in (int, float) and isfinite(x) for x in (v if isinstance(v, list) else [v]))
    }


def _check_cover(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Every parameter that gets a gradient is in one group, and nothing else is."""
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    given = [p for g in groups for p in g["params"]]
    seen = set(given)
    strange = [p for p in given if p not in names and p.requires_grad]
    if strange:
        raise ZplanError(
            f"{len(strange)} parameters of the optimizer are not the model's, the first of shape "
            f"{tuple(strange[0].shape)}",
            "build the optimizer over `model.parameters()` of the model that you pass",
        )
    if len(seen) < len(given):
        count = Counter(given)
        twice = next(p for p in given if count[p] > 1)
        raise ZplanError(f"`{names.get(twice)}` is in two parameter groups", "put each parameter into one")
    left = [n for p, n in names.items() if p not in seen]
    if left:
        raise ZplanError(
            f"{len(left)} parameters require gradients and are in no group of the optimizer, the first `{left[0]}`",
            "add them to a group, or freeze them with `requires_grad_(False)`",
        )


def _built_in(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of our own rule for a torch optimizer that asks for nothing beyond it."""
    name = BUILT_IN.get(type(optimizer))
    if name is None:
        return None
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", *KNOWN) and value not in NEUTRAL.get(key, ()):
                return None
        if isinstance(group["lr"], torch.Tensor) or group.get("decoupled_weight_decay", False) is not (name == "adamw"):
            return None
    if name == "sgd":
        with_momentum = [bool(g["momentum"]) for g in optimizer.param_groups]
        if any(with_momentum):
            return "sgd-momentum" if all(with_momentum) else None
    return name
