"""Configs for other tools: our own linter finds nothing in them, and the real packages load them."""

import json
import os
import subprocess
import sys

import pytest

import zplan
from zplan.planner.dsconfig import from_mapping
from zplan.planner.emit import FORMATS, SUGGESTED, emit
from zplan.planner.emit_scripts import model_config
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.lint import Subject, check_document
from zplan.planner.optimizers import KINDS
from zplan.planner.plan_file import load_plan, save_plan
from zplan.planner.relaxed import Document, read_document
from zplan.planner.report import plan_report

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
ASKED = {"gpus": 2, "mem": 8, "seq": 16, "device": "cpu", "accumulation": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("tiny")
    (where / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(where)


def make(folder, **changes):
    return zplan.plan(folder, **{**ASKED, **changes})


CHOICES = [
    {"stage": 0},
    {"stage": 1, "precision": "fp32"},
    {"stage": 2},
    {"stage": 3, "checkpointing": "full"},
]


@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: f"stage{c['stage']}")
@pytest.mark.parametrize("form", ["zplan", "deepspeed"])
def test_our_own_linter_has_nothing_against_it(folder, form, changes):
    plan = make(folder, **changes)
    text = emit(plan, form)[0]
    report = check_document(read_document(text, "x"), "x", Subject(consumer="deepspeed", gpus=2, hidden=32))
    unsaid = {"bucket-too-small", "no-effect-at-stage", "fp32"}  # small models have small blocks; all keys are written
    assert [f.rule for f in report.findings if f.rule not in unsaid and f.severity != "note"] in ([], ["gather-off"])
    assert not report.count("error")


@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: f"stage{c['stage']}")
def test_zplan_reads_its_own_back(folder, changes):
    plan = make(folder, **changes)
    config = from_mapping(json.loads(emit(plan, "zplan")[0]), world_size=2)
    for name in (
        "micro_batch",
        "accumulation",
        "stage",
        "precision",
        "piece_numel",
        "ring_slots",
        "checkpointing",
        "seq",
    ):
        assert getattr(config, name) == getattr(plan.choice, name)


@pytest.mark.witness
@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: f"stage{c['stage']}")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_deepspeed_loads_it(folder, changes, tmp_path):
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    plan = make(folder, **changes, gpus=1)
    path = tmp_path / "ds_config.json"
    path.write_text(emit(plan, "deepspeed")[0], encoding="utf-8")
    config = DeepSpeedConfig(str(path))
    assert config.train_batch_size == plan.choice.global_batch
    assert config.zero_optimization_stage == plan.choice.stage
    assert config.bfloat16_config.enabled is (plan.choice.precision == "bf16")
    assert config.gradient_clipping == plan.training.clip
    assert config.optimizer_params["lr"] == plan.training.lr


@pytest.mark.witness
@pytest.mark.parametrize("changes", [{"stage": 0}, {"stage": 3}], ids=["stage0", "stage3"])
def test_accelerate_loads_it(folder, changes, tmp_path):
    pytest.importorskip("accelerate", reason="needs the witness extra: accelerate")
    from accelerate.commands.config.config_args import ClusterConfig

    plan = make(folder, **changes)
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit(plan, "accelerate")[0], encoding="utf-8")
    config = ClusterConfig.from_yaml_file(str(path))
    assert (config.num_processes, config.num_machines, config.distributed_type.value) == (2, 1, "DEEPSPEED")
    assert config.deepspeed_config == {
        "deepspeed_config_file": SUGGESTED["deepspeed"],
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": changes["stage"] == 3,
    }
    assert config.downcast_bf16 == "no", "a bare `no` would have become false"


def test_our_linter_reads_the_accelerate_file(folder):
    pytest.importorskip("yaml", reason="needs PyYAML")
    from zplan.yaml_reading import read_yaml

    report = check_document(read_yaml(emit(make(folder), "accelerate")[0], "x.yaml"), "x.yaml", Subject())
    assert not report.count("error") and not report.count("warning")


@pytest.mark.witness
@pytest.mark.parametrize("changes", CHOICES[1:], ids=lambda c: f"stage{c['stage']}")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")
def test_transformers_takes_the_arguments_and_finds_no_mismatch(folder, changes, tmp_path, monkeypatch):
    """The Trainer compares its arguments with the DeepSpeed file and raises on any difference."""
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: transformers")
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    pytest.importorskip("accelerate", reason="needs the witness extra: accelerate")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    plan = make(folder, **changes, gpus=1)
    arguments = json.loads(emit(plan, "hf")[0])
    assert arguments.pop("deepspeed") == SUGGESTED["deepspeed"]
    args = transformers.TrainingArguments(**{**arguments, "output_dir": str(tmp_path)})
    assert args.gradient_checkpointing is (plan.choice.checkpointing == "full")
    config = HfTrainerDeepSpeedConfig(json.loads(emit(plan, "deepspeed")[0]))
    config.trainer_config_process(args)
    assert config.mismatches == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_models_config_comes_back_as_the_same_shape(folder, family):
    if family == "llama":
        arch = make(folder).spec.arch
    else:
        arch = read_architecture(
            {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64}, "x"
        )[0]
    assert read_architecture(model_config(arch), "x")[0] == arch


