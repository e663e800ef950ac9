"""torch's out-of-memory messages of many releases, in their own words, and what is read from each."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zplan.planner.oom_log import Size, read_messages, segment_bytes

MIB, GIB = 2**20, 2**30

ROWS = json.loads((Path(__file__).parent / "golden" / "oom_messages.json").read_text(encoding="utf-8"))
MESSAGES = {row["torch"]: "\n".join(row["text"]) for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=MESSAGES)
def test_messages_of_many_releases(row):
    (found,) = read_messages(f"epoch 1\nTraceback (most recent call last):\n{MESSAGES[row['torch']]}\n")
    for name in ("tried", "free", "in_use", "allocated"):
        size = getattr(found, name)
        assert (None if size is None else size.nbytes) == row[name], name
    for name in ("device", "gpu", "rank", "phase"):
        assert getattr(found, name) == row[name], name
    reserved = row["reserved"]
    assert found.reserved_bytes == (None if reserved is None else pytest.approx(reserved, abs=2))


SEEN = json.loads((Path(__file__).parent / "golden" / "oom_seen.json").read_text(encoding="utf-8"))
"""What people's programs printed, each with where they showed it, and every number in it as one reads it."""

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "GB": GIB}
"""Torch's GB on MPS are of 2**30 bytes (`ATen/mps/MPSAllocator.mm`)."""
SIZES = ("tried", "total", "free", "in_use", "allocated", "unallocated", "allowed")


def in_bytes(text):
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


@pytest.mark.parametrize("row", SEEN, ids=[r["url"].removeprefix("https://github.com/") for r in SEEN])
def test_messages_that_people_met(row):
    (found,) = read_messages("\n".join(row["text"]))
    expected = {name: in_bytes(row[name]) if name in row else None for name in SIZES}
    if "reserved" in row:  # with what is allocated in it
        expected["unallocated"] = in_bytes(row["reserved"]) - expected["allocated"]
    sizes = {name: getattr(found, name) for name in SIZES}
    assert {name: None if size is None else size.nbytes for name, size in sizes.items()} == expected
    assert (found.device, found.gpu, found.rank) == (row["device"], row.get("gpu"), row.get("rank"))


def test_messages_that_people_met_are_of_many_kinds():
    assert len(SEEN) >= 25 and len({r["url"] for r in SEEN}) >= 25
    assert {r["device"] for r in SEEN} == {"CUDA", "HIP", "XPU", "MPS", "CPU"}
    text = "\n".join(line for r in SEEN for line in r["text"])
    kinds = ("cached)", "reserved in total", "total capacty of", "total capacity of", "private pools", "allowed;")
    assert all(kind in text for kind in (*kinds, "Process 4078482", "[rank15]", "NVML_SUCCESS", "0 bytes free"))


def test_what_follows_from_the_numbers():
    (one,) = read_messages(MESSAGES["2.5, one rank of many"])
    assert one.fragmented, "5.66 GiB lay idle where 3.73 were asked for"
    assert one.outside_bytes == pytest.approx((79.10 - 1.28 - 76.08) * GIB, abs=MIB)
    assert one.where == "_optimizer_step of stage3.py"
    (limited,) = read_messages(MESSAGES["2.9, a limit and CUDA graphs"])
    assert limited.allowed.nbytes == 24 * GIB and limited.fragmented


def test_a_broken_line_is_one_message_and_a_repeated_one_is_told_once():
    text = MESSAGES["2.1"]
    head, _, tail = text.partition("GPU 0 has")
    (found,) = read_messages(f"{head}\n    GPU 0 has{tail}\n")
    assert found.free.nbytes == round(1.46 * GIB)
    assert len(read_messages(f"{text}\n{text}\n")) == 1
    assert len(read_messages("\n".join(MESSAGES[k] for k in ("1.4", "2.1")))) == 2
    assert read_messages("all is well: 20.00 MiB free\n") == ()


@example(2**17)
@given(st.integers(1, 2**38))
def test_a_printed_size_knows_how_exact_it_is(nbytes):
    unit, scale = ("GiB", GIB) if nbytes > GIB else ("MiB", MIB)
    text = f"CUDA out of memory. Tried to allocate {nbytes / scale:.2f} {unit}. GPU 0 has"
    (found,) = read_messages(text)
    assert found.tried.matches(nbytes) and not found.tried.matches(nbytes + scale // 50)
    assert isinstance(found.tried, Size)


@given(st.text(alphabet="CUDAout of memry.Tried to allocate 0123456789GMiB\n[rank]:'\"", max_size=120))
def test_no_text_causes_a_traceback(text):
    read_messages(f"CUDA out of memory. {text}")


@given(st.integers(1, 2**36))
def test_segments_hold_what_they_are_for(nbytes):
    assert nbytes <= segment_bytes(nbytes) < nbytes + 20 * MIB and segment_bytes(nbytes) % (2 * MIB) == 0
