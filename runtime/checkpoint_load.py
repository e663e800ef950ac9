"""What one rank does to load: compare models, and stream ranges into final buffers.

The peak beside the states is one range on the host: nothing is read that is not kept, and nothing is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.runtime.checkpoint_format import Manifest, Parameter
from zplan.runtime.checkpoint_ranges import NAMES, extents, state_tensor, states_of
from zplan.runtime.checkpoint_read import Checkpoint, Values
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def parameters_of(engine: Engine) -> tuple[Parameter, ...]:
    """Every unique parameter, in unit order."""
    return tuple(
        Parameter(p.name, tuple(p.shape), u.placement.frozen, tuple(u.states))
        for u in engine.units
        for p in u.placement.unit.params
    )


def check_model(mine: tuple[Parameter, ...], manifest: Manifest, *, weights_only: bool = False) -> None:
    """Refuse a checkpoint of another model, or whose moments are another optimizer's, naming what differs."""
    want, have = ({p.name: p for p in side} for side in (mine, manifest.parameters))
    wrong = [f"`{n}` is missing" for n in want if n not in have]
    wrong += [f"`{n}` is not in this model" for n in have if n not in want]
    both = [n for n in want if n in have]
    wrong += [
        f"`{n}` is {have[n].shape} there and {want[n].shape} here" for n in both if want[n].shape != have[n].shape
    ]
    wrong += [
        f"`{n}` is {_word(have[n])} there and {_word(want[n])} here" for n in both if want[n].frozen != have[n].frozen
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ZplanError(
            f"checkpoint `{manifest.tag}` is of another model: {', '.join(wrong[:3])}{more}",
            "build the model that was saved, with the same parameters frozen, or load another checkpoint",
        )
    for n in () if weights_only else both:
        if set(want[n].moments) != set(have[n].moments):
            raise ZplanError(
                f"checkpoint `{manifest.tag}` is of another optimizer: of `{n}` it has {_names(have[n])}, and this one "
                f"keeps {_names(want[n])}",
                "configure the optimizer that was saved, or load with `weights_only=True` and begin its states anew",
            )


def _names(p: Parameter) -> str:
    return ", ".join(f"`{m}`" for m in p.moments) or "no moments"


def _word(p: Parameter) -> str:
    return "frozen" if p.frozen else "trained"


@torch.no_grad()
def load_unit(unit: FlatUnit, checkpoint: Checkpoint, engine: Engine, *, weights_only: bool) -> None:
    """Stream a unit's states into its buffers, and write what it keeps in the compute dtype."""
    sharded = shards_states(engine.choice)
    # What is frozen and resident is whole on every rank, whatever the stage.
    everything = unit.shard is None if unit.placement.frozen else not sharded
    states = states_of(unit)
    for state in states[:1] if weights_only else states:
        tensor = state_tensor(unit, state)
        for extent in extents(unit, state, tensor, everything=everything):
            r = extent.range
            dtype = checkpoint.dtype(state, r.name)
            if DTYPES[dtype].is_floating_point != tensor.dtype.is_floating_point:
                raise ZplanError(
                    f"`{r.name}` was saved as {dtype} and is {r.dtype} here", "build the model that was saved"
                )
            for at, values in checkpoint.read(state, r.name, r.start, r.end):
                start = extent.at + at - r.start
                tensor[start : start + values.size].copy_(as_tensor(values, dtype))
    write_compute_copy(unit, sharded=sharded)


def write_compute_copy(unit: FlatUnit, *, sharded: bool) -> None:
    """Write what a resident unit keeps in the compute dtype from its masters: this rank's slices, where sharded."""
    if unit.flat is None or unit.master is None:  # halves are their own copy
        return
    if not sharded:
        unit.flat.copy_(unit.master)
        return
    for piece in unit.layout.pieces:
        unit.own(unit.flat, piece).copy_(unit.shard_of(unit.master, piece))


def as_tensor(values: Values, dtype: str) -> Tensor:
    """A tensor over values as `Checkpoint.read` gives them."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor
