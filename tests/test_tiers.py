"""Host, pinned and NVMe memory of a node beside the card: what the ranks take together, and the verdict."""

import json

import pytest

import zplan
from zplan.planner.answer import DoesNotFit
from zplan.planner.ledger import Line
from zplan.planner.saving import BLOCK_BYTES, BLOCKS
from zplan.planner.tiers import TierUse
from zplan.planner.units import GIB

HEADLINE = {"params": 7e9, "gpus": 8, "mem": 24}


def uses(**asked) -> dict[str, TierUse]:
    return {use.tier: use for use in zplan.estimate(**{**HEADLINE, **asked}).tiers}


def test_the_device_is_the_fullest_of_step_and_all_else():
    e = zplan.estimate(**HEADLINE)
    device = {use.tier: use for use in e.tiers}["device"]
    assert (device.nbytes, device.high_bytes) == (e.row.peak_bytes, e.row.high_bytes)
    assert device.where == f"step: {e.row.peak_phase}" and device.limit_bytes == 24 * GIB
    assert all(a.device_bytes <= device.nbytes for a in e.activities if a.plain)
    assert {a.name for a in e.activities if a.plain} == {
        *("initialise", "evaluate", "save", "load, resume", "export"),
    }


def test_a_node_holds_what_its_ranks_do():
    one, two = uses(saving="background"), uses(saving="background", nodes=2)
    assert one["pinned"].nbytes == two["pinned"].nbytes == one["pinned"].high_bytes
    assert one["pinned"].per_node_bytes == 8 * one["pinned"].nbytes == 2 * two["pinned"].per_node_bytes
    both = one["host and pinned"]
    assert max(one["host"].nbytes, one["pinned"].nbytes) <= both.nbytes <= one["host"].nbytes + one["pinned"].nbytes
    blocks = BLOCKS * BLOCK_BYTES
    assert uses()["pinned"].nbytes == blocks, "what a save in the foreground goes through"


def test_background_saves_are_held_against_the_host():
    need = uses(saving="background")["host and pinned"].per_node_bytes
    assert zplan.estimate(**HEADLINE, saving="background", host_mem=f"{need}B").fits
    small = zplan.estimate(**HEADLINE, saving="background", host_mem=64)
    assert not small.fits and small.verdict.code == "no-fit"
    assert "the 8 ranks of a node take " in small.verdict.text and "`save.snapshot`" in small.verdict.text
    assert small.remedies[0].option == "--saving foreground"
    nodes = zplan.estimate(**HEADLINE, saving="background", host_mem=64, nodes=2)
    assert nodes.fits, "two nodes have twice as much"
    with pytest.raises(DoesNotFit, match="host memory") as caught:
        zplan.plan(**{**HEADLINE, "saving": "background"}, host_mem=64)
    assert "--saving foreground" in caught.value.hint


@pytest.mark.parametrize(("gpus", "ranks"), [(1, "one rank takes"), (8, "the 8 ranks of a node take")])
def test_even_the_processes_need_room(gpus, ranks):
    e = zplan.estimate("gpt2", gpus=gpus, mem=24, host_mem="1GiB")
    assert not e.fits and ranks in e.verdict.text and "`host.process`" in e.verdict.text
    assert f"--host-mem {2 * gpus}" in [r.option for r in e.remedies]


def test_what_is_done_beside_the_steps_must_fit_too():
    """More than the steps need, and less than reading the weights does."""
    step = zplan.estimate(**HEADLINE).row.off_device.host_bytes
    most = uses()["host"]
    assert most.where == "initialise: unit.embed" and most.per_node_bytes > 8 * step
    e = zplan.estimate(**HEADLINE, host_mem=f"{most.per_node_bytes - 1}B")
    assert e.row.fits and not e.fits
    assert "`initialise: unit.embed` needs" in e.verdict.text and e.remedies[0].option.startswith("--host-mem ")
    with pytest.raises(DoesNotFit, match="initialise"):
        zplan.plan(**HEADLINE, host_mem=f"{most.per_node_bytes - 1}B")


def test_a_start_that_needs_more_than_the_steps_is_found():
    """A wide head on many ranks: its full fp32 values are more than any step of short sequences holds."""
    asked = {"gpus": 1024, "stage": 3, "seq": 64, "micro_batch": 1, "checkpointing": "full"}
    e = zplan.estimate("llama-3-8b", mem=24, **asked)
    start = next(a for a in e.activities if a.name == "initialise")
    device = {use.tier: use for use in e.tiers}["device"]
    assert start.device_bytes > e.row.peak_bytes and device.where == "initialise: unit.head"
    tight = zplan.estimate("llama-3-8b", mem=f"{device.high_bytes - 1}B", **asked)
    assert tight.row.fits and not tight.fits and tight.verdict.code == "no-fit"
    assert tight.remedies[0].option.startswith("--gpu ")


def test_json_names_every_memory_and_activity():
    e = zplan.estimate(**HEADLINE, saving="background", host_mem=512)
    found = json.loads(e.to_json())
    assert [t["tier"] for t in found["tiers"]] == ["device", "host", "pinned", "host and pinned"]
    assert all(t["over_bytes"] == 0 for t in found["tiers"])
    by_name = {a["name"]: a for a in found["activities"]}
    assert set(by_name) == {a.name for a in e.activities} and not by_name["summon"]["plain"]
    for a in by_name.values():
        device = sum(x["nbytes"] * x["live_at_peak"] for x in a["lines"] if x["tier"] == "device")
        assert device == a["device_bytes"] and a["low_bytes"] <= device <= a["high_bytes"]


def test_an_unknown_size_is_shown_and_not_judged():
    row = uses()["host"]
    assert row.limit_bytes is None and row.over_bytes == 0
    assert row._replace(limit_bytes=GIB).over_bytes == row.per_node_bytes - GIB
    assert Line("x", 8, ((0, 0),), "buffers", "nvme").tier == "nvme"
