"""plan.json: whole or not at all, read back strictly."""

import errno
import json
import os
from dataclasses import replace

import pytest

import zplan
from zplan.planner import writing
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.plan_file import Plan, load_config, load_plan, save_plan
from zplan.planner.plan_reading import parse_plan
from zplan.planner.writing import render, write_files

ASKED = {"model": "smollm2-135m", "gpus": 2, "mem": 8, "seq": 256, "global_batch": 8}


@pytest.fixture(scope="module")
def plan():
    return zplan.plan(**ASKED)


def changed(plan, **changes):
    """The plan's document with some values replaced; `a__b` reaches inside."""
    document = json.loads(plan.to_json())
    for path, value in changes.items():
        *outer, last = path.split("__")
        inner = document
        for key in outer:
            inner = inner[key]
        if value is KeyError:
            del inner[last]
        else:
            inner[last] = value
    return document


def test_saved_and_loaded_equal(plan, tmp_path):
    path = tmp_path / "plan.json"
    files = save_plan(plan, path)
    assert files == (str(path), str(tmp_path / "ds_config.json"))
    assert load_plan(path) == plan and path.read_text() == plan.to_json()
    assert sorted(os.listdir(tmp_path)) == ["ds_config.json", "plan.json"]
    save_plan(load_plan(path), path)
    assert path.read_text() == plan.to_json()


def test_every_field_of_a_machine_is_read_back(tmp_path):
    machine = {"gpus": 16, "nodes": 2, "gpu": "H200", "host_mem": 1000, "nvme": 4000}
    made = zplan.plan("smollm2-135m", seq=256, **machine)
    made = replace(made, hardware=made.hardware._replace(notes=("2 x H200",)))
    default = Hardware(1, 1, 1)
    assert all(a != b for a, b in zip(made.hardware, default, strict=True)), "a default would be read back unread"
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made


def test_what_initialize_reads_is_a_plan_or_a_config(plan, tmp_path):
    save_plan(plan, tmp_path / "plan.json")
    assert isinstance(load_config(tmp_path / "plan.json"), Plan)
    assert load_config(tmp_path / "ds_config.json") == plan.ds_config()


def test_the_deepspeed_config_holds_deepspeed_keys_only(plan):
    config = plan.ds_config()
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (8, plan.choice.micro_batch)
    block = max(u.numel for u in plan.spec.units if u.kind == "block")
    assert config["zero_optimization"]["stage3_max_live_parameters"] == plan.choice.ring_slots * block
    assert "zplan" not in config and json.loads(plan.to_json())["config"] == config


def test_a_config_of_somebody_else_is_not_replaced(plan, tmp_path):
    beside = tmp_path / "ds_config.json"
    beside.write_text('{"train_batch_size": 4}')
    with pytest.raises(ZplanError, match="is there already and does not belong"):
        save_plan(plan, tmp_path / "plan.json")
    assert beside.read_text() == '{"train_batch_size": 4}' and not (tmp_path / "plan.json").exists()
    with pytest.raises(ZplanError, match="is the name of the DeepSpeed config"):
        save_plan(plan, beside)


@pytest.mark.parametrize("fails_at", ["write", "second"])
def test_a_full_disk_leaves_what_was_there(plan, tmp_path, monkeypatch, fails_at):
    save_plan(plan, tmp_path / "plan.json")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls = []

    def full(fd):
        calls.append(fd)
        if fails_at == "write" or len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "fsync", full)
    other = zplan.plan(**{**ASKED, "seq": 512})
    with pytest.raises(ZplanError, match="cannot be written: no space left on device"):
        save_plan(other, tmp_path / "plan.json")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_that_is_not_there(plan, tmp_path):
    with pytest.raises(ZplanError, match="cannot be written: no such file"):
        save_plan(plan, tmp_path / "nothing" / "plan.json")
    with pytest.raises(ZplanError, match="cannot be written"):
        write_files({str(tmp_path): "x"})
    assert list(tmp_path.iterdir()) == []


