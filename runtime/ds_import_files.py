"""The files of a DeepSpeed checkpoint folder: which there must be, and their content without running any of it.

[Note: pickles] `*.pt` files are pickles, and a pickle may name any function to be called. They are read by torch's own
restricted reader (`weights_only`), which calls nothing but constructors of tensors and of what `ALLOWED` lists, and
those are records of this file: DeepSpeed need not be there, and none of its code runs. A file that names anything else
is refused by that name. Tensors are mapped, so a file takes memory only for what is being copied out of it.

Names and places of files as DeepSpeed 0.19 writes them (`runtime/engine.py`, `checkpoint/constants.py` there).
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_format import MANIFEST

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

UNREADABLE = {
    r"layer_\d+_expert_\d+_.*|expp_rank_.*": "experts that are spread over ranks",
    r"layer_\d+-.*": "pipeline stages",
    r"offloaded_tensors": "states on NVMe",
}
"""Files of forms of parallelism that zplan does not have."""


class Stage(int):
    """Stands for `ZeroStageEnum`."""


class Record:
    """Stands for a plain object: its attributes, and nothing that it could do."""


class Scaler(Record):
    """Stands for both of DeepSpeed's loss scalers."""


class Fragment(Record):
    """Stands for `fragment_address`: where in a rank's flat slice a parameter's part lies."""

    numel: int
    start: int


ALLOWED = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Scaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Scaler,
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
}
"""What a pickle may name besides what torch takes for tensors and plain values. See [Note: pickles]."""


@dataclass(frozen=True)
class Files:
    """Paths by rank. `models` has one for all ranks at stages 1 and 2, and one per rank at stage 3."""

    folder: Path
    models: tuple[Path, ...]
    optims: tuple[Path, ...]


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder of one tag was written by DeepSpeed."""
    return folder.is_dir() and any(MODEL.fullmatch(p.name) or OPTIM.fullmatch(p.name) for p in folder.iterdir())


def tag_folder(folder: Path, tag: str | None) -> Path:
    """One tag's folder, from that of all tags or from itself."""
    if tag is None and is_deepspeed(folder):
        return folder
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise ZplanError(
                f"`{folder}` is no DeepSpeed checkpoint: it has neither `latest` nor `*_model_states.pt`",
                "name the folder that `save_checkpoint` was given, or the one of a tag in it",
            )
        tag = latest.read_text(errors="replace").split("\n")[0].strip()
    found = folder / tag
    if (found / MANIFEST).exists():
        raise ZplanError(f"`{found}` is a checkpoint of zplan", "load it as it is: nothing is to be imported")
    if not is_deepspeed(found):
        raise ZplanError(f"`{found}` is no DeepSpeed checkpoint: it has no `*_model_states.pt`")
    return found


def find(folder: Path) -> Files:
    """The files of one tag's folder, all of them there.

    Raises
    ------
    ZplanError
        When a rank's file is missing, or when the folder is of a kind that can't be imported.
    """
    optims: dict[int, Path] = {}
    models: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        _refuse_parallelism(path)
        if match := OPTIM.fullmatch(path.name):
            optims[int(match[1])] = path
        elif match := MODEL.fullmatch(path.name):
            models[int(match[1] or 0)] = path
    if not optims:
        raise ZplanError(
            f"`{folder}` has no `zero_pp_rank_*_optim_states.pt`: it was saved without ZeRO, or without the optimizer",
            "checkpoints of stages 1 to 3 can be imported; plain weights are a model folder, see `zplan run --weights`",
        )
    for found, suffix in ((optims, "optim_states.pt"), (models, "model_states.pt")):
        missing = [r for r in range(max(found, default=0) + 1) if r not in found]
        if missing:
            names = ", ".join(f"`zero_pp_rank_{r}_mp_rank_00_{suffix}`" for r in missing[:4])
            raise ZplanError(f"`{folder}` lacks {names}", "copy the files of all ranks into one folder")
    return Files(folder, *(tuple(found[r] for r in sorted(found)) for found in (models, optims)))


def _refuse_parallelism(path: Path) -> None:
    """Files of runs whose states are cut in ways other than ZeRO's."""
    for pattern, what in UNREADABLE.items():
        if re.fullmatch(pattern, path.name):
            raise _unsupported(path, what)
    match = OPTIM.fullmatch(path.name) or MODEL.fullmatch(path.name)
    if match and int(match[2]):
        raise _unsupported(path, "model parallel ranks")


def _unsupported(path: Path, what: str) -> ZplanError:
    return ZplanError(
        f"`{path}` is of a run with {what}, and such checkpoints can't be imported",
        "convert it with DeepSpeed's own `zero_to_fp32.py --safe_serialization` and start from the weights",
    )


def read(path: Path) -> dict[str, Any]:
    """What a file holds, tensors mapped. See [Note: pickles]."""
    try:
        with torch.serialization.safe_globals([(cls, name) for name, cls in ALLOWED.items()]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)|whose module ([\w.]+)", str(error))
        what = f"names `{named[1] or named[2]}`" if named else "does what no list of tensors needs"
        raise ZplanError(
            f"the pickle in `{path}` {what}, which is not on the list of what is read; nothing of it was run",
            "save it again without that object in the client state, or move the weights over: "
            "`zero_to_fp32.py --safe_serialization`, then `zplan run --weights`",
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        line = str(error).strip().split("\n")[0]
        raise ZplanError(f"`{path}` can't be read: {line}", "it may be cut short; copy it again") from None
    if not isinstance(found, dict):
        raise ZplanError(f"`{path}` holds a `{type(found).__name__}` and no checkpoint")
    return found
