"""What a config says of which no line of another runtime's ledger comes: every such key is told by name, or refused.

It is refused where ignoring it would change the answer, and told where it decides no byte that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from zplan.planner import dskeys
from zplan.planner.config import Runtime, ZeroSizes
from zplan.planner.dsschema import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, TOP, UNPREFIXED, ZERO, Key
from zplan.planner.errors import ZplanError
from zplan.planner.peer_plan import OFFLOAD_SIZES
from zplan.planner.peer_rules import NAMES

ZPLAN_ONLY = ("ring_slots", "reduce", "transport")
"""Keys of the `zplan` object about mechanisms that no other runtime has."""

_COUNTED = ("stage", "offload_optimizer", "offload_param", *(f.name for f in fields(ZeroSizes)))

_DECIDES = (
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
)
"""Keys of `zero_optimization` that move DeepSpeed's bytes and are counted at its defaults alone."""


def peer_notes(config: Mapping[str, Any], runtime: Runtime, where: str) -> tuple[str, ...]:
    """One sentence for each block with keys that another runtime's ledger does not follow.

    Parameters
    ----------
    config
        One that `dsconfig.read_settings` has checked.
    runtime
        Any but `zplan`.
    where
        What the config is called in sentences.

    Raises
    ------
    ZplanError
        For a key that would move bytes and is counted at DeepSpeed's default alone.
    """
    found = []
    own = [key for key in ZPLAN_ONLY if key in (config.get("zplan") or {})]
    if own:
        found.append(
            f"{_all(own, f'`zplan` of {where}')} nothing with --runtime {runtime}: only {NAMES['zplan']} has that"
        )
    zero = {UNPREFIXED.get(key, key): value for key, value in (config.get("zero_optimization") or {}).items()}
    block = f"`zero_optimization` of {where}"
    if runtime != "deepspeed":
        sizes = [key for key in zero if key not in _COUNTED[:3]]
        if sizes:
            found.append(f"{_all(sizes, block)} nothing with --runtime {runtime}: {NAMES[runtime]} knows no such key")
        return tuple(found)
    _refuse(zero, ZERO, _DECIDES, block, stage=zero.get("stage"))
    for words, keys in _at_default(config, zero, where):
        found.append(f"{_all(keys, words)} nothing in the ledger, which is DeepSpeed's with its defaults for that")
    return tuple(found)


def _all(keys: Sequence[str], where: str) -> str:
    return f"{', '.join(f'`{key}`' for key in keys)} of {where} change{'s' * (len(keys) == 1)}"


def _at_default(config: Mapping[str, Any], zero: Mapping[str, Any], where: str) -> Iterator[tuple[str, list[str]]]:
    """`(block, keys)` that say something else than what DeepSpeed is counted with, though no byte comes of it."""
    top = [key for key in (*dskeys.TOP_INERT, *dskeys.TOP_MAPPED) if _differs(config.get(key), TOP.get(key))]
    if top:
        yield where, top
    left = [key for key, value in zero.items() if key not in _COUNTED and _differs(value, ZERO.get(key))]
    if left:
        yield f"`zero_optimization` of {where}", left
    for name, schema in (("offload_optimizer", OFFLOAD_OPTIMIZER), ("offload_param", OFFLOAD_PARAM)):
        inner = zero.get(name) or {}
        block = f"`{name}` of `zero_optimization` of {where}"
        known: tuple[str, ...] = (*dskeys.OFFLOAD_HONOURED, "pin_memory", "nvme_path")
        if inner.get("device") == "nvme":
            known = (*known, *OFFLOAD_SIZES[name])
        left = [k for k, v in inner.items() if k not in known and _differs(v, schema.get(k))]
        if left:
            yield block, left


def _differs(value: Any, key: Key | None) -> bool:
    return value is not None and (key is None or value != key.default)


def _refuse(
    block: Mapping[str, Any], schema: Mapping[str, Key], names: Sequence[str], where: str, *, stage: int | None = None
) -> None:
    for name in names:
        if not _differs(block.get(name), schema.get(name)) or name not in schema:
            continue
        if stage is not None and stage not in schema[name].stages:
            continue
        default = schema[name].default
        told = (
            "leave it out" if default is None else f"use {str(default).lower()}, DeepSpeed's default, or leave it out"
        )
        value = str(block[name]).lower()
        raise ZplanError(f"`{name}` {value} of {where} is not counted with --runtime deepspeed", told)
