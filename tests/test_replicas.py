"""`check_replicas_every`: ranks that drift apart are named with what differs, and the hashes are in the ledger."""

from __future__ import annotations

import pytest
import test_engine
import torch
import workload as w
from test_engine import exact
from test_ring import drifted

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.predict import predict
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize

EVERY, DRIFT_AT, ODD = 3, 4, 1


def change(engine: Engine, stage: int, what: str) -> None:
    if what == "rate":
        engine.optimizer.param_groups[0]["lr"] *= 2
    elif what == "applied":
        engine.optimizer.applied.add_(1)
    elif what == "moment":
        engine.units[2].states["exp_avg_sq"][7] += 1e-3
    elif what == "low":
        engine.units[-1].low[:64] += 100
    elif what == "weight":
        unit = next(u for u in reversed(engine.units) if u.flat is not None)
        (unit.flat if unit.master is None or stage else unit.master)[5] += 1.0


def drift(rank: int, world_size: int, stage: int, what: str, early: bool = False) -> tuple[str, int]:
    """What the ranks are told, and how many steps were taken, when one of them changes something before step 5."""
    clip = {"clip": 0.0} if early else {}
    config = w.config(stage, precision="bf16", check_replicas_every=EVERY, optimizer_in_backward=early, **clip)
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=config, init=w.fill, checked=False)
    try:
        for step in range(10):
            loss = engine(*w.batch(w.LLAMA4.vocab, step, rank, 0))
            if early and step == DRIFT_AT + 1 and rank == ODD:  # what is whole now is not gathered again
                change(engine, stage, what)
            engine.backward(loss)
            if not early and step == DRIFT_AT and rank == ODD:
                change(engine, stage, what)
            engine.step()
    except ZplanError as error:
        return error.message, engine.global_steps
    finally:
        engine.close()
    return "", engine.global_steps


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "what", "said"),
    [
        (0, "weight", "unit `head`"),
        (0, "moment", "unit `blocks.1`"),
        (0, "low", "unit `head`"),
        (2, "applied", "the optimizer's step, norm or scale"),
        (3, "rate", "a learning rate or another number of the optimizer"),
        (3, "nothing", ""),
    ],
)
def test_ranks_that_drift_are_named_at_the_next_comparison(run_ranks, stage, what, said):
    for message, steps in run_ranks(3, drift, stage, what):
        if said:
            assert message == f"{said} differs between ranks in step 6: ranks [{ODD}] hold another value than rank 0"
            assert steps == 5
        else:
            assert (message, steps) == ("", 10)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "what", "said"), [(2, "weight", "unit `head`"), (3, "nothing", "")])
def test_updates_in_backward_are_compared_too(run_ranks, stage, what, said):
    for message, steps in run_ranks(2, drift, stage, what, True):
        assert steps == (5 if said else 10)
        assert message.startswith(f"{said} differs between ranks in step 6") if said else not message


def weighted(rank: int, world_size: int) -> list[float]:
    """Ranks count other numbers of tokens."""
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(2, check_replicas_every=1), init=w.fill)
    norms = []
    for step in range(3):
        engine.backward(engine(*w.batch(w.LLAMA4.vocab, step, rank, 0)), num_tokens=5 + rank)
        engine.step()
        norms.append(engine.grad_norm.item())
    engine.close()
    return norms


@pytest.mark.gloo
def test_ranks_with_tokens_of_their_own_have_not_drifted(run_ranks):
    first, second = run_ranks(2, weighted)
    assert first == second and all(n > 0 for n in first)


@pytest.mark.gloo
def test_whole_weights_are_compared_below_stage_3(run_ranks):
    config = w.config(2, precision="bf16", check_replicas_every=1)
    for message in run_ranks(2, drifted, config, False):
        assert message.startswith("unit `blocks.1` differs between ranks in step 1: ranks [1]")


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_ledger_has_the_hashes(run_ranks, stage):
    exact(
        run_ranks(
            2, test_engine.train, "llama4", w.config(stage, precision="bf16", check_replicas_every=1), 2, False, True
        )
    )


def test_a_gpus_hashes_come_through_page_locked_memory():
    lines = {x.id: x for x in predict(w.spec(w.LLAMA4), Choice(2, 2, seq=16, check_replicas_every=9)).lines}
    # Two of all, and embedding, four blocks, norm and head.
    assert lines["comm.replicas"].nbytes == lines["comm.replicas.host"].nbytes == 2 * 8 * (2 + 7)
    assert lines["comm.replicas.host"].tier == "pinned"
    assert not any("replicas" in x.id for x in predict(w.spec(w.LLAMA4), Choice(2, 1, seq=16)).lines)


def test_one_rank_compares_with_nobody():
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(0, check_replicas_every=1), init=w.fill)
    assert engine.replicas is None
    engine.close()


def test_a_number_of_steps_is_asked_for():
    with pytest.raises(ZplanError, match="check_replicas_every"):
        initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "zplan": {"check_replicas_every": -1}})
