"""Start one process per rank with torchrun on this machine, and say in one sentence how it ended.

[Note: one agent] torchrun's agent runs in this very process, so that its report of dead ranks is a value to decode and
not text to parse. Ranks are its children in sessions of their own: it ends all of them when one dies or when this
process is interrupted, and each rank ends itself when this process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from zplan.planner.errors import ZplanError
from zplan.runtime.board import Failure, read_failures, read_left, read_where

LAUNCHER = "ZPLAN_LAUNCHER_PID"


class Interrupted(Exception):
    """The launcher was asked to stop; all ranks have ended."""

    def __init__(self, number: signal.Signals, where: str) -> None:
        super().__init__(f"{number.name}: {where}; all ranks have ended")
        self.exit_code = 128 + number


def launch(
    module: str, arguments: list[str], *, world_size: int, folder: Path, cpu: bool, deterministic: bool = False
) -> None:
    """Run `python -m module arguments` as `world_size` ranks and wait for the end of all of them.

    Parameters
    ----------
    folder
        Where ranks keep their boards (`runtime/board.py`); belongs to this one run.
    cpu
        Keep to the CPU and gloo even where there are GPUs.
    deterministic
        Give cuBLAS the workspaces in which it always does the same.

    Raises
    ------
    ZplanError
        The first rank that failed, where and why.
    Interrupted
        After SIGINT, SIGTERM or SIGHUP.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = ["--standalone", "--nproc-per-node", str(world_size), "--local-addr", "127.0.0.1", "-m", module]
    variables = rank_environment(world_size, cpu=cpu, deterministic=deterministic)
    with _environment(variables), _handlers(), _quiet_agent():
        try:
            torchrun.run(torchrun.parse_args([*command, *arguments]))
        except ChildFailedError as error:
            codes = {rank: f.exitcode for rank, f in error.failures.items()}
            raise first_cause(folder, codes) from None
        except (SignalException, KeyboardInterrupt) as error:
            number = signal.Signals(getattr(error, "sigval", signal.SIGINT))
            raise Interrupted(number, f"rank 0 was {read_where(folder, 0)}") from None


def rank_environment(world_size: int, *, cpu: bool, deterministic: bool = False) -> dict[str, str]:
    """Variables that every rank gets. What the user has set stays."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // world_size))}
    if cpu:
        if sys.platform == "linux":
            # One machine: no need for its name to resolve.
            wanted["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        # The caching allocator then reserves what it allocates, so the card fills as the ledger says.
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if deterministic:
            from zplan.runtime.deterministic import VARIABLE, WORKSPACE

            wanted[VARIABLE] = WORKSPACE
    missing = {k: v for k, v in wanted.items() if k not in os.environ}
    if cpu:
        missing["ZPLAN_DEVICE"] = "cpu"
    # Ranks import the installed zplan, not a folder of that name where the user stands.
    return {**missing, "PYTHONSAFEPATH": "1", LAUNCHER: str(os.getpid())}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """The agent takes over signals; give them back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {n: signal.getsignal(n) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's own log lines repeat what `first_cause` says better."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def first_cause(folder: Path, codes: dict[int, int]) -> ZplanError:
    """The failure that the others follow from, as one sentence; prints its traceback and report to stderr.

    A killed rank writes nothing down, and its peers then write that they lost it; ranks that the agent ended
    afterwards have SIGTERM as their code.
    """
    written = read_failures(folder)
    silent = {rank: code for rank, code in sorted(codes.items()) if rank not in {f.rank for f in written}}
    killed = [rank for rank, code in silent.items() if code != -signal.SIGTERM]
    first_hand = [f for f in written if not f.lost_peer]
    if first_hand:
        return _as_error(first_hand[0])
    left = [] if killed else read_left(folder, codes)
    waiting = sorted({*codes} - {*left})
    if left and waiting:
        return ZplanError(
            f"rank {left[0]} left without an error while rank {waiting[0]} was {read_where(folder, waiting[0])}",
            "every rank must run as many steps, also where its data ends earlier than another's",
        )
    if killed or silent:
        rank = killed[0] if killed else min(silent)
        return ZplanError(f"rank {rank} {_ending(silent[rank])} {read_where(folder, rank)}", _way_out(silent[rank]))
    return _as_error(written[0])


def _as_error(failure: Failure) -> ZplanError:
    for text in (failure.trace, failure.report):
        if text:
            print(text.rstrip(), end="\n\n", file=sys.stderr)  # noqa: T201
    if not failure.trace:
        where = f"; rank {failure.rank} was {failure.where}" if failure.in_step else ""
        return ZplanError(f"{failure.message}{where}", failure.hint)
    return ZplanError(f"rank {failure.rank} failed {failure.where}: {failure.message}", failure.hint)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _way_out(code: int) -> str | None:
    if code == -signal.SIGKILL:
        return "that is usually the system running out of host memory: see `dmesg`, and plan for fewer ranks or less"
    return None


def leave_with_launcher() -> None:
    """Called by a rank: end this process when the launcher is gone, so that nothing is left running."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="zplan-launcher-watch").start()
