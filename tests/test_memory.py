"""The check of ledger against storages can fail: one byte in a formula, one stray tensor, one missing line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.ledger import Ledger
from zplan.planner.predict import predict
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Comparison, Meter

KEPT: list[Any] = []


CHANGES = (
    "nothing",
    "one byte more in optim.exp_avg.block",
    "one byte more in params.ring.block",
    "one byte more in grads.shard.block",
    "one byte more in grads.block",
    "one byte more in grads.slot",
    "one byte more in act.block.output",
    "one byte more in act.block.backward",
    "one byte more in act.loss.saved",
    "without params.placeholder",
)


def measure(rank: int, world_size: int, stray: bool) -> dict[str, Comparison]:
    """Two metered bf16 steps at stage 3 with three ring slots, compared with ledgers that each of `CHANGES` touched."""
    arch = w.ARCHS["llama4"]
    config = w.config(3, 1, checkpointing="full", precision="bf16", piece=16384, ring_slots=3)
    with Meter(torch.device("cpu")) as meter:
        engine, *_ = initialize(model=w.build(arch, "full"), config=config, init=w.fill)
        meter.attach(engine)
        for step in range(2):
            batch = w.batch(arch.vocab, step, rank, 0)
            loss = engine(*batch)
            if stray:
                KEPT.append(torch.zeros(3))
            engine.backward(loss)
            engine.step()
            del batch, loss
        ledger = predict(w.spec(arch), engine.choice)
        found = {change: meter.compare(changed(ledger, change)) for change in CHANGES}
        engine.close()
    return found


def changed(ledger: Ledger, change: str) -> Ledger:
    if change.startswith("one byte"):
        line_id = change.rpartition(" ")[2]
        assert any(x.id == line_id for x in ledger.lines)
        lines = (x._replace(nbytes=x.nbytes + 1) if x.id == line_id else x for x in ledger.lines)
        return replace(ledger, lines=tuple(lines))
    if change.startswith("without"):
        return replace(ledger, lines=tuple(x for x in ledger.lines if x.id != change.rpartition(" ")[2]))
    return ledger


@pytest.mark.gloo
def test_three_slots_and_small_pieces_are_exact_and_a_wrong_ledger_turns_red(run_ranks):
    for found in run_ranks(2, measure, False):
        for change, comparison in found.items():
            assert bool(comparison.off_by_more_than(0.0)) == (change != "nothing"), change


@pytest.mark.gloo
def test_a_stray_tensor_turns_red(run_ranks):
    for found in run_ranks(2, measure, True):
        assert found["nothing"].off_by_more_than(0.0)
