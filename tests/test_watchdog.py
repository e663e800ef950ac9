"""Ranks that run apart get an error that names unit and ranks, without checked mode and well before a timeout."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import any_model as m
import pytest
import torch
import torch.distributed as dist
from test_models_flow import Net

from zplan.planner.errors import ZplanError
from zplan.runtime import watchdog
from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import Mesh
from zplan.runtime.watchdog import Watchdog, differ


def apart(rank: int, world_size: int, how: str) -> tuple[str, float]:
    """What rank 1 does otherwise in an evaluation at stage 3; the error, and seconds until it came."""
    watchdog.INTERVAL_S, watchdog.DUMP_S = 0.2, 0.6
    engine, *_ = initialize(model=Net(""), config=m.config(3), checked=False)
    routes = {"skipped": [0, 1, 3, 4], "order": [0, 2, 1, 3, 4], "more": [0, 1, 2, 3, 4]}
    start = 0.0
    try:
        for step in range(400):
            engine.backward(engine(**m.tokens(step, rank, 0)))
            engine.step()
            if step == 1:
                start = time.monotonic()
                route = routes[how] if rank == 1 else routes["more"]
                with torch.no_grad():
                    for _ in range(2 if how == "more" and rank == 1 else 1):
                        engine(**m.tokens(step, rank, 0), route=route)
    except ZplanError as error:
        return error.message, time.monotonic() - start
    return "", 0.0


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skipped", "rank 0: all_gather of layers.2; rank 1: all_gather of layers.3; rank 2: all_gather of layers.2"),
        ("order", "rank 0: all_gather of layers.1; rank 1: all_gather of layers.2; rank 2: all_gather of layers.1"),
        ("more", "rank 1: all_gather of layers.0"),
    ],
)
def test_ranks_that_run_apart_are_told_which_unit_and_where(run_ranks, how, said):
    for message, seconds in run_ranks(3, apart, how, limit=60):
        assert "ranks run different collectives: " in message and said in message
        assert seconds < 5


def waits(rank: int, world_size: int) -> str:
    watchdog.INTERVAL_S, watchdog.DUMP_S, watchdog.PATIENCE_S = 0.1, 0.3, 1.2
    engine, *_ = initialize(model=Net(""), config=m.config(3), checked=False)
    try:
        for step in range(3):
            engine.backward(engine(**m.tokens(step, rank, 0)))
            engine.step()
            if step == 1 and rank == 1:
                time.sleep(4)
                engine.collectives.all_reduce(torch.zeros(1), "after a sleep")
    except ZplanError as error:
        return error.message
    return ""


@pytest.mark.gloo
def test_a_rank_that_stays_away_is_told_and_then_an_error(run_ranks):
    for message in run_ranks(2, waits):
        assert "some are behind: rank 0: number " in message and "rank 1: number " in message


def silent(mesh: Mesh, store: dist.Store) -> Watchdog:
    """A watchdog whose thread is the test."""
    found = Watchdog(replace(mesh, world_size=1), 0)
    found.mesh, found.store = mesh, store
    return found


def test_hashes_find_what_agreed_in_size_and_ranks_tell_where_it_began():
    """As on GPUs: nobody waits, and values are wrong."""
    store = dist.HashStore()
    pair = [silent(Mesh(r, 2, torch.device("cpu"), None, None, started_here=False), store) for r in range(2)]
    for n in range(40):
        for rank, dog in enumerate(pair):
            dog.queue.append(("all_gather", f"layers.{n % 5 if n != 21 or rank == 0 else 3}"))
    for _ in range(3):
        for dog in reversed(pair):
            dog._look()
    for dog in pair:
        with pytest.raises(ZplanError, match="number 22 is all_gather of layers.1 on rank 0 and all_gather of"):
            dog.note("all_gather", "head")


def test_lists_are_compared_where_they_overlap():
    assert differ([[1, "a"], [2, "b"]], [[2, "b"], [3, "c"]]) is None
    assert differ([[1, "a"], [2, "b"]], [[2, "c"], [3, "c"]]) == 2
    assert differ([], [[1, "a"]]) is None


@pytest.mark.parametrize("noticed", [True, False])
def test_a_rank_whose_device_waits_for_ever_is_ended_with_the_reason(monkeypatch, noticed):
    ends, told = [], []
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    monkeypatch.setattr(watchdog, "LAST_WORDS", [told.append])
    monkeypatch.setattr(watchdog.os, "_exit", ends.append)
    aborted, begun, over = [], threading.Event(), threading.Event()

    class Stuck:
        """A communicator whose abort waits for the device."""

        def abort(self):
            aborted.append(1)
            begun.set()
            over.wait()

        def _get_backend(self, device):
            return self

    monkeypatch.setattr(watchdog.dist, "get_backend", lambda _: "nccl")
    group = Stuck()
    dog = silent(Mesh(0, 2, torch.device("cuda", 0), group, group, started_here=False), dist.HashStore())
    dog.verdict = ZplanError("ranks run different collectives")
    if noticed:
        with pytest.raises(ZplanError, match="ranks run different"):
            dog.note("all_gather", "head")
    dog._free()
    dog._insist()
    assert begun.wait(10)
    over.set()
    assert aborted == [1]
    assert (ends, told) == (([], []) if noticed else ([1], [dog.verdict]))


def test_one_rank_has_no_thread():
    engine, *_ = initialize(model=Net(""), config=m.config(0))
    assert engine.collectives.watchdog.thread is None
    engine.close()
