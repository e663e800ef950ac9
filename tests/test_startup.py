"""How long a cold command takes, and what it must not import."""

import os
import statistics
import sys

import pytest

ESTIMATE = ["estimate", "--params", "7e9", "--gpus", "8", "--mem", "24"]
PLAN = ["plan", "--model", "smollm2-135m", "--gpus", "2", "--mem", "8", "--seq", "256", "--global-batch", "8"]


def cpu_seconds(args, cwd):
    """Processor time of one new process, start-up included.

    The commands are single-threaded and their files are cached, so on an idle machine this is the time a user waits;
    unlike that, it does not count what other processes do meanwhile.
    """
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "zplan", *args],
        {**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(("args", "limit"), [(ESTIMATE, 0.2), (PLAN, 0.3)], ids=["estimate", "plan"])
def test_a_cold_command_is_quick(args, limit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cpu_seconds(args, tmp_path)
    # Another test beside this one slows the shared core down, which counts as processor time too: the best of three.
    medians = []
    while len(medians) < 3 and not (medians and medians[-1] < limit):
        medians.append(statistics.median(cpu_seconds(args, tmp_path) for _ in range(10)))
    assert min(medians) < limit, medians


HEAVY = (
    *("torch", "numpy", "tabulate", "asyncio", "urllib.request", "http", "ssl", "subprocess", "importlib.metadata"),
    *("csv", "difflib", "logging", "random", "tempfile"),
)
NOT_ASKED = (
    *("json", "zplan.planner.dsconfig", "zplan.planner.presets", "zplan.planner.peer", "zplan.planner.step_time"),
    *("zplan.planner.remedies", "zplan.planner.adapters", "zplan.planner.hfunits"),
)
"""What the headline command has no question for: it names no file, model or card, and it fits."""


@pytest.mark.parametrize(("args", "unwanted"), [(ESTIMATE, HEAVY + NOT_ASKED), (PLAN, HEAVY)], ids=["estimate", "plan"])
def test_nothing_heavy_is_imported(args, unwanted, tmp_path):
    import subprocess

    code = (
        "import sys\nfrom zplan.cli import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        f"print([m for m in {unwanted!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr == "[]\n"


def test_importing_zplan_costs_nothing(tmp_path):
    import subprocess

    code = "import sys, zplan; print([m for m in sys.modules if m.startswith('zplan')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "['zplan']\n"


def test_estimates_work_without_torch(tmp_path):
    """With torch and numpy made unimportable, the planner still answers."""
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import zplan; e = zplan.estimate(params='7e9', gpus=8, mem=24); print(e.fits)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "True\n"
