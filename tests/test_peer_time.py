"""Step times of FSDP2 and DDP: their transfers are their traffic, and what was measured is predicted."""

import json
from dataclasses import replace

import pytest
from test_step_time import MPT, PUBLISHED

import zplan
from zplan.planner.answer import open_search
from zplan.planner.comm import traffic
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.peer_time import STEP_BYTES, peer_step_time
from zplan.planner.report import report
from zplan.planner.request import make_request
from zplan.planner.speeds import speeds
from zplan.planner.step_time import wire
from zplan.planner.units import GIB
from zplan.planner.work import model_flops, step_work

H200, H100 = "H200 SXM 141GB", "H100 SXM 80GB"


def decoder(layers, hidden, heads, ffn, vocab):
    arch = Architecture("llama", layers, hidden, heads, heads, hidden // heads, ffn, vocab, 4096, tied=False)
    return ModelSpec("decoder", decoder_units(arch), arch)


TINY = decoder(5, 64, 4, 160, 256)
SHAPES = {"1.3b": decoder(24, 2048, 16, 5504, 32000), "7b": decoder(32, 4096, 32, 11008, 32000)}


def timed(spec, choice, *, gpu=H200, nodes=1, at=None, **said):
    hardware = Hardware(choice.world_size, nodes, 100 * GIB, gpu)
    at = at or speeds(hardware, choice.precision, **said)
    return peer_step_time(spec, choice, wire(choice, hardware, at), at, per_token=model_flops(spec, choice.seq))


MEASURED = [
    ("fsdp2", "1.3b", 1, 4, 44670),
    ("fsdp2", "1.3b", 2, 4, 43529),
    ("fsdp2", "1.3b", 2, 4, 44072),
    ("fsdp2", "7b", 2, 2, 8932),
    ("fsdp2", "7b", 2, 2, 9377),
    ("ddp", "1.3b", 2, 4, 38161),
]
"""tokens/s a GPU of the common workload on two H200s, torch 2.11, eager, 2026-11: `docs/runtimes-compared.md`."""


@pytest.mark.parametrize(("runtime", "shape", "gpus", "micro", "measured"), MEASURED)
def test_what_was_measured_is_predicted_within_four_per_cent(runtime, shape, gpus, micro, measured):
    time = timed(SHAPES[shape], Choice(0 if runtime == "ddp" else 3, gpus, micro, runtime=runtime))
    assert time.tokens_per_second / gpus == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(("shape", "gpus", "micro", "seq", "checkpointing", "measured"), PUBLISHED)
def test_what_others_published_is_predicted_within_a_ninth(shape, gpus, micro, seq, checkpointing, measured):
    choice = Choice(3, gpus, micro, 1, seq, checkpointing=checkpointing, runtime="fsdp2")
    time = timed(MPT[shape], choice, gpu=H100, nodes=gpus // 8)
    assert time.tokens_per_second / gpus == pytest.approx(measured, rel=0.111)


@pytest.mark.parametrize(("runtime", "stage"), [("fsdp2", 3), ("fsdp2", 2), ("ddp", 0)])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_all_transfers_are_the_traffic_that_is_counted(runtime, stage, k, checkpointing):
    """Without latency, seconds of transfers, hidden and exposed, are bytes over the rate of the links."""
    choice = Choice(stage, 4, accumulation=k, seq=64, checkpointing=checkpointing, runtime=runtime)
    at = replace(speeds(Hardware(4, 1, GIB, H200), "bf16"), call=0.0, hop=0.0)
    time = timed(TINY, choice, at=at)
    moved = time.hidden + time.gathers + time.reduces
    assert moved == pytest.approx(traffic(TINY, choice).total_bytes / at.intra, rel=1e-6)
    assert min(time.bounds().values()) >= 0 and time.total == pytest.approx(sum(time.bounds().values()))
    assert (time.recompute > 0) is (checkpointing == "full")


def test_the_optimizer_passes_over_what_a_rank_owns():
    at = speeds(Hardware(8, 1, GIB, H200), "bf16")
    sharded, whole = (timed(TINY, Choice(s, 8, seq=64, runtime=r)) for s, r in ((3, "fsdp2"), (0, "ddp")))
    assert STEP_BYTES == 4 + 8 + 28
    assert whole.optimizer == 8 * sharded.optimizer == pytest.approx(40 * TINY.num_params / at.hbm)


def test_copies_are_part_of_compute():
    """FSDP2 on one GPU copies as well; DDP's only copy is into its buckets. Beyond these it is the tape's work."""
    from zplan.planner.step_time import seconds_of

    at = speeds(Hardware(1, 1, GIB, H200), "bf16")
    cases = {("fsdp2", 3, 1): 2 * (6 + 4) + 6, ("fsdp2", 2, 1): (6 + 4) + 6, ("ddp", 0, 2): 2 * 8}
    cases["fsdp2", 2, 3] = 3 * (6 + 4) + 6 + 2 * 10 + 8  # summed in fp32: one cast, two additions, one copy
    for (runtime, stage, k), each in cases.items():
        choice = Choice(stage, 1, accumulation=k, seq=64, runtime=runtime)
        work = step_work(TINY.arch, choice)
        tape = sum(seconds_of(w, at) for w in (work.forward, work.backward))
        assert timed(TINY, choice).compute == pytest.approx(k * tape + each * TINY.num_params / at.hbm, rel=1e-6)


def test_slower_links_expose_what_they_move():
    for runtime, stage in (("fsdp2", 3), ("ddp", 0)):
        choice = Choice(stage, 16, runtime=runtime)
        fast, slow = (timed(SHAPES["1.3b"], choice, nodes=2, network=rate) for rate in (4 * 10**11, 10**9))
        assert slow.total > 5 * fast.total and slow.compute == fast.compute


def test_stage_2_gathers_once_and_reduces_once():
    two, three = (timed(SHAPES["7b"], Choice(s, 8, accumulation=4, runtime="fsdp2")) for s in (2, 3))
    assert two.total < three.total and two.hidden < three.hidden


ASKED = {"model": "llama-2-7b", "gpus": 8, "gpu": "H200"}


def test_the_answer_tells_fsdp2s_times_beside_ddps():
    e = zplan.estimate(**ASKED, runtime="fsdp2")
    assert [t.choice.stage for t in e.timings] == [2, 3] and e.untimed == ""
    two, three = e.timings
    assert two.below is None and three.below == pytest.approx(three.time.total / two.time.total)
    search = open_search(make_request({**ASKED, "runtime": "fsdp2"}), remainder=True)
    ddp = search.time(replace(two.choice, stage=0, runtime="ddp"))
    assert two.ddp == pytest.approx(two.time.total / ddp.total)
    assert "Step time of each row above" in report(e)
    assert json.loads(e.to_json())["untimed"] == ""


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"runtime": "deepspeed"}, "DeepSpeed's step times follow from no byte: its steps wait for host code"),
        ({"runtime": "fsdp2", "tp": 2}, "step times are those of data-parallel ranks"),
    ],
    ids=["deepspeed", "tp"],
)
def test_why_no_time_is_told(asked, why):
    e = zplan.estimate(**ASKED, **asked)
    assert e.timings == () and e.untimed == why
    with pytest.raises(ZplanError) as caught:
        zplan.estimate(**ASKED, **asked, tokens="1e9")
    assert caught.value.message == f"no hours can be told: {why}"
