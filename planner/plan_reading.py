"""Strict reading of `plan.json`: every key known and there, every value of its type, the ledger the config's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from zplan.planner.config import Choice, Device
from zplan.planner.dsblocks import EXTRAS
from zplan.planner.dsconfig import TrainingConfig, from_mapping
from zplan.planner.dswriting import FREE
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Kind, Ledger, Line, Source, Tier
from zplan.planner.models import ESTIMATE_ONLY, Adapters, Architecture, Family, ModelSpec
from zplan.planner.plan_file import SCHEMA_VERSION, Plan, version
from zplan.planner.predict import predict
from zplan.planner.reading import (
    check_keys,
    refuse_type,
    want_bool,
    want_int,
    want_list,
    want_number,
    want_object,
    want_one_of,
    want_str,
)
from zplan.planner.sources import build_spec
from zplan.planner.verdict import Decision

_TOP = (
    *("schema_version", "zplan_version", "asked", "estimate_only", "chosen", "model", "hardware", "config", "settings"),
    *("zplan", "ledger", "notes"),
)


def parse_plan(document: Mapping[str, Any], source: str) -> Plan:
    """A plan from its JSON object."""
    where = f"`{source}`"
    if "ledger" not in document and "zero_optimization" in document:
        raise ZplanError(f"{where} is a DeepSpeed config, no plan", f"zplan plan --model NAME --config {source}")
    schema = want_int("schema_version", where, document.get("schema_version"))
    made_by = document.get("zplan_version")
    if schema > SCHEMA_VERSION:
        raise ZplanError(
            f"{where} has schema {schema} (zplan {made_by}), this zplan reads up to {SCHEMA_VERSION}",
            "update zplan, or plan again",
        )
    check_keys(document, _TOP, where)
    for key in _TOP:
        if key not in document:
            raise ZplanError(f"{where} has no `{key}`", "it is not a whole plan: plan again")
    spec, model_source = _read_model(want_object("model", where, document["model"]), f"`model` of {where}")
    hardware = _read_hardware(want_object("hardware", where, document["hardware"]), f"`hardware` of {where}")
    training, choice = _read_config(document, where, source, hardware)
    plan = Plan(
        asked=want_object("asked", where, document["asked"]),
        decisions=tuple(_read_decision(x, where) for x in want_list("chosen", where, document["chosen"])),
        spec=spec,
        source=model_source,
        hardware=hardware,
        choice=choice,
        training=training,
        ledger=_read_ledger(want_object("ledger", where, document["ledger"]), f"`ledger` of {where}"),
        settings=_strings("settings", where, document["settings"]),
        notes=_strings("notes", where, document["notes"]),
        zplan_version=want_str("zplan_version", where, made_by),
    )
    _check_ledger(plan, document["ledger"], where)
    if _strings("estimate_only", where, document["estimate_only"]) != plan.estimate_only:
        raise ZplanError(
            f"`estimate_only` of {where} is not what this zplan can't run of it", f"plan again: {plan.command()}"
        )
    return plan


def _whole(block: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """All known keys and no others."""
    check_keys(block, known, where)
    for key in known:
        if key not in block:
            raise ZplanError(f"{where} has no `{key}`", "it is not a whole plan: plan again")


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _read_model(block: dict[str, Any], where: str) -> tuple[ModelSpec, str]:
    _whole(block, ("name", "source", "num_params", "architecture", "adapters"), where)
    inner = f"`architecture` of {where}"
    values = want_object("architecture", where, block["architecture"])
    _whole(values, tuple(n for n in _names(Architecture) if n not in ESTIMATE_ONLY), inner)
    scaling = want_object("rope_scaling", inner, values["rope_scaling"])
    for key, value in scaling.items():
        if key != "rope_type":
            want_number(key, f"`rope_scaling` of {inner}", value)
    integers = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")
    sizes: dict[str, Any] = {name: want_int(name, inner, values[name]) for name in integers}
    arch = Architecture(
        **sizes,
        family=_one_of("family", inner, values["family"], Family),
        tied=want_bool("tied", inner, values["tied"]),
        norm_eps=want_number("norm_eps", inner, values["norm_eps"]),
        rope_theta=want_number("rope_theta", inner, values["rope_theta"]),
        rope_scaling=tuple(sorted(scaling.items())),
        window=_optional_int("window", inner, values["window"]),
    )
    spec = build_spec(want_str("name", where, block["name"]), arch, where)
    if block["adapters"] is not None:
        spec = _read_adapters(spec, want_object("adapters", where, block["adapters"]), f"`adapters` of {where}")
    if spec.num_params != block["num_params"]:
        raise ZplanError(
            f"{where} says {block['num_params']} parameters, but its architecture has {spec.num_params}",
            "the file was changed by hand: plan again",
        )
    return spec, want_str("source", where, block["source"])


def _read_adapters(spec: ModelSpec, block: dict[str, Any], where: str) -> ModelSpec:
    from zplan.planner.adapters import adapt, linear_modules

    _whole(block, Adapters._fields, where)
    known = linear_modules(spec)
    targets = tuple(want_one_of("targets", where, x, known) for x in want_list("targets", where, block["targets"]))
    adapters = Adapters(
        want_int("rank", where, block["rank"]),
        targets,
        want_bool("embeddings", where, block["embeddings"]),
        want_bool("quantized", where, block["quantized"]),
    )
    return adapt(spec, adapters)


def _one_of(name: str, where: str, value: object, literal: Any) -> Any:
    """One of the strings of a `Literal`."""
    return want_one_of(name, where, value, get_args(literal))


def _strings(name: str, where: str, value: object) -> tuple[str, ...]:
    return tuple(want_str(name, where, x) for x in want_list(name, where, value))


def _optional_int(name: str, where: str, value: object) -> int | None:
    return None if value is None else want_int(name, where, value)


def _read_hardware(block: dict[str, Any], where: str) -> Hardware:
    _whole(block, Hardware._fields, where)
    return Hardware(
        world_size=want_int("world_size", where, block["world_size"]),
        nodes=want_int("nodes", where, block["nodes"]),
        mem_bytes=want_int("mem_bytes", where, block["mem_bytes"]),
        gpu=None if block["gpu"] is None else want_str("gpu", where, block["gpu"]),
        host_mem_bytes=_optional_int("host_mem_bytes", where, block["host_mem_bytes"]),
        nvme_bytes=_optional_int("nvme_bytes", where, block["nvme_bytes"]),
        compute_capability=want_str("compute_capability", where, block["compute_capability"]),
        notes=_strings("notes", where, block["notes"]),
        nvlink=want_bool("nvlink", where, block["nvlink"]),
    )


def _read_config(
    document: Mapping[str, Any], where: str, source: str, hardware: Hardware
) -> tuple[TrainingConfig, Choice]:
    extras = want_object("zplan", where, document["zplan"])
    whole = extras.pop("choice", None)
    _whole(extras, (*EXTRAS, "device"), f"`zplan` of {where}")
    if whole is not None:
        return _read_other(document, extras, want_object("choice", where, whole), where)
    device = _one_of("device", f"`zplan` of {where}", extras.pop("device"), Device)
    config = {**want_object("config", where, document["config"]), "zplan": extras}
    training = from_mapping(config, world_size=hardware.world_size, source=f"config of {source}")
    shared = {n for n in _names(Choice)} & {n for n in _names(TrainingConfig)}
    choice = Choice(**{n: getattr(training, n) for n in shared}, device=device, flash=hardware.flash)
    return _as_asked(training, document, where), choice


def _as_asked(training: TrainingConfig, document: Mapping[str, Any], where: str) -> TrainingConfig:
    """The keys that only DeepSpeed reads were written by zplan itself; they need no note. Nor was anything asked for
    but the settings: where no size to gather ahead was, the file names DeepSpeed's nearest to zplan's one unit.
    """
    given = frozenset(_strings("settings", where, document["settings"])) & frozenset(FREE)
    ahead = training.prefetch_numel if "prefetch_numel" in given else None
    return replace(training, given=given, notes=(), prefetch_numel=ahead)


def _read_other(
    document: Mapping[str, Any], extras: Mapping[str, Any], whole: Mapping[str, Any], where: str
) -> tuple[TrainingConfig, Choice]:
    """A choice of another runtime, which the config alone does not say."""
    from zplan.planner.peer_plan import plain, read_choice

    choice = read_choice(whole, f"`choice` of `zplan` of {where}")
    own = {name: value for name, value in extras.items() if name in EXTRAS}
    config = {**plain(want_object("config", where, document["config"])), "zplan": own}
    training = from_mapping(config, world_size=choice.world_size, source=f"config of {where}")
    shared = {n: getattr(choice, n) for n in set(_names(Choice)) & set(_names(TrainingConfig))}
    return replace(_as_asked(training, document, where), **shared), choice


def _read_decision(value: Any, where: str) -> Decision:
    where = f"`chosen` of {where}"
    block = want_object("chosen", where, value)
    _whole(block, Decision._fields, where)
    return Decision(
        name=want_str("name", where, block["name"]),
        value=block["value"],
        chosen=want_bool("chosen", where, block["chosen"]),
        reason=want_str("reason", where, block["reason"]),
    )


def _read_ledger(block: dict[str, Any], where: str) -> Ledger:
    _whole(block, ("peak_bytes", "peak_phase", "phases", "lines"), where)
    phases = _strings("phases", where, block["phases"])
    lines = [
        _read_line(want_object("lines", where, x), where, len(phases))
        for x in want_list("lines", where, block["lines"])
    ]
    return Ledger(phases, tuple(lines))


def _read_line(block: dict[str, Any], where: str, num_phases: int) -> Line:
    where = f"`lines` of {where}"
    _whole(block, Line._fields, where)
    spans = []
    for span in want_list("spans", where, block["spans"]):
        pair = [want_int("spans", where, x, least=0) for x in want_list("spans", where, span)]
        if len(pair) != 2 or not pair[0] <= pair[1] < num_phases:
            raise refuse_type("spans", where, span, "pairs of phase numbers, first and last")
        spans.append((pair[0], pair[1]))
    return Line(
        id=want_str("id", where, block["id"]),
        nbytes=want_int("nbytes", where, block["nbytes"]),
        spans=tuple(spans),
        kind=_one_of("kind", where, block["kind"], Kind),
        tier=_one_of("tier", where, block["tier"], Tier),
        source=_one_of("source", where, block["source"], Source),
        note=want_str("note", where, block["note"]),
        low=None if block["low"] is None else want_int("low", where, block["low"], least=0),
        high=None if block["high"] is None else want_int("high", where, block["high"], least=0),
    )


def _check_ledger(plan: Plan, block: Mapping[str, Any], where: str) -> None:
    """The ledger must be what this zplan allocates for this config, else the file and the run would disagree."""
    overheads = tuple(x for x in plan.lines if x.kind == "overhead")
    same = predict(plan.spec, plan.choice, overheads=overheads, rank=None) == plan.ledger
    if not same or (block["peak_bytes"], block["peak_phase"]) != (plan.peak_bytes, plan.ledger.peak_phase()):
        why = (
            f"it was made by zplan {plan.zplan_version}"
            if plan.zplan_version != version()
            else "it was changed by hand"
        )
        raise ZplanError(
            f"the ledger of {where} is not the one that its config gives: {why}", f"plan again: {plan.command()}"
        )
