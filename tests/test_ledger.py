"""The ledger adds up, and model states shrink with stage and ranks as far as padding allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import workload as w
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.config import Choice
from zplan.planner.layout import ALIGN, Piece
from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.placement import place
from zplan.planner.predict import predict
from zplan.planner.states import group_runs, num_rows

PHASES = tuple("abcdefgh")
SPANS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).map(lambda p: (min(p), max(p))), min_size=1, max_size=5
).map(tuple)
LINES = st.lists(
    st.tuples(
        st.integers(0, 10**12), SPANS, st.sampled_from(["states", "buffers"]), st.sampled_from(["device", "host"])
    ),
    max_size=8,
).map(lambda rows: [Line(f"l{i}", n, spans, kind, tier) for i, (n, spans, kind, tier) in enumerate(rows)])


@given(LINES)
def test_phases_are_sums_of_live_lines(lines):
    ledger = merge(PHASES, lines)
    for tier in ("device", "host"):
        per = ledger.per_phase(tier)
        for phase, total in zip(PHASES, per, strict=True):
            assert total == sum(n * line.nbytes for line, n in ledger.live(phase, tier))
        assert ledger.peak_bytes(tier) == max(per) >= 0
        assert per[PHASES.index(ledger.peak_phase(tier))] == max(per)
        by_kind = [sum(x) for x in zip(*(ledger.per_phase(tier, k) for k in ("states", "buffers")), strict=True)]
        assert tuple(by_kind) == per


def test_ids_are_unique():
    line = Line("x", 1, ((0, 1),), "states")
    with pytest.raises(AssertionError, match="given twice"):
        merge(PHASES, [line], [line])


def states_and_gradients(ledger: Ledger) -> int:
    """Model states with the fp32 gradients, all alive before the step."""
    return ledger.per_phase(kind="states")[-1] + sum(
        n * x.nbytes for x, n in ledger.live("step") if x.id.startswith("grads.")
    )


@given(st.integers(1, 6), st.sampled_from([64, 96, 128]), st.sampled_from(["bf16", "fp32"]), st.sampled_from([1, 2]))
def test_stages_and_ranks_never_cost_more_than_padding(layers, hidden, precision, accumulation):
    arch = Architecture("llama", layers, hidden, 4, 2, 16, 96, 101, 32, tied=False)
    model = ModelSpec("m", decoder_units(arch), arch)
    bytes_of = {}
    for world_size in (1, 2, 3, 8):
        for stage in range(4):
            choice = Choice(stage, world_size, accumulation=accumulation, seq=8, precision=precision, device="cpu")
            bytes_of[stage, world_size] = states_and_gradients(predict(model, choice))
    slack = len(model.units) * 8 * ALIGN * 16
    for world_size in (1, 2, 3, 8):
        for stage in range(1, 4):
            assert bytes_of[stage, world_size] <= bytes_of[stage - 1, world_size] + slack
    for stage in range(4):
        assert bytes_of[stage, 8] <= bytes_of[stage, 2] + slack


@pytest.mark.parametrize(
    ("stage", "accumulation", "a_parameter"),
    [
        (0, 1, lambda n: 2 + 10 + 4),
        (1, 1, lambda n: 2 + 10 / n + 4 / n),
        (1, 2, lambda n: 2 + 10 / n + 4),
        (2, 1, lambda n: 2 + 10 / n + 4 / n),
        (2, 2, lambda n: 2 + 10 / n + 4 / n),
        (3, 1, lambda n: 12 / n + 4 / n),
    ],
)
def test_bytes_a_parameter_are_those_of_the_runtime(stage, accumulation, a_parameter):
    """The zplan rows: bf16 weights 2, what masters have beyond them and moments 10, fp32 gradients 4, divided where the
    stage divides.
    """
    arch = Architecture("llama", 48, 1024, 16, 16, 64, 2816, 64, 4096, tied=False)
    model = ModelSpec("m", decoder_units(arch), arch)
    ledger = predict(model, Choice(stage, 8, accumulation=accumulation, seq=8))
    blocks = sum(u.numel for u in model.units if u.kind == "block")
    lines = [x for x in ledger.lines if x.id.endswith(".block") and x.kind in ("states", "buffers")]
    held = sum(x.total_bytes for x in lines if not x.id.startswith("params.ring"))
    assert held == pytest.approx(a_parameter(8) * blocks, rel=1e-3)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 8), st.sampled_from([0, 3]))
def test_more_tokens_never_cost_less(micro_batch, seq, more, stage):
    choice = Choice(stage, 2, micro_batch=micro_batch, seq=seq, device="cpu")
    peak = predict(w.spec(w.LLAMA), choice).peak_bytes()
    assert peak <= predict(w.spec(w.LLAMA), replace(choice, seq=seq + more)).peak_bytes()
    assert peak <= predict(w.spec(w.LLAMA), replace(choice, micro_batch=micro_batch + more)).peak_bytes()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("piece_numel", [1, 1000, 2**20])
def test_rows_are_the_overlaps_of_pieces_and_runs_of_a_group(stage, piece_numel):
    arch = Architecture("llama", 2, 64, 4, 2, 16, 100, 101, 64, tied=False)
    units = tuple(
        u._replace(params=tuple(p._replace(group=int(len(p.shape) < 2)) for p in u.params)) for u in decoder_units(arch)
    )
    choice, count = Choice(stage, 3, piece_numel=piece_numel), 0
    placements = place(ModelSpec("m", units, arch), choice)
    for p in placements:
        cuts = p.layout.pieces if stage else (Piece(0, p.layout.padded_numel, 0),)
        for start, end, _ in group_runs(p):
            count += sum(x.offset < end and start < x.offset + x.numel for x in cuts)
    assert num_rows(placements, choice) == count > len(placements)
