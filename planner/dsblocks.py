"""The blocks of a config in DeepSpeed's schema, one strict reader each.

A reader puts the fields of `dsconfig.TrainingConfig` that its block names into `found`, refuses what it does not know
or zplan does not do, and returns notes on keys that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from zplan.planner import dskeys
from zplan.planner.config import (
    Attention,
    Checkpointing,
    CrossEntropy,
    Kernels,
    Offload,
    Place,
    Reduce,
    Saving,
    Transport,
)
from zplan.planner.dsoptimizer import name_optimizer, optimizer_block, read_optimizer
from zplan.planner.dsschema import UNPREFIXED
from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import read_loss_scale
from zplan.planner.reading import check_keys, refuse_type, want_bool, want_int, want_number, want_object, want_one_of

PAGE = "docs/config.md"
"""Lists every key that is known."""

_EXTRA_INTS = {"ring_slots": 2, "seq": 1, "checkpoint_every": 1, "check_replicas_every": 0}
"""With their least values."""
_EXTRA_FLAGS = ("checkpoint_offload", "padded", "compile", "deterministic", "optimizer_in_backward")
_EXTRA_WORDS = ("checkpointing", "attention", "cross_entropy", "kernels", "reduce", "transport", "saving")
EXTRAS = (*_EXTRA_INTS, *_EXTRA_FLAGS, *_EXTRA_WORDS, "optimizer")
"""Keys of the `zplan` object: what DeepSpeed's schema has no word for."""


def screen(
    block: Mapping[str, Any], neutral: Mapping[str, dskeys.Neutral], inert: Mapping[str, str], where: str
) -> tuple[str, ...]:
    """Refuse keys that ask for what is not built; return a note for each that changes nothing."""
    for key, asks_nothing in neutral.items():
        if key in block and not asks_nothing(block[key]):
            if block[key] == "auto":
                raise refuse_type(key, where, "auto", "the value itself")
            if isinstance(block[key], str) and block[key].lower() in ("true", "false"):
                raise refuse_type(key, where, block[key], f"{block[key].lower()} without quotes")
            raise ZplanError(
                f"`{key}` of {where} asks for something that is not built yet", dskeys.INSTEAD.get(key, "leave it out")
            )
    for key in block:
        if block[key] == "auto" and key in inert:
            raise refuse_type(key, where, "auto", "the value itself")
    asked = [key for key, value in block.items() if key in inert and not dskeys.all_off(value)]
    return tuple(f"`{key}` of {where} changes nothing: {inert[key]}" for key in asked)


