"""How a launch ends: fine, with a failing rank named, or interrupted, and never with a process left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zplan.planner.errors import ZplanError
from zplan.runtime.board import Board, read_failures, read_where
from zplan.runtime.launch import first_cause, launch, rank_environment

TESTS = Path(__file__).parent

LAUNCH = """
import sys
from pathlib import Path
from zplan.runtime.launch import Interrupted, launch
folder = Path(sys.argv[1])
try:
    launch("ranks_for_launch", [str(folder), "hang"], world_size=2, folder=folder, cpu=True)
except Interrupted as error:
    print("INTERRUPTED", error, error.exit_code)
"""


def start(folder: Path) -> subprocess.Popen:
    """A launcher in a process of its own, to be ended; its ranks hang."""
    env = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


def wait_for(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def all_gone(folder: Path) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids(folder))


def launch_here(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher in this process, which has torch already."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    launch("ranks_for_launch", [str(folder), what], world_size=2, folder=folder, cpu=True)


@pytest.mark.gloo
def test_every_rank_runs_and_knows_its_place(tmp_path, monkeypatch, capfd):
    launch_here(tmp_path, "fine", monkeypatch)
    assert capfd.readouterr() == ("", "")
    assert [(tmp_path / f"env{rank}").read_text() for rank in range(2)] == ["2 cpu", "2 cpu"]


@pytest.mark.parametrize(
    ("what", "message", "on_stderr"),
    [
        ("raise", "rank 1 failed in step 3, phase `backward.head`: ValueError: seven", "Traceback"),
        (
            "refuse",
            "there is no water; rank 1 was in step 3, phase `backward.head` (hint: bring some)",
            "",
        ),
        ("exit", "rank 1 ended with exit code 7 in step 3, phase `backward.head`", ""),
        (
            "SIGKILL",
            "rank 1 was ended by SIGKILL in step 3, phase `backward.head` (hint: that is usually the system",
            "",
        ),
    ],
)
@pytest.mark.gloo
def test_the_first_failing_rank_is_named_and_the_other_ended(tmp_path, monkeypatch, capfd, what, message, on_stderr):
    with pytest.raises(ZplanError) as caught:
        launch_here(tmp_path, what, monkeypatch)
    assert str(caught.value).startswith(message)
    out, err = capfd.readouterr()
    assert out == "" and ((on_stderr in err) if on_stderr else (err == ""))
    assert len(pids(tmp_path)) == 2 and all_gone(tmp_path)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.gloo
def test_signals_end_all_ranks_and_say_where_they_were(tmp_path, name, code):
    process = start(tmp_path)
    assert wait_for(lambda: all((tmp_path / f"rank{rank}.state").exists() for rank in range(2)))
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=30)
    assert out == f"INTERRUPTED {name}: rank 0 was in step 3, phase `backward.head`; all ranks have ended {code}\n"
    assert err == ""
    assert all_gone(tmp_path)


@pytest.mark.gloo
def test_ranks_end_themselves_when_the_launcher_is_killed(tmp_path):
    process = start(tmp_path)
    assert wait_for(lambda: len(pids(tmp_path)) == 2)
    process.kill()
    process.communicate(timeout=10)
    assert wait_for(lambda: all_gone(tmp_path), 10)


def test_a_lost_peer_is_not_the_cause(tmp_path):
    Board(tmp_path, 0).fail(RuntimeError("Connection closed by peer"))
    Board(tmp_path, 2).fail(RuntimeError("Connection reset by peer"))
    Board(tmp_path, 1).enter("forward.head")
    assert "rank 1 was ended by SIGSEGV" in str(first_cause(tmp_path, {0: 1, 1: -11, 2: 1}))
    Board(tmp_path, 3).fail(KeyError("x"))
    assert "rank 3 failed" in str(first_cause(tmp_path, {0: 1, 1: -15, 2: 1, 3: 1}))


def test_a_rank_that_left_early_is_the_cause(tmp_path):
    """Whether it was gone already, or was ended while it closed its engine."""
    Board(tmp_path, 0).fail(RuntimeError("Connection closed by peer"))
    Board(tmp_path, 1).enter("idle")
    assert str(first_cause(tmp_path, {0: 1})).startswith("rank 1 left without an error while rank 0 was in its start")
    Board(tmp_path, 2).enter("end")
    assert str(first_cause(tmp_path, {0: 1, 1: -15, 2: -15})).startswith("rank 2 left without an error while rank 0")
    assert str(first_cause(tmp_path, {0: 1, 1: -11, 2: -15})).startswith("rank 1 was ended by SIGSEGV")


def test_only_lost_peers_still_name_one(tmp_path):
    for rank in (1, 0):
        Board(tmp_path, rank).fail(RuntimeError("Connection closed by peer"))
    assert str(first_cause(tmp_path, {0: 1, 1: 1})).startswith("rank 1 failed in its start: RuntimeError: Conn")


def test_a_user_mistake_keeps_its_hint(tmp_path):
    Board(tmp_path, 0).fail(ZplanError("a", "b"))
    error = first_cause(tmp_path, {0: 1, 1: -15})
    assert (error.message, error.hint) == ("a", "b")


def test_the_board_outlives_long_names_and_other_phases(tmp_path):
    board = Board(tmp_path, 0)
    board.step = 12
    board.enter("x" * 500)
    board.enter("step")
    assert read_where(tmp_path, 0) == "in step 12, phase `step`"
    assert read_where(tmp_path, 1) == "before it had started"
    assert read_failures(tmp_path) == []


def test_the_users_own_variables_win(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    gpu = rank_environment(2, cpu=False)
    assert "OMP_NUM_THREADS" not in gpu
    assert gpu["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "ZPLAN_DEVICE" not in gpu
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(2, cpu=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(2, cpu=False)
