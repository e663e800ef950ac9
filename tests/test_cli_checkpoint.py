"""`zplan checkpoint`: whole outputs and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import workload as w

from zplan import cli
from zplan.runtime.checkpoint_format import MANIFEST
from zplan.runtime.initialize import initialize


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 1 and 2 in one folder, step 2 again in another."""
    root = tmp_path_factory.mktemp("saved")
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0), init=w.fill)
    for step in range(2):
        engine.backward(engine(*w.batch(w.LLAMA.vocab, step, 0, 0)))
        engine.step()
        engine.save_checkpoint(root / "a")
    engine.save_checkpoint(root / "b")
    engine.close()
    return root


def zplan(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_list(saved, capsys):
    code, out, err = zplan(capsys, "list", saved / "a")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[
        0
    ].split() == "tag step samples ranks stage precision GB written state".split()
    assert lines[1].split()[:8] == ["global_step2", "*", "2", "4", "1", "0", "fp32", "0.001"]
    assert lines[2].startswith("  global_step1") and all(x.endswith("complete") for x in lines[1:3])
    assert "* is what `latest` names." in out


def test_list_as_json(saved, capsys):
    code, out, _ = zplan(capsys, "list", saved / "a", "--json")
    rows = json.loads(out)
    assert code == 0 and [(r["tag"], r["latest"], r["problem"]) for r in rows] == [
        ("global_step2", True, None),
        ("global_step1", False, None),
    ]
    assert rows[0]["global_samples"] == 2 * w.MICRO_BATCH and rows[0]["stage"] == 0


def test_verify_reads_every_byte(saved, tmp_path, capsys):
    code, out, _ = zplan(capsys, "verify", saved / "a")
    assert code == 0 and out.endswith("bytes of 1 ranks, every crc32 right\n") and "global_step2: step 2, 30 par" in out
    copy = tmp_path / "copy"
    shutil.copytree(saved / "a", copy)
    data = copy / "global_step1" / "rank00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 128
    data.write_bytes(content)
    code, out, _ = zplan(capsys, "verify", copy, "--tag", "global_step1")
    assert code == 1 and out == (
        f"`{data}` is damaged: the crc32 of `exp_avg_sq|head.weight|0:6464` is not its index's\n"
    )
    (copy / "global_step2" / MANIFEST).unlink()
    code, out, _ = zplan(capsys, "verify", copy)
    assert code == 1 and "is no checkpoint" in out
    code, out, _ = zplan(capsys, "list", copy)
    assert code == 0 and "is no checkpoint" in out and "complete" in out
    code, out, err = zplan(capsys, "verify", copy, "--tag", "global_step9")
    assert code == 2 and "there is no checkpoint" in err and "`global_step1`" in err


def test_diff(saved, capsys):
    assert zplan(capsys, "diff", saved / "a", saved / "b") == (
        0,
        "alike: 30 parameters with master weights and moments, counters and client state\n",
        "",
    )
    code, out, _ = zplan(capsys, "diff", saved / "a" / "global_step1", saved / "b")
    lines = out.splitlines()
    assert code == 1 and lines[0] == "global_step: 1 and 2" and lines[3].split()[:2] == ["parameter", "state"]
    assert len(lines) == 4 + 3 * 30


def test_export(saved, tmp_path, capsys):
    out = tmp_path / "model"
    code, text, _ = zplan(capsys, "export", saved / "a", out, "--dtype", "fp32", "--shard-size", "100KB")
    assert (code, text) == (0, f'AutoModelForCausalLM.from_pretrained("{out}")\n')
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 0
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    code, _, err = zplan(capsys, "export", saved / "a", out)
    assert code == 2 and f"`{out}` exists" in err


def test_what_is_asked_of_the_wrong_folder(saved, tmp_path, capsys):
    code, _, err = zplan(capsys, "list", saved / "a" / "global_step1")
    assert code == 2 and "is a checkpoint, and its name is a tag" in err
    code, _, err = zplan(capsys, "import", saved / "a", tmp_path / "out")
    assert code == 2 and "global_step2` is a checkpoint of zplan" in err
    (tmp_path / "a" / "latest").mkdir(parents=True)
    code, _, err = zplan(capsys, "verify", tmp_path / "a")
    assert code == 2 and "latest` can't be read: Is a directory" in err


def test_a_folder_that_is_not_there(tmp_path, capsys):
    for command in (["list", tmp_path / "x"], ["verify", tmp_path / "x"], ["export", tmp_path / "x", tmp_path / "y"]):
        code, out, err = zplan(capsys, *command)
        assert code == 2 and not out and "there is no folder" in err
