"""`zplan estimate` and the commands that list: text, JSON, exit codes, and errors without tracebacks."""

import json
import os
import re
import subprocess
import sys

import click
import pytest

import zplan
from zplan import cli

HEADLINE = ["estimate", "--params", "7e9", "--gpus", "8", "--mem", "24"]

TEXTBOOK = """\
Textbook: model states of one GPU (P = 7B, N = 8)
  stage  formula        GB     GiB  of card  sends  GB a step
  0      16P         112.0  104.31    435 %     2P       24.5
  1      4P + 12P/N   38.5   35.86    149 %     2P       24.5
  2      2P + 14P/N  26.25   24.45    102 %     2P       24.5
  3      16P/N        14.0   13.04     54 %     3P      36.75
  Rule of thumb, states at most 60 % of the card: stage 3. All lines counted, below: stage 3.
"""


def test_the_headline(run):
    code, out, err = run(*HEADLINE)
    assert (code, err) == (0, "")
    assert out.startswith("Memory-bound, shard: one GPU would need ")
    assert "Llama-like,\n          32 layers x 4096, 32 heads of 128, feed-forward 11648, vocabulary 32000\n" in out
    assert TEXTBOOK in out
    rows = re.findall(r"^  (\d)( \*)? +(none|full) +1 x 1 .* (yes|no), ([\d.]+) (spare|over)", out, flags=re.M)
    assert [(r[0], r[1].strip(), r[2], r[3]) for r in rows] == [
        ("0", "", "full", "no"),
        ("1", "", "full", "no"),
        ("2", "", "full", "no"),
        ("3", "*", "full", "yes"),
    ]
    assert float(rows[3][4]) > 1
    assert re.search(r"^  stage +3 +chosen +the lowest that fits", out, flags=re.M)
    assert re.search(r"^  checkpointing +full +chosen +without it ", out, flags=re.M)
    longest = re.search(r"Longest sequence of this choice: ([\d,]+) tokens", out)
    assert int(longest[1].replace(",", "")) > 8192
    assert out.rstrip().splitlines()[-5] == "Not counted"


def test_the_text_is_the_json_rounded(run):
    _, text, _ = run(*HEADLINE)
    code, out, err = run(*HEADLINE, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    for row in found["stages"]:
        cells = [
            f"{row[k] / 2**30:.2f}" for k in ("states_bytes", "buffers_bytes", "activations_bytes", "overhead_bytes")
        ]
        assert re.search(rf"^  {row['stage']}.*" + r" +".join(map(re.escape, cells)), text, flags=re.M)
    assert f"{found['peak_bytes']:,} bytes" in text


def test_lines_no_wider_than_a_terminal_except_notes(run):
    _, out, _ = run(*HEADLINE)
    assert all(len(line) <= 140 for line in out.splitlines() if "  estimate" not in line)


def test_check_says_no_by_exit_code(run):
    fits_not = ["estimate", "--params", "7e9", "--gpus", "4", "--mem", "24"]
    assert run(*HEADLINE, "--check")[0] == 0
    assert run(*fits_not)[0] == 0
    code, out, _ = run(*fits_not, "--check")
    assert code == 1
    assert out.startswith("Does not fit: stage 3 on 4 GPUs needs ")
    assert re.search(r"Would fit with 8 GPUs at stage 3: [\d.]+ GiB to spare \(--gpus 8\)", out)
    assert "The nearest choice (* above), which does not fit" in out


def test_one_gpu_is_enough(run):
    code, out, err = run("estimate", "--model", "gpt2", "--gpus", 8, "--mem", 24)
    assert code == 0 and out.startswith("One GPU is enough: ")
    assert (
        err == "note: dropout (attn_pdrop, embd_pdrop, resid_pdrop) is left out: the plan is for training without it\n"
    )
    assert "Longest sequence of this choice: 1,024 tokens (the model's limit); of any: --max seq." in out


def test_what_is_asked_is_kept_and_marked(run):
    options = (
        "--stage 3 --micro-batch 2 --accumulation 4 --seq 512 --precision fp32 --checkpointing none --attention eager"
    )
    code, out, _ = run("estimate", "--model", "smollm2-135m", "--gpus", 2, "--gpu", "RTX 4090", *options.split())
    assert code == 0 and "2 x RTX 4090, 23.99 GiB each" in out
    for name, value in (("stage", 3), ("micro-batch", 2), ("accumulation", 4), ("seq", 512), ("precision", "fp32")):
        assert re.search(rf"^  {name} +{value} +asked +asked by --{name}$", out, flags=re.M)
    assert re.search(r"^  global-batch +16 +chosen +2 x 4 x 2$", out, flags=re.M)


def test_host_memory_is_shown(run):
    _, out, _ = run(*HEADLINE, "--host-mem", 64, "--nodes", 2)
    assert "8 GPUs, 24.00 GiB each, on 2 nodes" in out
    assert "Host      64.00 GiB a node\n" in out
    assert re.search(r"^  host and pinned +[\d.]+ +[\d.]+ +[\d.]+ +64.00 a node +yes ", out, flags=re.M)


def test_a_config_file(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 1, "sub_group_size": 1e9}}))
    code, out, err = run(
        "estimate", "--model", "smollm2-135m", "--gpus", 2, "--mem", 24, "--seq", 128, "--config", path
    )
    assert code == 0 and re.search(r"^  stage +1 +asked +asked by `ds.json`$", out, flags=re.M)
    assert re.search(r"^  micro-batch +8 ", out, flags=re.M)
    assert "note: `sub_group_size` of `zero_optimization` of `ds.json` changes nothing" in err


