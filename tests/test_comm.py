"""Bytes sent per step: the textbook's ratios, zplan's exact sums, and a count of gathers by simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.comm import Traffic, ring_gathers, textbook_traffic, textbook_volume, traffic
from zplan.planner.config import Choice
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.placement import place
from zplan.planner.textbook import TEXTBOOK, runtime_rate, textbook_states

ARCH = Architecture("llama", 6, 64, 4, 2, 16, 160, 256, 128, tied=False)
SPEC = ModelSpec("tiny", decoder_units(ARCH), ARCH)


def padded(choice):
    return sum(p.layout.padded_numel for p in place(SPEC, choice))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("reduce", "itemsize"), [("exchange", 2), ("scatter", 4)])
def test_stages_0_to_2_by_formula(n, k, reduce, itemsize):
    p = padded(Choice(0, n))
    share = p * (n - 1) // n
    assert traffic(SPEC, Choice(0, n, accumulation=k, reduce=reduce)) == Traffic(0, 2 * 4 * share)
    # With accumulation, stage 1 adds whole gradients up in fp32 and reduces those.
    stage1 = itemsize if k == 1 else 4
    assert traffic(SPEC, Choice(1, n, accumulation=k, reduce=reduce)) == Traffic(2 * share, stage1 * share)
    assert traffic(SPEC, Choice(2, n, accumulation=k, reduce=reduce)) == Traffic(2 * share, k * itemsize * share)
    assert traffic(SPEC, Choice(2, n, accumulation=k, precision="fp32")).gather_bytes == 4 * share


@pytest.mark.parametrize("k", [1, 3])
def test_stage_3_gathers_blocks_both_ways_and_embedding_and_head_one_way(k):
    n, slots = 2, 2
    choice = Choice(3, n, accumulation=k, ring_slots=slots)
    sizes = {p.unit.name: p.layout.padded_numel for p in place(SPEC, choice)}
    block, guests = sizes["blocks.0"], sizes["embed"] + sizes["head"]
    # The head takes the slot of the last block but one, so at the turn one block is still there. Between micro-steps
    # the embedding takes the second block's, so the first block alone is.
    first = guests + (6 + 5) * block
    later = guests + (6 - 1 + 5) * block
    assert traffic(SPEC, choice) == Traffic(
        2 * (sizes["norm"] + first + (k - 1) * later) // n, k * 2 * sum(sizes.values()) // n
    )


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_sends_nothing(stage):
    assert traffic(SPEC, Choice(stage, 1)).total_bytes == 0
    assert textbook_traffic(10**9, stage, world_size=1) == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=12), st.integers(2, 4), st.integers(1, 5)
)
def test_ring_gathers_by_simulation(members, slots, k):
    """Walk the members up and down with `slots` slots, every micro-step, and count what is not there."""
    held, sent = {}, 0
    for _ in range(k):
        way = [(i, True) for i in range(len(members))]
        for i, read in [*way, *((i, members[i][1]) for i, _ in reversed(way))]:
            if read and held.get(i % slots) != i:
                sent, held[i % slots] = sent + members[i][0], i
    assert ring_gathers(tuple(members), slots, accumulation=k) == sent


@given(st.integers(1, 64))
def test_textbook_ratios_by_accumulation(k):
    v = [textbook_volume(s, k) for s in range(4)]
    assert v[3] * (k + 1) == v[2] * 3 * k
    assert v[2] * 2 == v[1] * (k + 1)
    assert v[0] == v[1] == 2


def test_links_at_which_stage_3_takes_as_long_as_computing():
    """A rule for large jobs, by textbook: 8 P operations a token with checkpointing, three volumes of 2 bytes."""
    p, n, tokens, flops_per_second = 10**10, 64, 4096, 4 * 10**14
    seconds = 8 * p * tokens / flops_per_second
    assert textbook_traffic(p, 3, world_size=n) / seconds == pytest.approx(72.0978e9, rel=1e-4)
    assert textbook_traffic(p, 3, world_size=n) / seconds == pytest.approx(
        0.75 * (n - 1) / n * flops_per_second / tokens
    )


def test_textbook_bytes():
    p = 7 * 10**9
    assert textbook_traffic(p, 2, world_size=8) == 2 * 2 * p * 7 // 8
    assert textbook_traffic(p, 3, world_size=8) * 2 == textbook_traffic(p, 2, world_size=8) * 3
    assert [textbook_states(p, s, 8) for s in range(4)] == [16 * p, 5.5 * p, 3.75 * p, 2 * p]
    assert [r.formula() for r in TEXTBOOK] == ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]


@given(st.integers(1, 10**12), st.integers(1, 1024))
def test_a_higher_stage_never_keeps_more(p, n):
    states = [textbook_states(p, s, n) for s in range(4)]
    assert states == sorted(states, reverse=True)
    assert all(TEXTBOOK[s].whole + TEXTBOOK[s].split == 16 for s in range(4))


@given(st.integers(0, 3), st.integers(1, 8), st.sampled_from([1, 2]), st.sampled_from(["bf16", "fp32"]))
def test_runtime_rate_agrees_with_the_ledger(stage, n, k, precision):
    """The rate is the ledger's states and gradients, up to padding and units that stay resident at stage 3."""
    from zplan.planner.buffers import gradient_lines
    from zplan.planner.states import state_lines
    from zplan.planner.timeline import timeline

    choice = Choice(stage, n, accumulation=k, precision=precision)
    placements, time = place(SPEC, choice), timeline(SPEC.units)
    lines = [*state_lines(placements, choice, time), *gradient_lines(placements, choice, time)]
    kept = sum(x.total_bytes for x in lines if not x.id.startswith(("optim.scalars", "optim.norms", "optim.table")))
    ringed = choice.sharded
    resident = sum(p.layout.padded_numel for p in placements if not p.ringed)
    extra = 0
    if ringed:
        # Resident units add their whole flat buffer, whose own slices are the masters, or in bf16 half of them.
        extra = (resident - resident // n) * (2 if precision == "bf16" else 4)
    assert kept == runtime_rate(choice).of(padded(choice), n) + extra
