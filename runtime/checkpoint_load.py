"""What one rank does to load: compare models, and stream ranges into final buffers.

The peak beside the states is one range on the host: nothing is read that is not kept, and nothing is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_format import STATES, Manifest
from zplan.runtime.checkpoint_ranges import extents, state_tensor
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine


def parameters_of(engine: Engine) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of every unique parameter, in unit order."""
    return tuple((p.name, p.shape) for u in engine.units for p in u.placement.unit.params)


def check_model(mine: tuple[tuple[str, tuple[int, ...]], ...], manifest: Manifest) -> None:
    """Refuse a checkpoint of another model, naming what differs."""
    want, have = dict(mine), dict(manifest.parameters)
    wrong = [f"`{n}` is missing" for n in want if n not in have]
    wrong += [f"`{n}` is not in this model" for n in have if n not in want]
    wrong += [f"`{n}` is {have[n]} there and {want[n]} here" for n in want if n in have and want[n] != have[n]]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ZplanError(
            f"checkpoint `{manifest.tag}` is of another model: {', '.join(wrong[:3])}{more}",
            "build the model that was saved, or load another checkpoint",
        )


@torch.no_grad()
def load_unit(unit: FlatUnit, checkpoint: Checkpoint, *, everything: bool, weights_only: bool) -> None:
    """Stream a unit's states into its buffers, and write what it keeps in the compute dtype."""
    for state in ("weight",) if weights_only else STATES:
        tensor = state_tensor(unit, state)
        for extent in extents(unit, state, everything=everything):
            r = extent.range
            for at, values in checkpoint.read(state, r.name, r.start, r.end):
                start = extent.at + at - r.start
                tensor[start : start + values.size].copy_(torch.from_numpy(values))
    if unit.flat is not None and unit.master is not None:
        if everything:
            unit.flat.copy_(unit.master)
        else:
            for piece in unit.layout.pieces:
                unit.own(unit.flat, piece).copy_(unit.shard_of(unit.master, piece))