ERRORS = [
    (
        ["estimate", "--model", "lama-2-7b", "--gpus", "8", "--mem", "24"],
        "error: unknown model `lama-2-7b`\n\nhint: did you mean `llama-2-7b`?\n",
    ),
    (
        ["plan", "--model", "qwen3-8b", "--gpus", "8", "--mem", "80"],
        "error: `model_type` of `qwen3-8b` is `qwen3`, which is estimate only: zplan has no decoder for it\n\n"
        "hint: zplan runs llama, mistral and gpt2; train another module by your own script, with zplan.initialize\n",
    ),
    (
        [*HEADLINE, "--global-batch", "100"],
        "error: `--global-batch 100` does not split over 8 GPUs: 100 / 8 = 12.5 sequences a GPU\n\n"
        "hint: use 96 or 104\n",
    ),
    (
        [*HEADLINE[:-1], "-24"],
        "error: `--mem -24` is negative\n\nhint: write a positive number, such as 24 (GiB), 24GB or 512MiB\n",
    ),
    (
        [*HEADLINE[:-1], "nan"],
        "error: `--mem nan` is not a size that zplan can read\n\nhint: write it as 24 (GiB), 24GB or 512MiB\n",
    ),
    (
        [*HEADLINE, "--offload-params", "cpu"],
        "error: `--offload-params cpu` leaves the larger optimizer on the GPU\n\nhint: add --offload cpu\n",
    ),
    (
        [*HEADLINE, "--gpus", "x"],
        "error: invalid value for '--gpus': 'x' is not a valid integer\n\n"
        "hint: write a whole number in digits, such as 2048\n",
    ),
    (
        [*HEADLINE, "--config", "nothing.json"],
        "error: `nothing.json` does not exist\n\nhint: check the path\n",
    ),
    (
        [*HEADLINE, "--params", "9" * 5000],
        f"error: `--params {'9' * 60}...` is not a size that zplan can read\n\nhint: write it as 7e9, 7B or 350M\n",
    ),
    (["estimat"], "error: unknown command `estimat`\n\nhint: did you mean `estimate`?\n"),
    (
        ["estimate", "--gpus", "8", "--mem", "24"],
        "error: neither --model nor --params is given\n\nhint: give one: --model llama-2-7b, or --params 7e9\n",
    ),
    (
        ["estimate", "--model", "org/name", "--gpus", "8", "--mem", "24", "--offline"],
        "error: `org/name` is not in zplan's table or the local Hugging Face cache, and --offline forbids a download\n"
        "\nhint: drop --offline, or give the folder or config.json of the model\n",
    ),
]


