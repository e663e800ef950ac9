"""`--explain`: why one stage uses more than another."""

from __future__ import annotations

import json

import pytest

from zplan.planner.errors import ZplanError
from zplan.planner.peer_rules import STAGES
from zplan.planner.request import make_request
from zplan.planner.stage_differences import explain, explanation_json, explanation_text

ASKED = {"model": "llama-3.2-3b", "gpus": 2, "mem": 80, "micro_batch": 1, "checkpointing": "full"}


LOSS = {"model": "llama-3.2-1b", "gpus": 1, "mem": 140, "micro_batch": 8, "checkpointing": "none"}
"""A peak in the loss, where nothing of the step is there yet."""


@pytest.mark.parametrize(
    ("runtime", "pair"),
    [(r, f"{a},{b}") for r in ("zplan", "deepspeed", "fsdp2") for a in STAGES[r] for b in STAGES[r] if a < b],
)
def test_the_lines_add_up_to_the_difference(runtime, pair):
    found = explain(make_request({**ASKED, "runtime": runtime}), pair)
    assert sum(d.more_bytes for d in found.differences) == found.second.peak_bytes - found.first.peak_bytes
    sizes = [abs(d.more_bytes) for d in found.differences]
    assert sizes == sorted(sizes, reverse=True) and all(sizes) and all(d.source for d in found.differences)
    stages = [row.choice.stage for row in (found.first, found.second)]
    assert stages == [int(s) for s in pair.split(",")]


def test_why_deepspeed_3_uses_more_than_2():
    """On one GPU it shards nothing, and makes its gradient buffer and its bucket at the start."""
    found = explain(make_request({**ASKED, **LOSS, "runtime": "deepspeed"}), "2,3")
    more = {d.line: d.more_bytes for d in found.differences if d.more_bytes > 0}
    assert found.more_bytes > 0 and {"grads.shard", "grads.ipg", "params.shard"} <= set(more)
    text = explanation_text(found)
    assert text.startswith("DeepSpeed's stage 3 holds ") and "more than stage 2 on one GPU" in text
    assert "zero/stage3.py: grad_partitions_flat_buffer" in text and "Stage 3 adds" in text


def test_the_command(run):
    words = ["estimate", "--model", "llama-3.2-3b", "--gpus", "2", "--mem", "80", "--runtime", "fsdp2"]
    code, out, err = run(*words, "--explain")
    assert (code, err) == (0, "") and out.startswith("FSDP2's stage 3 holds ") and "params.unsharded.block" in out
    code, out, _ = run(*words, "--explain", "3,2", "--json")
    document = json.loads(out)
    assert document["more_bytes"] == sum(d["more_bytes"] for d in document["lines"]) > 0
    assert (document["first"]["stage"], document["second"]["stage"]) == (3, 2)


@pytest.mark.parametrize(
    ("asked", "pair", "message"),
    [
        ({"runtime": "ddp"}, "auto", "DDP has stage 0 alone"),
        ({"runtime": "fsdp2"}, "1,3", "no two of the stages 2, 3"),
        ({}, "3,3", "no two of the stages 0, 1, 2, 3"),
        ({}, "all", "`--explain all`"),
    ],
)
def test_what_is_refused(asked, pair, message):
    with pytest.raises(ZplanError, match=message):
        explain(make_request({**ASKED, **asked}), pair)


def test_what_is_compared_by_itself():
    """The picked stage and the one below it; from the lowest up to the next."""
    for stage, pair in ((3, (2, 3)), (0, (0, 1))):
        found = explain(make_request({**ASKED, "stage": stage}), "auto")
        assert (found.first.choice.stage, found.second.choice.stage) == pair
    assert json.loads(explanation_json(found))["runtime"] == "zplan"
