"""`zplan run` with checkpoints, weights, evaluation and export: what it refuses, and that a stop changes nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload as w
from safetensors.torch import load_file, save_file

from zplan import cli_run
from zplan.planner.api import plan as make_plan
from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import save_plan
from zplan.runtime import demo, start
from zplan.runtime.board import Board
from zplan.runtime.checkpoint_folder import latest_tag, tags
from zplan.runtime.decoder import Decoder
from zplan.runtime.hf_import import ModelWeights
from zplan.runtime.initialize import initialize
from zplan.runtime.job import Job
from zplan.runtime.train import train


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory) -> Path:
    """The demo's inputs, and a plan of the same global batch on one rank."""
    folder = tmp_path_factory.mktemp("plan")
    demo.write_inputs(folder)
    (folder / "alone").mkdir()
    asked = {
        "seq": 128,
        "micro_batch": 8,
        "accumulation": 1,
        "config": demo.CONFIG,
        "precision": "fp32",
        "offline": True,
    }
    save_plan(
        make_plan(str(folder / "model"), gpus=1, mem=2, device="cpu", stage=2, **asked), folder / "alone" / "plan.json"
    )
    return folder


def run_job(rank: int, world_size: int, job: Job) -> list[str]:
    """What this rank printed to stderr."""
    import io

    sys.stderr = io.StringIO()
    job.folder.mkdir(parents=True, exist_ok=True)
    train(job, Board(job.folder, rank))
    return sys.stderr.getvalue().splitlines()


def job_of(plan: Path, folder: Path, **more: Any) -> Job:
    folder.mkdir()
    corpus = start.random_corpus(257, 128 * 8 * 8 + 1, 3, folder)
    return Job("train", folder, plan, corpus, seed=5, **more)


def losses(job: Job) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in map(json.loads, job.results.read_text().splitlines())}


@pytest.mark.gloo
def test_a_run_in_three_parts_is_the_run_in_one(run_ranks, plan_folder, tmp_path):
    plan, saved = plan_folder / "plan.json", tmp_path / "saved"
    whole = job_of(plan, tmp_path / "whole", steps=6)
    run_ranks(2, run_job, whole)
    parts = [
        job_of(plan, tmp_path / "first", steps=2, save_dir=saved, save_every=1),
        job_of(plan, tmp_path / "second", steps=5, save_dir=saved, save_every=2, resume="auto", keep=2),
        job_of(plan, tmp_path / "third", steps=6, save_dir=saved, resume="global_step4", measured_steps=2),
    ]
    said = [run_ranks(2, run_job, job)[0] for job in parts]
    assert sorted(tags(saved)) == ["global_step4", "global_step5", "global_step6"]
    assert any("loaded" in line and "global_step2" in line for line in said[1])
    assert list(losses(parts[1])) == [3, 4, 5] and list(losses(parts[2])) == [5, 6]
    assert losses(whole) == losses(parts[0]) | losses(parts[1]) | losses(parts[2])
    again = job_of(plan_folder / "alone" / "plan.json", tmp_path / "fourth", steps=6, save_dir=saved, resume="auto")
    (done,) = run_ranks(1, run_job, again)
    assert any("step 6 of 6 is done" in line for line in done)


@pytest.mark.gloo
def test_other_ranks_go_on_with_the_same_samples(run_ranks, plan_folder, tmp_path):
    plan, saved = plan_folder / "plan.json", tmp_path / "saved"
    run_ranks(2, run_job, job_of(plan, tmp_path / "first", steps=2, save_dir=saved))
    two = job_of(plan, tmp_path / "two", steps=4, save_dir=saved, resume="global_step2")
    one = replace(two, plan=plan_folder / "alone" / "plan.json", folder=tmp_path / "one")
    run_ranks(2, run_job, two)
    run_ranks(1, run_job, one)
    assert list(losses(one)) == [3, 4]
    assert losses(one) == pytest.approx(losses(two), rel=1e-6)


@pytest.mark.gloo
def test_evaluation_weights_and_export(run_ranks, plan_folder, tmp_path):
    plan, out = plan_folder / "plan.json", tmp_path / "model"
    first = job_of(plan, tmp_path / "first", steps=2, export=out, save_dir=tmp_path / "saved", save_every=1)
    first = replace(first, eval_corpus=first.corpus)
    said = run_ranks(2, run_job, first)
    assert [x.split(":")[1] for x in said[0] if "held-out" in x] == [" step 1", " step 2"] and not said[1]
    assert all("on 64 held-out sequences" in x for x in said[0] if "held-out" in x)
    second = job_of(plan, tmp_path / "second", steps=0, weights=out)
    again = run_ranks(2, run_job, replace(second, eval_corpus=second.corpus))[0]
    values = [float(x.split("loss ")[1].split()[0]) for x in (said[0] + again) if "held-out" in x]
    # The folder is in bf16.
    assert values[2] == pytest.approx(values[1], rel=1e-3) and values[0] != values[1]


