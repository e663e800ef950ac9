"""`zplan run`, `verify` and `demo`: what they refuse, and one whole chain of them on real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from zplan import cli, cli_run
from zplan.planner.errors import ZplanError
from zplan.runtime import demo, preflight, start
from zplan.runtime.launch import Interrupted
from zplan.runtime.start import Training

SCRIPT = """
import sys
import torch
import zplan
from zplan.planner.plan_file import load_plan
from zplan.runtime.decoder import Decoder
import beside

plan = load_plan(sys.argv[1])
torch.manual_seed(0)
model = Decoder(plan.spec.arch)
engine, *_ = zplan.initialize(model=model)
for step in range(2):
    ids = torch.randint(0, 257, (1, 16))
    if step == 1 and engine.rank == 1 and "--fail" in sys.argv:
        model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    engine.backward(engine(ids, ids.clone()))
    engine.step()
assert __name__ == "__main__" and beside.HERE and sys.argv[2:3] == ["--steps"]
# One write: unbuffered, `print` would send its newline apart, and lines of two ranks could mix.
sys.stdout.write(f"rank {engine.rank} of {engine.world_size}: {sys.argv[2:]}" + chr(10))
"""


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory) -> Path:
    """A demo's folder before its ranks start: text, model and plan."""
    folder = tmp_path_factory.mktemp("plan")
    demo.write_inputs(folder)
    return folder


def test_random_tokens_that_do_not_fit_the_disk(tmp_path):
    (tmp_path / "tokens.uint32").symlink_to("/dev/full")
    with pytest.raises(ZplanError, match="tokens.uint32` cannot be written"):
        start.random_corpus(257, 10**5, 0, tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_seeds_that_no_generator_takes(plan_folder, never_launch, seed):
    with pytest.raises(click.BadParameter, match="not in the range"):
        invoke(cli_run.verify, plan_folder / "plan.json", "--seed", seed)


@pytest.fixture
def never_launch(monkeypatch):
    def launch(*_args, **_more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "launch", launch)


def zplan(*words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "zplan", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def invoke(command: click.Command, *words: object) -> None:
    """Run in this process; usage errors and `ZplanError`s come out as they are."""
    command.main([str(w) for w in words], standalone_mode=False)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "neither --data nor a script is given"),
        (("--data", "x.txt", "train.py"), "both --data and a script are given"),
        (("--steps", "3", "train.py"), "`--steps` is for --data"),
        (("--tokenizer", "bytes", "train.py"), "`--tokenizer` is for --data"),
        (("no.py",), "there is no script `no.py`"),
        (("--data", "nowhere"), "no file or folder `nowhere`"),
        (("--data", "nowhere", "--tokenizer", "nothing"), "`nothing` has no tokenizer.json"),
    ],
)
def test_run_refuses(plan_folder, never_launch, words, message):
    with pytest.raises(ZplanError, match=message):
        invoke(cli_run.run, plan_folder / "plan.json", *words)


def test_a_plan_for_more_gpus_names_the_command_for_this_machine(plan_folder, never_launch, monkeypatch):
    text = (plan_folder / "plan.json").read_text()
    gpu_plan = start.load_plan(plan_folder / "plan.json")
    assert '"device": "cpu"' in text
    monkeypatch.setattr(preflight, "num_gpus", lambda: 4)
    monkeypatch.setattr(
        start, "load_plan", lambda _: start.replace(gpu_plan, choice=start.replace(gpu_plan.choice, device="cuda"))
    )
    with pytest.raises(ZplanError, match="the plan is for 2 ranks and this machine has 4 GPUs") as caught:
        invoke(cli_run.verify, plan_folder / "plan.json")
    hint = caught.value.hint
    assert hint.startswith("plan for this machine: zplan plan --model ") and f"-o {plan_folder / 'plan.json'}" in hint
    assert "--gpus 4" in hint and "--mem" not in hint


def test_a_cpu_plan_stays_on_the_cpu_beside_gpus(plan_folder, monkeypatch):
    monkeypatch.setattr(preflight, "num_gpus", lambda: 4)
    assert start.look(plan_folder / "plan.json")[1] == 0


def test_a_gpu_plan_without_gpus_says_where_it_runs(plan_folder, monkeypatch, capsys):
    plan = start.load_plan(plan_folder / "plan.json")
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)
    monkeypatch.setattr(
        start, "load_plan", lambda _: start.replace(plan, choice=start.replace(plan.choice, device="cuda"))
    )
    assert start.look(plan_folder / "plan.json")[1] == 0
    assert capsys.readouterr().err == "zplan: no GPU here: 2 ranks on the CPU over gloo\n"


def test_too_little_host_memory_is_told_before_anything_is_read(plan_folder, never_launch, monkeypatch):
    monkeypatch.setattr(preflight, "available_host_bytes", lambda: 2**20)
    with pytest.raises(ZplanError, match="2 ranks need .* of host memory and 1.00 MiB is available"):
        invoke(cli_run.run, plan_folder / "plan.json", "--data", "nowhere")


def test_cap_needs_a_gpu(plan_folder, never_launch):
    with pytest.raises(ZplanError, match="--cap limits a GPU's allocator and this run is on the CPU"):
        invoke(cli_run.verify, plan_folder / "plan.json", "--cap", "24")


