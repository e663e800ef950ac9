"""What each unit of any module saves for backward, without running it: the op sequence under fake tensors on the CPU.

Fake tensors have shapes and storages but no bytes, so a model of any size is traced in seconds, on the op table of the
CPU (`planner/aten.py` says where CUDA's differs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from zplan.runtime.meter import StorageRegistry

AFTER = "after "
"""Prefix of the phase between a unit's end and the next unit's start."""


@dataclass(frozen=True)
class UnitTrace:
    """Storages that were born in one unit and wait for backward.

    Attributes
    ----------
    saved
        Their bytes, each storage counted once and whole.
    detail
        `(op that made it, bytes)`, in the order of birth.
    """

    saved: int
    detail: tuple[tuple[str, int], ...]


def unit_names(model: nn.Module) -> tuple[str, ...]:
    """The modules that a trace reports: elements of module lists, and every module that holds no such list."""

    def walk(prefix: str, module: nn.Module) -> list[str]:
        if isinstance(module, nn.ModuleList):
            return [f"{prefix}{name}" for name, _ in module.named_children()]
        found = []
        for name, child in module.named_children():
            has_list = any(isinstance(m, nn.ModuleList) for m in child.modules())
            found += walk(f"{prefix}{name}.", child) if has_list else [f"{prefix}{name}"]
        return found

    return tuple(walk("", model))


def trace_units(
    model: nn.Module, *args: Any, units: Sequence[str] | None = None, **kwargs: Any
) -> dict[str, UnitTrace]:
    """Saved storages per unit of one forward `model(*args, **kwargs)`, and of what follows the last unit as `loss`.

    A storage belongs to the unit in which it is born, so a unit's input is its producer's. Parameters, buffers, the
    caller's tensors and the model's outputs do not count.

    Parameters
    ----------
    model
        On any device, meta included. It is neither run nor changed.
    args, kwargs
        Of the model's forward; tensors among them are replaced by fake ones.
    units
        Module paths, in forward order. By default those of `unit_names`.
    """
    names = tuple(units if units is not None else unit_names(model))
    registry = StorageRegistry()
    hooks = []
    for name in names:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: registry.enter(name)))
        hooks.append(module.register_forward_hook(lambda m, a, out, name=name: registry.enter(AFTER + name)))
    try:
        with FakeTensorMode():
            state = _fake_state(model)
            fake_args, fake_kwargs = tree_map(_fake, (args, kwargs))
            with registry:
                registry.adopt(*state.values(), *(t for t in tree_leaves((fake_args, fake_kwargs)) if _is_tensor(t)))
                out = functional_call(model, state, fake_args, fake_kwargs)
                return _read(registry, names, out)
    finally:
        for hook in hooks:
            hook.remove()


def _read(registry: StorageRegistry, names: Sequence[str], out: Any) -> dict[str, UnitTrace]:
    outputs = {t.untyped_storage()._cdata for t in tree_leaves(out) if _is_tensor(t)}
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in (*names, "loss")}
    last = AFTER + names[-1]
    for record in registry.storages():
        storage = record.ref()
        if record.phase == "idle" or storage is None or storage._cdata in outputs:
            continue
        unit = "loss" if record.phase == last else record.phase.removeprefix(AFTER)
        found[unit].append((record.op, record.nbytes))
    return {name: UnitTrace(sum(n for _, n in rows), tuple(rows)) for name, rows in found.items()}


def _fake_state(model: nn.Module) -> dict[str, Tensor]:
    """Fake parameters and buffers by name; tied ones are one tensor."""
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor).requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


def _fake(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") if _is_tensor(x) else x


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
