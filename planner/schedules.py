"""Learning-rate schedules by DeepSpeed's names and formulas: pure functions of the number of applied steps.

[Note: t] `t` is one less than the optimizer steps that were applied: -1 before the first, which runs at the schedule's
start. A skipped step does not move it. So the step number n, from 1, runs at the rate of t = n - 2, and with a minimum
of 0 the first two steps run at a rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.reading import check_keys, want_bool, want_int, want_number, want_object, want_one_of, want_str

SECOND_BETA = 0.99
"""What DeepSpeed's OneCycle sets the second moment's decay to."""


@dataclass(frozen=True)
class Schedule:
    """One schedule with every parameter explicit."""

    type: str
    params: tuple[tuple[str, Any], ...]
    """In the order of DeepSpeed's signature. `warmup_max_lr` may be None: the optimizer's own rate."""

    def lr(self, t: int, base: float) -> float:
        """Learning rate at `t`; see [Note: t].

        Parameters
        ----------
        t
            Applied steps less one.
        base
            The optimizer's own rate.

        Examples
        --------
        >>> s = read_schedule({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}, "x")
        >>> [s.lr(t, 1.0) for t in (-1, 0, 1, 3, 4, 100)]
        [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
        """
        return _RATES[self.type](dict(self.params), t, base)

    def betas(self, t: int, betas: tuple[float, float]) -> tuple[float, float]:
        """Decay of the two moments at `t`; only OneCycle moves them."""
        p = dict(self.params)
        if self.type != "OneCycle" or not p["cycle_momentum"]:
            return betas
        return _one_cycle_momentum(p, t), SECOND_BETA

    def explicit(self, base: float) -> dict[str, Any]:
        """The `scheduler` block with nothing left to a default."""
        params = {k: base if k == "warmup_max_lr" and v is None else v for k, v in self.params}
        return {"type": self.type, "params": params}

    def peak(self, base: float) -> float:
        """The largest rate that it aims at, for tools that want one number."""
        p = dict(self.params)
        top = p.get("warmup_max_lr", p.get("cycle_max_lr", base))
        return base if top is None else float(top)

    def words(self, base: float) -> str:
        """Type and curve in one line.

        Examples
        --------
        >>> params = {"total_num_steps": 90, "warmup_num_steps": 9}
        >>> read_schedule({"type": "WarmupDecayLR", "params": params}, "x").words(1.0)
        'WarmupDecayLR: 0 at the start, 0.001 at step 11, 0 at step 92'
        """
        at = [f"{self.lr(-1, base):g} at the start"]
        at += [f"{self.lr(t, base):g} at step {t + 2}" for t in self.corners()]
        return f"{self.type}: {', '.join(at)}"

    def corners(self) -> tuple[int, ...]:
        """Values of `t` at which the curve bends or ends."""
        p = dict(self.params)
        if self.type == "OneCycle":
            first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
            return first - 1, first + second - 1
        if self.type == "LRRangeTest":
            return (p["lr_range_test_step_size"] - 1,)
        return tuple(dict.fromkeys((_warmup_steps(p), *((p["total_num_steps"],) if "total_num_steps" in p else ()))))


def _warmup_steps(p: Mapping[str, Any]) -> int:
    # The logarithm of one step is no divisor, so there are at least two.
    return max(2, int(p["warmup_num_steps"]))


def _warmup(p: Mapping[str, Any], t: int) -> float:
    """Share of the way up, for 0 <= t < W."""
    w = _warmup_steps(p)
    return t / w if p["warmup_type"] == "linear" else math.log(t + 1) / math.log(w)


def _warmup_lr(p: Mapping[str, Any], t: int, base: float) -> float:
    low, high = p["warmup_min_lr"], p["warmup_max_lr"]
    high = base if high is None else high
    if t < 0:
        return float(low)
    w = _warmup_steps(p)
    share = _warmup(p, t) if t < w else 1.0
    if t >= w and "total_num_steps" in p:
        total = p["total_num_steps"]
        share = max(0.0, (total - t) / max(1, total - w))
    return float(low + (high - low) * share)


def _warmup_cosine_lr(p: Mapping[str, Any], t: int, base: float) -> float:
    if t < 0:
        return 0.0
    w, total = _warmup_steps(p), p["total_num_steps"]
    if t < w:
        low = p["warmup_min_ratio"]
        return float(base * (low + (1 - low) * _warmup(p, t)))
    low = p["cos_min_ratio"]
    progress = min(1.0, (t - w + 1) / max(1, total - w))
    return float(base * max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2))


def _lr_range_test(p: Mapping[str, Any], t: int, base: float) -> float:
    del base  # the range is absolute
    interval = (t + 1) / p["lr_range_test_step_size"]
    if p["lr_range_test_staircase"]:
        interval = math.floor(interval)
    return float(p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval))


def _one_cycle_share(p: Mapping[str, Any], t: int) -> float:
    """Share of the way from the minimum to the maximum, for t below the cycle's length."""
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    whole = first + second
    at = t + 1
    x = 1.0 + at / whole - math.floor(1 + at / whole)
    ratio = first / whole
    rising = x <= ratio
    share: float = x / ratio if rising else (x - 1) / (ratio - 1)
    stairs = p["cycle_first_stair_count"] if rising else p["cycle_second_stair_count"]
    if stairs > 0:
        # From the whole number of steps: rounding in `share` could drop the top stair.
        inside = at % whole
        stair = inside * stairs / first if inside <= first else (whole - inside) * stairs / second
        share = math.floor(stair) / stairs
    return share


def _one_cycle(p: Mapping[str, Any], t: int, base: float) -> float:
    del base  # the range is absolute
    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    if t < 0:
        return float(low)
    whole = p["cycle_first_step_size"] + p["cycle_second_step_size"]
    if t < whole:
        return float(low + (high - low) * _one_cycle_share(p, t))
    if not p["decay_step_size"] or not p["decay_lr_rate"]:
        return float(low)
    return float(low / (1 + p["decay_lr_rate"] * (t - whole + 1) / p["decay_step_size"]))


def _one_cycle_momentum(p: Mapping[str, Any], t: int) -> float:
    low, high = p["cycle_min_mom"], p["cycle_max_mom"]
    if t < 0:
        return float(low)
    whole = p["cycle_first_step_size"] + p["cycle_second_step_size"]
    if t < whole:
        return float(high - (high - low) * _one_cycle_share(p, t))
    if not p["decay_step_size"] or not p["decay_mom_rate"]:
        return float(high)
    return float(high * (1 + p["decay_mom_rate"] * (t - whole + 1) / p["decay_step_size"]))


_RATES: dict[str, Callable[[Mapping[str, Any], int, float], float]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}

_NEEDED = object()
_RATE, _COUNT, _LEAST_0, _FLAG, _KIND = "rate", "count", "count0", "flag", "kind"
_WARMUP_STEPS = ("warmup_num_steps", _COUNT, 1000)
_WARMUP_TYPE = ("warmup_type", _KIND, "log")
_TOTAL = ("total_num_steps", _COUNT, _NEEDED)
_ROWS: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "WarmupLR": (("warmup_min_lr", _RATE, 0.0), ("warmup_max_lr", _RATE, None), _WARMUP_STEPS, _WARMUP_TYPE),
    "WarmupDecayLR": (
        _TOTAL,
        ("warmup_min_lr", _RATE, 0.0),
        ("warmup_max_lr", _RATE, 0.001),
        _WARMUP_STEPS,
        _WARMUP_TYPE,
    ),
    "WarmupCosineLR": (
        _TOTAL,
        ("warmup_min_ratio", _RATE, 0.0),
        _WARMUP_STEPS,
        ("cos_min_ratio", _RATE, 0.0001),
        _WARMUP_TYPE,
    ),
    "OneCycle": (
        ("cycle_min_lr", _RATE, _NEEDED),
        ("cycle_max_lr", _RATE, _NEEDED),
        ("decay_lr_rate", _RATE, 0.0),
        ("cycle_first_step_size", _COUNT, 2000),
        ("cycle_second_step_size", _LEAST_0, None),
        ("cycle_first_stair_count", _LEAST_0, 0),
        ("cycle_second_stair_count", _LEAST_0, None),
        ("decay_step_size", _LEAST_0, 0),
        ("cycle_momentum", _FLAG, True),
        ("cycle_min_mom", _RATE, 0.8),
        ("cycle_max_mom", _RATE, 0.9),
        ("decay_mom_rate", _RATE, 0.0),
    ),
    "LRRangeTest": (
        ("lr_range_test_min_lr", _RATE, 1e-3),
        ("lr_range_test_step_size", _COUNT, 2000),
        ("lr_range_test_step_rate", _RATE, 1.0),
        ("lr_range_test_staircase", _FLAG, False),
    ),
}
"""Type -> (parameter, kind of value, default) in the order of DeepSpeed's signatures."""


