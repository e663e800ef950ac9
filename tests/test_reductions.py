"""What a sum over rows holds on CUDA, beside what an H200 was seen to allocate (torch 2.11)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from phases import activation_ledger, choose

from zplan.planner.models import Architecture
from zplan.planner.reductions import INDEX_REACH, row_sum_bytes
from zplan.planner.simulation import simulation

GPT2 = Architecture("gpt2", 3, 512, 8, 8, 64, 1408, 4096, 1024, tied=False)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("columns", "measured"), [(512, 16_777_232), (1408, 46_137_388), (1536, 50_331_696)])
def test_what_an_h200_requested_for_4096_rows(columns, measured, itemsize):
    assert row_sum_bytes(4096, columns, itemsize) == measured


@pytest.mark.parametrize(
    ("precision", "attention", "checkpointing", "measured"),
    [
        ("fp32", "sdpa", "none", {2: 391_526_424, 1: 288_065_048, 0: 174_622_232}),
        ("fp32", "sdpa", "full", {2: 167_530_036, 1: 169_122_868, 0: 160_734_260}),
        # Scores make another moment the peak, where nothing is summed: equal before these buffers were known.
        ("fp32", "eager", "none", {2: 1_092_347_400, 1: 853_750_792, 0: 605_172_744}),
        ("bf16", "eager", "none", {2: 1_084_736_264, 1: 830_663_176, 0: 571_599_368}),
    ],
)
def test_backward_of_gpt2_blocks_as_an_h200_measured_it(precision, attention, checkpointing, measured):
    ledger = activation_ledger(GPT2, choose(4, 1024, precision, checkpointing, attention, "cuda"))
    peaks = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
    assert {i: peaks[f"backward.blocks.{i}"] for i in measured} == measured


def test_who_sums_rows():
    """Four biases of three widths, and the positions, added to four sequences; no bias in Llama; no buffer on a CPU."""
    choice = choose(4, 1024, device="cuda")
    found = simulation(GPT2, choice).row_sums
    positions = (4, 1024 * 512, 2)
    assert {x.at(4, 1024) for x in found} == {(4096, 512, 2), (4096, 1408, 2), (4096, 1536, 2), positions}
    assert row_sum_bytes(*positions) == 0
    assert not simulation(GPT2, choose(4, 1024)).row_sums
    llama = Architecture("llama", 3, 512, 8, 8, 64, 1408, 4096, 1024, tied=False)
    assert not simulation(llama, choice).row_sums


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1020, 4096, 0),  # A thread would add up 255 values: too few to share.
        (1021, 4096, 4 * 4096 * 16 * 128 + 4 * 32),
        (4096, 1001, 4 * 1001 * 16 * 32 + 4 * 32),  # no vectors, and blocks that are higher
        (4096, 1002, 4 * 1002 * 32 * 64 + 4 * 16),  # vectors of two
        (3000, 300_000, 0),  # more groups of columns than the GPU holds blocks
        (130_560, 1, 0),
        (131_073, 1, 4 * 17 + 4),  # a single column is shared by lines of threads
    ],
)
def test_shapes_by_hand(rows, columns, expected):
    assert row_sum_bytes(rows, columns, 2) == expected


def test_only_large_sums_depend_on_the_gpu():
    a100, rtx_4090 = {"sms": 108}, {"sms": 128, "threads_per_sm": 1536}
    assert {row_sum_bytes(4096, 1536, 2, **gpu) for gpu in ({}, a100, rtx_4090)} == {50_331_696}
    shared = {"H200": (25, {}), "A100": (21, a100), "RTX 4090": (18, rtx_4090)}
    for blocks, gpu in shared.values():
        assert row_sum_bytes(4096, 11008, 2, **gpu) == 4 * 11008 * blocks * 128 + 4 * 86


@pytest.mark.parametrize(("itemsize", "apart"), [(2, 4 * 11008), (4, 0)])
def test_what_32_bit_offsets_do_not_reach_is_summed_in_parts(itemsize, apart):
    rows = 2 * (INDEX_REACH // (11008 * itemsize))
    assert row_sum_bytes(rows, 11008, itemsize) == row_sum_bytes(rows // 2, 11008, itemsize) + apart


@given(st.integers(1, 60_000), st.integers(1, 4_000), st.integers(1, 5_000))
def test_more_rows_never_take_less(rows, more, columns):
    assert 0 <= row_sum_bytes(rows, columns, 2) <= row_sum_bytes(rows + more, columns, 2)
