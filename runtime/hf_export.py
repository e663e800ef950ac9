"""From a checkpoint, or from a live engine, to a folder that `from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zplan.planner.errors import ZplanError
from zplan.planner.models import Param
from zplan.runtime.checkpoint_format import Parameter
from zplan.runtime.checkpoint_load import as_tensor, parameters_of
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.checkpoint_state import architecture, describe_model
from zplan.runtime.hf_names import hf_config, hf_name, is_transposed
from zplan.runtime.model_folder import SHARD_BYTES, Dtype, ModelFolder, Row
from zplan.runtime.tables import PIECES
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine

ADAPTED = ("base_model.model.", ".base_layer.")
"""How peft names what it wraps: the model, and a layer in it."""


def loading_class(model: Mapping[str, Any]) -> str:
    """The class of transformers whose `from_pretrained` gives the exported model back."""
    name = str(model.get("class", "")) if model["kind"] == "transformers" else ""
    return name if name and not name.endswith(("ForCausalLM", "LMHeadModel")) else "AutoModelForCausalLM"


def contents(model: Mapping[str, Any], parameters: tuple[Parameter, ...]) -> tuple[dict[str, Any], list[Row]]:
    """`config.json` and a row for every parameter, in the order given. Tied weights stand there once.

    Raises
    ------
    ZplanError
        When nobody knows what `config.json` such a model has.
    """
    piece = next((p.name for p in parameters if f".{PIECES}." in p.name), None)
    if piece is not None:
        raise ZplanError(
            f"`{piece}` is a piece of a table that `cap_tables` cut, and no model folder has such a name",
            "`with zplan.summon(model): model.save_pretrained(folder)` writes the whole table under its own name",
        )
    adapted = next((p.name for p in parameters if p.name.startswith(ADAPTED[0]) or ADAPTED[1] in p.name), None)
    if adapted is not None:
        raise ZplanError(
            f"`{adapted}` is of a model with adapters, and no model folder has such a name",
            "`with zplan.summon(model): model.save_pretrained(folder)` writes the adapters, which load onto their base",
        )
    if model["kind"] == "transformers" and (buffers := model.get("buffers")):
        raise ZplanError(
            f"`{buffers[0]}` is a buffer, one of {len(buffers)} that no checkpoint holds and a model folder needs",
            "`with zplan.summon(model): model.save_pretrained(folder)` writes them too",
        )
    if model["kind"] == "transformers":
        config = dict(model["config"])
        config["architectures"] = config.get("architectures") or [model["class"]]
        return config, [Row(p.name, p.shape) for p in parameters]
    if model["kind"] != "decoder":
        raise ZplanError(
            f"a `{model['class']}` has no `config.json` that zplan knows",
            "`with zplan.summon(model): torch.save(model.state_dict(), path)` keeps its weights",
        )
    arch = architecture(model)
    rows = []
    for p in parameters:
        transposed = is_transposed(arch, Param(p.name, p.shape))
        rows.append(Row(hf_name(arch, p.name), p.shape[::-1] if transposed else p.shape, transposed))
    return hf_config(arch), rows


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, dtype: Dtype, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model folder from a checkpoint's master weights. Needs no GPU; memory is that of one tensor, twice."""
    manifest = checkpoint.manifest
    config, rows = contents(manifest.model, manifest.parameters)
    with ModelFolder(out, config, rows, dtype=dtype, shard_bytes=shard_bytes) as folder:
        for p in manifest.parameters:
            dtype_there = checkpoint.dtype(p.value, p.name)
            folder.write(as_tensor(checkpoint.whole(p.value, p.name, p.numel), dtype_there))


def export_engine(engine: Engine, out: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a bf16 model folder from training, on rank 0, unit by unit. Every rank must call it.

    Costs one unit in the compute dtype beside what training holds.
    """
    quantized = next((u.name for u in engine.units if u.placement.unit.constant_bytes), None)
    if quantized is not None:
        raise ZplanError(
            f"`{quantized}` is quantized, and a 16-bit folder can't hold it",
            "save what was trained: `with zplan.summon(model): model.save_pretrained(folder)` writes adapters",
        )
    engine.checkpoints.between_steps("export")
    config, rows = contents(describe_model(engine.module), parameters_of(engine))
    folder = ModelFolder(out, config, rows, dtype="bf16", shard_bytes=shard_bytes)

    def on_first_rank(act: Callable[[], None]) -> None:
        """A refusal on rank 0 is raised on all ranks, so that none waits in a gather."""

        def act_or_not() -> str:
            if engine.rank == 0:
                act()
            return ""

        engine.checkpoints.meeting.all_say(act_or_not)

    def write(unit: FlatUnit) -> None:
        for p in unit.params:
            folder.write(p)

    try:
        on_first_rank(folder.begin)
        for unit in engine.units:
            with engine.summon(nn.ParameterList(unit.params)):
                on_first_rank(partial(write, unit))
        on_first_rank(folder.commit)
    finally:
        if engine.rank == 0:
            folder.abandon()