def read_schedule(block: Mapping[str, Any], where: str) -> Schedule:
    """A `scheduler` block, checked, with defaults filled in.

    "auto" is settled for the two rates, as trainers do; the numbers of steps can't be known here.
    """
    check_keys(block, ("type", "params"), where)
    kind = want_str("type", where, block.get("type"))
    if kind not in _ROWS:
        near = did_you_mean(kind, _ROWS) or f"use one of {', '.join(_ROWS)}"
        raise ZplanError(f"there is no schedule `{kind}` in {where}", near)
    params = want_object("params", where, block.get("params") or {})
    where = f"`params` of {where}"
    check_keys(params, [name for name, _, _ in _ROWS[kind]], where)
    found: dict[str, Any] = {}
    for name, value_kind, default in _ROWS[kind]:
        given = params.get(name)
        if given == "auto" and name in ("warmup_min_lr", "warmup_max_lr"):
            found[name] = 0.0 if name == "warmup_min_lr" else None
        elif given is not None:
            found[name] = _read(name, value_kind, where, given)
        elif default is _NEEDED:
            raise ZplanError(f"{kind} needs `{name}` in {where}", f"add `{name}`")
        else:
            found[name] = default
    for second, first in (
        ("cycle_second_step_size", "cycle_first_step_size"),
        ("cycle_second_stair_count", "cycle_first_stair_count"),
    ):
        if second in found and found[second] is None:
            found[second] = found[first]
    return Schedule(kind, tuple(found.items()))


def _read(name: str, kind: str, where: str, value: Any) -> Any:
    if kind == _FLAG:
        return want_bool(name, where, value)
    if kind == _KIND:
        return want_one_of(name, where, value, ("log", "linear"))
    if kind == _RATE:
        return want_number(name, where, value)
    return want_int(name, where, value, least=1 if kind == _COUNT else 0)
