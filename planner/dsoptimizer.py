"""The `optimizer` block of a config in DeepSpeed's schema: read into settings, and written with every value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zplan.planner import dskeys
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.optimizers import KINDS
from zplan.planner.reading import (
    check_keys,
    want_bool,
    want_list,
    want_number,
    want_object,
    want_one_of,
    want_str,
)

STARTS: dict[str, dict[str, Any]] = {
    "lion": {"betas": (0.9, 0.99)},
    "adagrad": {"eps": 1e-10},
    "sgd": {"momentum": 0.0},
}
"""Fields of `TrainingConfig` that an optimizer starts from where they differ from AdamW's."""


def optimizer_type(name: str) -> str:
    """What an optimizer of the table is called in DeepSpeed's schema; its own name where that has none and zplan only
    counts it.
    """
    kind = KINDS[name]
    return kind.deepspeed or ("AdamW" if kind.runnable else kind.name)


def in_deepspeed(name: str) -> bool:
    """Whether DeepSpeed or torch has an optimizer of the table, by the type that is written for it."""
    kind = KINDS[name]
    return bool(kind.deepspeed) or kind.runnable


def _only_counted(title: str) -> str | None:
    """The kind that a type in lower case means, where zplan counts its bytes and can't run it."""
    found = (k.name for k in KINDS.values() if not k.runnable and title in (k.name, k.deepspeed.lower()))
    return next(found, None)


def optimizer_block(block: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any], str, dict[str, dskeys.Neutral]]:
    """Type in lower case, its parameters, what they are called in errors, and which may only ask for nothing."""
    check_keys(block, ("type", "params", "legacy_fusion"), where)
    if "type" not in block:
        raise ZplanError(f"{where} has no `type`", 'write "type": "AdamW"')
    kind = _type(want_str("type", where, block["type"]), where)
    params = want_object("params", where, block.get("params") or {})
    where = f"`params` of {where}"
    if "max_grad_norm" in params:
        raise ZplanError(f"`max_grad_norm` of {where} clips nothing", "write `gradient_clipping` at the top level")
    own = dskeys.OPTIMIZER_PARAMS.get(kind, dskeys.OPTIMIZER_PARAMS["adamw"])
    neutral = {k: v for k, v in dskeys.OPTIMIZER_NEUTRAL.items() if k not in own}
    check_keys(params, (*own, *neutral, *dskeys.OPTIMIZER_INERT), where)
    return kind, params, where, neutral


def read_optimizer(kind: str, params: Mapping[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Put the fields of `TrainingConfig` that the parameters name into `found`, and return notes."""
    notes: tuple[str, ...] = ()
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if name in params:
            found[name] = want_number(name, where, params[name])
    if "betas" in params:
        found["betas"] = _betas(params["betas"], where)
    if "lr" not in params:
        found["lr"] = 1e-3
        notes = (f"{where} has no `lr`: 0.001, which is DeepSpeed's default",)
    if kind == "sgd":
        kind = _sgd(params, where, found)
    elif only := _only_counted(kind):
        kind = only
    elif kind == "adam" and want_bool("adam_w_mode", where, params.get("adam_w_mode", True)):
        kind = "adamw"  # DeepSpeed's "Adam" decays like AdamW unless told otherwise.
    _settle(kind, found)
    return notes


def name_optimizer(value: object, where: str, found: dict[str, Any]) -> None:
    """The `optimizer` key of the `zplan` block: a name of the table, where DeepSpeed's schema has no word for it."""
    name = want_one_of("optimizer", where, value, KINDS)
    before = found.get("optimizer", name)
    if optimizer_type(before) != optimizer_type(name) or (optimizer_type(name) == "SGD" and before != name):
        raise ZplanError(
            f"`optimizer` of {where} is {name}, and the `optimizer` block is of {before}", "drop one of them"
        )
    _settle(name, found)


def explicit_optimizer(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The block of an optimizer of the table; `values` are the fields of `TrainingConfig`."""
    title = optimizer_type(name)
    own = dskeys.OPTIMIZER_PARAMS.get(title.lower(), dskeys.OPTIMIZER_PARAMS["adamw"])
    params = {key: list(values[key]) if key == "betas" else values[key] for key in own if key in values}
    if title in ("AdamW", "Adam"):
        params["adam_w_mode"] = title == "AdamW"
    if name == "sgd":
        params["momentum"] = 0.0
    return {"type": title, "params": params}


def _settle(kind: str, found: dict[str, Any]) -> None:
    found["optimizer"] = kind
    for name, value in STARTS.get(kind, {}).items():
        found.setdefault(name, value)


def _sgd(params: Mapping[str, Any], where: str, found: dict[str, Any]) -> str:
    found["nesterov"] = want_bool("nesterov", where, params.get("nesterov", False))
    if found.setdefault("momentum", 0.0):
        return "sgd-momentum"
    if found["nesterov"]:
        raise ZplanError(f"`nesterov` of {where} without momentum", 'give "momentum" above 0, such as 0.9')
    return "sgd"


def _type(kind: str, where: str) -> str:
    """The type in lower case; refuses what is not built."""
    if kind.lower() in dskeys.OPTIMIZER_PARAMS or _only_counted(kind.lower()):
        return kind.lower()
    if kind.lower() in dskeys.OTHER_OPTIMIZERS:
        raise ZplanError(
            f"optimizer `{kind}` is not built yet",
            'use "AdamW", "Adam", "SGD", "Lion" or "Adagrad", or pass `optimizer=` to `zplan.initialize`',
        )
    near = did_you_mean(kind.lower(), (*dskeys.OPTIMIZER_PARAMS, *dskeys.OTHER_OPTIMIZERS))
    raise ZplanError(f"unknown optimizer `{kind}` in {where}", near or 'use "AdamW"')


def _betas(value: Any, where: str) -> tuple[float, float]:
    betas = [want_number("betas", where, b) for b in want_list("betas", where, value)]
    if len(betas) != 2 or max(betas) >= 1:
        raise ZplanError(f"`betas` of {where} are {betas}", "write two numbers below 1, such as [0.9, 0.999]")
    return betas[0], betas[1]
