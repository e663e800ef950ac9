"""Optimizers that users bring: any torch optimizer that looks at one element at a time runs on the flat slices.

Whether it does is tried out: a few steps on a small matrix must come out the same when the matrix is cut into flat
stretches. Its states are then flat tensors too. They get buffers of the ledger before the first step, in which the
optimizer finds them from its second step on: what it makes for itself in the first one is copied there, a slice at a
time. An optimizer that looks at whole tensors (Muon, Shampoo, Adafactor) runs where a rank holds them: at stage 0, or
on one rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.planner.optimizers import spelled_out
from zplan.runtime.adamw import Group, Row
from zplan.runtime.norms import Scalars

TRIAL_STEPS = 3
CUTS = (0, 20, 48)
"""Where the trial matrix of 6 x 8 is cut."""

DTYPES = {torch.float32: 4, torch.bfloat16: 2}


@dataclass(frozen=True)
class Trial:
    """What a few steps showed."""

    elementwise: bool
    states: dict[str, int]
    """Bytes of an element by state that is as large as the parameter."""
    scalars: dict[str, Any]
    """What it keeps of a slice beside those, such as a step count; numbers or 0-dim tensors."""

    @property
    def per_slice(self) -> int:
        """Bytes of those scalars that are tensors."""
        return sum(v.untyped_storage().nbytes() for v in self.scalars.values() if isinstance(v, Tensor))


class Foreign:
    """One optimizer of the user's, on this rank's slices."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
        self.given, self.title = optimizer, type(optimizer).__name__
        self.trial = try_out(optimizer)
        if not self.trial.elementwise and sharded:
            raise ZplanError(
                f"{self.title} looks at whole tensors, and ranks hold slices of them at stages 1 to 3",
                'use "stage": 0, or an optimizer that looks at one element at a time',
            )
        self.name = spelled_out(self.title, self.trial.states, self.trial.per_slice)
        self.inner = _empty(optimizer)
        self.params: dict[int, nn.Parameter] = {}
        self.mine: dict[int, dict[str, Any]] = {}
        """Slices as parameters, and their groups, by their keys."""
        self.saved: dict[str, Any] = {}
        """Scalars of a checkpoint, for slices that have not stepped yet."""

    @property
    def whole_tensors(self) -> bool:
        return not self.trial.elementwise

    def update(self, rows: Sequence[Row], s: Scalars, group: Group) -> None:
        """One step of one group. The host asks whether it is to be skipped, which costs a wait."""
        if s.skip.item():
            return
        known = [r for r in rows if r.key in self.params and self.inner.state.get(self.params[r.key])]
        # A slice that has no states yet steps alone: what the optimizer makes for it is moved before the next one's.
        for part in ([known] if known else []) + [[r] for r in rows if r not in known]:
            params = [self._param(r, group) for r in part]
            for p, r in zip(params, part, strict=True):
                self._show_states(p, r)
                p.grad = r.grad.div_(s.scale)
            with torch.enable_grad():
                self.inner.step()
            for p, r in zip(params, part, strict=True):
                p.grad = None
                self._keep_states(p, r)
                if r.half is not None:
                    r.half.copy_(r.master)

    def _param(self, r: Row, group: Group) -> nn.Parameter:
        """The slice as a parameter in a group of its own, with the numbers of the user's group as they are now."""
        key, numbers = r.key, {k: v for k, v in _quiet(group).items() if k != "params"}
        if key not in self.params:
            self.params[key] = nn.Parameter(r.master)
            self.inner.add_param_group({**numbers, "params": [self.params[key]]})
            self.mine[key] = self.inner.param_groups[-1]
        self.mine[key].update(numbers)
        return self.params[key]

    def _show_states(self, p: nn.Parameter, r: Row) -> None:
        """Before the first step: what a checkpoint brought, or what the constructor made."""
        if self.inner.state.get(p):
            return
        if self.saved:
            names = list(self.trial.states)
            self.inner.state[p] = {**dict(zip(names, r.states, strict=True)), **_copy(self.saved)}
        elif self.given.state:
            first, state = next(iter(self.given.state.items()))
            self.inner.state[p] = {
                k: torch.full_like(r.master, float(v.flatten()[0])) if _as_large(v, first) else _copy({k: v})[k]
                for k, v in state.items()
            }

    def _keep_states(self, p: nn.Parameter, r: Row) -> None:
        """After the first step: states move into the ledger's buffers."""
        state = self.inner.state[p]
        for name, buffer in zip(self.trial.states, r.states, strict=False):
            if state[name] is not buffer and state[name].data_ptr() != buffer.data_ptr():
                buffer.copy_(state[name])
                state[name] = buffer

    def scalars(self) -> dict[str, float]:
        """What is kept of every slice alike, such as a step count, for a checkpoint; empty before the first step."""
        state = next((s for s in self.inner.state.values() if s), self.saved)
        return {k: v.item() if isinstance(v, Tensor) else v for k, v in state.items() if k in self.trial.scalars}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Go on from a checkpoint: states lie in the buffers already."""
        like = self.trial.scalars
        self.saved = {
            k: torch.tensor(v, dtype=like[k].dtype) if isinstance(like.get(k), Tensor) else v
            for k, v in scalars.items()
        }
        self.inner.state.clear()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(ledger line, tensor) of what the optimizer keeps beside the ledger's buffers."""
        return [
            ("optim.steps" if self.trial.elementwise else f"optim.{self.title}", v)
            for p, state in self.inner.state.items()
            for k, v in state.items()
            if isinstance(v, Tensor) and not (self.trial.elementwise and k in self.trial.states)
        ]


