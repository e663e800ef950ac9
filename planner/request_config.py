"""What a config adds to a request, and how it agrees with the flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zplan.planner.config import ZeroSizes
from zplan.planner.errors import ZplanError
from zplan.planner.request_checks import MOST, OPTION

MOST_ELEMENTS = 10**12
"""Largest reduce bucket; configs use absurdly large ones to say: all at once."""

ELEMENTS = ("piece_numel", "persist_numel")
"""Choices that count elements."""


def zero_sizes(config: str | os.PathLike[str] | Mapping[str, Any]) -> ZeroSizes:
    """DeepSpeed's own sizes, as its config says them."""
    from zplan.planner.peer_plan import read_sizes
    from zplan.planner.relaxed import read_config

    if isinstance(config, Mapping):
        return read_sizes(config, "config")
    return read_sizes(read_config(config)[0], os.path.basename(os.fspath(config)))


def still_true(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Without the notes on keys that change nothing in zplan's runtime and are counted for DeepSpeed."""
    from zplan.planner.peer_plan import counted_here

    return tuple(note for note in notes if not counted_here(note))


_CONFIG_NAMES = {"train_batch_size": "global_batch"}


def merge_config(
    config: str | os.PathLike[str] | Mapping[str, Any], fixed: dict[str, Any], fixed_by: dict[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add to `fixed` what a config names; return its other settings and notes. Flags and config must agree."""
    from zplan.planner.dsconfig import read_settings
    from zplan.planner.relaxed import read_config

    source = "config" if isinstance(config, Mapping) else os.path.basename(os.fspath(config))
    mapping, loose = (config, ()) if isinstance(config, Mapping) else read_config(config)
    found, notes = read_settings(mapping, source=source, runtime=fixed.get("runtime", "zplan"))
    notes = (*loose, *notes)
    batch = {"train_batch_size", "micro_batch", "accumulation"}
    if batch & set(found) == {"train_batch_size"} and not {"micro_batch", "accumulation"} & set(fixed):
        found["accumulation"] = 1  # DeepSpeed's rule for the train batch alone.
        notes += (f"`{source}` gives `train_batch_size` alone: one micro-step, as in DeepSpeed",)
    settings = {}
    for name, value in found.items():
        own = _CONFIG_NAMES.get(name, name)
        if own not in OPTION:
            settings[name] = value
        elif isinstance(value, int) and value > (MOST_ELEMENTS if own in ELEMENTS else MOST):
            raise ZplanError(f"`{source}` asks for {value:,} as {own.replace('_', '-')}", "check that number")
        elif own in fixed and fixed[own] != value:
            raise ZplanError(f"`{OPTION[own]} {fixed[own]}` and `{source}` ({value}) disagree", "drop one of the two")
        elif own not in fixed:
            fixed[own], fixed_by[own] = value, f"`{source}`"
    return settings, notes
