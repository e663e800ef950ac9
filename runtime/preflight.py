"""Before any rank starts: is this the machine that the plan was made for, and is there room on it now?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zplan.planner.errors import ZplanError
from zplan.planner.units import format_small

if TYPE_CHECKING:
    import torch

    from zplan.planner.ledger import Ledger

CGROUP = Path("/sys/fs/cgroup")


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
    """Host memory of a rank that holds no tensor yet, measured on this process, which has torch loaded too."""
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
            f"{world_size} ranks need {format_small(need)} of host memory and {format_small(available)} is available: "
            f"each takes {format_small(peak_bytes)} by the plan and {format_small(base)} for Python and torch",
            "close other programs, or plan with a smaller micro-batch, a shorter --seq or --checkpointing full",
        )


def check_pinned_memory(ranks_here: int, pinned_bytes: int, *, available: int) -> None:
    """Page-locked buffers of all ranks of this machine; `pinned_bytes` is the ledger's of one."""
    need = ranks_here * pinned_bytes
    if need > available:
        raise ZplanError(
            f"{ranks_here} ranks lock {format_small(need)} of host memory and {format_small(available)} is available",
            "close other programs, or plan with --saving foreground",
        )


OUTSIDE = ("overhead.driver", "overhead.context", "overhead.kernels", "overhead.nccl")
"""Lines that lie beside the caching allocator."""

ALREADY = ("overhead.driver", "overhead.context")
"""Lines that are there once a context is."""


def check_device_memory(ledger: Ledger, device: torch.device) -> None:
    """Called by a rank with nothing but a CUDA context on its GPU yet: the plan's peak must fit in what is free."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    need = ledger.peak_bytes() - sum(x.total_bytes for x in ledger.lines if x.id in ALREADY)
    if need > free:
        raise ZplanError(
            f"GPU {device.index} has {format_small(free)} of {format_small(total)} free "
            f"and the plan's peak needs {format_small(need)}",
            "end what else runs on that GPU (see nvidia-smi), or plan with a smaller --mem",
        )


def limit_device_memory(cap_bytes: int, ledger: Ledger, device: torch.device) -> None:
    """Give the allocator what a card of `cap_bytes` would leave it: the card less the ledger's overheads beside it."""
    import torch

    outside = sum(x.total_bytes for x in ledger.lines if x.kind == "overhead" and x.id.startswith(OUTSIDE))
    total = torch.cuda.get_device_properties(device).total_memory
    if not outside < cap_bytes <= total:
        raise ZplanError(
            f"--cap {format_small(cap_bytes)} is not between the {format_small(outside)} that context and NCCL take "
            f"and the {format_small(total)} of this card"
        )
    torch.cuda.set_per_process_memory_fraction((cap_bytes - outside) / total, device)