def try_out(optimizer: torch.optim.Optimizer) -> Trial:
    """Steps on a small matrix, whole and cut into flat stretches. Leaves the optimizer and random states alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start, grads = torch.randn(6, 8), [torch.randn(6, 8) for _ in range(TRIAL_STEPS)]
        try:
            whole, state = _run(optimizer, [start], [[g] for g in grads])
        except Exception as error:
            raise ZplanError(
                f"{type(optimizer).__name__} can't step: {type(error).__name__}: {error}",
                "`optimizer=` takes optimizers whose `step()` needs no closure",
            ) from error
        cut = [[g.flatten()[a:b] for a, b in zip(CUTS, CUTS[1:], strict=False)] for g in [start, *grads]]
        try:
            parts, flat_state = _run(optimizer, cut[0], cut[1:])
        except Exception:  # whatever it says of flat tensors, it can't work on them
            return Trial(elementwise=False, states={}, scalars={})
    same = torch.allclose(torch.cat([p.detach() for p in parts]), whole[0].detach().flatten(), rtol=1e-6, atol=1e-7)
    large = {k: v for k, v in flat_state.items() if _as_large(v, parts[0])}
    rest = {k: v for k, v in flat_state.items() if k not in large}
    known = all(isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1) for v in rest.values())
    fits = same and known and all(v.dtype in DTYPES for v in large.values())
    if not fits:
        return Trial(elementwise=False, states={}, scalars={})
    itemsizes = {k: DTYPES[v.dtype] for k, v in large.items()}
    return Trial(elementwise=True, states=itemsizes, scalars=rest)


def _run(
    optimizer: torch.optim.Optimizer, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> tuple[list[nn.Parameter], dict[str, Any]]:
    params = [nn.Parameter(t.clone()) for t in start]
    inner = _empty(optimizer)
    for p in params:
        inner.add_param_group({**_quiet(optimizer.param_groups[0]), "params": [p]})
    for p in params if optimizer.state else ():
        first, state = next(iter(optimizer.state.items()))
        inner.state[p] = {
            k: torch.full_like(p, float(v.flatten()[0])) if _as_large(v, first) else _copy({k: v})[k]
            for k, v in state.items()
        }
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        inner.step()
    return params, dict(inner.state[params[0]])


def _empty(optimizer: torch.optim.Optimizer) -> Any:
    """The same optimizer without parameters, whatever its constructor takes."""
    new = object.__new__(type(optimizer))
    new.__dict__.update(optimizer.__dict__)
    new.state, new.param_groups = defaultdict(dict), []
    return new


def _quiet(group: Group) -> dict[str, Any]:
    """The numbers of a group, with torch's many-tensors-at-once form off: it holds copies of all of them."""
    return {**group, **({"foreach": False} if group.get("foreach", 0) is None else {})}


def _as_large(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == like.shape


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
