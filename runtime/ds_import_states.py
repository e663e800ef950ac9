"""What one rank's file of optimizer states says, by the names that zplan has for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.planner.optimizers import KINDS, RUNNABLE
from zplan.runtime.checkpoint_format import WEIGHT
from zplan.runtime.ds_import_files import Fragment, Scaler


@dataclass(frozen=True)
class RankStates:
    """One rank's flat tensors and what belongs to them.

    Attributes
    ----------
    flat
        For each group (stages 1 and 2) or sub-group (stage 3): 1D fp32 tensors by state.
    moments
        The optimizer's own states, in the order in which zplan saves them.
    step
        Steps that the optimizer took, skipped ones left out; None for one that does not count them.
    groups
        Hyperparameters of each optimizer group.
    partition_count
        Ranks that share a group.
    paddings, fragments
        Of stages 1 and 2, by group: elements after each parameter, and where each parameter's part lies in this rank's
        slice, where the version that wrote the file says so.
    """

    stage: int
    flat: tuple[Mapping[str, Tensor], ...]
    moments: tuple[str, ...]
    step: int | None
    groups: tuple[Mapping[str, Any], ...]
    partition_count: int
    loss_scale: tuple[float, ...] | None
    paddings: Sequence[Sequence[int]] | None
    fragments: Sequence[Mapping[str, Fragment]] | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each flat tensor."""
        return tuple(f["weight"].numel() for f in self.flat)


def rank_states(path: Path, content: Mapping[str, Any]) -> RankStates:
    """Read `optimizer_state_dict` of a file of optimizer states.

    Raises
    ------
    ZplanError
        When it is not of an optimizer that zplan has too, with fp32 masters.
    """
    opt = content.get("optimizer_state_dict")
    if not isinstance(opt, dict):
        raise _odd(path, "has no `optimizer_state_dict`")
    stage = int(opt.get("zero_stage", 1))  # its bf16 optimizer, which is of stage 1, does not say
    masters, inner = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    if masters not in opt or inner not in opt:
        raise _odd(path, f"has no `{masters if masters not in opt else inner}`")
    states, groups = _by_group(path, opt[inner])
    weights = opt[masters]
    if len(states) != len(weights):
        raise _odd(path, f"has master weights of {len(weights)} groups and moments of {len(states)}")
    moments = moments_of(path, states)
    flat, steps = [], set()
    for group, (weight, state) in enumerate(zip(weights, states, strict=True)):
        flat.append(_flat(path, weight, {name: state[name] for name in moments}))
        where = groups[min(group, len(groups) - 1)]
        steps.add(state.get("step", where.get("step", opt.get("base_optimizer_state_step"))))
    if len({int(s) for s in steps if s is not None}) > 1:
        raise _odd(path, f"has groups that took {sorted(map(int, steps))} steps")
    step = next(iter(steps), None)
    count = opt.get("partition_count", 0)
    return RankStates(
        stage=stage,
        flat=tuple(flat),
        moments=moments,
        step=None if step is None else int(step),
        groups=tuple(groups),
        partition_count=max(count) if isinstance(count, (list, tuple)) else int(count),
        loss_scale=_loss_scale(opt.get("loss_scaler")),
        paddings=opt.get("param_alignment_paddings"),
        fragments=opt.get("param_slice_mappings"),
    )


def _by_group(path: Path, inner: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """States in the order of the flat tensors, and hyperparameters by group."""
    if isinstance(inner, list):  # the elastic form: states without hyperparameters
        return inner, [{}]
    groups = inner["param_groups"]
    order = [index for g in groups for index in g["params"]]
    missing = [index for index in order if index not in inner["state"]]
    if missing and any("betas" in g or g.get("momentum") for g in groups):
        raise _odd(path, f"has no optimizer states of group {missing[0]}: saved before the first step?")
    return [inner["state"].get(index, {}) for index in order], groups  # plain SGD has none


def moments_of(path: Path, states: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of what the optimizer keeps of every element, which must be those of an optimizer that zplan runs."""
    kept = [{k for k, v in state.items() if isinstance(v, Tensor) and v.dim()} for state in states]
    known = [tuple(s.name for s in KINDS[name].states) for name in RUNNABLE]
    for names in known:
        if all(found == set(names) for found in kept):
            return names
    odd = next((found for found in kept if not any(found == set(names) for names in known)), kept[0])
    said = ", ".join(f"`{n}`" for n in sorted(odd)) or "nothing"
    raise ZplanError(
        f"`{path}` is of an optimizer that zplan has not: it keeps {said}",
        "move the weights over instead: `zero_to_fp32.py --safe_serialization`, then `zplan run --weights`",
    )


def _flat(path: Path, weight: Tensor, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = {WEIGHT: weight, **moments}
    for name, tensor in whole.items():
        # Paddings are cut off masters and not always off moments.
        if tensor.dim() != 1 or tensor.numel() < weight.numel():
            raise _odd(path, f"has {tuple(tensor.shape)} elements of `{name}` and {weight.numel():,} of master weights")
    return {name: tensor if tensor.dtype == torch.float32 else tensor.float() for name, tensor in whole.items()}


def _loss_scale(scaler: Any) -> tuple[float, ...] | None:
    """Scale, tolerance left and age as `LossScaler.state` has them; None for one that never moved and is 1."""
    if not isinstance(scaler, Scaler):
        return None
    has: dict[str, Any] = vars(scaler)
    if "cur_iter" in has:
        return float(has["cur_scale"]), float(has["cur_hysteresis"]), float(has["cur_iter"] - has["last_overflow_iter"])
    return (float(has["cur_scale"]), 1.0, 1.0)


def _odd(path: Path, what: str) -> ZplanError:
    return ZplanError(
        f"`{path}` {what}",
        "move the weights over instead: `zero_to_fp32.py --safe_serialization`, then `zplan run --weights`",
    )