@pytest.mark.parametrize(
    ("option", "value"), [("--tolerance", "x"), ("--tolerance", "101%"), ("--steps", "1"), ("--world", "0")]
)
def test_verify_options_are_checked(plan_folder, option, value):
    with pytest.raises(click.UsageError):
        invoke(cli_run.verify, plan_folder / "plan.json", option, value)


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.5", 0.005), ("0%", 0.0), ("100 %", 1.0)])
def test_percent(text, value):
    assert cli_run.Percent().convert(text, None, None) == value


def test_a_model_with_too_few_rows_for_bytes(plan_folder, never_launch, monkeypatch):
    monkeypatch.setattr("zplan.runtime.tokenizer.BYTES_VOCAB", 258)
    monkeypatch.setattr("zplan.runtime.tokenizer.ByteTokenizer.vocab", 258)
    with pytest.raises(ZplanError, match="gives ids up to 257 and the model has only 257 rows"):
        start.train(plan_folder / "plan.json", Training(plan_folder / "text.txt", 2))


def test_stopping_is_one_line_and_a_shell_s_exit_code(plan_folder, monkeypatch):
    import signal

    def stopped(*_args, **_more):
        raise Interrupted(signal.SIGTERM, "rank 0 was in step 3, phase `loss`")

    monkeypatch.setattr(start, "launch", stopped)
    done = CliRunner().invoke(cli_run.verify, [str(plan_folder / "plan.json")])
    assert done.exit_code == 143
    assert done.stderr == "zplan: stopped by SIGTERM: rank 0 was in step 3, phase `loss`; all ranks have ended\n"


@pytest.mark.parametrize(
    "words", [("run", "plan.json", "--data", "text.txt"), ("verify", "plan.json"), ("demo", "--out", "d")]
)
def test_without_torch_training_is_refused_in_one_sentence(plan_folder, tmp_path, words):
    hide = "import sys; sys.modules['torch'] = None; from zplan.cli import main; main(sys.argv[1:])"
    words = [str(plan_folder / w) if w.startswith(("plan.", "text.")) else w for w in words]
    done = subprocess.run(
        [sys.executable, "-c", hide, *words], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: training needs torch, which is not installed\n\nhint: pip install 'zplan[runtime]'\n"
    )
    assert not list(tmp_path.iterdir())


# --- the demo's folder ------------------------------------------------------------------------------------------------


def test_demo_keeps_out_of_folders_that_are_not_its_own(tmp_path, never_launch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, message in (("mine", "is not empty and no demo made it"), ("file", "is a file")):
        with pytest.raises(ZplanError, match=message):
            invoke(cli_run.demo, "--out", tmp_path / name)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("failing", range(4))
def test_a_write_that_fails_leaves_nothing_half_written(tmp_path, never_launch, monkeypatch, failing):
    """Each of the demo's writes in turn finds the disk full; a demo there before stays whole or is replaced whole."""
    demo.write_inputs(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    calls = 0
    real = os.fsync

    def fsync(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ZplanError, match="cannot be written: no space left on device"):
        demo.write_inputs(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_text_is_the_standard_library_s():
    text = demo.standard_library_text(100_000)
    assert 100_000 <= len(text) < 400_000 and "import" in text


# --- real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.gloo
def test_demo_from_start_to_end(tmp_path):
    done = zplan("demo", "--out", tmp_path / "demo", "--steps", "12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(x) for x in (tmp_path / "demo" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 12 and steps[0]["loss"] > 5 > 4 > steps[-1]["loss"]
    assert "2 ranks" in done.stdout and "measured equals predicted to the byte" in done.stdout
    assert done.stdout.startswith((tmp_path / "demo" / "bytes.txt").read_text())
    assert "step 12/12  loss" in done.stderr
    for name in ("plan.json", "ds_config.json", "model/config.json", "text.txt"):
        assert (tmp_path / "demo" / name).stat().st_size > 0


@pytest.fixture
def script(tmp_path) -> Path:
    """A program in a folder of its own, with a module beside it. Its ranks are real; the command is this process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = True\n")
    return tmp_path / "train.py"


@pytest.mark.gloo
def test_run_a_script(plan_folder, script, capfd):
    plan = plan_folder / "plan.json"
    invoke(cli_run.run, plan, script, plan, "--steps", "7", "--data")
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"rank {r} of 2: ['--steps', '7', '--data']" for r in range(2)]


@pytest.mark.gloo
def test_a_script_that_fails_is_told_with_rank_step_and_phase(plan_folder, script, capfd):
    plan = plan_folder / "plan.json"
    with pytest.raises(SystemExit) as left:
        cli.main(["run", str(plan), str(script), str(plan), "--fail"])
    _, err = capfd.readouterr()
    assert left.value.code == 2
    assert "error: rank 1 failed in step 2, phase `forward.blocks.2`: ZeroDivisionError: division by zero" in err
    assert err.count("Traceback") == 1


def test_verify_one_rank_of_many(plan_folder, run, one_rank_here):
    code, out, err = run("verify", plan_folder / "plan.json", "--world", "8", "--steps", "2", "--json")
    assert code == 0, out + err
    document = json.loads(out)
    assert document["ok"] is True and len(document["ranks"]) == 1
    line = start.load_plan(plan_folder / "plan.json").ledger.line("optim.master.block")
    (eighths,) = [x for x in document["ranks"][0]["lines"] if x["name"] == "optim.master.block"]
    # Four blocks of an eighth each here, of a half each in the plan; both are padded.
    assert eighths["measured"] == pytest.approx(line.total_bytes / 4, rel=0.01)