@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: f"stage{c['stage']}")
def test_the_fsdp2_script_says_what_the_plan_says(folder, changes):
    plan = make(folder, **changes)
    text, notes = emit(plan, "fsdp2")
    assert ("stage 0 is DDP" in " ".join(notes)) is (plan.choice.stage == 0)
    assert ("fp32 shards" in " ".join(notes)) is (plan.choice.stage > 0 and plan.choice.precision == "bf16")
    names: dict = {}
    head = text[text.index("WORLD_SIZE = ") : text.index("\n\n\ndef build")]
    compile(text, "train_fsdp2.py", "exec")
    exec(head, {"json": json}, names)
    assert (names["MICRO_BATCH"], names["ACCUMULATION"], names["SEQ"]) == (plan.choice.micro_batch, 2, 16)
    assert (names["LR"], names["BETAS"], names["CLIP"]) == (plan.training.lr, plan.training.betas, plan.training.clip)
    assert ("fully_shard(" in text) is (plan.choice.stage > 0)
    assert ("reshard_after_forward=True" in text) is (plan.choice.stage == 3)
    assert ("gradient_checkpointing_enable" in text) is (plan.choice.checkpointing == "full")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("stage", [3])
def test_the_fsdp2_script_trains(folder, stage, tmp_path):
    pytest.importorskip("transformers", reason="needs the hf extra: transformers")
    script = tmp_path / "train_fsdp2.py"
    script.write_text(emit(make(folder, stage=stage), "fsdp2")[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "--steps", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and all(3 < x < 6 for x in losses), "random tokens of 64 kinds cost about ln 64 = 4.16"


def test_the_slurm_script_starts_one_torchrun_a_node(folder, tmp_path):
    plan = zplan.plan(folder, gpus=8, nodes=2, mem=8, seq=16, host_mem=64)
    text = emit(plan, "slurm")[0]
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--mem=65536M"):
        assert f"#SBATCH {line}\n" in text
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'host7\\nhost8\\n'\n", encoding="utf-8")
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho "plan $ZPLAN_PLAN"\n', encoding="utf-8")
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host[7-8]", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash", "-c", text, "job", "--lr", "1"], capture_output=True, text=True, env=env, check=True)
    words = done.stdout.splitlines()
    assert words[1:] == [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=host7:29500",
        "--rdzv-id=12",
        "train.py",
        "--lr",
        "1",
        "plan plan.json",
    ]


SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 2e-4}}


def test_a_plan_with_a_schedule(folder, tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 2e-4}}
    plan = make(folder, config={"optimizer": optimizer, "scheduler": SCHEDULE})
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert "WarmupDecayLR: 0 at the start, 0.0002 at step 5, 0 at step 11" in plan_report(plan, ())
    written = json.loads(emit(plan, "deepspeed")[0])["scheduler"]
    assert written["params"] == {**SCHEDULE["params"], "warmup_min_lr": 0.0, "warmup_type": "log"}
    arguments = json.loads(emit(plan, "hf")[0])
    assert (arguments["learning_rate"], arguments["warmup_steps"], arguments["max_steps"]) == (2e-4, 3, 9)
    with pytest.raises(ZplanError, match="FSDP2 script yet"):
        emit(plan, "fsdp2")


@pytest.mark.witness
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")
def test_transformers_finds_no_mismatch_in_a_schedule(folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: transformers")
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    optimizer = {"type": "AdamW", "params": {"lr": 2e-4}}
    plan = make(folder, gpus=1, config={"optimizer": optimizer, "scheduler": SCHEDULE})
    arguments = json.loads(emit(plan, "hf")[0])
    del arguments["deepspeed"]
    args = transformers.TrainingArguments(**{**arguments, "output_dir": str(tmp_path)})
    config = HfTrainerDeepSpeedConfig(json.loads(emit(plan, "deepspeed")[0]))
    config.trainer_config_process(args)
    config.fill_match("scheduler.params.total_num_steps", args.max_steps, "max_steps")
    config.fill_match("scheduler.params.warmup_num_steps", args.get_warmup_steps(args.max_steps), "warmup_steps")
    assert config.mismatches == []


def test_unknown_formats_and_the_command(folder, tmp_path, capsys):
    from zplan.cli import main

    plan = make(folder)
    with pytest.raises(ZplanError, match="did you mean `deepspeed`"):
        emit(plan, "depspeed")
    save_plan(plan, tmp_path / "plan.json")
    for form in set(FORMATS) - {"torchtitan"}:  # which has no model of this shape
        with pytest.raises(SystemExit) as stopped:
            main(["emit", str(tmp_path / "plan.json"), "--format", form, "-o", str(tmp_path / f"out.{form}")])
        assert stopped.value.code == 0
        assert (tmp_path / f"out.{form}").read_text(encoding="utf-8") == emit(plan, form)[0]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["emit", str(tmp_path / "plan.json"), "--format", "deepspeed"])
    assert capsys.readouterr().out == (tmp_path / "ds_config.json").read_text(encoding="utf-8")