@pytest.mark.parametrize(("args", "expected"), ERRORS, ids=[" ".join(e[0][-3:]) for e in ERRORS])
def test_errors_are_one_sentence_and_a_hint(run, args, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert run(*args) == (2, "", expected)


def test_misspelt_options_are_guessed(run):
    code, out, err = run("estimate", "--parms", "7e9")
    assert (code, out) == (2, "") and "--params" in err and "Traceback" not in err


def test_version(run):
    assert run("--version") == (0, f"zplan {zplan.__version__}\n", "")


def test_no_command_shows_help(run):
    before = set(sys.modules)
    shown = run()
    assert shown[1:] in ((run("--help")[1], ""), ("", run("--help")[1])) and shown[0] == (2 if shown[2] else 0)
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if re.fullmatch(r"(Plan|Run|Inspect):", line)] == [
        "Plan:",
        "Run:",
        "Inspect:",
    ]
    # What `run` and `demo` need is not imported to say what they do.
    assert "zplan.runtime.launch" not in set(sys.modules) - before


QUESTION = (
    "--model --params --gpus --nodes --mem --gpu --host-mem --nvme --margin --stage --offload --offload-params "
    "--offload-ratio --optimizer --accumulation --micro-batch --global-batch --seq --precision --checkpointing "
    "--checkpoint-every --checkpoint-offload --loss --reduce-dtype --attention --compile --device --runtime --tp "
    "--pp --cp --hpz --saving --beyond-limit --padded --config --lora --lora-targets --lora-embeddings --qlora "
    "--efficiency --network --tokens --epochs --examples --price --offline "
)
FLAGS = {
    "estimate": QUESTION + "--json --check --explain --top --max --min --sweep",
    "plan": QUESTION + "--out",
    "models": "--json",
    "gpus": "--json",
}


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_frozen(command):
    found = [max(p.opts, key=len) for p in getattr(cli, command).params if isinstance(p, click.Option)]
    assert found == FLAGS[command].split()


def test_every_command_has_a_section():
    assert {row[0] for row in cli.COMMANDS.values()} == {"Plan", "Run", "Inspect"}
    assert set(FLAGS) <= set(cli.COMMANDS)


@pytest.mark.parametrize("command", FLAGS)
def test_help_ends_with_two_examples_that_run(run, command, tmp_path, monkeypatch):
    import shlex

    _, out, _ = run(command, "--help")
    *_, first, second = out.rstrip().splitlines()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for example in (first, second):
        words = shlex.split(example)
        assert words[:2] == ["zplan", command]
        assert run(*words[1:])[0] in (0, 1)


def test_models_and_gpus(run):
    code, out, _ = run("models")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 95
    (row,) = [x for x in lines if x.startswith("  llama-2-7b ")]
    assert "6,738,415,616" in row and " plan and run " in row
    assert any("estimate only" in x and "qwen3-8b" in x for x in lines)
    assert len(json.loads(run("models", "--json")[1])) == 94
    code, out, _ = run("gpus")
    assert (
        code == 0
        and len(out.splitlines()) == 55
        and re.search(r"H200 SXM 141GB +NVIDIA +140.40 +reported +measured", out)
    )
    assert {g["name"] for g in json.loads(run("gpus", "--json")[1])} >= {"RTX 4090", "T4"}


def test_colour_only_on_a_terminal_and_never_with_no_color(run, monkeypatch):
    assert "\033" not in run(*HEADLINE)[1]
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli.coloured()


def test_colour_adds_nothing():
    from zplan.planner.report import report

    found = zplan.estimate(params="7e9", gpus=8, mem=24)
    assert re.sub(r"\033\[\d+m", "", report(found, colour=True)) == report(found) != report(found, colour=True)


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m zplan models | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stderr == "" and done.stdout.startswith("  name")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here that is always full")
@pytest.mark.parametrize("args", [[*HEADLINE, "--check"], ["estimate", "--help"]], ids=["answer", "help"])
def test_an_answer_that_finds_no_room_is_no_answer(args):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "zplan", *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == (
        "error: the answer cannot be written: no space left on device\n\nhint: send it where there is room\n"
    )
    assert done.returncode == 2, "not 1, which --check gives for a model that does not fit"


def test_python_dash_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zplan", *HEADLINE], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert TEXTBOOK in done.stdout and done.stderr == ""
