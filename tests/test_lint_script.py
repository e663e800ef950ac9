"""Training scripts: configs as dicts, variables without effect, imports that fail."""

import importlib
import importlib.util
import json

import pytest

from zplan.planner.errors import ZplanError
from zplan.planner.lint import Subject
from zplan.planner.lint_script import EXPORTS, check_script

SCRIPT = """\
import os, deepspeed

os.environ["NCCL_TIMEOUT"] = "1800"
os.environ.setdefault("NCCL_DEBUG", "INFO")
lr = 1e-4
ds_config = {
    "train_batch_size": 64,
    "micro_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": (0.9, 0.95)}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 10_000},
}
other = {"learning_rate": lr}
"""


def check(text, **subject):
    return check_script(text, "train.py", Subject(**subject))


def test_a_dict_is_checked_where_it_stands():
    report = check(SCRIPT, gpus=8)
    at = {f.rule: f.place for f in report.findings}
    assert at["ignored-key"] == (8, 5) and at["bucket-too-small"] == (10, 39) and at["inert-variable"] == (3, 12)
    assert report.headline.startswith("stage 2")
    assert "wrong-type" not in report.rules, "an unknown value was taken for a wrong one"


def test_further_configs_and_none():
    two = check('a = {"train_batch_size": 3}\nb = {"train_batch_size": 8}\n', gpus=2)
    assert [f.place[0] for f in two.findings if f.rule == "batch-triple"] == [1] and "2 DeepSpeed configs" in two.kind
    assert check("import torch\n").findings == ()


def test_broken_scripts_say_where():
    with pytest.raises(ZplanError, match=r"not valid Python \(line 2\)"):
        check("a = 1\nb = (\n")
    with pytest.raises(ZplanError, match="not valid Python"):
        check("a = '\0'")


def test_the_command_reads_scripts(tmp_path, capsys):
    from zplan.cli import main

    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(file), "--json"])
    assert stopped.value.code == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "Python script with a DeepSpeed config"


@pytest.mark.witness
@pytest.mark.parametrize("module", EXPORTS)
def test_deepspeed_has_these_names(module):
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    found = importlib.import_module(module)
    for name in EXPORTS[module]:
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), name
    assert not hasattr(found, "checkpointing_config")
