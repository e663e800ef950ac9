"""What every rank of `zplan run`, `verify` and `demo` runs: `python -m zplan.runtime.worker JOB`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zplan.planner.errors import ZplanError
from zplan.runtime.board import END, Board
from zplan.runtime.job import Job
from zplan.runtime.launch import leave_with_launcher
from zplan.runtime.watchdog import LAST_WORDS


def main() -> None:
    """Run the job; on any failure write it down where the launcher finds it, and be gone at once."""
    leave_with_launcher()
    job = Job.read(Path(sys.argv[1]))
    board = Board(job.folder, int(os.environ.get("RANK", "0")))
    LAST_WORDS.append(board.fail)
    try:
        if job.task == "script":
            run_script(job, board)
        else:
            from zplan.runtime.train import train

            train(job, board)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            board.fail(ZplanError(f"`{job.script}` left with {leaving.code!r} on rank {board.rank}"))
            _leave(1)
        board.enter(END)
    except BaseException as error:
        board.fail(cause_of(error), report=report_on(error, job, board.phase))
        _leave(1)
    close_engines()


def close_engines() -> None:
    """Close what a script left open: gloo's threads abort a process that ends while they run."""
    from zplan.runtime.initialize import engines

    for engine in engines():
        engine.close()


def cause_of(error: BaseException) -> BaseException:
    """What the watchdog found, where it ended the wait that this error comes from."""
    from zplan.runtime.initialize import engines

    found = (engine.collectives.watchdog.verdict for engine in engines())
    return next((verdict for verdict in found if verdict is not None), error)


def report_on(error: BaseException, job: Job, phase: str) -> str:
    """What there is to say beside the traceback; never in the way of it."""
    from zplan.runtime.oom import explain

    try:
        return explain(error, job.plan, phase)
    except Exception as second:
        return f"(the ledger of this phase could not be shown: {second})"


def run_script(job: Job, board: Board) -> None:
    """The user's program as `__main__`, with its own folder first on the path, as `python script` would have it."""
    import runpy

    from zplan.runtime.initialize import watch_phases

    assert job.script is not None
    os.environ.pop("PYTHONSAFEPATH", None)
    os.environ["ZPLAN_PLAN"] = str(job.plan)
    watch_phases(board.follow)
    sys.argv = [str(job.script), *job.arguments]
    sys.path.insert(0, str(job.script.resolve().parent))
    board.enter("script")
    runpy.run_path(str(job.script), run_name="__main__")
    board.enter(END)


def _leave(code: int) -> None:
    """End without teardown: destroying a process group whose peers are gone can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