def test_the_whole_command(plan_folder, tmp_path, one_rank_here, capsys):
    """Every option of a run that saves, twice: from a model folder to a model folder, then on from the checkpoint."""
    model_folder(demo_architecture(plan_folder), tmp_path / "weights")
    (tmp_path / "held-out.txt").write_bytes((plan_folder / "text.txt").read_bytes()[:2000])
    command = [
        plan_folder / "alone" / "plan.json",
        "--data",
        plan_folder / "text.txt",
        "--save-dir",
        tmp_path / "saved",
    ]
    command += ["--save-every", "2", "--keep", "2", "--resume", "auto", "--weights", tmp_path / "weights"]
    command += ["--eval-data", tmp_path / "held-out.txt"]
    for steps, export in (("2", "first"), ("3", "second")):
        words = [*command, "--steps", steps, "--export", tmp_path / export]
        cli_run.run.main(list(map(str, words)), standalone_mode=False)
        out, err = capsys.readouterr()
        assert out.endswith(f'\nAutoModelForCausalLM.from_pretrained("{tmp_path / export}")\n')
        assert "held-out" in err and ("a fresh start" in err) == (export == "first"), err
    assert "loaded" in err and "global_step2" in err
    assert sorted(tags(tmp_path / "saved")) == ["global_step2", "global_step3"]
    folders = [tmp_path / f / "model.safetensors" for f in ("weights", "first", "second")]
    first, second, third = (load_file(f)["model.norm.weight"] for f in folders)
    assert not torch.equal(first, second) and not torch.equal(second, third)


def demo_architecture(plan_folder: Path) -> Any:
    from zplan.planner.plan_file import load_plan

    return load_plan(plan_folder / "plan.json").spec.arch


@pytest.mark.gloo
def test_other_data_is_refused(run_ranks, plan_folder, tmp_path):
    plan, saved = plan_folder / "plan.json", tmp_path / "saved"
    job = job_of(plan, tmp_path / "first", steps=1, save_dir=saved)
    run_ranks(2, run_job, job)
    with pytest.raises(RuntimeError, match="stands in the middle of other data: seed 5 there and 6 here"):
        run_ranks(2, run_job, replace(job, seed=6, resume="auto"))
    assert latest_tag(saved) == "global_step1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--save-every", "3"), "`--save-every` needs a folder of checkpoints"),
        (("--resume", "auto"), "`--resume` needs a folder of checkpoints"),
        (("--keep", "2"), "`--keep` needs a folder of checkpoints"),
        (("--export", "."), r"`\.` exists"),
        (("--weights", "nowhere"), "`nowhere` has neither `model.safetensors` nor"),
        (("--save-dir", "used"), "`used` holds checkpoints of an earlier run, the newest `global_step0`"),
        (("--eval-data", "nowhere"), "no file or folder `nowhere`"),
    ],
)
def test_run_refuses_before_it_starts(plan_folder, tmp_path, monkeypatch, words, message):
    def launch(*_args: Any, **_more: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.chdir(tmp_path)
    if "used" in words:
        engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0), init=w.fill)
        engine.save_checkpoint("used")
        engine.close()
    command = [str(plan_folder / "plan.json"), "--data", str(plan_folder / "text.txt"), *words]
    with pytest.raises(ZplanError, match=message):
        cli_run.run.main(command, standalone_mode=False)


def test_options_of_training_are_no_scripts(plan_folder):
    with pytest.raises(ZplanError, match="`--save-dir` is for --data"):
        cli_run.run.main([str(plan_folder / "plan.json"), "--save-dir", "x", "train.py"], standalone_mode=False)


# --- model folders as weights ----------------------------------------------------------------------------------------


def model_folder(arch: Any, out: Path) -> dict[str, torch.Tensor]:
    """A bf16 model folder and the values that are in it, by the decoder's names."""
    engine, *_ = initialize(model=w.build(arch), config=w.config(0), init=w.fill)
    engine.save_16bit_model(out)
    values = {n: p.detach().bfloat16().float() for n, p in engine.module.named_parameters()}
    engine.close()
    return values


@pytest.mark.parametrize("name", w.ARCHS)
@pytest.mark.parametrize("bare", [False, True])
def test_weights_come_back(tmp_path, name, bare):
    arch = w.ARCHS[name]
    values = model_folder(arch, tmp_path / "model")
    if bare:  # as a folder of the model without its head has them
        path = tmp_path / "model" / "model.safetensors"
        save_file({k.removeprefix("model.").removeprefix("transformer."): v for k, v in load_file(path).items()}, path)
    weights = ModelWeights(tmp_path / "model", arch)
    for key, value in values.items():
        got = torch.empty(value.shape)
        weights.fill(key, got)
        assert torch.equal(got, value), key
    assert {n for n, _ in Decoder(arch).named_parameters()} == set(values)


def test_a_folder_of_another_model_is_refused(tmp_path):
    model_folder(w.LLAMA, tmp_path / "model")
    with pytest.raises(
        ZplanError, match=r"`model.embed_tokens.weight` of .* is \(101, 64\) and the plan's .* \(50, 64\)"
    ):
        ModelWeights(tmp_path / "model", replace(w.LLAMA, vocab=50))
    with pytest.raises(ZplanError, match=r"has no tensor `model.layers.3.input_layernorm.weight`"):
        ModelWeights(tmp_path / "model", w.LLAMA4)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ZplanError, match="can't be read"):
        ModelWeights(tmp_path / "model", w.LLAMA)
