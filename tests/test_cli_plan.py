"""`zplan plan`: what it writes, what it prints, and that nothing is half-written."""

import json
import os
import re
import subprocess
import sys

import pytest

from zplan.planner.plan_file import load_plan

EXAMPLE = ["plan", "--model", "smollm2-135m", "--gpus", "2", "--mem", "8", "--seq", "256", "--global-batch", "8"]


@pytest.fixture
def run(run, tmp_path, monkeypatch):
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return run


def test_the_example(run, tmp_path):
    code, out, err = run(*EXAMPLE, "-o", "plan.json")
    assert (code, err) == (0, "")
    plan = load_plan("plan.json")
    assert plan.choice.global_batch == 8 and plan.choice.seq == 256 and plan.fits
    assert out.startswith(f"Stage {plan.choice.stage}, checkpointing {plan.choice.checkpointing}, micro-batch ")
    assert re.search(
        r"^  micro-batch +4 +chosen +the largest that fits and divides 4 sequences a GPU$", out, flags=re.M
    )
    assert re.search(r"^  lr +0.0001 +chosen +a default, not a recommendation$", out, flags=re.M)
    assert out.endswith("wrote plan.json\nwrote ds_config.json\n")
    assert sorted(os.listdir(tmp_path)) == ["ds_config.json", "plan.json"]
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["asked"] == {"model": "smollm2-135m", "gpus": 2, "mem": "8", "global_batch": 8, "seq": 256}
    assert [d["name"] for d in document["chosen"] if not d["chosen"]] == ["global_batch", "seq"]
    assert json.loads((tmp_path / "ds_config.json").read_text()) == document["config"]


def test_planning_twice_gives_the_same_bytes(run, tmp_path):
    run(*EXAMPLE)
    before = (tmp_path / "plan.json").read_bytes()
    assert run(*EXAMPLE)[0] == 0
    assert (tmp_path / "plan.json").read_bytes() == before


def test_the_deepspeed_config_can_be_planned_with(run):
    run(*EXAMPLE, "--stage", "3", "-o", "plan.json")
    first = load_plan("plan.json")
    os.mkdir("again")
    args = [
        "plan",
        "--model",
        "smollm2-135m",
        "--gpus",
        "2",
        "--mem",
        "8",
        "--seq",
        "256",
        "--config",
        "ds_config.json",
    ]
    assert run(*args, "-o", "again/plan.json")[0] == 0
    assert load_plan("again/plan.json").choice == first.choice


def test_a_plan_for_a_count_says_so(run):
    code, _, err = run("plan", "--params", "20M", "--gpus", "2", "--mem", "8", "--seq", "128")
    plan = load_plan("plan.json")
    assert code == 0 and f"the plan is for the assumed shape itself: {plan.spec.num_params:,} parameters" in err


def test_cpu_ranks(run):
    assert run(*EXAMPLE, "--device", "cpu", "--precision", "fp32")[0] == 0
    plan = load_plan("plan.json")
    assert plan.choice.device == "cpu" and not any(x.kind == "overhead" for x in plan.lines)


def test_what_does_not_fit_is_not_written(run, tmp_path):
    code, out, err = run("plan", "--params", "7e9", "--gpus", "4", "--mem", "24")
    assert (code, out) == (1, "")
    assert err.startswith("error: Does not fit: stage 3 on 4 GPUs needs ") and "hint: it would fit with 8 GPUs" in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--global-batch", "7"], "hint: use 6 or 8"),
        (["--optimizer", "sgdd"], "`--optimizer sgdd` is unknown"),
        (["-o", "missing/plan.json"], "cannot be written"),
        (["-o", "ds_config.json"], "use -o plan.json"),
    ],
)
def test_errors_write_nothing(run, tmp_path, args, said):
    code, out, err = run(*EXAMPLE, *args)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_a_config_of_the_user_is_left_alone(run, tmp_path):
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8}')
    code, _, err = run(*EXAMPLE)
    assert code == 2 and "hint: move it away" in err
    assert os.listdir(tmp_path) == ["ds_config.json"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a limit on the size of files")
def test_a_limit_on_file_size_leaves_what_was_there(run, tmp_path):
    """A real failure in the middle of a write: the kernel refuses bytes beyond 4 KiB."""
    run(*EXAMPLE)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(before["plan.json"]) > 8192
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        f"from zplan.cli import main; main({[*EXAMPLE[:-1], '16']!r})"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "cannot be written: file too large" in done.stderr
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
