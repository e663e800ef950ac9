"""Counts and bytes: what people type, and printing that reads back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.errors import ZplanError
from zplan.planner.units import (
    GIB,
    MAX_BYTES,
    MAX_COUNT,
    format_bytes,
    format_count,
    format_gb,
    format_gib,
    parse_bytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7e9", 7_000_000_000),
        ("7E9", 7_000_000_000),
        ("7B", 7_000_000_000),
        ("7b", 7_000_000_000),
        ("1.3b", 1_300_000_000),
        ("0.5B", 500_000_000),
        (".5B", 500_000_000),
        ("7_000_000_000", 7_000_000_000),
        ("7,000,000,000", 7_000_000_000),
        ("350M", 350_000_000),
        ("350 M", 350_000_000),
        ("1.1T", 1_100_000_000_000),
        ("1", 1),
        (7_000_000_000, 7_000_000_000),
        (7e9, 7_000_000_000),
        ("6.738415616e9", 6_738_415_616),
    ],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24", 24 * GIB),
        (24, 24 * GIB),
        ("23.5", 23 * GIB + GIB // 2),
        ("24GB", 24_000_000_000),
        ("24 gb", 24_000_000_000),
        ("24GiB", 24 * GIB),
        ("24G", 24 * GIB),
        ("80 GB", 80_000_000_000),
        ("512MiB", 512 * 2**20),
        ("512MB", 512_000_000),
        ("1TiB", 2**40),
        ("100B", 100),
        ("0.1GiB", 107_374_182),
    ],
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["-7e9", "-1", "0", "0B", "nan", "inf", "-inf", "", "  ", "seven", "7X", "1.5", "7e", "e9", "0.0", "7e99"]
)
def test_counts_that_are_none(text):
    with pytest.raises(ZplanError) as caught:
        parse_count(text, "--params")
    assert "`--params" in caught.value.message and "7e9" in caught.value.hint


@pytest.mark.parametrize("value", ["-24", "0", "nan", "inf", "", "24XB", "24 24", "24000000000", "0.0000000001B"])
def test_bytes_that_are_none(value):
    with pytest.raises(ZplanError) as caught:
        parse_bytes(value, "--mem")
    assert "`--mem" in caught.value.message and caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -7, 0, True, None, [1]])
def test_values_that_are_no_size(value):
    for parse in (parse_count, parse_bytes):
        with pytest.raises(ZplanError):
            parse(value)


@given(st.integers(1, MAX_COUNT))
def test_counts_read_back(count):
    assert parse_count(format_count(count)) == count


@given(st.integers(1, MAX_BYTES))
def test_bytes_read_back(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == nbytes


@given(st.integers(1, 10**6), st.sampled_from(["", "GiB"]))
def test_bare_numbers_are_gib(number, unit):
    assert parse_bytes(f"{number} {unit}") == number * GIB


def test_the_textbook_prints_as_textbooks_do():
    p, n = 7 * 10**9, 8
    rows = [16 * p, 4 * p + 12 * p // n, 2 * p + 14 * p // n, 16 * p // n]
    assert [format_gb(x) for x in rows] == ["112.0", "38.5", "26.25", "14.0"]
    assert format_gib(rows[-1]) == "13.04"
