"""What users may do to a model that an engine has, and may not: refuses `state_dict` where parameters are not whole,
`load_state_dict` where what it writes would be lost, and training of what is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zplan.planner.errors import ZplanError
from zplan.runtime.unit import FlatUnit


def refuse_unless_whole(units: Sequence[FlatUnit]) -> None:
    """Raise where parameters of these units show no values."""
    closed = next((u for u in units if not u.open), None)
    if closed is not None:
        raise ZplanError(
            f"`state_dict()` outside `zplan.summon`: this rank holds {closed.placement.owned_numel:,} of "
            f"{closed.layout.numel:,} elements of `{closed.name}`",
            "use `with zplan.summon(model): model.state_dict()`",
        )


def guard_state_dicts(model: nn.Module, units: Sequence[FlatUnit], *, sharded: bool) -> list[RemovableHandle]:
    """Hooks on every module that has parameters of its own."""
    owner = {p: u for u in units for p in u.params}
    handles: list[RemovableHandle] = []
    for module in model.modules():
        mine = list(dict.fromkeys(owner[p] for p in module.parameters(recurse=False) if p in owner))
        if not mine:
            continue

        def saving(m: nn.Module, *_: Any, module: nn.Module = module, mine: list[FlatUnit] = mine) -> None:
            if m is module:
                refuse_unless_whole(mine)

        def loading(
            m: nn.Module, _: Any, prefix: str, metadata: Any, *_more: Any,
            module: nn.Module = module, mine: list[FlatUnit] = mine,
        ) -> None:  # fmt: skip
            if m is module:
                _refuse_loading(mine, assign=metadata.get("assign_to_params_buffers", False), sharded=sharded)

        handles += module.register_state_dict_pre_hook(saving), module.register_load_state_dict_pre_hook(loading)
    return handles


def _refuse_loading(units: Sequence[FlatUnit], *, assign: bool, sharded: bool) -> None:
    hint = "use `with zplan.summon(model, write=True): model.load_state_dict(...)`, with the same values on every rank"
    if assign:
        raise ZplanError("`load_state_dict(assign=True)` would put other parameters in place of those trained", hint)
    for u in units:
        kept = u.placement.frozen or (not sharded and u.master is None)
        if not u.summoned and not (u.open and kept):
            raise ZplanError(f"`load_state_dict` into `{u.name}`, of which this rank trains a part or a copy", hint)


def check_loss(loss: object) -> None:
    """Raise where backward would have nowhere to begin."""
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else "one that no parameter leads to"
    raise ZplanError(
        f"`backward` needs one loss with a graph and got {what}",
        "take the mean of several; on a rank that has nothing to learn from pass `num_tokens=0`, or add "
        "`0.0 * output.sum()`",
    )


def check_own(model: nn.Module, units: Sequence[FlatUnit]) -> None:
    """Raise where something came into the model that the engine of these units does not train. Walks all modules."""
    own = {id(p) for u in units for p in u.params}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in own:
            raise ZplanError(
                f"`{name}` came into the model after `zplan.initialize`, so that nothing trains it",
                "resize embeddings and add adapters before `initialize`",
            )


def check_frozen(units: Sequence[FlatUnit]) -> None:
    """Raise where a parameter of frozen units, which has no states, was unfrozen."""
    for unit in units:
        for p, row in zip(unit.params, unit.placement.unit.params, strict=True):
            if p.requires_grad:
                raise ZplanError(
                    f"`{row.name}` was frozen when the engine was made, so that it has no optimizer states, and "
                    "requires a gradient now",
                    "leave it trainable for `zplan.initialize`, in a group of its own with an `lr` of 0 at first",
                )
