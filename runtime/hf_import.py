"""Weights from a local model folder, read tensor by tensor through the format's own memory-mapped reader."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture, Param
from zplan.runtime.hf_names import decoder_params, hf_name, is_transposed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class ModelWeights:
    """A model folder as the source of a decoder's initial weights. Opening it reads headers only.

    Raises
    ------
    ZplanError
        When a file or a tensor is missing, or a shape is not the plan's.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self.folder, self.arch = folder, arch
        self.files = self._files()
        self.params = {p.name: p for p in decoder_params(arch)}
        for p in self.params.values():
            self._check(p)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Write one full parameter; an `init=` of `zplan.initialize`."""
        found, file = self._find(name)
        with safe_open(file, framework="pt") as opened:
            values = opened.get_tensor(found)
        tensor.copy_(values.t() if is_transposed(self.arch, self.params[name]) else values)

    def _files(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self.folder / INDEX
        try:
            if index.exists():
                table = json.loads(index.read_text())["weight_map"]
                return {name: self.folder / file for name, file in table.items()}
            with safe_open(self.folder / SINGLE, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), self.folder / SINGLE)
        except FileNotFoundError:
            raise ZplanError(
                f"`{self.folder}` has neither `{SINGLE}` nor `{INDEX}`",
                "give a folder that transformers' `save_pretrained` wrote",
            ) from None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ZplanError(f"`{self.folder}` can't be read: {error}") from None

    def _find(self, name: str) -> tuple[str, Path]:
        """(name in the folder, file). Folders of a bare model leave the first part of names out."""
        wanted = hf_name(self.arch, name)
        for candidate in (wanted, wanted.split(".", 1)[1]):
            if candidate in self.files:
                return candidate, self.files[candidate]
        raise ZplanError(f"`{self.folder}` has no tensor `{wanted}`", "plan for the model that the folder holds")

    def _check(self, param: Param) -> None:
        name, file = self._find(param.name)
        try:
            with safe_open(file, framework="pt") as opened:
                shape = tuple(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ZplanError(f"`{file}` can't be read: {error}", "download the folder again") from None
        if (shape[::-1] if is_transposed(self.arch, param) else shape) != param.shape:
            raise ZplanError(
                f"`{name}` of `{self.folder}` is {shape} and the plan's `{param.name}` is {param.shape}",
                "plan for the model that the folder holds: `zplan plan --model FOLDER`",
            )
