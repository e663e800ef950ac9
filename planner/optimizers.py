"""Optimizer kinds as data: what each keeps per parameter between steps, and what its step holds for a moment.

[Note: optimizer bytes] Elements are those of a rank's slices. `State.nbytes` is that of one flat slice, padding
included, for optimizers that look at one element at a time. Adafactor and Muon look at whole matrices: their states
are counted by parameter, and where states are sharded each rank is charged an even share.

Sources: torch 2.13 (`torch/optim/*.py`) for adamw, sgd, adagrad, adafactor and muon; bitsandbytes 0.50
(`optim/optimizer.py`: blocks of 256 elements, one fp32 constant each, for both moments) for adamw8bit; Chen et al. 2023
for lion; You et al. 2020 for lamb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.models import Param, Unit

FP32, BF16 = 4, 2

SCRATCH_NUMEL = 4 * 2**20
"""Elements of a scratch buffer; longer slices are updated in parts of so many."""


class State(NamedTuple):
    """One tensor beside a parameter.

    Attributes
    ----------
    name
        Last part of its ledger line, `optim.<name>`.
    itemsize
        Bytes of one element.
    block
        Elements that share one fp32 constant; 0 for none.
    numel_of
        Elements that one parameter of a unit needs; None: as many as it has, padding included.
    """

    name: str
    itemsize: int = FP32
    block: int = 0
    numel_of: Callable[[Unit, Param], int] | None = None

    def nbytes(self, unit: Unit, owned_numel: int, shares: int) -> int:
        """Bytes of one rank for a unit of which it owns `owned_numel` elements, split over `shares` ranks."""
        if self.numel_of is not None:
            numel = -(-sum(self.numel_of(unit, p) for p in unit.params) // shares)
        else:
            numel = owned_numel
        return numel * self.itemsize + (FP32 * -(-numel // self.block) if self.block else 0)


class OptimizerKind(NamedTuple):
    """One optimizer.

    Attributes
    ----------
    states
        What it keeps beside the parameter.
    deepspeed
        Its name in DeepSpeed's schema, or in `torch.optim`, where DeepSpeed looks next; empty: in neither.
    master
        Whether 16-bit training keeps fp32 master weights.
    workspace
        Bytes that the update of the largest parameter holds beside states and gradients; None for none.
    runnable
        Whether zplan's runtime steps with it.
    nominal
        Bytes of the states per parameter, to the whole byte, for tables of rates.
    note
        What is assumed, where something is.
    scratch
        fp32 buffers of at most `SCRATCH_NUMEL` elements, through which the runtime's update goes where torch has no
        fused kernel.
    per_slice
        Bytes of what an optimizer that users bring keeps of each slice beside its states, such as a step count.
    """

    name: str
    states: tuple[State, ...]
    deepspeed: str
    nominal: int
    master: bool = True
    workspace: Callable[[Unit, Param], int] | None = None
    runnable: bool = False
    note: str = ""
    scratch: int = 0
    per_slice: int = 0


def _is_hidden_matrix(unit: Unit, p: Param) -> bool:
    """What Muon takes: matrices inside the blocks. Embedding, head, norms and biases are left to AdamW."""
    return unit.kind == "block" and len(p.shape) == 2


def _others(unit: Unit, p: Param) -> int:
    return 0 if _is_hidden_matrix(unit, p) else p.numel


def _hidden(unit: Unit, p: Param) -> int:
    return p.numel if _is_hidden_matrix(unit, p) else 0


def _newton_schulz(unit: Unit, p: Param) -> int:
    """The update in fp32, then Newton-Schulz in bf16 on an m x n matrix, m the shorter side: two of m x n, two of
    m x m.
    """
    if not _is_hidden_matrix(unit, p):
        return 0
    short = min(p.shape)
    return FP32 * p.numel + BF16 * (2 * p.numel + 2 * short * short)


def _rows(unit: Unit, p: Param) -> int:
    return p.numel // p.shape[-1] if len(p.shape) > 1 else 0


def _columns(unit: Unit, p: Param) -> int:
    return p.numel // p.shape[-2] if len(p.shape) > 1 else 0


def _vectors(unit: Unit, p: Param) -> int:
    return p.numel if len(p.shape) < 2 else 0


def _whole(unit: Unit, p: Param) -> int:
    return FP32 * p.numel


_MOMENTS = (State("exp_avg"), State("exp_avg_sq"))

KINDS: dict[str, OptimizerKind] = {
    k.name: k
    for k in (
        OptimizerKind("adamw", _MOMENTS, "AdamW", 8, runnable=True),
        OptimizerKind("adam", _MOMENTS, "Adam", 8, runnable=True, note="weight decay is added to the gradient (L2)"),
        OptimizerKind("sgd", (), "SGD", 0, runnable=True, note="without momentum"),
        OptimizerKind("sgd-momentum", (State("momentum_buffer"),), "SGD", 4, runnable=True),
        OptimizerKind("adagrad", (State("sum"),), "Adagrad", 4, runnable=True, scratch=1),
        OptimizerKind("lion", (State("exp_avg"),), "Lion", 4, runnable=True, scratch=1),
        OptimizerKind(
            "lamb",
            _MOMENTS,
            "Lamb",
            8,
            workspace=_whole,
            note="the update of one parameter is whole before its norm is known",
        ),
        OptimizerKind(
            "adamw8bit",
            (State("exp_avg", 1, 256), State("exp_avg_sq", 1, 256)),
            "",
            2,
            note="blocks of 256 elements with one fp32 constant, as in bitsandbytes; flat slices have no small tensors "
            "to keep in fp32",
        ),
        OptimizerKind(
            "adafactor",
            (
                State("row_var", numel_of=_rows),
                State("col_var", numel_of=_columns),
                State("variance", numel_of=_vectors),
            ),
            "Adafactor",
            0,
            workspace=_whole,
            note="second moments of matrices by rows and columns, no first moment; an even share on each rank",
        ),
        OptimizerKind(
            "muon",
            (
                State("momentum_buffer", numel_of=_hidden),
                State("exp_avg", numel_of=_others),
                State("exp_avg_sq", numel_of=_others),
            ),
            "Muon",
            4,
            workspace=_newton_schulz,
            note="matrices of the blocks by Muon, the rest by AdamW; a matrix is orthogonalised whole on its rank",
        ),
        OptimizerKind(
            "adamw-bf16",
            (State("exp_avg", BF16), State("exp_avg_sq", BF16)),
            "",
            4,
            master=False,
            runnable=True,
            scratch=3,
            note="no fp32 master weights: weights and second moments are rounded stochastically",
        ),
        OptimizerKind(
            "adamw8bit-bf16",
            (State("exp_avg", 1, 256), State("exp_avg_sq", 1, 256)),
            "",
            2,
            master=False,
            note="no fp32 master weights; moments as of adamw8bit",
        ),
        OptimizerKind(
            "adamw-bf16-states",
            (State("exp_avg", BF16), State("exp_avg_sq", BF16)),
            "",
            4,
            runnable=True,
            scratch=3,
            note="both moments in bf16, the second one rounded stochastically; fp32 master weights",
        ),
    )
}

RUNNABLE = tuple(k.name for k in KINDS.values() if k.runnable)

_OTHER_NAMES = {
    **{"adam8bit": "adamw8bit", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit"},
    **{"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd_momentum": "sgd-momentum", "bf16": "adamw-bf16"},
    **{"paged_adamw_8bit": "adamw8bit", "adamw_bf16": "adamw-bf16"},
}


def find_kind(name: str, flag: str = "--optimizer") -> OptimizerKind:
    """The kind that a user's word means.

    Examples
    --------
    >>> find_kind("AdamW").name, find_kind("adam8bit").name
    ('adamw', 'adamw8bit')
    """
    word = name.lower()
    found = KINDS.get(_OTHER_NAMES.get(word, word))
    if found is None:
        hint = did_you_mean(word, KINDS) or f"use one of {', '.join(KINDS)}"
        raise ZplanError(f"`{flag} {name}` is unknown", hint)
    return found


def kind_of(name: str) -> OptimizerKind:
    """The kind of a choice's optimizer, whose name is checked already: a row of the table, or what `spelled_out` wrote.

    Examples
    --------
    >>> kind_of("NAdam(exp_avg:4,exp_avg_sq:4;8)").states[1].itemsize
    4
    """
    if name in KINDS:
        return KINDS[name]
    title, _, inside = name.removesuffix(")").partition("(")
    listed, _, per_slice = inside.partition(";")
    pairs = [text.split(":") for text in listed.split(",") if text]
    states = tuple(State(n, int(size)) for n, size in pairs)
    nominal = sum(s.itemsize for s in states)
    return OptimizerKind(name, states, title, nominal, runnable=True, per_slice=int(per_slice or 0))


def spelled_out(title: str, states: Mapping[str, int], per_slice: int) -> str:
    """The name of an optimizer that users bring: its class, bytes of an element by state, and bytes of a slice."""
    return f"{title}({','.join(f'{n}:{size}' for n, size in states.items())};{per_slice})"


@lru_cache(maxsize=64)
def workspace_bytes(name: str, units: Sequence[Unit]) -> int:
    """The most that the update of one parameter holds for a moment."""
    workspace = KINDS[name].workspace
    if workspace is None:
        return 0
    return max((workspace(u, p) for u in units if not u.frozen for p in u.params if math.prod(p.shape)), default=0)