def read_prescaling(mapping: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Dividing before or after the sum over ranks is the same in fp32, but for the last bit."""
    notes = []
    for key, why in dskeys.TOP_MAPPED.items():
        if key not in mapping or mapping[key] is None:
            continue
        if key == "prescale_gradients":
            asks = want_bool(key, where, mapping[key])
        else:
            asks = want_number(key, where, mapping[key]) != 1
            if not mapping[key]:
                raise ZplanError(f"`{key}` of {where} is 0", "write 1.0, or leave it out")
        if asks:
            notes.append(f"`{key}` of {where} changes nothing: {why}")
    return tuple(notes)


def read_bf16(block: dict[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    check_keys(block, ("enabled", *dskeys.BF16_NEUTRAL), where)
    enabled = want_bool("enabled", where, block.get("enabled", False))
    found["precision"] = "bf16" if enabled else "fp32"
    notes = screen(block, dskeys.BF16_NEUTRAL, {}, where)
    if block.get("check_grad_overflow") is False:
        notes += (
            f"`check_grad_overflow` of {where} changes nothing: a step whose gradient norm is not finite is skipped",
        )
    return notes


def read_fp16(block: dict[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Read after `_bf16`. A config that turns fp16 off and names nothing else asks for fp32."""
    scale = read_loss_scale(block, where)
    if not want_bool("enabled", where, block.get("enabled", False)):
        found.setdefault("precision", "fp32")
        return ()
    if found.get("precision") == "bf16":
        raise ZplanError(f"both `bf16` and {where} are on", "turn one off")
    found["precision"], found["loss_scale"] = "fp16", scale
    return ()


def read_zero(block: dict[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    block = {UNPREFIXED.get(key, key): value for key, value in block.items()}
    known = (*dskeys.ZERO_HONOURED, *dskeys.ZERO_NEUTRAL, *dskeys.ZERO_MAPPED, *dskeys.ZERO_INERT)
    check_keys(block, known, where, page=PAGE)
    if "stage" in block:
        stage = want_int("stage", where, block["stage"], least=0)
        if stage > 3:
            raise ZplanError(f"`stage` of {where} is {stage}", "use 0, 1, 2 or 3")
        found["stage"] = stage
    if "reduce_bucket_size" in block:
        found["piece_numel"] = want_int("reduce_bucket_size", where, block["reduce_bucket_size"])
    if block.get("overlap_comm") is not None:
        found["overlap"] = want_bool("overlap_comm", where, block["overlap_comm"])
    for name, field in dskeys.ZERO_COUNTS.items():
        if block.get(name) is not None:
            found[field] = want_int(name, where, block[name], least=0)
    if "stage3_max_live_parameters" in block:
        name = "stage3_max_live_parameters"
        found["max_live"] = want_int(name, where, block[name], least=0)
    notes = [*_offload(block, where, found)]
    for key, (value, why) in dskeys.ZERO_MAPPED.items():
        if block.get(key) is not None and want_bool(key, where, block[key]) is not value:
            notes.append(f"`{key}` of {where} is taken as {str(value).lower()}: {why}")
    return (*notes, *screen(block, dskeys.ZERO_NEUTRAL, dskeys.ZERO_INERT, where))


def _offload(block: Mapping[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Both offload blocks, as one setting."""
    block, notes = _old_offloads(block, where)
    places: dict[str, Any] = {}
    ratio = 1.0
    for key in ("offload_optimizer", "offload_param"):
        if block.get(key) is None:
            continue
        inner = want_object(key, where, block[key])
        there = f"`{key}` of {where}"
        check_keys(inner, (*dskeys.OFFLOAD_HONOURED, *dskeys.OFFLOAD_INERT, "super_offload"), there)
        if inner.get("super_offload"):
            raise ZplanError(f"`super_offload` of {there} asks for something that is not built yet", "leave it out")
        places[key] = want_one_of("device", there, inner.get("device") or "none", get_args(Place))
        if "ratio" in inner and key == "offload_optimizer":
            ratio = want_number("ratio", there, inner["ratio"])
        if places[key] != "none":
            notes += screen(inner, {}, dskeys.OFFLOAD_INERT, there)
    offload = Offload(places.get("offload_optimizer", "none"), places.get("offload_param", "none"), ratio)
    if offload.params != "none" and offload.optimizer == "none":
        raise ZplanError(
            f"`offload_param` of {where} leaves the larger optimizer on the GPU",
            f'add "offload_optimizer": {{"device": "{offload.params}"}}',
        )
    if places:
        found["offload"] = offload if offload.optimizer != "none" else Offload()
    return notes


def _old_offloads(block: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Old keys as the blocks that they are short for, and what there is to say of them."""
    written, notes = dict(block), []
    for old, key in dskeys.OLD_OFFLOADS.items():
        if block.get(old) is None or not want_bool(old, where, block[old]):
            continue
        if block.get(key) is not None:
            raise ZplanError(f"both `{old}` and `{key}` of {where} are given", f"drop `{old}`")
        written[key] = {"device": "cpu"}
        notes.append(f'`{old}` of {where} is the old name of `"{key}": {{"device": "cpu"}}`')
    return written, tuple(notes)


def read_optimizer_block(block: dict[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    kind, params, where, neutral = optimizer_block(block, where)
    notes = screen(params, neutral, dskeys.OPTIMIZER_INERT, where)
    return notes + read_optimizer(kind, params, where, found)


def read_extras(block: dict[str, Any], where: str, found: dict[str, Any]) -> tuple[str, ...]:
    check_keys(block, EXTRAS, where)
    for name, least in _EXTRA_INTS.items():
        if name in block:
            found[name] = want_int(name, where, block[name], least=least)
    words = {
        "checkpointing": Checkpointing,
        "attention": Attention,
        "cross_entropy": CrossEntropy,
        "kernels": Kernels,
        "reduce": Reduce,
        "transport": Transport,
        "saving": Saving,
    }
    for name, kind in words.items():
        if name in block:
            found[name] = want_one_of(name, where, block[name], get_args(kind))
    for name in _EXTRA_FLAGS:
        if name in block:
            found[name] = want_bool(name, where, block[name])
    if "optimizer" in block:
        name_optimizer(block["optimizer"], where, found)
    return ()