def test_pipes_and_devices_are_written_into_and_stay_what_they_are(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_files({str(pipe): "text"})
    assert os.read(reader, 100) == b"text" and pipe.is_fifo()
    os.close(reader)
    if os.path.exists("/dev/full"):
        full = tmp_path / "full"
        full.symlink_to("/dev/full")
        with pytest.raises(ZplanError, match="full` cannot be written: no space left on device"):
            write_files({str(full): "text"})
        assert full.is_symlink()


def test_a_config_in_the_place_of_a_plan_is_told_as_one():
    with pytest.raises(ZplanError, match="`ds.json` is a DeepSpeed config, no plan") as e:
        parse_plan({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, "ds.json")
    assert e.value.hint == "zplan plan --model NAME --config ds.json"


def test_rendering_is_json_with_one_row_a_line():
    value = {"a": [{"x": 1, "y": [1, 2]}, {"x": 2, "y": []}], "b": {"c": [1.5, None, True], "d": {}}, "é": "ü\n"}
    text = render(value)
    assert json.loads(text) == value
    assert '    {"x": 1, "y": [1, 2]},\n' in text and '"c": [1.5, null, true]' in text


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"schema_version": 2}, "has schema 2 (zplan 0.1.0), this zplan reads up to 1", "update zplan"),
        ({"schema_version": KeyError}, "`schema_version` of `p.json` is null", "whole number"),
        ({"schema_version": "1"}, 'is the string "1"', "whole number"),
        ({"ledgr": {}}, "unknown key `ledgr` in `p.json`", "`ledger`"),
        ({"ledger": KeyError}, "`p.json` has no `ledger`", "plan again"),
        ({"model": []}, "`model` of `p.json` is a list", "an object"),
        ({"model__architecture__layers": 31}, "says 134515008 parameters, but its architecture has", "plan again"),
        ({"model__architecture__layers": "30"}, 'is the string "30"', "whole number"),
        ({"model__architecture__famly": "x"}, "unknown key `famly`", "`family`"),
        ({"model__architecture__family": "lama"}, "`family`", "`llama`"),
        ({"hardware__mem_bytes": -1}, "is the number -1", "at least 1"),
        ({"hardware__mem_bytes": KeyError}, "has no `mem_bytes`", "plan again"),
        ({"hardware__world_size": 3}, "is not 4 x 1 x 3 GPUs = 12", "use 12"),
        (
            {"config__zero_optimization__stage": 1},
            "is not the one that its config gives: it was changed by hand",
            "zplan plan",
        ),
        ({"config__zero_optimization__stge": 1}, "unknown key `stge`", "`stage`"),
        ({"zplan__seq": 512}, "is not the one that its config gives", "--seq 256"),
        ({"zplan__device": "tpu"}, "`device` of `zplan` of `p.json`", "`cpu`"),
        ({"zplan__ring_slots": KeyError}, "has no `ring_slots`", "plan again"),
        ({"ledger__peak_bytes": 1}, "is not the one that its config gives", "zplan plan"),
        ({"zplan_version": "0.0.9", "ledger__peak_bytes": 1}, "it was made by zplan 0.0.9", "zplan plan"),
        ({"chosen": [{"name": "x"}]}, "has no `value`", "plan again"),
        ({"notes": [1]}, "is the number 1", "a string"),
    ],
)
def test_plans_that_are_refused(plan, changes, message, hint):
    with pytest.raises(ZplanError) as caught:
        parse_plan(changed(plan, **changes), "p.json")
    assert message in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "stats", "`kind`"),
        ("nbytes", -1, "is the number -1"),
        ("spans", [[0, 10**6]], "`spans`"),
        ("spans", [[2, 1]], "`spans`"),
        ("spans", [[1]], "`spans`"),
        ("id", None, "is null"),
    ],
)
def test_lines_that_are_refused(plan, key, value, message):
    document = json.loads(plan.to_json())
    document["ledger"]["lines"][0][key] = value
    with pytest.raises(ZplanError) as caught:
        parse_plan(document, "p.json")
    assert message in caught.value.message


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_truncated_plan(plan, tmp_path, cut):
    text = plan.to_json()
    path = tmp_path / "plan.json"
    path.write_text(text[: int(len(text) * cut)])
    with pytest.raises(ZplanError, match="cut short"):
        load_plan(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("[1]", "holds a list"),
        ("nonsense", "is not valid JSON"),
        ('{"a": 1, "a": 2}', "key `a` is given twice"),
        ('{"a": NaN}', "`NaN` is not a number"),
        (b"\xff\xfe\x00", "is not a text file"),
        ("[" * 100_000, "nests too deeply"),
        ('{"schema_version": ' + "9" * 5000 + "}", "number of thousands of digits"),
        (None, "does not exist"),
    ],
    ids=["empty", "list", "text", "twice", "nan", "binary", "deep", "digits", "missing"],
)
def test_files_that_are_no_plan(tmp_path, content, said):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ZplanError, match=said):
        load_plan(path)
    with pytest.raises(ZplanError, match="is a folder"):
        load_plan(tmp_path)


def test_the_command_that_made_it_can_be_asked_again(plan):
    assert plan.command() == "zplan plan --model smollm2-135m --gpus 2 --mem 8 --global-batch 8 --seq 256"
    assert plan.command(gpus=4, mem=None, gpu="RTX 4090") == (
        "zplan plan --model smollm2-135m --gpus 4 --global-batch 8 --seq 256 --gpu 'RTX 4090'"
    )
