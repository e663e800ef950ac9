"""Starts ranks of which one ends badly, and says how long the others lived on and what was left of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from zplan.planner.errors import ZplanError
from zplan.runtime.job import Job
from zplan.runtime.launch import launch
from zplan.runtime.start import WORKER

SCRIPT = Path(__file__).with_name("failing_script.py")
LIMIT_S = 30.0


@dataclass(frozen=True)
class End:
    """How a launch ended."""

    message: str
    seconds: float
    """From the failure of one rank to the end of all."""
    ranks: int
    """That had begun to train."""
    left: tuple[int, ...]
    """Processes of ranks that are still there."""


def fail(folder: Path, how: str, *, world_size: int, cpu: bool) -> End:
    job = Job("script", folder, folder / "no plan", script=SCRIPT, arguments=(str(folder), how))
    message = "the ranks ended as if nothing had been"
    try:
        launch(WORKER, [str(job.write())], world_size=world_size, folder=folder, cpu=cpu)
    except ZplanError as error:
        message = error.message
    ended = time.monotonic()
    began = folder / "began"
    seconds = ended - float(began.read_text()) if began.exists() else float("inf")
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    return End(message, seconds, len(pids), tuple(p for p in pids if os.path.exists(f"/proc/{p}")))
