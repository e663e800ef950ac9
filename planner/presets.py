"""Our own table of models: one JSON of config keys each, read when asked for, and an index of exact counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.reading import parse_json, read_text

MODELS = os.path.join(os.path.dirname(__file__), "data", "models")


@dataclass(frozen=True)
class Preset:
    """One row of the index."""

    name: str
    hf_id: str
    num_params: int
    """Unique parameters, exact."""
    num_active: int | None
    """Parameters that one token passes, of a mixture of experts."""
    layers: int
    hidden: int
    max_seq: int | None


def preset_names() -> list[str]:
    """All names, sorted."""
    return sorted(f[:-5] for f in os.listdir(MODELS) if f.endswith(".json"))


def read_preset(name: str) -> dict[str, Any] | None:
    """Config keys of the model of that name (in any case), or None."""
    path = os.path.join(MODELS, f"{name.lower()}.json")
    if os.path.basename(path) != f"{name.lower()}.json" or not os.path.isfile(path):
        return None
    return parse_json(read_text(path), name)


def read_index() -> list[Preset]:
    """Every row of the index."""
    import csv

    with open(os.path.join(MODELS, "index.csv"), encoding="utf-8", newline="") as f:
        return [
            Preset(
                name=row["name"],
                hf_id=row["hf_id"],
                num_params=int(row["params_total_exact"]),
                num_active=int(row["params_active"]) if row["params_active"] else None,
                layers=int(row["layers"]),
                hidden=int(row["hidden"]),
                max_seq=int(row["max_seq"]) if row["max_seq"] else None,
            )
            for row in csv.DictReader(f)
        ]


def preset_of_hub_id(hub_id: str) -> str | None:
    """Name of the model that the hub knows as `org/name`, or None."""
    return next((row.name for row in read_index() if row.hf_id.lower() == hub_id.lower()), None)


def unknown_model(name: str) -> ZplanError:
    near = did_you_mean(name.lower(), preset_names())
    return ZplanError(
        f"unknown model `{name}`",
        near
        or "give a name that `zplan models` lists, a folder, a config.json, a hub id such as org/name, or --params 7e9",
    )
