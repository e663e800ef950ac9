"""`plan.json`: what was asked, what was chosen and why, the config, and the ledger. Written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from zplan.planner.config import Choice, Device
from zplan.planner.dsconfig import EXTRAS, TrainingConfig, from_mapping, to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Kind, Ledger, Line, Source, Tier
from zplan.planner.models import Architecture, Family, ModelSpec, decoder_units
from zplan.planner.reading import (
    check_keys,
    read_json,
    refuse_type,
    want_bool,
    want_int,
    want_list,
    want_number,
    want_object,
    want_one_of,
    want_str,
)
from zplan.planner.verdict import Decision
from zplan.planner.writing import render, write_files

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """A choice that fits, and everything that led to it. What `zplan run` and `zplan.initialize` take."""

    asked: Mapping[str, Any]
    """Arguments as given; JSON values."""
    decisions: tuple[Decision, ...]
    spec: ModelSpec
    source: str
    """Where the model came from, in words."""
    hardware: Hardware
    choice: Choice
    training: TrainingConfig
    ledger: Ledger
    """Of one rank, overheads included."""
    settings: tuple[str, ...] = ()
    """Names of the values in `training` that were asked for and decide no bytes, such as `lr`."""
    notes: tuple[str, ...] = ()
    zplan_version: str = ""
    """Empty for this version."""

    def __post_init__(self) -> None:
        if not self.zplan_version:
            object.__setattr__(self, "zplan_version", _version())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.hardware.mem_bytes

    @property
    def peak_bytes(self) -> int:
        """Of one GPU, overheads included."""
        return self.ledger.peak_bytes()

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.ledger.lines

    def ds_config(self) -> dict[str, Any]:
        """The config in DeepSpeed's schema, every value explicit."""
        blocks = [u.numel for u in self.spec.units if u.kind == "block"]
        return to_mapping(self.training, largest_block_numel=max(blocks, default=self.spec.num_params))

    def to_json(self) -> str:
        """The text of `plan.json`; `parse_plan` reads it back."""
        return render(_document(self)) + "\n"

    def command(self, **changes: Any) -> str:
        """The `zplan plan` command that asks for the same with some arguments changed; None drops one."""
        import shlex

        words = ["zplan", "plan"]
        for name, value in {**self.asked, **changes}.items():
            if value is None or isinstance(value, Mapping):
                continue
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
        return shlex.join(words)


def _version() -> str:
    from zplan import __version__

    return __version__


# --- writing ----------------------------------------------------------------------------------------------------------


def _document(plan: Plan) -> dict[str, Any]:
    assert plan.spec.arch is not None
    c = plan.choice
    return {
        "schema_version": SCHEMA_VERSION,
        "zplan_version": plan.zplan_version,
        "asked": dict(plan.asked),
        "chosen": [asdict(d) for d in plan.decisions],
        "model": {
            "name": plan.spec.name,
            "source": plan.source,
            "num_params": plan.spec.num_params,
            "architecture": {**asdict(plan.spec.arch), "rope_scaling": dict(plan.spec.arch.rope_scaling)},
        },
        "hardware": {**asdict(plan.hardware), "notes": list(plan.hardware.notes)},
        "config": plan.ds_config(),
        "settings": list(plan.settings),
        "zplan": {**{name: getattr(c, name) for name in EXTRAS}, "device": c.device},
        "ledger": {
            "peak_bytes": plan.peak_bytes,
            "peak_phase": plan.ledger.peak_phase(),
            "phases": list(plan.ledger.phases),
            "lines": [{**asdict(x), "spans": [list(s) for s in x.spans]} for x in plan.ledger.lines],
        },
        "notes": list(plan.notes),
    }


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> tuple[str, str]:
    """Write the plan, and beside it a `ds_config.json` that DeepSpeed loads as it is. Both or neither.

    Returns
    -------
    tuple
        The two paths.

    Raises
    ------
    ZplanError
        When a file can't be written, or a `ds_config.json` is there that zplan did not write.
    """
    name = os.fspath(path)
    beside = os.path.join(os.path.dirname(name), "ds_config.json")
    if os.path.abspath(name) == os.path.abspath(beside):
        raise ZplanError("`ds_config.json` is the name of the DeepSpeed config beside the plan", "use -o plan.json")
    if os.path.exists(beside) and not _is_ours(name, beside):
        raise ZplanError(
            f"`{beside}` is there already and does not belong to `{name}`",
            "move it away, or write the plan into a folder of its own",
        )
    write_files({name: plan.to_json(), beside: render(plan.ds_config()) + "\n"})
    return name, beside


def _is_ours(plan_path: str, config_path: str) -> bool:
    """Whether a DeepSpeed config is the one that an earlier plan of this name came with."""
    try:
        return bool(read_json(plan_path).get("config") == read_json(config_path))
    except ZplanError:
        return False


# --- reading ----------------------------------------------------------------------------------------------------------

