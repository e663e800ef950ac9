"""What a DeepSpeed file of model states says of the model and the run, and the manifest that comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zplan import __version__
from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime import ds_import_files as files
from zplan.runtime.checkpoint_format import Manifest, Parameter
from zplan.runtime.checkpoint_state import plain
from zplan.runtime.ds_import_states import RankStates

OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info"),
}
"""What DeepSpeed itself puts beside the caller's client state."""

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Model:
    """The file of model states of rank 0.

    Attributes
    ----------
    shapes
        Trained parameters of each optimizer group, in the order in which they lie.
    frozen
        Shapes of parameters that no optimizer has.
    aliases
        Further names of tied parameters.
    """

    content: Mapping[str, Any]
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    frozen: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for members in self.shapes for name, shape in members.items()}


def read_model(path: Path) -> Model:
    """Read a file of model states."""
    content = files.read(path)
    groups = content.get("param_shapes")
    if not groups:
        raise ZplanError(
            f"`{path}` has no `param_shapes`: it was saved without ZeRO, or by a DeepSpeed older than 0.4",
            "checkpoints of stages 1 to 3 can be imported",
        )
    if content.get("mp_world_size", 1) != 1:
        raise ZplanError(
            f"`{path}` is of a run with {content['mp_world_size']} model parallel ranks, and such checkpoints can't be "
            "imported"
        )
    shapes = tuple({name: tuple(shape) for name, shape in members.items()} for members in groups)
    aliases = dict(content.get("shared_params") or {})
    known = {name for members in shapes for name in members} | set(content.get("buffer_names") or ()) | set(aliases)
    module: Mapping[str, Tensor] = content["module"]
    frozen = content.get("frozen_param_shapes")
    if frozen is None:
        # Stage 1 lists none; what is neither trained nor a buffer lies in the module's own state.
        frozen = {
            name: value.shape for name, value in module.items() if name not in known and isinstance(value, Tensor)
        }
    return Model(content, shapes, {n: tuple(s) for n, s in frozen.items() if n not in known}, aliases)


def manifest_of(
    tag: str,
    model: Model,
    states: RankStates,
    world_size: int,
    config: Mapping[str, Any] | None,
    notes: list[str],
) -> Manifest:
    raw = model.content
    group, said = states.groups[0], raw.get("ds_config")
    version = str(raw.get("ds_version", "unknown"))
    lr = float(group.get("lr", 0.0))
    given = _given_lr(said)
    values = [v for v in raw["module"].values() if isinstance(v, Tensor) and v.is_floating_point()]
    precision = PRECISIONS.get(values[0].dtype, "fp32") if values else "fp32"
    if len({(g.get("lr"), g.get("weight_decay")) for g in states.groups}) > 1:
        notes.append(f"its {len(states.groups)} parameter groups differ in hyperparameters: the new config decides")
    if raw.get("buffer_names"):
        notes.append(
            f"{len(raw['buffer_names'])} buffers of the module, such as `{raw['buffer_names'][0]}`, stay behind"
        )
    if raw.get("lr_scheduler"):
        notes.append("the schedule goes on from the step and from what the new config says of it")
    applied = int(raw["global_steps"]) - int(raw.get("skipped_steps", 0))
    frozen = [Parameter(n, s, frozen=True) for n, s in model.frozen.items()]
    return Manifest(
        tag=folder.check_tag(tag),
        global_step=int(raw["global_steps"]),
        global_samples=int(raw["global_samples"]),
        applied_steps=applied if states.step is None else states.step,
        world_size=world_size,
        lr=lr,
        loss_scale=states.loss_scale if precision == "fp16" else None,
        training={
            "stage": states.stage,
            "precision": precision,
            "lr": lr if given is None else given,
            "deepspeed": version,
        },
        model=_describe(config),
        parameters=(*(Parameter(n, s, moments=states.moments) for n, s in model.trained.items()), *frozen),
        aliases=model.aliases,
        files=(),
        client_state=_client_state(raw, notes),
        zplan_version=__version__,
        torch_version=torch.__version__,
        written_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _given_lr(ds_config: Any) -> float | None:
    """The learning rate that the config named, which a schedule may have moved away from."""
    try:
        return float(ds_config["optimizer"]["params"]["lr"])
    except (KeyError, TypeError, ValueError):
        return None


def _describe(config: Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {"kind": "module", "class": "module from DeepSpeed"}
    names = config.get("architectures") or ["unknown"]
    return {"kind": "transformers", "config": json.loads(json.dumps(dict(config))), "class": names[0]}


def _client_state(raw: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The caller's own part, as far as JSON can hold it."""
    kept: dict[str, Any] = {}
    lost = []
    for key, value in raw.items():
        if key in OWN_KEYS:
            continue
        try:
            kept |= plain({key: value})
        except ZplanError:
            lost.append(f"`{key}`")
    if lost:
        notes.append(f"of the client state {', '.join(lost)} stay behind: JSON can't hold them")
    return kept
