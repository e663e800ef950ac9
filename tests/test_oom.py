"""When memory runs out, the ledger's lines of that very phase are shown beside what is held."""

import pytest
import torch

from zplan.planner.ledger import Ledger, Line
from zplan.runtime import demo, oom
from zplan.runtime.board import Board

REFUSED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(REFUSED), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError(REFUSED), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert oom.is_out_of_memory(error) is expected


def test_rows_hold_predicted_and_held_and_what_nobody_predicted():
    ledger = Ledger(
        ("idle", "loss"),
        (
            Line("params.flat.block", 1000, ((0, 1), (0, 1)), "states"),
            Line("act.head", 500, ((1, 1),), "activations"),
            Line("act.embed", 9, ((0, 0),), "activations"),
        ),
    )
    assert oom.rows(ledger, "loss", {"params.flat.block": 2000, "grads.slot": 64}) == [
        ("params.flat.block", "2,000", "2,000"),
        ("act.head", "500", "-"),
        ("grads.slot", "0", "64"),
    ]


def test_other_errors_and_errors_before_the_engine(tmp_path):
    assert oom.explain(ValueError("x"), tmp_path / "plan.json", "start") == ""
    assert "before the engine was there" in oom.explain(MemoryError(), tmp_path / "plan.json", "start")


def _run_out(rank, world_size, folder):
    """Memory runs out in block 1 of the second step's backward; returns what a worker would report."""
    import zplan
    from zplan.planner.plan_file import load_plan
    from zplan.runtime.decoder import Decoder

    torch.manual_seed(0)
    model = Decoder(load_plan(folder / "plan.json").spec.arch)
    engine, *_ = zplan.initialize(model=model, config=folder / "plan.json")
    board = Board(folder, rank)
    engine.on_phase = board.follow
    for step in range(2):
        ids = torch.zeros(1, 16, dtype=torch.int64)
        loss = engine(ids, ids.clone())
        if step == 1:
            engine.on_phase = lambda phase: _raise_at(phase, board)
        try:
            engine.backward(loss)
        except RuntimeError as error:
            return board.step, board.phase, oom.explain(error, folder / "plan.json", board.phase)
        engine.step()


def _raise_at(phase, board):
    board.follow(phase)
    if phase == "backward.blocks.1":
        raise RuntimeError(REFUSED)


@pytest.mark.gloo
def test_the_phase_and_its_lines_are_shown(run_ranks, tmp_path):
    demo.write_inputs(tmp_path)
    for rank, (step, phase, text) in enumerate(run_ranks(2, _run_out, tmp_path)):
        assert (step, phase) == (2, "backward.blocks.1")
        assert f"phase `backward.blocks.1`, rank {rank}" in text
        rows = [line.split() for line in text.splitlines()]
        assert ["params.ring.block", "1,607,680", "1,607,680"] in rows
        assert ["optim.master.block", "1,607,680", "1,607,680"] in rows
        assert any(r[:1] == ["act.block.saved"] and r[-1] == "-" for r in rows)
        assert "MiB resident" in text
