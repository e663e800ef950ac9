"""Step times: the work of a step, transfers beside compute, rates of cards, and what was measured."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.adapters import adapt, find_targets
from zplan.planner.comm import traffic
from zplan.planner.config import Choice, Offload
from zplan.planner.folding import unfolded
from zplan.planner.hardware import Hardware
from zplan.planner.models import Adapters, Architecture, ModelSpec, decoder_units
from zplan.planner.sources import model_from
from zplan.planner.speeds import EFFICIENCY, speeds
from zplan.planner.step_time import (
    Queue,
    gathered_first,
    reduced_after,
    step_time,
    unit_sizes,
    wire,
)
from zplan.planner.units import GIB
from zplan.planner.work import matrix_params, model_flops, step_work

H200 = "H200 SXM 141GB"


def decoder(layers, hidden, heads, ffn, vocab, kv_heads=None):
    arch = Architecture(
        "llama", layers, hidden, heads, kv_heads or heads, hidden // heads, ffn, vocab, 4096, tied=False
    )
    return ModelSpec("decoder", decoder_units(arch), arch)


SHAPES = {"1.3b": decoder(24, 2048, 16, 5504, 32000), "7b": decoder(32, 4096, 32, 11008, 32000)}
TINY = decoder(5, 64, 4, 160, 256, kv_heads=2)
FROZEN = replace(TINY, units=tuple(u._replace(frozen=u.kind == "block") for u in TINY.units))
"""Trained outside of its blocks only."""


def timed(spec, choice, *, gpu=H200, nodes=1, **said):
    hardware = Hardware(choice.world_size, nodes, 100 * GIB, gpu)
    at = said.pop("at", None) or speeds(hardware, choice.precision, **said)
    sizes = unit_sizes(unfolded(spec), choice)
    link = wire(choice, hardware, at)
    return step_time(spec, choice, sizes, link, at, per_token=model_flops(spec, choice.seq))


@pytest.mark.parametrize("name", ["llama-2-7b", "gemma-2-2b", "qwen3-8b", "mixtral-8x7b", "gpt2", "phi-2"])
def test_counted_operations_are_six_a_parameter_and_attention(name):
    """With eager attention, which computes what causality masks, the tape counts what the formula says, but experts'
    routing and the like: within 1 %."""
    model = model_from(name, None)
    choice = Choice(0, 1, 2, seq=256, attention="eager")
    work = step_work(model.arch, choice)
    expected = 2 * 256 * model_flops(model.spec, 256)
    assert work.forward.flops + work.backward.flops == pytest.approx(expected, rel=0.01)
    assert work.backward.flops == pytest.approx(2 * work.forward.flops, rel=0.01)


def test_keys_and_values_of_two_widths():
    spec = model_from("deepseek-v2-lite", None).spec
    trained, _ = matrix_params(spec)
    # 27 layers of 16 heads, 192 wide in scores and 128 in values.
    assert model_flops(spec, 4096) - 6 * trained == 6 * 27 * 16 * (192 + 128) * 4096


def test_a_decoder_is_counted_to_the_operation():
    work = step_work(TINY.arch, Choice(0, 1, 3, seq=32, attention="eager"))
    assert work.forward.flops * 3 == work.forward.flops + work.backward.flops == 3 * 32 * model_flops(TINY, 32)
    fused = step_work(TINY.arch, Choice(0, 1, 3, seq=32))
    scores = 3 * 5 * 4 * 32 * 32 * 16  # B L H T T D
    assert work.forward.flops - fused.forward.flops == 2 * scores
    assert fused.backward.flops - 2 * (fused.forward.flops - 2 * scores) == 5 * scores


def adapted(spec, rank=4, targets="q,v"):
    return adapt(spec, Adapters(rank, find_targets(spec, targets)))


@pytest.mark.parametrize(("targets", "names"), [("q,v", {"q", "v"}), ("all-linear", {*"qkvo", "gate", "up", "down"})])
def test_a_frozen_base_makes_no_weight_gradients(targets, names):
    """Operations by hand: a frozen map's backward is one product, an adapter's has all, and nothing leaves block 0."""
    a, tokens, rank = TINY.arch, 3 * 32, 4
    heads, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes = {"q": (a.hidden, heads), "k": (a.hidden, narrow), "v": (a.hidden, narrow), "o": (heads, a.hidden)}
    shapes |= {"gate": (a.hidden, a.ffn), "up": (a.hidden, a.ffn), "down": (a.ffn, a.hidden)}
    forward = backward = 2 * tokens * a.hidden * a.vocab  # The head's: its input's gradient alone.
    scores = 2 * 3 * a.heads * 32 * 32 * a.head_dim
    for block in range(a.layers):
        for name, (wide, out) in shapes.items():
            base, down, up = (2 * tokens * n for n in (wide * out, wide * rank, rank * out))
            first = not block and name in ("q", "k", "v")  # Their input is the frozen embedding's.
            forward += base + (down + up if name in names else 0)
            backward += (0 if first else base) + (down * (2 - first) + 2 * up if name in names else 0)
        forward += 2 * scores
        backward += 4 * scores - (0 if block or "k" in names else scores)
    work = step_work(a, Choice(0, 1, 3, seq=32, attention="eager"), adapted(TINY, rank, targets).adapters)
    assert (work.forward.products, work.backward.products) == (forward, backward)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_take_two_thirds_of_a_full_step_and_hardly_an_optimizer(stage):
    full, lora = (timed(spec, Choice(stage, 8)) for spec in (SHAPES["7b"], adapted(SHAPES["7b"], 16)))
    assert 0.65 < lora.compute / full.compute < 0.75  # attention and what is written are as they were
    assert lora.total < 0.75 * full.total
    assert lora.optimizer < full.optimizer / 500 and lora.reduces < full.reduces / 2
    # MFU counts what is asked for: 4 operations of a frozen parameter, 6 of an adapter's.
    trained, frozen = matrix_params(adapted(SHAPES["7b"], 16))
    attention = 12 * 32 * 4096 * 2048
    assert model_flops(adapted(SHAPES["7b"], 16), 2048) == 6 * trained + 4 * frozen + attention
    assert trained == 32 * 2 * 2 * 16 * 4096 and frozen == matrix_params(SHAPES["7b"])[0]


def test_checkpointing_runs_blocks_again_up_to_the_last_thing_saved():
    none, full = (step_work(TINY.arch, Choice(0, 1, 2, seq=64, checkpointing=c)) for c in ("none", "full"))
    assert full.forward == none.forward
    again = full.blocks_backward.flops - none.blocks_backward.flops
    assert (
        again == none.blocks.flops - 5 * 2 * 2 * 64 * 160 * 64
    )  # All but the last product, which saves its inputs first.


def test_experts_count_as_often_as_tokens_meet_them():
    mixtral = model_from("mixtral-8x7b", None).spec
    trained, frozen = matrix_params(mixtral)
    assert frozen == 0 and trained < mixtral.num_params / 3
    assert 12.4e9 < trained < 12.9e9


queues = st.lists(
    st.builds(Queue, st.integers(0, 4), st.integers(0, 9).map(float), st.integers(0, 9).map(float)),
    min_size=1,
    max_size=4,
)


@given(queues)
def test_queues_by_simulation(runs):
    entries = [(r.seconds, r.moved) for r in runs for _ in range(r.count)]
    arrived = done = 0.0
    for seconds, moved in entries:
        arrived += moved
        done = max(done, arrived) + seconds
    assert gathered_first(runs) == pytest.approx(done)
    done = sent = 0.0
    for seconds, moved in entries:
        done += seconds
        sent = max(sent, done) + moved
    assert reduced_after(runs) == pytest.approx(sent)


@settings(max_examples=60)
@given(st.integers(0, 3), st.integers(2, 16), st.integers(1, 4), st.sampled_from(["none", "full"]), st.booleans())
def test_all_transfers_are_the_traffic_that_is_counted(stage, n, k, checkpointing, frozen):
    """Without latency, seconds of transfers, hidden and exposed, are bytes over the rate of the links."""
    choice = Choice(stage, n, accumulation=k, seq=64, checkpointing=checkpointing)
    hardware = Hardware(n, 1, GIB, H200)
    at = replace(speeds(hardware, "bf16"), call=0.0, hop=0.0)
    spec = FROZEN if frozen else TINY
    time = timed(spec, choice, at=at)
    moved = time.hidden + time.gathers + time.reduces
    assert moved == pytest.approx(traffic(spec, choice).total_bytes / at.intra, rel=1e-6)


def test_what_is_frozen_is_neither_reduced_nor_updated():
    n = 4
    trained = sum(u.numel for u in FROZEN.units if not u.frozen)
    moved = traffic(FROZEN, Choice(2, n, accumulation=3))
    assert moved.gather_bytes == pytest.approx(2 * trained * (n - 1) / n, rel=0.05)
    assert moved.reduce_bytes == pytest.approx(3 * 2 * trained * (n - 1) / n, rel=0.05)
    # A frozen ring is gathered like any other: 5 blocks up, 3 down.
    ring = traffic(FROZEN, Choice(3, n)).gather_bytes - traffic(FROZEN, Choice(1, n)).gather_bytes
    assert ring == 8 * 2 * traffic_share(FROZEN, n)
    times = [timed(spec, Choice(2, n)) for spec in (TINY, FROZEN)]
    assert times[1].optimizer < times[0].optimizer and times[1].reduces <= times[0].reduces


def traffic_share(spec, n):
    """What a rank sends of one block's padded elements."""
    from zplan.planner.placement import place

    (block,) = {p.layout.padded_numel for p in place(spec, Choice(3, n)) if p.unit.kind == "block"}
    return block * (n - 1) // n


