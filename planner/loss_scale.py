"""How fp16 losses are scaled: DeepSpeed's settings and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zplan.planner.errors import ZplanError
from zplan.planner.reading import check_keys, want_bool, want_int, want_number

NUM_SCALARS = 8
"""fp32 scalars that the scale takes on the device: scale, tolerance left, age, failed, and four of scratch."""

LARGEST_POWER = 100
"""Of 2; fp32 ends at 127, and a scale may still double."""


@dataclass(frozen=True)
class LossScale:
    """Static where `static` is above 0, else dynamic.

    [Note: loss scale] A step whose gradients are not finite is skipped. The scale halves once `hysteresis` such steps
    have come since the tolerance was refilled. It doubles, and refills the tolerance, when the number of good steps
    since the last skipped one, this one left out, is a multiple of `window` above 0. `consecutive` refills with every
    good step.
    """

    static: float = 0.0
    power: int = 16
    """The dynamic scale begins at 2 to this power."""
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: int = 1

    @property
    def start(self) -> float:
        return self.static or 2.0**self.power


def read_loss_scale(block: Mapping[str, Any], where: str) -> LossScale:
    """The settings of an `fp16` block; `enabled` is read elsewhere."""
    own = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    check_keys(block, ("enabled", "auto_cast", "fp16_master_weights_and_grads", "consecutive_hysteresis", *own), where)
    for key in ("auto_cast", "fp16_master_weights_and_grads"):
        if want_bool(key, where, block.get(key, False)):
            raise ZplanError(f"`{key}` of {where} asks for something that is not built yet", "leave it out")
    found = LossScale(
        static=want_number("loss_scale", where, block.get("loss_scale", 0)),
        power=want_int("initial_scale_power", where, block.get("initial_scale_power", 16), least=0),
        window=want_int("loss_scale_window", where, block.get("loss_scale_window", 1000)),
        hysteresis=want_int("hysteresis", where, block.get("hysteresis", 2)),
        consecutive=want_bool("consecutive_hysteresis", where, block.get("consecutive_hysteresis", False)),
        minimum=want_int("min_loss_scale", where, block.get("min_loss_scale", 1)),
    )
    if found.power > LARGEST_POWER:
        raise ZplanError(
            f"`initial_scale_power` of {where} is {found.power}", f"use at most {LARGEST_POWER}, such as 16"
        )
    if found.start < found.minimum and not found.static:
        raise ZplanError(
            f"the loss scale of {where} begins at {found.start:g}, below its minimum {found.minimum}",
            "raise `initial_scale_power` or lower `min_loss_scale`",
        )
    return found


def explicit_loss_scale(scale: LossScale) -> dict[str, Any]:
    """The `fp16` block with nothing left to a default."""
    return {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": scale.static,
        "initial_scale_power": scale.power,
        "loss_scale_window": scale.window,
        "hysteresis": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive,
        "min_loss_scale": scale.minimum,
    }
