"""The tables of models and GPUs, as `zplan models` and `zplan gpus` print them."""

from __future__ import annotations

from dataclasses import asdict

from zplan.planner.hardware import read_gpus
from zplan.planner.hfconfig import RUNNABLE_TYPES
from zplan.planner.overhead import MEASURED
from zplan.planner.presets import read_index, read_preset
from zplan.planner.report import table
from zplan.planner.units import format_gib
from zplan.planner.writing import render


def list_models(*, as_json: bool) -> str:
    """The model table."""
    found = []
    for row in read_index():
        kind = str((read_preset(row.name) or {}).get("model_type", ""))
        found.append((row, kind, _known(kind)))
    if as_json:
        return render([{**asdict(r), "model_type": kind, "known": known} for r, kind, known in found]) + "\n"
    rows = [
        [r.name, f"{r.num_params:,}", str(r.layers), str(r.hidden), str(r.max_seq or ""), known, kind, r.hf_id]
        for r, kind, known in found
    ]
    head = ["name", "parameters", "layers", "width", "sequence", "known", "type", "hub id"]
    return "\n".join(table(head, rows, "lrrrrlll")) + "\n"


def _known(kind: str) -> str:
    """How far zplan knows a model_type of the table: to plan and train it, or to estimate it."""
    return "plan and run" if kind in RUNNABLE_TYPES else "estimate only"


def list_gpus(*, as_json: bool) -> str:
    """The GPU table."""
    found = read_gpus()
    if as_json:
        return render([{**g._asdict(), "overheads_measured": g.name in MEASURED} for g in found]) + "\n"
    rows = [
        [
            g.name,
            g.vendor,
            format_gib(g.mem_bytes),
            "reported" if g.mem_reported else "label",
            "measured" if g.name in MEASURED else "estimated",
            g.device_name,
        ]
        for g in found
    ]
    return "\n".join(table(["name", "vendor", "GiB", "total is", "overheads", "driver's name"], rows, "llrlll")) + "\n"
