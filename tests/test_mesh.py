"""Process groups that engines start, one after another in one job."""

import os
import threading
import time

import pytest
import torch.distributed as dist
import workload as w
from torch import nn

from zplan.planner.errors import ZplanError
from zplan.runtime.initialize import initialize


def start_again(rank: int, world_size: int, port: int) -> list[float]:
    """Losses of engines that start and leave a group each, as under torchrun, whose store outlives them."""
    dist.barrier()  # nobody leaves while another still connects
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    losses = []
    for life in range(4):
        # One rank is late for every second group, so that the other would meet what the first left in the store.
        time.sleep(0.2 * (rank == life % 2))
        engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(3), init=w.fill)
        loss = engine(*w.batch(w.LLAMA4.vocab, 0, rank, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.close()
        assert not dist.is_initialized()
    initialize(model=w.build(w.LLAMA4), config=w.config(3), init=w.fill)  # the caller ends this group
    return losses


@pytest.mark.gloo
def test_engines_start_one_after_another(run_ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for losses in run_ranks(2, start_again, store.port, limit=30.0):
        assert len(set(losses)) == 1


def leave_what_others_started(rank: int, world_size: int, stage: int) -> list[int]:
    """Process groups before, while and after an engine lives in a group that the caller started."""
    groups = dist.distributed_c10d._world.pg_map
    found = [len(groups)]
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(stage), init=w.fill)
    found.append(len(groups))
    engine.close()
    engine.close()
    assert dist.is_initialized()
    return [*found, len(groups)]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "own"), [(0, 1), (3, 2)])
def test_engine_takes_its_groups_with_it(run_ranks, stage, own):
    for before, alive, after in run_ranks(2, leave_what_others_started, stage, limit=30.0):
        assert (alive - before, after - before) == (own, 0)


def refuse(rank: int, world_size: int, stage: int) -> int:
    """Process groups that a refused model leaves behind, in a group that the caller started."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with pytest.raises(ZplanError, match="no parameters to train"):
        initialize(model=nn.ReLU(), config=w.config(stage))
    return len(groups) - before


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_refused_leaves_no_group(run_ranks, stage):
    assert run_ranks(2, refuse, stage, limit=30.0) == [0, 0]


def fail_late(rank: int, world_size: int) -> list[str]:
    """Threads of ours that an engine leaves which could not be made in its last part."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr("zplan.runtime.engine.Checkpoints", lambda engine: [][0])
        with pytest.raises(IndexError):
            initialize(model=w.build(w.LLAMA4), config=w.config(3), init=w.fill)
    end = time.monotonic() + 10
    while (left := [t.name for t in threading.enumerate() if t.name.startswith("zplan")]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


@pytest.mark.gloo
def test_an_engine_that_fails_late_leaves_no_watchdog(run_ranks):
    assert run_ranks(2, fail_late, limit=30.0) == [[], []]


def refuse_one(rank: int, world_size: int) -> str:
    """What a rank hears whose config alone is refused."""
    config = {**w.config(3), "nonsense": 1} if rank else w.config(3)
    try:
        initialize(model=w.build(w.LLAMA4), config=config, init=w.fill)
    except ZplanError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_no_rank_waits_for_one_that_was_refused(run_ranks):
    """Not before the first collective of the engine's own, which tells who is missing."""
    others, refused = run_ranks(2, refuse_one, limit=30.0)
    assert others == "" and "unknown key `nonsense`" in refused
