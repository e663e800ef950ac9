"""Laws of the flat layout: everything is somewhere, nothing is twice, every rank's slices meet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.layout import ALIGN, ceil_to, lay_out, piece_length

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
WORLDS = st.integers(1, 9)
PIECES = st.integers(1, 8192)


def laid(sizes, world_size, piece_numel):
    return lay_out("u", [(f"p{i}", n) for i, n in enumerate(sizes)], world_size=world_size, piece_numel=piece_numel)


@given(SIZES, WORLDS, PIECES)
def test_entries_follow_each_other_with_little_between(sizes, world_size, piece_numel):
    u = laid(sizes, world_size, piece_numel)
    assert u.entries[0].offset == 0 and [e.numel for e in u.entries] == sizes
    assert all(e.offset % ALIGN == 0 for e in u.entries)
    assert all(0 <= b.offset - a.end < ALIGN for a, b in zip(u.entries, u.entries[1:], strict=False))
    assert 0 <= u.padded_numel - u.entries[-1].end < ALIGN * world_size


@given(SIZES, WORLDS, PIECES)
def test_ranks_own_every_element_once(sizes, world_size, piece_numel):
    u = laid(sizes, world_size, piece_numel)
    owned = sorted(u.own(p, r) for p in u.pieces for r in range(world_size))
    assert owned[0][0] == 0 and owned[-1][1] == u.padded_numel
    assert all(a[1] == b[0] for a, b in zip(owned, owned[1:], strict=False))
    for rank in range(world_size):
        lengths = [end - start for start, end in (u.own(p, rank) for p in u.pieces)]
        assert sum(lengths) == u.shard_numel and all(n % ALIGN == 0 and n > 0 for n in lengths)


@given(SIZES, WORLDS, PIECES)
def test_pieces_are_capped_and_their_shards_follow_each_other(sizes, world_size, piece_numel):
    u = laid(sizes, world_size, piece_numel)
    cap = piece_length(piece_numel, world_size)
    assert all(p.numel <= cap for p in u.pieces) and all(p.numel == cap for p in u.pieces[:-1])
    at = 0
    for p in u.pieces:
        assert p.shard_offset == at
        at += p.numel // world_size
    assert at == u.shard_numel


@given(SIZES, WORLDS)
def test_padding_is_small(sizes, world_size):
    """A rank's shard is the mean share and at most one alignment a parameter and one a rank more."""
    u = laid(sizes, world_size, 8192)
    assert sum(sizes) == u.numel <= u.padded_numel < u.numel + ALIGN * len(sizes) + ALIGN * world_size


@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_ceil_to(numel, multiple):
    up = ceil_to(numel, multiple)
    assert up % multiple == 0 and numel <= up < numel + multiple
