"""Before any rank starts: is this the machine that the plan was made for, and is there room on it now?"""

from __future__ import annotations

import os
from pathlib import Path

from zplan.planner.errors import ZplanError

GIB = 2**30

CGROUP = Path("/sys/fs/cgroup")


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def require_torch() -> None:
    """Refuse early, and without importing it, when there is no torch to run with."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise ZplanError("training needs torch, which is not installed", "pip install 'zplan[runtime]'")


def num_gpus() -> int:
    """GPUs that ranks started from here would see, `CUDA_VISIBLE_DEVICES` honoured; 0 under `ZPLAN_DEVICE=cpu`.

    Asks the driver without making a CUDA context, which would take memory from every card.
    """
    import torch

    return 0 if os.environ.get("ZPLAN_DEVICE") == "cpu" else torch.cuda.device_count()


def check_world(world_size: int, gpus: int, replan: str) -> None:
    """On a machine with GPUs the plan must be for as many as there are.

    Parameters
    ----------
    replan
        The full `zplan plan` line that asks for this machine.
    """
    if gpus and gpus != world_size:
        seen = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        way_out = f"plan for this machine: {replan}"
        if gpus > world_size:
            way_out += f"; or show it {world_size} of them with CUDA_VISIBLE_DEVICES"
        raise ZplanError(f"the plan is for {world_size} ranks and this machine has {seen}", way_out)


def available_host_bytes() -> int:
    """Host memory that new processes can take: what the system calls available, within this container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    try:
        limit_text = limit.read_text().strip()
        if limit_text != "max":
            available = min(available, int(limit_text) - int(used.read_text()))
    except (OSError, ValueError):
        pass  # no such control group here: the system's number is the limit
    return available


def process_bytes() -> int:
    """Host memory that a rank takes before it holds any tensor: measured on this process, which has torch loaded too."""
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def check_host_memory(world_size: int, peak_bytes: int, *, available: int, base: int) -> None:
    """CPU ranks share the host: all of them must fit at their peak.

    Parameters
    ----------
    peak_bytes
        Ledger's peak of one rank on the CPU.
    available, base
        From `available_host_bytes` and `process_bytes`.
    """
    need = world_size * (peak_bytes + base)
    if need > available:
        raise ZplanError(
            f"{world_size} ranks need {gib(need)} of host memory ({gib(peak_bytes)} each by the plan and {gib(base)} for "
            f"Python and torch) and {gib(available)} is available",
            "close other programs, or plan with a smaller micro-batch, a shorter --seq or --checkpointing full",
        )


def check_device_memory(peak_bytes: int, context_bytes: int, device: int) -> None:
    """Called by a rank with its GPU set and nothing on it but the CUDA context: the plan's peak must fit in what is free.

    Parameters
    ----------
    peak_bytes
        Ledger's peak of one rank, overheads included.
    context_bytes
        The part of it that the context, already there, accounts for.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    need = peak_bytes - context_bytes
    if need > free:
        raise ZplanError(
            f"GPU {device} has {gib(free)} of {gib(total)} free and the plan's peak needs {gib(need)}",
            "end what else runs on that GPU (see nvidia-smi), or plan with a smaller --mem",
        )
