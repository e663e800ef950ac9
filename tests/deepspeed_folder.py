"""Folders in the layout of DeepSpeed's checkpoints, written without DeepSpeed: states go in, files come out.

The pickles name DeepSpeed's classes, from modules that exist only while one is written.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATES = ("weight", "exp_avg", "exp_avg_sq")


@dataclass
class Content:
    """What a run has in the end. `states[name]` are the three fp32 tensors of a trained parameter."""

    states: dict[str, tuple[Tensor, Tensor, Tensor]]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    step: int = 7
    lr: float = 5e-4
    scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@contextmanager
def deepspeed_names() -> Iterator[types.SimpleNamespace]:
    """The classes that pickles name, where a reader of DeepSpeed's would look for them."""
    found = types.SimpleNamespace(
        ZeroStageEnum=enum.Enum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, type=int),
        LossScaler=type("LossScaler", (), {}),
        DynamicLossScaler=type("DynamicLossScaler", (), {}),
        fragment_address=type("fragment_address", (), {}),
    )
    homes = {
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
    before = dict(sys.modules)
    for home, names in homes.items():
        for part in range(1, home.count(".") + 2):
            sys.modules[".".join(home.split(".")[:part])] = types.ModuleType(home)
        for name in names:
            cls = getattr(found, name)
            cls.__module__, cls.__qualname__ = home, name
            setattr(sys.modules[home], name, cls)
    try:
        yield found
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "deepspeed" and n not in before]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in before.items() if n.split(".")[0] == "deepspeed"})


def made(cls: type, **attributes: Any) -> Any:
    out = cls.__new__(cls)
    out.__dict__.update(attributes)
    return out


