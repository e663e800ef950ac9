"""Finds the units of a module tree: the blocks of its module lists, or what users name, and what lies around them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.models import Param, Unit, UnitKind
from zplan.runtime.quantized import check_class, constant_storages
from zplan.runtime.tables import PIECES, SplitTable

LIST_SHARE = 0.02
"""Share of all parameters from which the children of a module list are units; below it the list is one unit."""


@dataclass(eq=False)
class Found:
    """One unit as modules: where its hooks go and which parameters it owns (by first name)."""

    unit: Unit
    """Its trainable parameters; may have none."""
    module: nn.Module
    params: list[nn.Parameter]
    reads: list[str] = field(default_factory=list)
    """Names of other units, trainable or frozen, that own parameters which this one uses too (tied weights)."""
    frozen: list[tuple[Unit, list[nn.Parameter]]] = field(default_factory=list)
    """Its frozen parameters, as one unit for each dtype. See [Note: frozen] in planner/placement.py."""

    def segments(self) -> Iterator[tuple[Unit, list[nn.Parameter]]]:
        """Everything that is laid out flat: trainable parameters first."""
        if self.params:
            yield self.unit, self.params
        yield from self.frozen


KNOWN_CLASSES = ("zplan.runtime.decoder", "transformers.models.")
"""Where models come from whose heads, and embeddings of names in `TABLES`, are read by their own forward alone, unless
they are tied. Elsewhere a weight may be used by hand (`x @ embed.weight.T`, `query_embed.weight.unsqueeze(0)`), which
asks for a resident unit."""

TABLES = ("embed", "positions", "embed_tokens", "embed_in", "word_embeddings", "wte", "wpe")
"""Tables of tokens and positions, as decoders of `KNOWN_CLASSES` call them."""

PLAIN_CLASSES = ("torch.nn.", "zplan.runtime.decoder")
"""Where their embeddings and linear layers come from."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called themselves: what they hold is a unit of the module around them, or has units of its own."""

Row = tuple[str, UnitKind, nn.Module, list[tuple[str, nn.Parameter]]]
"""(unit name, kind, module, named parameters)."""


def find_units(
    model: nn.Module,
    *,
    units: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    groups: Mapping[nn.Parameter, int] | None = None,
) -> list[Found]:
    """Units in module order; each parameter belongs to the first unit that uses it.

    Parameters
    ----------
    model
        Any module tree.
    units
        Patterns of module names (`model.layers.*`; `*` does not match a dot). The modules they name are the blocks. By
        default these are the children of every module list that is in no other one and holds at least `LIST_SHARE` of
        the parameters. Every other child that holds parameters is a unit of its own; parameters that hang directly on a
        module around the blocks form a unit with that module.
    resident
        Patterns of unit names that are never put in the ring.
    groups
        The optimizer's parameter group of each trained parameter; None: there is one.
    """
    for name, p in model.named_parameters():
        _check(name, p)
    blocks = _blocks(model, units)
    owner: dict[nn.Parameter, str] = {}
    found: list[Found] = []
    for name, m in model.named_modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse:
            raise ZplanError(
                f"embedding `{name}` makes sparse gradients, which can't be reduced here", "set sparse=False"
            )
    known = type(model).__module__.startswith(KNOWN_CLASSES)
    for name, kind, module, params in _candidates(model, blocks):
        if any(_matches(name, pattern) for pattern in resident):
            kind = "other"
        f = _own(name, kind, module, params, owner, groups or {})
        plain = isinstance(module, (nn.Embedding, nn.Linear)) and type(module).__module__.startswith(PLAIN_CLASSES)
        if known and plain and (kind == "head" or (kind == "embed" and name.rpartition(".")[2] in TABLES)):
            f.unit = f.unit._replace(guest=True)
        if f.params or f.frozen or f.reads:
            found.append(f)
    _check_patterns([f.unit.name for f in found], resident, "resident")
    return found


def _own(
    name: str,
    kind: UnitKind,
    module: nn.Module,
    params: list[tuple[str, nn.Parameter]],
    owner: dict[nn.Parameter, str],
    groups: Mapping[nn.Parameter, int],
) -> Found:
    """The unit of one module: what nobody before it owns is its own, the rest it reads."""
    trained: list[tuple[str, nn.Parameter]] = []
    frozen: dict[str, list[tuple[str, nn.Parameter]]] = {}
    reads: dict[str, None] = {}
    for pname, p in params:
        if p in owner:
            if owner[p].partition(":")[0] != name:
                reads[owner[p]] = None
            continue
        segment = name if p.requires_grad else f"{name}:frozen"
        if not p.is_floating_point():
            segment = f"{name}:{str(p.dtype).removeprefix('torch.')}"
        owner[p] = segment
        (trained if p.requires_grad else frozen.setdefault(segment, [])).append((pname, p))
    segments = [(_frozen_unit(segment, kind, rows), [p for _, p in rows]) for segment, rows in frozen.items()]
    unit = Unit(name, kind, tuple(Param(n, tuple(p.shape), groups.get(p, 0)) for n, p in trained))
    return Found(unit, module, [p for _, p in trained], list(reads), segments)


