"""What each rank of tests/test_launch.py runs: `python -m ranks_for_launch FOLDER WHAT`."""

import os
import signal
import sys
import time
from pathlib import Path

from zplan.planner.errors import ZplanError
from zplan.runtime.board import Board
from zplan.runtime.launch import leave_with_launcher


def act(what: str, rank: int, folder: Path) -> None:
    if what == "fine":
        (folder / f"env{rank}").write_text(f"{os.environ['WORLD_SIZE']} {os.environ.get('ZPLAN_DEVICE')}")
        return
    if rank == 1:
        if what == "raise":
            raise ValueError("seven")
        if what == "refuse":
            raise ZplanError("there is no water", "bring some")
        if what == "exit":
            os._exit(7)
        if what in ("SIGKILL", "SIGSEGV"):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.Signals[what])
    if rank == 0 and what == "lost":
        time.sleep(0.1)
    if what == "SIGKILL":
        time.sleep(0.4)
        raise RuntimeError("[gloo/pair.cc] Connection closed by peer [127.0.0.1]:80")
    time.sleep(600)


def main() -> None:
    folder, what, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    leave_with_launcher()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    board = Board(folder, rank)
    board.step = 3
    board.enter("backward.head")
    try:
        while len(list(folder.glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)  # no rank ends before another has begun
        act(what, rank, folder)
    except BaseException as error:
        board.fail(error)
        os._exit(1)


if __name__ == "__main__":
    main()
