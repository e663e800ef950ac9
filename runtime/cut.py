"""Decides how a model is trained under a config, before anything is allocated: choice, optimizer, units, placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from zplan.planner.config import Choice
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.placement import Placement, place_units, shards_states
from zplan.runtime.choices import choice_of
from zplan.runtime.detect import Found, find_units
from zplan.runtime.groups import Asked, Parameters, Wanted, read_optimizer
from zplan.runtime.mesh import Mesh
from zplan.runtime.weights import WeightFolder


@dataclass(frozen=True)
class Cut:
    """A model cut into units. `placements` has one for each segment of what was found, in order."""

    mesh: Mesh
    """With as many groups as the choice has communicators."""
    choice: Choice
    optimizer: Wanted
    found: list[Found]
    placements: list[Placement]


def cut_up(
    model: nn.Module,
    training: TrainingConfig,
    mesh: Mesh,
    *,
    units: Sequence[str] | None,
    resident: Sequence[str],
    optimizer: Asked,
    parameters: Parameters | None,
    weights: WeightFolder | None,
) -> Cut:
    """See `initialize` for what is asked. Every rank must call it; a folder's buffers are in the model afterwards."""
    choice = choice_of(training, mesh)
    if choice.communicators == 1:
        mesh = mesh.with_one_group()
    if weights is not None:
        weights.bind(model)
        weights.fill_buffers(model, mesh.device)
    wanted = read_optimizer(model, training, optimizer, parameters, sharded=shards_states(choice))
    choice = replace(choice, optimizer=wanted.name)
    found = find_units(model, units=units, resident=resident, groups=wanted.group_of)
    if not any(f.params for f in found):
        raise ZplanError("the model has no parameters to train", "pass an nn.Module with some that require gradients")
    blocks = [sum(u.numel for u, _ in f.segments()) for f in found if f.unit.kind == "block"]
    choice = replace(choice, ring_slots=training.slots(blocks))
    read_elsewhere = frozenset(name for f in found for name in f.reads)
    placements = place_units([unit for f in found for unit, _ in f.segments()], choice, tied=read_elsewhere)
    return Cut(mesh, choice, wanted, found, list(placements))
