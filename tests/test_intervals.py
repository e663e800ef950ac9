"""Intervals of totals: from the sources of their lines, and the verdict by the upper end."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zplan
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import hardware_from
from zplan.planner.interval import Margin, parse_margin
from zplan.planner.ledger import SPREAD_PERCENT, Ledger, Line
from zplan.planner.overhead import MEASURED, constants
from zplan.planner.report import report
from zplan.planner.units import GIB

SOURCES = tuple(SPREAD_PERCENT)


@st.composite
def ledgers(draw):
    phases = tuple(f"p{i}" for i in range(draw(st.integers(1, 4))))
    lines = []
    for i in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, len(phases) - 1))
        span = (first, draw(st.integers(first, len(phases) - 1)))
        nbytes, source = draw(st.integers(1, 10**6)), draw(st.sampled_from(SOURCES))
        low, high = (None, None)
        if source == "estimate" and draw(st.booleans()):
            low, high = draw(st.integers(0, nbytes)), nbytes + draw(st.integers(0, 10**6))
        lines.append(
            Line(f"l{i}", nbytes, (span,) * draw(st.integers(1, 3)), "states", "device", source, "", low, high)
        )
    return Ledger(phases, tuple(lines))


@given(ledgers())
def test_ends_are_the_worst_phase_with_all_lines_at_their_least_and_most(ledger):
    def largest(size):
        return max(sum(size(x) * n for x, n in ledger.live(p)) for p in ledger.phases)

    assert ledger.interval() == (largest(lambda x: x.bounds[0]), largest(lambda x: x.bounds[1]))
    assert ledger.interval()[0] <= ledger.peak_bytes() <= ledger.interval()[1]


@pytest.mark.parametrize("source", ["allocated", "derived"])
def test_what_is_allocated_or_derived_is_exact(source):
    line = Line("x", 1000, ((0, 0),), "states", source=source)
    assert line.bounds == (1000, 1000) and Ledger(("p",), (line,)).interval() == (1000, 1000)


def test_other_sources_have_a_spread_or_bounds_of_their_own():
    line = Line("x", 1000, ((0, 0),), "overhead", source="measured")
    assert line.bounds == (950, 1050)
    assert line._replace(source="estimate").bounds == (900, 1100)
    assert line._replace(source="estimate", low=10, high=5000).bounds == (10, 5000)


def test_every_estimate_of_an_overhead_has_bounds_and_says_why():
    for gpu in (None, *MEASURED):
        for c in constants(hardware_from(gpus=2, mem_bytes=24 * GIB, gpu=gpu)):
            assert c.note and (c.source != "estimate" or c.between is not None), c
            low, high = c.line((0, 0)).bounds
            assert low <= c.line((0, 0)).nbytes <= high


def ends(**asked):
    """How far the ends of the picked row are from its total, as fractions."""
    row = zplan.estimate(**asked).row
    assert row.low_bytes <= row.peak_bytes <= row.high_bytes
    return max(row.high_bytes - row.peak_bytes, row.peak_bytes - row.low_bytes) / row.peak_bytes


BENCHED = [
    {"model": "llama-2-7b", "gpus": 2, "micro_batch": 2},
    {"model": "llama-3-8b", "gpus": 8, "stage": 3},
    {"params": "13e9", "gpus": 2},
    {"params": "70e9", "gpus": 16},
]


@pytest.mark.parametrize("asked", BENCHED, ids=str)
def test_three_per_cent_on_a_benched_machine(asked):
    assert ends(gpu="H200", **asked) <= 0.03


ELSEWHERE = [
    {"params": "7e9", "gpus": 8, "mem": 24},
    {"model": "llama-3-8b", "gpus": 8, "gpu": "RTX 4090", "seq": 4096},
    {"params": "13e9", "gpus": 8, "mem": 80},
    {"model": "qwen3-8b", "gpus": 8, "gpu": "A100 SXM4 80GB"},
]


@pytest.mark.parametrize("asked", ELSEWHERE, ids=str)
def test_eight_per_cent_elsewhere(asked):
    assert 0 < ends(**asked) <= 0.08


def test_a_rank_on_the_cpu_is_exact():
    row = zplan.estimate("gpt2", gpus=2, mem=24, device="cpu", seq=128).row
    assert row.low_bytes == row.peak_bytes == row.high_bytes


def test_it_fits_when_the_upper_end_does():
    row = zplan.estimate(params=7e9, gpus=8, mem=24, stage=3, checkpointing="full").row
    assert zplan.estimate(params=7e9, gpus=8, mem=f"{row.high_bytes}B", stage=3, checkpointing="full").fits
    for nbytes in (row.high_bytes - 1, row.peak_bytes):
        less = zplan.estimate(params=7e9, gpus=8, mem=f"{nbytes}B", stage=3, checkpointing="full")
        assert not less.fits and less.verdict.code == "no-fit"
        assert " GiB (up to " in less.verdict.text
        assert less.remedies and all(r.spare_bytes >= 0 for r in less.remedies)


def test_what_is_missing_is_told_from_the_upper_end_which_is_named():
    found = zplan.estimate(params="7e9", gpus=1, mem=24)
    room = re.search(r"needs ([\d.]+) GiB \(up to ([\d.]+)\) of ([\d.]+) GiB, ([\d.]+) GiB over", found.verdict.text)
    peak, most, card, over = map(float, room.groups())
    assert peak < most and abs(most - card - over) < 0.011
    eager = zplan.estimate(params="7e9", gpus=8, mem=24)
    reason = next(d.reason for d in eager.decisions if d.name == "checkpointing")
    most, over = map(float, re.search(r"\(up to ([\d.]+)\) are needed, ([\d.]+) GiB more", reason).groups())
    assert abs(most - 24 - over) < 0.011


def test_a_line_of_several_instances_has_the_bounds_of_all():
    text = report(zplan.estimate(params="7e9", gpus=8, mem=24))
    assert re.search(r"overhead\.cublas .* 2 x 32\.00 MiB +0\.06  estimate 0\.02 to 0\.06:", text)


def test_margin_is_kept_beyond_the_interval():
    asked = dict(params=7e9, gpus=8, mem=24, stage=3, checkpointing="full")
    plain, share, size = (zplan.estimate(**asked, margin=m) for m in (None, "15%", "2GiB"))
    assert share.row.margin_bytes == 24 * GIB * 15 // 100 and size.row.margin_bytes == 2 * GIB
    for e in (share, size):
        assert e.row.spare_bytes == plain.row.spare_bytes - e.row.margin_bytes
        assert e.row.peak_bytes == plain.row.peak_bytes
    assert "less 3.60 GiB of margin" in share.verdict.text
    assert not zplan.estimate(**asked, margin="90%").fits
    assert plain.longest_seq > share.longest_seq > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100%", "`--margin 100%` leaves nothing of the card"),
        ("-5%", "`--margin -5%` leaves nothing of the card"),
        ("x%", "`--margin x%` is no share that zplan can read"),
        ("much", "`--margin much` is not a size that zplan can read"),
    ],
)
def test_bad_margins_are_refused(text, message):
    with pytest.raises(ZplanError, match="--margin") as caught:
        parse_margin(text)
    assert caught.value.message == message


def test_margins_are_told_as_asked():
    assert [parse_margin(t).told() for t in ("15%", "2GiB", "12.5%")] == ["15%", "2 GiB", "12.5%"]
    assert parse_margin("0").of(10**9) == 0 and Margin(1500).of(1000) == 150


def test_json_has_both_ends_of_every_total_and_line():
    e = zplan.estimate(params=7e9, gpus=8, mem=24)
    found = json.loads(e.to_json())
    assert found["peak_between_bytes"] == [e.row.low_bytes, e.row.high_bytes]
    for row in found["stages"]:
        assert row["low_bytes"] < row["peak_bytes"] < row["high_bytes"]
        assert row["spare_bytes"] == row["capacity_bytes"] - row["high_bytes"] - row["margin_bytes"]
    most = sum(x["high"] * x["live_at_peak"] for x in found["lines"] if x["tier"] == "device")
    assert most == e.row.high_bytes, "all loose lines live in the peak phase"