MEASURED = [("1.3b", 4, 47440), ("7b", 2, 10149)]
"""tokens/s a GPU at stage 3 on two H200s: docs/benchmarks/runtime_h200x2_202611.md."""


@pytest.mark.parametrize(("shape", "micro", "measured"), MEASURED)
def test_what_was_measured_is_predicted_within_two_per_cent(shape, micro, measured):
    time = timed(SHAPES[shape], Choice(3, 2, micro, reduce="scatter"))
    assert time.tokens_per_second / 2 == pytest.approx(measured, rel=0.02)


def mpt(layers, hidden, heads):
    """MPT's shape: GPT-2 without position tables, which weigh nothing here."""
    arch = Architecture("gpt2", layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50368, 8192, tied=True)
    return ModelSpec("mpt", decoder_units(arch), arch)


MPT = {"7b": mpt(32, 4096, 32), "30b": mpt(48, 7168, 56), "70b": mpt(80, 8192, 64)}
PUBLISHED = [
    ("7b", 8, 6, 2048, "none", 10643),
    ("7b", 8, 16, 4096, "full", 8611),
    ("30b", 8, 3, 2048, "full", 2002),
    ("30b", 8, 1, 4096, "full", 1802),
    ("30b", 16, 10, 2048, "full", 2263),
    ("30b", 32, 14, 2048, "full", 2308),
    ("70b", 32, 2, 2048, "full", 882),
    ("70b", 64, 8, 2048, "full", 1039),
]
"""tokens/s a GPU of FSDP on H100 SXM 80GB: MosaicML, llm-foundry, scripts/train/benchmarking. None was used."""