TITAN = [
    {"stage": 3, "checkpointing": "full"},
    {"stage": 2, "precision": "fp32", "seq": 512},
    {"stage": 0, "accumulation": 3, "seq": 512},
]


def titan(**changes):
    asked = {"gpus": 8, "mem": 141, "micro_batch": 1, "seq": 2048, **changes}
    return zplan.plan("llama-3.2-1b", **asked)


@pytest.mark.parametrize("changes", TITAN, ids=lambda c: f"stage{c['stage']}")
def test_torchtitan_is_told_what_the_plan_says(changes):
    plan = titan(**changes)
    text, notes = emit(plan, "torchtitan")
    compile(text, "torchtitan_config.py", "exec")
    lines = dict(
        x.strip().removeprefix("config.").split(" = ", 1) for x in text.splitlines() if x.startswith("    config.")
    )
    assert lines["model_spec"] == 'model_registry("1B")'
    assert int(lines["training.global_batch_size"]) == plan.choice.global_batch == 8 * changes.get("accumulation", 1)
    degrees = [int(lines[f"parallelism.data_parallel_{kind}_degree"]) for kind in ("replicate", "shard")]
    assert degrees == ([8, 1] if plan.choice.stage == 0 else [1, 8])
    assert "FullAC.Config()" == lines["activation_checkpoint"] or plan.choice.checkpointing == "none"
    assert "torchrun --standalone --nproc-per-node 8 -m torchtitan.train" in notes[1]


def test_what_torchtitan_does_not_have_is_refused(folder):
    for plan, message in (
        (make(folder), "no flavour for"),
        (titan(stage=3, precision="fp16"), "does not train in fp16"),
        (titan(stage=3, config={"scheduler": SCHEDULE}), "not built into torchtitan's"),
    ):
        with pytest.raises(ZplanError, match=message):
            emit(plan, "torchtitan")


@pytest.mark.parametrize("changes", TITAN, ids=lambda c: f"stage{c['stage']}")
@pytest.mark.filterwarnings("ignore")
def test_torchtitan_loads_it(changes, tmp_path, monkeypatch):
    """Witness: its own manager, with an option on the command line on top."""
    pytest.importorskip("torchtitan", reason="needs torchtitan and what it imports")
    manager = pytest.importorskip("torchtitan.config.manager", reason="needs what torchtitan imports")
    pytest.importorskip("torchtitan.models.llama3.config_registry", reason="needs what torchtitan imports")
    plan = titan(**changes)
    (tmp_path / SUGGESTED["torchtitan"]).write_text(emit(plan, "torchtitan")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchtitan_config", raising=False)
    args = ["--module", "torchtitan_config", "--config", "zplan", "--training.steps", "5"]
    config = manager.ConfigManager().parse_args(args)
    t, c = config.training, plan.choice
    assert (t.local_batch_size, t.global_batch_size, t.seq_len, t.steps) == (c.micro_batch, c.global_batch, c.seq, 5)
    assert t.mixed_precision_param == {"bf16": "bfloat16", "fp32": "float32"}[c.precision]
    assert config.model_spec.flavor == "1B"
    group = config.optimizer.param_groups[0].optimizer_kwargs
    assert (group["lr"], tuple(group["betas"])) == (plan.training.lr, plan.training.betas)
    assert (type(config.activation_checkpoint).__qualname__ == "FullAC.Config") is (c.checkpointing == "full")


@pytest.mark.parametrize("optimizer", [k.name for k in KINDS.values()])
def test_a_deepspeed_config_is_written_only_of_an_optimizer_that_deepspeed_has(tmp_path, optimizer):
    plan = zplan.plan("smollm2-135m", gpus=2, mem=24, seq=128, optimizer=optimizer)
    files = save_plan(plan, tmp_path / "plan.json")
    known = optimizer not in ("adamw8bit", "adamw8bit-bf16")
    assert (len(files), (tmp_path / "ds_config.json").exists()) == (1 + known, known)
    if known:
        document = Document(json.loads(emit(plan, "deepspeed")[0]), "json")
        report = check_document(document, "ds_config.json", Subject(gpus=2))
        assert not report.count("error"), [f.message for f in report.findings]
    else:
        with pytest.raises(ZplanError, match=f"DeepSpeed and torch have no optimizer `{optimizer}`"):
            emit(plan, "deepspeed")
    assert emit(plan, "zplan")[0]


def test_a_plan_without_a_deepspeed_config_takes_that_of_the_plan_before_along(folder, tmp_path):
    """Else it would say something else than the plan beside it, and stop the next plan from being written."""
    path, beside = tmp_path / "plan.json", tmp_path / "ds_config.json"
    save_plan(make(folder), path)
    assert beside.exists()
    save_plan(make(folder, runtime="ddp"), path)
    assert not beside.exists()
    save_plan(make(folder), path)
    beside.write_text("{}", encoding="utf-8")
    save_plan(make(folder, runtime="ddp"), path)
    assert beside.read_text(encoding="utf-8") == "{}"