def write(folder: Path, content: Content, stage: int, world_size: int, *, align: int = 1, sub_group: int = 0) -> Path:
    """Write `folder/global_stepN` and `folder/latest`.

    Parameters
    ----------
    align
        Stages 1 and 2: each parameter but the last starts on a multiple of so many elements, as newer versions do.
    sub_group
        Stage 3: elements of a rank's sub-groups at least; 0 for one.
    """
    out = folder / f"global_step{content.step}"
    out.mkdir(parents=True)
    (folder / "latest").write_text(out.name)
    groups = content.groups or [list(content.states)]
    with deepspeed_names() as names:
        scaler = content.scaler or {"cur_scale": 1.0, "dynamic": False}
        kind = names.DynamicLossScaler if "cur_iter" in scaler else names.LossScaler
        cut = _cut_parameters if stage == 3 else _cut_groups
        flats, more = cut(content, groups, world_size, align, sub_group, names)
        for rank in range(world_size):
            opt = {
                "loss_scaler": made(kind, **scaler),
                "zero_stage": names.ZeroStageEnum(stage),
                "partition_count": world_size if stage == 3 else [world_size] * len(groups),
                **_optimizer(content, groups, flats[rank], stage),
                **more[rank],
            }
            saved = {"optimizer_state_dict": opt, "ds_config": {}, "ds_version": "0.19.8"}
            torch.save(saved, out / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for rank in range(world_size if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(_model(content, groups, stage, rank, world_size), out / f"{prefix}mp_rank_00_model_states.pt")
    return folder


def _cut_groups(
    content: Content, groups: list[list[str]], world_size: int, align: int, _sub_group: int, names: Any
) -> tuple[list[list[Sequence[Tensor]]], list[dict[str, Any]]]:
    """Stages 1 and 2: flat groups with paddings between parameters, one slice per rank, cut short at the end."""
    flats: list[list[Sequence[Tensor]]] = [[] for _ in range(world_size)]
    paddings, ends = [], []
    mappings: list[list[Any]] = [[] for _ in range(world_size)]
    for members in groups:
        after, at, places = [], 0, {}
        for name in members:
            numel = content.states[name][0].numel()
            places[name] = (at, at + numel)
            gap = 0 if name == members[-1] else -(at + numel) % align
            after.append(gap)
            at += numel + gap
        per_rank = -(-at // (2 * world_size)) * 2
        whole = [torch.full((per_rank * world_size,), -77.0) for _ in STATES]
        for name, (lo, hi) in places.items():
            for flat, value in zip(whole, content.states[name], strict=True):
                flat[lo:hi] = value.reshape(-1)
        paddings.append(after)
        ends.append(per_rank)
        for rank in range(world_size):
            begin = rank * per_rank
            length = max(0, min(per_rank, at - begin))
            flats[rank].append([flat[begin : begin + length].clone() for flat in whole])
            spans = {n: (max(lo, begin) - begin, min(hi, begin + per_rank) - begin) for n, (lo, hi) in places.items()}
            rows = {n: made(names.fragment_address, start=a, numel=b - a) for n, (a, b) in spans.items() if b > a}
            mappings[rank].append(OrderedDict(rows))
    return flats, [{"param_alignment_paddings": paddings, "param_slice_mappings": m} for m in mappings]


def _cut_parameters(
    content: Content, groups: list[list[str]], world_size: int, _align: int, sub_group: int, _names: Any
) -> tuple[list[list[Sequence[Tensor]]], list[dict[str, Any]]]:
    """Stage 3: a slice of each parameter per rank, in sub-groups of whole parameters."""
    flats: list[list[Sequence[Tensor]]] = [[] for _ in range(world_size)]
    for members in groups:
        pending: list[list[list[Tensor]]] = [[[] for _ in STATES] for _ in range(world_size)]
        for name in members:
            for k, value in enumerate(content.states[name]):
                per_rank = -(-value.numel() // world_size)
                padded = torch.full((per_rank * world_size,), -77.0)
                padded[: value.numel()] = value.reshape(-1)
                for rank in range(world_size):
                    pending[rank][k].append(padded[rank * per_rank : (rank + 1) * per_rank])
            size = sum(t.numel() for t in pending[0][0])
            if name == members[-1] or (sub_group and size >= sub_group):
                for rank in range(world_size):
                    flats[rank].append([torch.cat(parts) for parts in pending[rank]])
                pending = [[[] for _ in STATES] for _ in range(world_size)]
    return flats, [{} for _ in range(world_size)]


def _optimizer(content: Content, groups: list[list[str]], flats: list[Sequence[Tensor]], stage: int) -> dict[str, Any]:
    state = {
        k: {"step": torch.tensor(float(content.step)), "exp_avg": m, "exp_avg_sq": v}
        for k, (_, m, v) in enumerate(flats)
    }
    split = [list(range(len(flats)))] if len(groups) == 1 else [[k] for k in range(len(flats))]
    param_groups = [{"lr": content.lr, "weight_decay": 0.01, "params": members} for members in split]
    masters, inner = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    return {masters: [w for w, _, _ in flats], inner: {"state": state, "param_groups": param_groups}}


def _model(content: Content, groups: list[list[str]], stage: int, rank: int, world_size: int) -> Mapping[str, Any]:
    module = OrderedDict((n, w.to(content.dtype)) for n, (w, _, _) in content.states.items())
    module |= {n: t.to(content.dtype) for n, t in content.frozen.items()}
    module |= {n: module[first] for n, first in content.tied.items()} | content.buffers
    frozen: dict[str, Any] = {"frozen_param_shapes": None, "frozen_param_fragments": None}
    if stage >= 2:
        frozen["frozen_param_shapes"] = OrderedDict((n, t.shape) for n, t in content.frozen.items())
        frozen["frozen_param_fragments"] = OrderedDict(
            (n, _slice(module[n], rank, world_size) if stage == 3 else module[n]) for n in content.frozen
        )
    if stage == 3:
        module = OrderedDict((n, torch.empty(0, dtype=t.dtype)) for n, t in module.items())
    return {
        "module": module,
        "buffer_names": list(content.buffers),
        "param_shapes": [OrderedDict((n, content.states[n][0].shape) for n in members) for members in groups],
        **frozen,
        "shared_params": dict(content.tied),
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": content.step,
        "global_samples": 6 * content.step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": content.lr}}},
        "ds_version": "0.19.8",
        **content.client_state,
    }


def _slice(value: Tensor, rank: int, world_size: int) -> Tensor:
    per_rank = -(-value.numel() // world_size)
    padded = torch.zeros(per_rank * world_size, dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * per_rank : (rank + 1) * per_rank].clone()
