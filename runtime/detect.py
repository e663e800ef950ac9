"""Finds the units of a module tree: the blocks of its largest module lists, and what lies around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from zplan.planner.errors import ZplanError
from zplan.planner.models import Param, Unit, UnitKind


@dataclass(eq=False)
class Found:
    """One unit as modules: where its hooks go and which parameters it owns (by first name)."""

    unit: Unit
    module: nn.Module
    params: list[nn.Parameter]
    reads: list[str] = field(default_factory=list)
    """Names of other units that own parameters which this one uses too (tied weights)."""


def find_units(model: nn.Module) -> list[Found]:
    """Units in module order; each parameter belongs to the first unit that uses it.

    Blocks are the children of the `nn.ModuleList` with the most parameters. Every other child that holds parameters is a
    unit of its own; parameters that hang directly on a module around the blocks form a unit with that module.
    """
    blocks = _largest_list(model)
    owner: dict[nn.Parameter, str] = {}
    found: list[Found] = []
    for name, kind, module, params in _candidates(model, blocks):
        mine: list[nn.Parameter] = []
        rows: list[Param] = []
        reads: list[str] = []
        for pname, p in params:
            if p in owner:
                if owner[p] != name and owner[p] not in reads:
                    reads.append(owner[p])
                continue
            owner[p] = name
            mine.append(p)
            rows.append(Param(pname, tuple(p.shape)))
        if mine or reads:
            found.append(Found(Unit(name, kind, tuple(rows)), module, mine, reads))
    _refuse_frozen(found)
    return found


def _largest_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        return None
    return max(lists, key=lambda row: sum(p.numel() for p in row[1].parameters()))


def _candidates(
    model: nn.Module, blocks: tuple[str, nn.ModuleList] | None
) -> Iterator[tuple[str, UnitKind, nn.Module, list[tuple[str, nn.Parameter]]]]:
    """(unit name, kind, module, named parameters) in module order."""
    path = blocks[0] if blocks else None

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, UnitKind, nn.Module, list[tuple[str, nn.Parameter]]]]:
        own = [(_join(prefix, n), p) for n, p in module.named_parameters(recurse=False)]
        if own:
            yield prefix or "root", "other", module, own
        for child_name, child in module.named_children():
            name = _join(prefix, child_name)
            if path is not None and name == path:
                for i, block in enumerate(child.children()):
                    yield f"{name}.{i}", "block", block, _named(f"{name}.{i}", block)
            elif path is not None and path.startswith(name + "."):
                yield from walk(name, child)
            else:
                yield name, _kind(child), child, _named(name, child)

    yield from walk("", model)


def _named(prefix: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(_join(prefix, n), p) for n, p in module.named_parameters(remove_duplicate=False)]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _kind(module: nn.Module) -> UnitKind:
    if isinstance(module, nn.Embedding):
        return "embed"
    if isinstance(module, nn.Linear):
        return "head"
    if "norm" in type(module).__name__.lower():
        return "norm"
    return "other"


def _refuse_frozen(found: list[Found]) -> None:
    for f in found:
        for row, p in zip(f.unit.params, f.params, strict=True):
            if not p.requires_grad:
                raise ZplanError(
                    f"parameter `{row.name}` is frozen, and frozen parameters are not built yet",
                    "set requires_grad on every parameter",
                )
            if not p.is_floating_point():
                raise ZplanError(f"parameter `{row.name}` has dtype {p.dtype}, which can't be trained", None)
