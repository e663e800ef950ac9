"""No machine at all: the fewest of each common GPU, by ways of training."""

import json
import re
import shlex

import pytest

import zplan
from zplan.planner.answer import open_search
from zplan.planner.extremes import fewest
from zplan.planner.fewest import COMMON, WAYS
from zplan.planner.hardware import find_gpu
from zplan.planner.interval import Margin
from zplan.planner.remedies import _larger_card
from zplan.planner.request import make_request
from zplan.planner.units import GIB


def test_no_machine_at_all(run, monkeypatch):
    monkeypatch.setattr("zplan.planner.hardware.local_gpus", list)
    code, out, err = run("estimate", "--model", "llama-3.2-1b")
    assert (code, err) == (0, "")
    rows = re.findall(rf"^  ({'|'.join(COMMON)}) +[\d.]+  (\d+) .*", out, flags=re.M)
    assert [r[0] for r in rows] == list(COMMON)
    assert run("estimate", "--model", "llama-3.2-1b", "--min", "gpus")[1] == out
    found = json.loads(run("estimate", "--model", "llama-3.2-1b", "--json")[1])
    assert len(found["fewest"]) == len(COMMON) * len(WAYS)
    for cell in found["fewest"]:
        assert cell["row"]["fits"] and cell["row"]["world_size"] == cell["gpus"]


def test_no_machine_and_a_model_of_latent_attention_or_one_that_no_number_of_a_card_trains(run, monkeypatch):
    monkeypatch.setattr("zplan.planner.hardware.local_gpus", list)
    code, out, _ = run("estimate", "--model", "deepseek-v2-lite")
    assert code == 0 and re.search(r"^  H200 SXM 141GB +140.40  \d+ .*  \d+ .*  \d+ ", out, flags=re.M)
    code, out, _ = run("estimate", "--model", "llama-3.1-405b", "--min", "gpus")
    assert code == 0 and re.search(r"^  RTX 4090 +23.99 +(none up to 4,096 *){3}$", out, flags=re.M)
    named = re.search(r"--gpu (\w+)\)", out).group(1)
    assert find_gpu(named)


@pytest.mark.parametrize("gpu", ["RTX 4090", "H100 SXM 80GB"])
def test_the_fewest_is_the_first_that_fits(gpu):
    request = make_request({"model": "llama-2-13b", "gpu": gpu})
    for way in WAYS:
        search = fewest(way.change(request), lambda r: open_search(r, remainder=True), way.holds)
        n, row = search.hardware.world_size, way.accept(search)
        assert way.holds(search)
        assert row.fits and row.capacity_bytes == find_gpu(gpu)[0].mem_bytes
        fewer = None if n == 1 else less(way, gpu, n - 1 if n <= 8 else n - 8)
        assert fewer is None or (way.accept(fewer) is None and not way.holds(fewer))


def less(way, gpu, gpus):
    request = way.change(make_request({"model": "llama-2-13b", "gpu": gpu, "gpus": gpus}))
    return open_search(request, remainder=True)


def test_columns_of_the_fewest_are_those_of_the_runtime_and_of_what_was_asked(run, monkeypatch):
    monkeypatch.setattr("zplan.planner.hardware.local_gpus", list)

    def fewest_by(*asked):
        found = json.loads(run("estimate", "--model", "llama-2-13b", *asked, "--json")[1])["fewest"]
        return {way: [c["gpus"] for c in found if c["way"] == way] for way in dict.fromkeys(c["way"] for c in found)}

    plain = fewest_by()
    assert list(plain) == ["fully", "offloaded", "LoRA"]
    assert list(fewest_by("--runtime", "deepspeed")) == ["fully", "offloaded"]
    assert list(fewest_by("--runtime", "fsdp2")) == list(fewest_by("--runtime", "ddp")) == ["fully"]
    # What is asked of one column changes that one alone.
    for option, way in (
        (["--offload", "cpu", "--offload-ratio", "0.3"], "offloaded"),
        (["--qlora", "--lora", 8], "LoRA"),
    ):
        found = fewest_by(*option)
        assert all((found[name] == plain[name]) == (name != way) for name in plain), option
    out = run("estimate", "--model", "llama-2-7b", "--qlora", "--lora", 8)[1]
    assert "  LoRA: adapters of rank 8 on all-linear, the rest frozen in 4 bits; estimate only\n" in out
    assert "hours are told of one machine" in run("estimate", "--model", "llama-2-7b", "--tokens", "1e9")[2]


@pytest.mark.parametrize("option", ["--host-mem", "--nvme"])
def test_a_size_of_a_node_is_of_a_machine_that_must_be_named(run, monkeypatch, option):
    monkeypatch.setattr("zplan.planner.hardware.local_gpus", list)
    code, out, err = run("estimate", "--model", "gpt2", option, "4TB")
    assert (code, out) == (2, "") and "no NVIDIA GPU was found" in err


@pytest.mark.parametrize("asked", [{"stage": 1}, {"stage": 0, "checkpointing": "none"}, {"checkpointing": "none"}, {}])
def test_a_larger_card_is_named_with_all_that_makes_it_fit(asked):
    base = {"model": "qwen2.5-14b", "gpus": 4, "mem": 20, "micro_batch": 2}
    found = zplan.estimate(**base, **asked)
    (card,) = [r for r in found.remedies if r.what.startswith("a card")]
    words = shlex.split(card.option)
    options = dict(zip(words[::2], words[1::2], strict=True))
    named = {k: int(v) if k == "stage" else v for k, v in ((k.removeprefix("--"), v) for k, v in options.items())}
    again = zplan.estimate(**{**{k: v for k, v in base.items() if k != "mem"}, **asked, **named})
    assert not found.fits and again.row.fits


def test_a_larger_card_computes_in_what_was_planned():
    """Of 32 GiB there is a V100 alone, which has no bf16."""
    row = zplan.estimate(params="7e9", gpus=8, mem=24).row
    need = int(31.9 * GIB)
    assert _larger_card(need, need, row, Margin()).option == '--gpu "A100 PCIe 40GB"'
    old = zplan.estimate("gpt2", gpus=1, gpu="T4").row
    assert "V100" in _larger_card(need, need, old, Margin()).option
