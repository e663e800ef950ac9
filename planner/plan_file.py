"""`plan.json`: what was asked, what was chosen and why, the config, and the ledger. Written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zplan.planner.config import Choice
from zplan.planner.dsblocks import EXTRAS
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.dsoptimizer import in_deepspeed
from zplan.planner.dswriting import to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Ledger, Line
from zplan.planner.models import ModelSpec, adapter_values, architecture_values
from zplan.planner.reading import read_json
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
            object.__setattr__(self, "zplan_version", version())

    @property
    def fits(self) -> bool:
        """Whether the upper end of the peak's interval does."""
        return self.ledger.interval()[1] <= self.hardware.mem_bytes

    @property
    def peak_bytes(self) -> int:
        """Of one GPU, overheads included."""
        return self.ledger.peak_bytes()

    @property
    def estimate_only(self) -> tuple[str, ...]:
        """What `zplan run` refuses of it, and why; empty for a plan that it runs."""
        from zplan.planner.runnable import limits

        return tuple(limit.told() for limit in limits(self.choice, self.spec))

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.ledger.lines

    def ds_config(self) -> dict[str, Any]:
        """The config in DeepSpeed's schema, every value explicit."""
        blocks = [u.numel for u in self.spec.units if u.kind == "block"]
        config = to_mapping(self.training, largest_block_numel=max(blocks, default=self.spec.num_params))
        if self.choice.runtime != "deepspeed":
            return config
        from zplan.planner.peer_plan import deepspeed_config

        return deepspeed_config(config, self.choice)

    def to_json(self) -> str:
        """The text of `plan.json`; `parse_plan` reads it back."""
        return render(_document(self)) + "\n"

    def command(self, **changes: Any) -> str:
        """The `zplan plan` command that asks for the same with some arguments changed; None drops one."""
        import shlex

        from zplan.planner.request import flag_of

        words = ["zplan", "plan"]
        for name, value in {**self.asked, **changes}.items():
            if value is None or isinstance(value, Mapping):
                continue
            words.append(flag_of(name))
            words += [] if value is True else [str(value)]
        return shlex.join(words)


def version() -> str:
    """The version of this zplan."""
    from zplan import __version__

    return __version__


def _document(plan: Plan) -> dict[str, Any]:
    assert plan.spec.arch is not None
    c = plan.choice
    return {
        "schema_version": SCHEMA_VERSION,
        "zplan_version": plan.zplan_version,
        "asked": dict(plan.asked),
        "estimate_only": list(plan.estimate_only),
        "chosen": [d._asdict() for d in plan.decisions],
        "model": {
            "name": plan.spec.name,
            "source": plan.source,
            "num_params": plan.spec.num_params,
            "architecture": architecture_values(plan.spec.arch),
            "adapters": adapter_values(plan.spec.adapters),
        },
        "hardware": {**plan.hardware._asdict(), "notes": list(plan.hardware.notes)},
        "config": plan.ds_config(),
        "settings": list(plan.settings),
        "zplan": {**{name: getattr(c, name) for name in EXTRAS}, "device": c.device, **_whole_choice(c)},
        "ledger": {
            "peak_bytes": plan.peak_bytes,
            "peak_phase": plan.ledger.peak_phase(),
            "phases": list(plan.ledger.phases),
            "lines": [{**x._asdict(), "spans": [list(s) for s in x.spans]} for x in plan.ledger.lines],
        },
        "notes": list(plan.notes),
    }


def _whole_choice(choice: Choice) -> dict[str, Any]:
    """What the config does not say of a choice of another runtime."""
    if choice.runtime == "zplan":
        return {}
    from zplan.planner.peer_plan import choice_json

    return {"choice": choice_json(choice)}


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the plan, and beside it a `ds_config.json` that DeepSpeed loads as it is. Both or neither.

    Beside a plan of another name than `plan.json` it is called `NAME.ds_config.json`, so that plans can share a folder.

    Returns
    -------
    tuple
        The two paths; one for a runtime that reads no such config, or an optimizer that DeepSpeed does not have.

    Raises
    ------
    ZplanError
        When a file can't be written, or a `ds_config.json` is there that zplan did not write.
    """
    name = os.fspath(path)
    stem = os.path.splitext(os.path.basename(name))[0]
    beside = os.path.join(os.path.dirname(name), "ds_config.json" if stem == "plan" else f"{stem}.ds_config.json")
    if name.endswith("ds_config.json"):
        raise ZplanError("`ds_config.json` is the name of the DeepSpeed config beside the plan", "use -o plan.json")
    if plan.choice.runtime in ("fsdp2", "ddp") or not in_deepspeed(plan.choice.optimizer):
        stale = os.path.exists(beside) and _is_ours(name, beside)
        write_files({name: plan.to_json()})
        if stale:
            os.remove(beside)  # Of the plan that was here before: beside this one it would say something else.
        return (name,)
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


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; its ledger must be the one that its config and model give."""
    from zplan.planner.plan_reading import parse_plan

    return parse_plan(read_json(path), os.fspath(path))


def load_config(path: str | os.PathLike[str]) -> Plan | dict[str, Any]:
    """A plan, or a DeepSpeed config as it stands: what the file holds."""
    from zplan.planner.plan_reading import parse_plan
    from zplan.planner.relaxed import read_config

    document, loose = read_config(path)
    if "schema_version" in document or "ledger" in document:
        # A plan was written by zplan, so anything but JSON is damage.
        return parse_plan(read_json(path) if loose else document, os.fspath(path))
    return document
