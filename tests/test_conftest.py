"""The fixture that every multi-process test stands on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.gloo


def _sum(rank, world_size, scale):
    x = torch.full((3,), float(rank + 1) * scale)
    dist.all_reduce(x)
    assert dist.get_world_size() == world_size
    return rank, x


def _fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("this one first")
    dist.barrier()


def _die_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang(rank, world_size, path):
    (path / f"{rank}").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(run_ranks, world_size):
    results = run_ranks(world_size, _sum, 2.0)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, x in results:
        assert x.tolist() == [world_size * (world_size + 1.0)] * 3


def test_runs_can_follow_each_other(run_ranks):
    for scale in (1.0, 2.0):
        assert run_ranks(2, _sum, scale)[0][1].tolist() == [3 * scale] * 3


def test_first_failing_rank_is_named_with_its_traceback(run_ranks):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*_fail_on_one.*ValueError: this one first"):
        run_ranks(2, _fail_on_one)


def test_a_killed_rank_is_named(run_ranks):
    with pytest.raises(RuntimeError, match="rank 1 failed\nthe process ended without an answer: SIGKILL"):
        run_ranks(2, _die_on_one)


def test_time_limit_leaves_no_process_behind(run_ranks, tmp_path):
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] not done after 2 s"):
        run_ranks(2, _hang, tmp_path, limit=2)
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        end = time.monotonic() + 5
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{pid}")
