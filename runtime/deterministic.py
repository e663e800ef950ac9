"""torch's deterministic algorithms for as long as an engine is open."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from zplan.planner.errors import ZplanError
from zplan.planner.overhead import WORKSPACE

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def check_workspace(device: torch.device) -> None:
    """cuBLAS reads its workspaces from the environment once, when it starts; the ledger counts these."""
    found = os.environ.get(VARIABLE)
    if device.type == "cuda" and found != WORKSPACE:
        raise ZplanError(
            f"`deterministic` needs {VARIABLE}={WORKSPACE} before torch uses the GPU, and it is {found or 'not set'}",
            f"set it where the job is started, as `zplan run` does: {VARIABLE}={WORKSPACE} torchrun ...",
        )


_users: list[object] = []
"""Engines that want the mode: the first turns it on, and the last puts back what was there."""
_before: dict[str, bool] = {}
_changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}


def be_deterministic(*, compiled: bool) -> Callable[[], None]:
    """Turn deterministic algorithms on; an op that has none raises torch's own error.

    torch would also fill every new tensor with NaN, which costs time and finds no wrong order: that is left off.

    Parameters
    ----------
    compiled
        Blocks are compiled: their kernels are then chosen by rule and not by timing them.

    Returns
    -------
    Callable
        Puts back what was there.
    """
    settings: list[tuple[Any, str, bool]] = [
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch.backends.cudnn, "benchmark", False),
    ]
    if compiled:
        settings.append((_inductor(), "deterministic", True))
    if not _users:
        _before["mode"] = torch.are_deterministic_algorithms_enabled()
        _before["warns"] = torch.is_deterministic_algorithms_warn_only_enabled()
    user = object()
    _users.append(user)
    for owner, name, value in settings:
        _changed.setdefault((id(owner), name), (owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    torch.use_deterministic_algorithms(mode=True)

    def undo() -> None:
        if user not in _users:
            return
        _users.remove(user)
        if not _users:
            torch.use_deterministic_algorithms(mode=_before["mode"], warn_only=_before["warns"])
            for owner, name, value in _changed.values():
                setattr(owner, name, value)
            _changed.clear()

    return undo


def _inductor() -> Any:
    import torch._inductor.config as inductor

    if "deterministic" not in inductor._config:
        raise ZplanError(
            f"torch {torch.__version__} times compiled kernels to choose one, so `deterministic` and `compile` exclude "
            "each other",
            "leave one of the two out",
        )
    return inductor