@pytest.mark.parametrize(("shape", "gpus", "micro", "seq", "checkpointing", "measured"), PUBLISHED)
def test_what_others_published_is_predicted_within_a_tenth(shape, gpus, micro, seq, checkpointing, measured):
    choice = Choice(3, gpus, micro, 1, seq, checkpointing=checkpointing, reduce="scatter")
    time = timed(MPT[shape], choice, gpu="H100 SXM 80GB", nodes=gpus // 8)
    assert time.tokens_per_second / gpus == pytest.approx(measured, rel=0.101)


def test_bounds_add_up_and_mfu_leaves_recomputing_out():
    none, full = (timed(SHAPES["7b"], Choice(3, 8, 2, 4, checkpointing=c)) for c in ("none", "full"))
    for time in (none, full):
        assert time.total == pytest.approx(sum(time.bounds().values()))
        assert min(time.bounds().values()) >= 0
        assert time.mfu == pytest.approx(time.tokens * model_flops(SHAPES["7b"], 2048) / (8 * 989e12 * time.total))
    assert none.recompute == 0 < full.recompute < full.compute / 2.9
    assert full.mfu < none.mfu < EFFICIENCY


@pytest.mark.parametrize("stage", range(4))
def test_slower_machines_take_longer(stage):
    choice = Choice(stage, 16, 1, 2)
    spec = SHAPES["1.3b"]
    fast = timed(spec, choice)
    assert timed(spec, choice, efficiency=0.25).compute > 1.5 * fast.compute
    assert timed(spec, choice, nodes=2, network=10**9).total > 3 * fast.total
    assert timed(spec, choice, gpu="RTX 4090").total > 3 * fast.total
    assert timed(spec, choice, nodes=2, network=4 * 10**11).total == pytest.approx(fast.total, rel=0.01)


def test_a_thousand_ranks_pay_for_every_hop_of_a_ring():
    few, many = (timed(SHAPES["7b"], Choice(3, n), nodes=n // 8) for n in (16, 1024))
    assert many.total > few.total


def test_stages_beside_each_other():
    """Stage 1 updates a share of what stage 0 does; with accumulation on slow links stages 2 and 3 pay most."""
    spec = SHAPES["1.3b"]
    slow = [timed(spec, Choice(s, 16, 1, 8), nodes=16, network=10**9) for s in range(4)]
    assert slow[1].total < slow[0].total < slow[2].total < slow[3].total
    assert slow[2].reduces > 3 * slow[1].reduces
    one = timed(spec, Choice(3, 1))
    assert one.gathers == one.reduces == one.hidden == 0


def test_offloading_adds_what_the_slowest_of_host_pcie_and_disk_takes():
    spec = SHAPES["1.3b"]
    sizes = {where: timed(spec, Choice(2, 2, 4, offload=Offload(where))) for where in ("none", "cpu", "nvme")}
    assert sizes["none"].offload == 0 and sizes["none"].offload_bound == ""
    # 1.345e9 elements of both ranks on one host: 30 bytes each at 106.1 GB/s.
    assert sizes["cpu"].offload == pytest.approx(1.3454e9 * 30 / 106.1e9, rel=0.01)
    assert sizes["cpu"].offload_bound == "host" and sizes["nvme"].offload_bound == "disk"
    assert sizes["nvme"].offload == pytest.approx(1.3454e9 * 12 * (1 / 1.81e9 + 1 / 3.03e9), rel=0.01)
    assert sizes["cpu"].optimizer == 0 < sizes["none"].optimizer
    half = timed(spec, Choice(2, 2, 4, offload=Offload("cpu", ratio=0.5)))
    assert half.offload == pytest.approx(sizes["cpu"].offload / 2, rel=0.01) and half.optimizer > 0


@pytest.mark.parametrize("gpu", [H200, "RTX 4090"])
@pytest.mark.parametrize("offload", [Offload("cpu"), Offload("nvme"), Offload("cpu", ratio=0.5), Offload("cpu", "cpu")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_computes_more_takes_no_less_where_gradients_leave_beside_it(gpu, offload, stage):
    """The same seconds of backward hide reduces and copies to the host: more of them may not save both."""
    spec = decoder(8, 1024, 16, 2816, 32000)
    for k in (1, 3):
        choice = Choice(stage, 4, 1, k, 64, offload=offload if stage == 3 else replace(offload, params="none"))
        times = [timed(spec, replace(choice, micro_batch=m), gpu=gpu).total for m in (1, 2, 3, 8, 40, 200)]
        assert times == sorted(times) and times[0] < times[-1]
        assert timed(spec, replace(choice, checkpointing="full"), gpu=gpu).total >= times[0]


def test_bytes_to_the_host_and_to_disk():
    spec = TINY
    total = sum(u.numel for u in spec.units)
    off = traffic(spec, Choice(2, 2, 1, 3, offload=Offload("nvme")))
    assert off.down_bytes == pytest.approx(3 * 4 * total / 2, rel=0.02)
    assert off.up_bytes == pytest.approx(2 * total / 2, rel=0.02)
    assert off.disk_read_bytes == off.disk_written_bytes == pytest.approx(12 * total / 2, rel=0.02)
    params = traffic(spec, Choice(3, 2, 1, 1, offload=Offload("cpu", "cpu")))
    assert params.up_bytes == pytest.approx(params.gather_bytes, rel=0.02)  # With two ranks each sends what it fetches.
    inputs = traffic(spec, Choice(0, 1, 2, 3, seq=10, checkpointing="full", checkpoint_offload=True))
    assert inputs.down_bytes == inputs.up_bytes == 3 * 5 * 2 * 10 * 64 * 2
    assert traffic(spec, Choice(2, 2)).down_bytes == 0


@pytest.mark.parametrize(("gpu", "precision"), [(None, "bf16"), ("CPU rank", "bf16"), (H200, "fp32"), ("T4", "bf16")])
def test_no_rates_without_a_known_peak(gpu, precision):
    assert speeds(Hardware(8, 1, GIB, gpu), precision) is None


def test_what_is_assumed_is_said():
    measured = speeds(Hardware(2, 1, GIB, H200), "bf16")
    assert measured.assumed == () and measured.peak_flops == 989e12
    bridged = speeds(Hardware(8, 1, GIB, "RTX 3090"), "bf16")
    assert "PCIe at 16 GB/s" in bridged.assumed
    two = speeds(Hardware(2, 1, GIB, "RTX 3090"), "bf16")
    assert "NVLink at 33 GB/s" in two.assumed
    far = speeds(Hardware(16, 2, GIB, H200), "bf16")
    assert far.assumed == ("network of 400 GB/s a node",) and far.network == 400e9
    assert speeds(Hardware(16, 2, GIB, "A100 SXM 80GB"), "bf16").network == 200e9
    assert speeds(Hardware(16, 2, GIB, H200), "bf16", network=5 * 10**9).assumed == ()
