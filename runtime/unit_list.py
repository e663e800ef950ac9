"""What `zplan trace --units` prints: the units of a model, their sizes, and where stage 3 would keep them.

The model is built on the meta device, so one of any size is listed in seconds and without memory.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.placement import place_units
from zplan.planner.units import format_bytes, format_count
from zplan.runtime.detect import find_units


@dataclass(frozen=True)
class UnitRow:
    """One unit. Sizes in elements and bytes (bf16, alignment and padding included)."""

    name: str
    module: str
    """Class of its module."""
    tensors: int
    numel: int
    nbytes: int
    frozen: bool
    where: str
    """At stage 3: `ring` or `resident`."""
    reads: tuple[str, ...]
    """Units that own parameters which this one uses too."""


def list_units(
    model: nn.Module, *, world_size: int, units: Sequence[str] | None = None, resident: Sequence[str] = ()
) -> list[UnitRow]:
    """Units as `zplan.initialize(model=model, units=units, resident=resident)` would cut them at stage 3 in bf16."""
    found = find_units(model, units=units, resident=resident)
    choice = Choice(stage=3, world_size=world_size)
    tied = frozenset(name for f in found for name in f.reads)
    placed = {p.unit.name: p for p in place_units([u for f in found for u, _ in f.segments()], choice, tied=tied)}
    rows = []
    for f in found:
        kind, reads = type(f.module).__name__, tuple(f.reads)
        for unit, params in f.segments():
            p = placed[unit.name]
            where = "ring" if p.ringed else "resident"
            nbytes = p.buffer_bytes(choice)
            rows.append(UnitRow(unit.name, kind, len(params), unit.numel, nbytes, unit.frozen, where, reads))
        if not f.params and not f.frozen:
            rows.append(UnitRow(f.unit.name, kind, 0, 0, 0, frozen=False, where="resident", reads=reads))
    return rows


def as_text(rows: Sequence[UnitRow], world_size: int) -> str:
    """The rows as a table, with runs of equal blocks folded into one line."""
    named = [
        (first.name if count == 1 else f"{first.name} ... {last.name}", first, count)
        for first, last, count in _folded(rows)
    ]
    wide = max(36, *(len(name) for name, _, _ in named))
    lines = [f"{'unit':<{wide}} {'module':<24} {'tensors':>7} {'parameters':>13} {'bf16':>10}  stage 3"]
    for name, first, count in named:
        notes = [first.where, *(["frozen"] if first.frozen else []), *(f"reads {n}" for n in first.reads)]
        if count > 1:
            notes.insert(0, f"{count} x")
        lines.append(
            f"{name:<{wide}} {first.module:<24} {first.tensors:>7} {format_count(first.numel):>13} "
            f"{format_bytes(first.nbytes):>10}  {' '.join(notes)}"
        )
    total = sum(r.numel for r in rows)
    frozen = sum(r.numel for r in rows if r.frozen)
    lines.append(
        f"{len(rows)} units, {format_count(total)} parameters, {format_count(frozen)} of them frozen, "
        f"on {world_size} GPUs"
    )
    return "\n".join(lines) + "\n"


def _folded(rows: Sequence[UnitRow]) -> list[tuple[UnitRow, UnitRow, int]]:
    """(first, last, count) of runs whose rows differ in name only."""
    runs: list[tuple[UnitRow, UnitRow, int]] = []
    for row in rows:
        same = runs and {**asdict(runs[-1][0]), "name": ""} == {**asdict(row), "name": ""} and row.where == "ring"
        if same:
            first, _, count = runs[-1]
            runs[-1] = (first, row, count + 1)
        else:
            runs.append((row, row, 1))
    return runs


def as_json(rows: Sequence[UnitRow]) -> str:
    return json.dumps([asdict(r) for r in rows], indent=2) + "\n"


def load_model(source: str) -> nn.Module:
    """A model on the meta device.

    Parameters
    ----------
    source
        `package.module:function` (a function without arguments that returns an `nn.Module`), or a transformers
        `config.json` or the folder that holds one.
    """
    with torch.device("meta"):
        if ":" in source and not Path(source).exists():
            return _from_function(source)
        return _from_config(Path(source))


def _from_function(source: str) -> nn.Module:
    module_name, _, attribute = source.partition(":")
    sys.path.insert(0, "")
    try:
        build = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ZplanError(f"`{source}` can't be imported: {error}", "give it as package.module:function") from None
    finally:
        sys.path.remove("")
    model = build()
    if not isinstance(model, nn.Module):
        raise ZplanError(f"`{source}` returned a {type(model).__name__}", "it must return an nn.Module")
    return model


def _from_config(path: Path) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ZplanError(f"no `config.json` at `{path}`", "give a folder, a config.json, or package.module:function")
    try:
        import transformers
    except ImportError:
        raise ZplanError("reading a config.json needs transformers", "pip install 'zplan[hf]'") from None
    config = transformers.AutoConfig.from_pretrained(str(file.parent if file.name == "config.json" else file))
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        return transformers.AutoModelForCausalLM.from_config(config)
    return kind(config)