def _frozen_unit(name: str, kind: UnitKind, rows: list[tuple[str, nn.Parameter]]) -> Unit:
    params = tuple(Param(n, tuple(p.shape)) for n, p in rows)
    p = rows[0][1]
    itemsize = None if p.is_floating_point() else p.element_size()
    beside = sum(t.untyped_storage().nbytes() for t in constant_storages([p for _, p in rows]).values())
    return Unit(name, kind, params, frozen=True, itemsize=itemsize, constant_bytes=beside)


def _check(name: str, p: nn.Parameter) -> None:
    if p.is_complex():
        raise ZplanError(
            f"parameter `{name}` is complex ({p.dtype}), which has no gradient sum here", "store real parts"
        )
    check_class(name, p)


# --- which modules are blocks
# -------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, units: Sequence[str] | None) -> dict[str, nn.Module]:
    """By name; the pieces of a table are blocks too, whatever `units` says of others. See [Note: tables]."""
    blocks = _named_blocks(model, units) if units is not None else _listed_blocks(model)
    for name, module in model.named_modules():
        if isinstance(module, SplitTable) and not any(name == b or name.startswith(f"{b}.") for b in blocks):
            blocks.update((_join(f"{name}.{PIECES}", n), piece) for n, piece in module.pieces.named_children())
    return blocks


def tables_of(model: nn.Module) -> dict[str, nn.Embedding | nn.Linear]:
    """Embeddings and linear maps that lie in no block, such as the head, by name."""
    blocks = _blocks(model, None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and not any(f"{name}.".startswith(f"{b}.") for b in blocks)
    }


def _listed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Children of the outermost module lists that hold a fair share of the parameters."""
    total = sum(p.numel() for p in model.parameters())
    blocks: dict[str, nn.Module] = {}
    inside: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(outer + ".") for outer in inside):
            continue
        called = dict(_called(path, module))
        if len(called) > 1 and sum(p.numel() for p in module.parameters()) >= LIST_SHARE * total:
            inside.append(path)
            blocks.update(called)
    return blocks


def _called(path: str, holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children of a list, those of a list in it in their place: no list is ever called."""
    for name, child in holder.named_children():
        if isinstance(child, CONTAINERS):
            yield from _called(_join(path, name), child)
        else:
            yield _join(path, name), child


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Modules whose names match a pattern; a module inside another that matches belongs to the outer one."""
    names = [n for n, m in model.named_modules() if n and any(True for _ in m.parameters())]
    _check_patterns(names, patterns, "units")
    blocks: dict[str, nn.Module] = {}
    for name in names:
        outer = any(name.startswith(taken + ".") for taken in blocks)
        if not outer and any(_matches(name, pattern) for pattern in patterns):
            blocks[name] = model.get_submodule(name)
    return blocks


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check_patterns(names: Sequence[str], patterns: Sequence[str], what: str) -> None:
    for pattern in patterns:
        if not any(_matches(n, pattern) for n in names):
            raise ZplanError(
                f"`{what}`: no module with parameters is called `{pattern}`",
                did_you_mean(pattern, names) or f"names are like `{names[len(names) // 2]}`" if names else None,
            )


def _candidates(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[Row]:
    """Every unit in module order. A module that is met twice is one unit under its first name."""
    yield from _walk("", model, model, blocks, set())


def _walk(
    prefix: str, module: nn.Module, called: nn.Module, blocks: dict[str, nn.Module], seen: set[nn.Module]
) -> Iterator[Row]:
    own = [(_join(prefix, n), p) for n, p in module.named_parameters(recurse=False)]
    if own:
        yield prefix or "root", "other", called, own
    for child_name, child in module.named_children():
        name = _join(prefix, child_name)
        if child in seen:
            continue
        seen.add(child)
        if name in blocks:
            yield name, "block", child, _named(name, child)
        elif isinstance(child, CONTAINERS):
            yield from _walk(name, child, called, blocks, seen)
        elif any(path.startswith(name + ".") for path in blocks):
            yield from _walk(name, child, child, blocks, seen)
        else:
            yield name, _kind(child), child, _named(name, child)


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
