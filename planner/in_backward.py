"""When the optimizer may run in backward, unit by unit."""

from __future__ import annotations

from typing import Protocol

from zplan.planner.config import Offload, Precision
from zplan.planner.errors import ZplanError


class Wanted(Protocol):
    """What a config or a choice says of the step."""

    @property
    def accumulation(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def offload(self) -> Offload: ...


def check_in_backward(wanted: Wanted, *, clip: float) -> None:
    """Refuse `optimizer_in_backward` where an update needs more than its own unit's gradients of one micro-step.

    Parameters
    ----------
    wanted
        A `Choice` or a `TrainingConfig`.
    clip
        Largest gradient norm; 0 for no clipping.
    """
    for why, hint in _obstacles(wanted, clip):
        raise ZplanError(f"`optimizer_in_backward` updates before {why}", f"{hint}, or drop `optimizer_in_backward`")


def allows_in_backward(wanted: Wanted, *, clip: float) -> bool:
    """Whether `check_in_backward` passes."""
    return not _obstacles(wanted, clip)


def _obstacles(wanted: Wanted, clip: float) -> list[tuple[str, str]]:
    """Each as what is not known yet, and the way out."""
    found = []
    if clip > 0:
        found.append(
            (f"the norm that `gradient_clipping` {clip:g} clips to is known", 'write "gradient_clipping": 0.0')
        )
    if wanted.accumulation > 1:
        k = wanted.accumulation
        found.append((f"the gradients of {k} micro-steps are added up", "use gradient_accumulation_steps 1"))
    if wanted.precision == "fp16":
        found.append(("the loss scale is known to have been small enough", "use bf16"))
    if wanted.offload.optimizer != "none":
        found.append(("gradients reach the offloaded optimizer", "keep the optimizer on the GPU"))
    return found
