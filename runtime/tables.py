"""Huge embeddings and heads in pieces, so that stage 3 gathers one piece at a time and never the whole table.

[Note: tables] torch's embedding and linear map read their weight whole, so under them one tensor can't be gathered in
parts. `cap_tables` puts several smaller modules in their place: of an embedding each makes some columns of the output
(a slice of the width), of a linear map some outputs (a slice of the rows), and the outputs are joined. Every piece is a
block like a layer: pieces of one size share a ring. `state_dict` and `load_state_dict` know the whole table by its old
name; parameters and checkpoints know the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError

PIECES = "zplan_pieces"
"""What the list of pieces is called in the names of their parameters."""

MIN_PIECES = 4
"""Fewer would not be more than a ring has slots, and so all be whole on every rank."""


class SplitTable(nn.Module):
    """The pieces of one embedding or linear map, whose outputs stand side by side in the last dim."""

    def __init__(self, pieces: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.dim = dim
        """Dim of the whole weight along which it is cut."""
        setattr(self, PIECES, nn.ModuleList(pieces))
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_cut)

    @property
    def pieces(self) -> nn.ModuleList:
        return getattr(self, PIECES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([piece(x) for piece in self.pieces], dim=-1)


def cap_tables(model: nn.Module, max_numel: int) -> tuple[str, ...]:
    """Put pieces in the place of every embedding and head that has more than `max_numel` elements. In place.

    For `zplan.initialize`, and before an optimizer is made: the pieces' parameters are new ones. At stage 3 a rank then
    holds as many pieces as the ring has slots, instead of whole tables. Costs one more copy of the joined output in
    forward (of a head: of the logits in the compute dtype), and while cutting a second copy of one table.

    Parameters
    ----------
    model
        Anywhere, meta included.
    max_numel
        Most elements of one piece.

    Returns
    -------
    tuple
        Names of the modules that were cut.

    Raises
    ------
    ZplanError
        When a table over the cap can't be cut: tied, of a class of its own, or with a norm over whole rows. Nothing has
        been changed then.

    Examples
    --------
    >>> model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    >>> cap_tables(model, 400)
    ('0', '1')
    >>> [tuple(p.shape) for p in model.parameters()][:2], sorted(model.state_dict())
    ([(100, 4), (100, 4)], ['0.weight', '1.bias', '1.weight'])
    """
    from zplan.runtime.detect import tables_of

    if max_numel < 1:
        raise ZplanError(f"a cap of {max_numel} elements", "give the most elements of one piece, such as 64e6")
    found = {name: m for name, m in tables_of(model).items() if m.weight.numel() > max_numel}
    holders: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(p), []).append(name)
    for name, module in found.items():
        _check(name, module, holders[id(module.weight)])
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _in_pieces(module, max_numel))
    return tuple(found)


def _check(name: str, module: nn.Module, holders: list[str]) -> None:
    numel = module.weight.numel()
    if len(holders) > 1:
        other = next(h for h in holders if not h.startswith(f"{name}."))
        raise ZplanError(
            f"table `{name}` ({numel:,} elements) is tied to `{other}`, and tied weights stay whole on every rank",
            "untie them, or raise the cap over its size",
        )
    if type(module) not in (nn.Embedding, nn.Linear):
        raise ZplanError(
            f"table `{name}` ({numel:,} elements) is a `{type(module).__name__}`, whose forward may read it whole",
            "raise the cap over its size, or cut it in the model itself",
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        what = "sparse gradients" if module.sparse else "`max_norm`, which looks at whole rows"
        raise ZplanError(f"table `{name}` ({numel:,} elements) has {what}", "raise the cap over its size")


def _in_pieces(module: nn.Module, max_numel: int) -> SplitTable:
    embedding = isinstance(module, nn.Embedding)
    dim = 1 if embedding else 0
    extent = module.weight.shape[dim]
    wide = -(-extent // num_pieces(module.weight.numel(), extent, max_numel))
    parts = module.weight.detach().split(wide, dim)
    make = _embedding if embedding else _linear
    pieces = [make(module, part, start) for start, part in zip(range(0, extent, wide), parts, strict=True)]
    return SplitTable(pieces, dim).train(module.training)


def num_pieces(numel: int, extent: int, max_numel: int) -> int:
    """How many pieces a table is cut into: the fewest under the cap, or up to twice as many where these are equal.

    Unequal ones are of another size class, so the last would not share the others' ring.

    Examples
    --------
    >>> num_pieces(128256 * 4096, 4096, 2**26), num_pieces(50257 * 1600, 50257, 2**24)
    (8, 5)
    """
    fewest = min(extent, max(MIN_PIECES, -(-numel // max_numel)))
    return next((n for n in range(fewest, 2 * fewest + 1) if extent % n == 0), fewest)


def _embedding(module: nn.Embedding, part: Tensor, _start: int) -> nn.Module:
    piece = nn.Embedding(
        *part.shape, padding_idx=module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq, device="meta"
    )
    piece.weight = nn.Parameter(part.clone(), requires_grad=module.weight.requires_grad)
    return piece


def _linear(module: nn.Linear, part: Tensor, start: int) -> nn.Module:
    piece = nn.Linear(part.shape[1], part.shape[0], bias=module.bias is not None, device="meta")
    piece.weight = nn.Parameter(part.clone(), requires_grad=module.weight.requires_grad)
    if module.bias is not None:
        own = module.bias.detach()[start : start + part.shape[0]].clone()
        piece.bias = nn.Parameter(own, requires_grad=module.bias.requires_grad)
    return piece


# --- the whole table's name ------------------------------------------------------------------------------------------


def _names(table: SplitTable, prefix: str) -> Mapping[str, list[str]]:
    """Name of the whole tensor -> names of its pieces."""
    first = table.pieces[0]
    count = range(len(table.pieces))
    return {f"{prefix}{n}": [f"{prefix}{PIECES}.{i}.{n}" for i in count] for n, _ in first.named_parameters()}


def _join(table: SplitTable, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for whole, parts in _names(table, prefix).items():
        state[whole] = torch.cat([state.pop(part) for part in parts], dim=table.dim if whole.endswith("weight") else 0)


def _cut(table: SplitTable, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for whole, parts in _names(table, prefix).items():
        if whole in state:
            dim = table.dim if whole.endswith("weight") else 0
            sizes = [piece.get_parameter(whole.rpartition(".")[2]).shape[dim] for piece in table.pieces]
            state.update(zip(parts, state.pop(whole).split(sizes, dim), strict=True))