_TOP = (
    *("schema_version", "zplan_version", "asked", "chosen", "model", "hardware", "config", "settings"),
    *("zplan", "ledger", "notes"),
)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; its ledger must be the one that its config and model give."""
    return parse_plan(read_json(path), os.fspath(path))


def load_config(path: str | os.PathLike[str]) -> Plan | dict[str, Any]:
    """A plan, or a DeepSpeed config as it stands: what the file holds."""
    document = read_json(path)
    if "schema_version" in document or "ledger" in document:
        return parse_plan(document, os.fspath(path))
    return document


def parse_plan(document: Mapping[str, Any], source: str) -> Plan:
    """A plan from its JSON object."""
    where = f"`{source}`"
    version = want_int("schema_version", where, document.get("schema_version"))
    made_by = document.get("zplan_version")
    if version > SCHEMA_VERSION:
        raise ZplanError(
            f"{where} has schema {version} (zplan {made_by}), this zplan reads up to {SCHEMA_VERSION}",
            "update zplan, or plan again",
        )
    check_keys(document, _TOP, where)
    for key in _TOP:
        if key not in document:
            raise ZplanError(f"{where} has no `{key}`", "it is not a whole plan: plan again")
    spec, model_source = _read_model(want_object("model", where, document["model"]), f"`model` of {where}")
    hardware = _read_hardware(want_object("hardware", where, document["hardware"]), f"`hardware` of {where}")
    training, choice = _read_config(document, where, source, hardware.world_size)
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
    _whole(block, ("name", "source", "num_params", "architecture"), where)
    inner = f"`architecture` of {where}"
    values = want_object("architecture", where, block["architecture"])
    _whole(values, _names(Architecture), inner)
    scaling = want_object("rope_scaling", inner, values["rope_scaling"])
    for key, value in scaling.items():
        if key != "rope_type":
            want_number(key, f"`rope_scaling` of {inner}", value)
    integers = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")
    arch = Architecture(
        **{name: want_int(name, inner, values[name]) for name in integers},
        family=_one_of("family", inner, values["family"], Family),
        tied=want_bool("tied", inner, values["tied"]),
        norm_eps=want_number("norm_eps", inner, values["norm_eps"]),
        rope_theta=want_number("rope_theta", inner, values["rope_theta"]),
        rope_scaling=tuple(sorted(scaling.items())),
        window=_optional_int("window", inner, values["window"]),
    )
    spec = ModelSpec(want_str("name", where, block["name"]), decoder_units(arch), arch)
    if spec.num_params != block["num_params"]:
        raise ZplanError(
            f"{where} says {block['num_params']} parameters, but its architecture has {spec.num_params}",
            "the file was changed by hand: plan again",
        )
    return spec, want_str("source", where, block["source"])


def _one_of(name: str, where: str, value: object, literal: Any) -> Any:
    """One of the strings of a `Literal`."""
    return want_one_of(name, where, value, get_args(literal))


def _strings(name: str, where: str, value: object) -> tuple[str, ...]:
    return tuple(want_str(name, where, x) for x in want_list(name, where, value))


def _optional_int(name: str, where: str, value: object) -> int | None:
    return None if value is None else want_int(name, where, value)


def _read_hardware(block: dict[str, Any], where: str) -> Hardware:
    _whole(block, _names(Hardware), where)
    return Hardware(
        world_size=want_int("world_size", where, block["world_size"]),
        nodes=want_int("nodes", where, block["nodes"]),
        mem_bytes=want_int("mem_bytes", where, block["mem_bytes"]),
        gpu=None if block["gpu"] is None else want_str("gpu", where, block["gpu"]),
        host_mem_bytes=_optional_int("host_mem_bytes", where, block["host_mem_bytes"]),
        compute_capability=want_str("compute_capability", where, block["compute_capability"]),
        notes=_strings("notes", where, block["notes"]),
    )


def _read_config(
    document: Mapping[str, Any], where: str, source: str, world_size: int
) -> tuple[TrainingConfig, Choice]:
    extras = want_object("zplan", where, document["zplan"])
    _whole(extras, (*EXTRAS, "device"), f"`zplan` of {where}")
    device = _one_of("device", f"`zplan` of {where}", extras.pop("device"), Device)
    config = {**want_object("config", where, document["config"]), "zplan": extras}
    training = from_mapping(config, world_size=world_size, source=f"config of {source}")
    shared = {n for n in _names(Choice)} & {n for n in _names(TrainingConfig)}
    choice = Choice(**{n: getattr(training, n) for n in shared}, device=device)
    # The keys that only DeepSpeed reads were written by zplan itself; they need no note.
    return replace(training, given=frozenset(), notes=()), choice


def _read_decision(value: Any, where: str) -> Decision:
    where = f"`chosen` of {where}"
    block = want_object("chosen", where, value)
    _whole(block, _names(Decision), where)
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
    _whole(block, _names(Line), where)
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
    )


def _check_ledger(plan: Plan, block: Mapping[str, Any], where: str) -> None:
    """The ledger must be what this zplan allocates for this config, else the file and the run would disagree."""
    from zplan.planner.predict import predict

    overheads = tuple(x for x in plan.lines if x.kind == "overhead")
    same = predict(plan.spec, plan.choice, overheads=overheads) == plan.ledger
    if not same or (block["peak_bytes"], block["peak_phase"]) != (plan.peak_bytes, plan.ledger.peak_phase()):
        why = (
            f"it was made by zplan {plan.zplan_version}"
            if plan.zplan_version != _version()
            else "it was changed by hand"
        )
        raise ZplanError(
            f"the ledger of {where} is not the one that its config gives: {why}", f"plan again: {plan.command()}"
        )
