"""Process groups that engines start, one after another in one job."""

import os
import time

import pytest
import torch.distributed as dist
import workload as w

from zplan.runtime.initialize import initialize


def start_again(rank: int, world_size: int, port: int) -> list[float]:
    """Losses of engines that start and leave a group each, as under torchrun, whose store outlives them."""
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
