"""Where a model comes from: our table, a folder, a config.json, the hub, or a count alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.units import format_count

MOST = {"layers": 10_000, "hidden": 10**7, "heads": 10**6, "head_dim": 10**6, "ffn": 10**8, "vocab": 10**8}
MOST_PARAMS = 10**13
"""Beyond any model there is; a typing error larger than this would only keep the machine busy."""


class Model(NamedTuple):
    """A model and what is known about it."""

    spec: ModelSpec
    source: str
    """In words."""
    assumed: bool = False
    """The shape was solved for from a count alone."""
    stated_params: int | None = None
    """The count that was given, where the shape was solved for it."""
    notes: tuple[str, ...] = ()
    base_params: int = 0
    """Parameters of the model itself, without adapters, where it has some; else 0."""

    @property
    def arch(self) -> Architecture:
        assert self.spec.arch is not None
        return self.spec.arch

    @property
    def num_params(self) -> int:
        """The model's own count, adapters apart: the given one, else the shape's."""
        return self.stated_params or self.shape_params

    @property
    def shape_params(self) -> int:
        """What the shape itself has."""
        return self.base_params or self.spec.num_params

    @property
    def reckoned_params(self) -> int:
        """The count to reckon with in textbook rows: what is trained."""
        return self.spec.num_trained if self.spec.adapters else self.num_params

    @property
    def missing_params(self) -> int:
        """Parameters of the given count that the assumed shape does not have."""
        return self.num_params - self.shape_params

    def frozen_bytes(self, itemsize: int) -> int:
        """Of the base that adapters stand beside, whole; 0 where everything is trained."""
        if self.spec.adapters is None:
            return 0
        from zplan.planner.adapters import frozen_bytes

        return frozen_bytes(self.spec, itemsize) + self.missing_params * itemsize


def model_from(name: str | None, params: int | None, *, offline: bool = False) -> Model:
    """The model that was asked for.

    Parameters
    ----------
    name
        A name of our table, a folder with a `config.json`, that file itself, or a hub id `org/name`.
    params
        A parameter count alone. Exactly one of the two must be given.
    offline
        Never touch the network.
    """
    if (name is None) == (params is None):
        what = "both --model and --params are" if name is not None else "neither --model nor --params is"
        raise ZplanError(f"{what} given", "give one: --model llama-2-7b, or --params 7e9")
    if params is not None:
        return _assumed(params)
    assert name is not None
    return _named(name, offline=offline)


def _assumed(params: int) -> Model:
    from zplan.planner.shape import solve_shape

    arch = solve_shape(params)
    spec = ModelSpec(f"llama-like-{format_count(params).replace(',', '').lower()}", decoder_units(arch), arch)
    return Model(spec, "shape assumed for the count", assumed=True, stated_params=params)


def _named(name: str, *, offline: bool) -> Model:
    from zplan.planner.presets import read_preset, unknown_model

    if not name.strip():
        raise ZplanError("--model is empty", "give a name such as llama-2-7b")
    config = read_preset(name)
    if config is not None:
        hidden = (f"`{name}` is also a file or folder here; write `./{name}` for it",) if os.path.exists(name) else ()
        return _from_config(name.lower(), config, "zplan's table", hidden)
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return _from_path(name, path)
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise ZplanError(f"`{name}` does not exist", "check the path")
    if "/" in name:
        return _from_hub(name, offline=offline)
    raise unknown_model(name)


def _from_path(name: str, path: str) -> Model:
    from zplan.planner.reading import read_json

    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise ZplanError(f"folder `{name}` has no config.json", "give the folder of a model, or its config.json")
    folder = os.path.basename(os.path.dirname(os.path.abspath(file)))
    return _from_config(folder or "model", read_json(file), file, label=file)


def _from_hub(name: str, *, offline: bool) -> Model:
    from zplan.planner.hub import hub_config, is_hub_id
    from zplan.planner.presets import preset_of_hub_id, read_preset

    preset = preset_of_hub_id(name)
    config = read_preset(preset) if preset else None
    if preset and config is not None:
        return _from_config(preset, config, f"zplan's table, as {name}")
    if not is_hub_id(name):
        raise ZplanError(f"`{name}` is no hub id", "a hub id reads org/name")
    config, source = hub_config(name, offline=offline)
    return _from_config(name, config, source)


def _from_config(
    name: str, config: Mapping[str, Any], source: str, notes: tuple[str, ...] = (), *, label: str | None = None
) -> Model:
    """`label` is what the config is called in errors."""
    from zplan.planner.hfconfig import read_architecture

    arch, left_out = read_architecture(config, label or name)
    return Model(build_spec(name, arch, f"`{label or name}`"), source, notes=(*notes, *left_out))


def build_spec(name: str, arch: Architecture, where: str) -> ModelSpec:
    """The units of an architecture that a file gave, once its sizes are such that they can be listed at all."""
    for field, most in MOST.items():
        if getattr(arch, field) > most:
            raise ZplanError(f"`{field}` of {where} is {getattr(arch, field):,}", f"zplan plans for up to {most:,}")
    spec = ModelSpec(name, decoder_units(arch), arch)
    if spec.num_params > MOST_PARAMS:
        raise ZplanError(f"{where} has {spec.num_params:,} parameters", f"zplan plans for up to {MOST_PARAMS:,}")
    return spec
