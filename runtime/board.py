"""What each rank is doing, where the launcher can read it even after the rank was killed.

Every rank keeps its step and phase in a small mapped file, which survives any kind of death, and writes down the error
that ended it. So the launcher can say which rank failed first, where, and why, in one sentence.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from zplan.planner.errors import ZplanError

STATE_BYTES = 256

END = "end"
"""The phase of a rank whose program is over without an error."""

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""How gloo and NCCL say that another rank has gone."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes
    ----------
    when
        Seconds on the machine's monotonic clock, which all processes share; the smallest is the cause of the others.
    message, hint
        For a `ZplanError`: itself. Otherwise the exception in one line.
    trace
        The traceback; empty for a `ZplanError`, which needs none.
    report
        Further lines to show, such as the ledger of the phase in which memory ran out.
    lost_peer
        Whether it only says that another rank has gone.
    in_step
        Whether training had begun.
    """

    rank: int
    when: float
    where: str
    message: str
    hint: str | None = None
    trace: str = ""
    report: str = ""
    lost_peer: bool = False
    in_step: bool = False


class Board:
    """One rank's side: says where it is, and what ended it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.step = 0
        with _state_path(folder, rank).open("w+b") as file:
            file.truncate(STATE_BYTES)
            self._state = mmap.mmap(file.fileno(), STATE_BYTES)
        self.phase = ""
        self.enter("start")

    def enter(self, phase: str) -> None:
        """Cheap enough for every phase of every step: one copy into a mapped page."""
        self.phase = phase
        text = f"{self.step}\n{phase}\n".encode()[:STATE_BYTES]
        self._state[: len(text)] = text

    def follow(self, phase: str) -> None:
        """Listener for an engine's phases: `idle` closes a step."""
        if phase == "idle" or not self.step:
            self.step += 1
        self.enter(phase)

    def fail(self, error: BaseException, *, report: str = "") -> None:
        """Write down what ends this rank. The file appears complete or not at all."""
        where = describe(self.step, self.phase)
        if isinstance(error, ZplanError):
            failure = Failure(
                self.rank, time.monotonic(), where, error.message, error.hint, report=report, in_step=self.step > 0
            )
        else:
            line = traceback.format_exception_only(error)[-1].strip()
            trace = "".join(traceback.format_exception(error))
            lost = isinstance(error, RuntimeError) and any(x in line for x in LOST_PEER)
            failure = Failure(self.rank, time.monotonic(), where, line, trace=trace, report=report, lost_peer=lost)
        partial = self.folder / f"rank{self.rank}.part"
        partial.write_text(json.dumps(asdict(failure)))
        os.replace(partial, self.folder / f"rank{self.rank}.failed")


def _state_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.state"


def describe(step: int, phase: str) -> str:
    """`in step 3, phase X`, or where in its life a rank is before the first step."""
    return f"in step {step}, phase `{phase}`" if step else f"in its {phase}"


def read_where(folder: Path, rank: int) -> str:
    """Where a rank is, or was when it died."""
    path = _state_path(folder, rank)
    if not path.exists():
        return "before it had started"
    return describe(*_read_state(path))


def _read_state(path: Path) -> tuple[int, str]:
    step, phase, *_ = path.read_bytes().decode(errors="replace").split("\n")
    return int(step), phase


def read_left(folder: Path, failed: Collection[int]) -> list[int]:
    """Ranks that were through, or are not among those that failed."""
    ranks = sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.state"))
    return [r for r in ranks if r not in failed or _read_state(_state_path(folder, r))[1] == END]


def read_failures(folder: Path) -> list[Failure]:
    """What ranks wrote down, the first to fail first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank*.failed")]
    return sorted(found, key=lambda f: f.when)
