"""`run_ranks`: run a function on several real ranks over gloo, each in a process of its own. `run`: a command line.

`host_kernels`: the CUDA kernels, on the CPU.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes depends on what else runs.
settings.register_profile("zplan", deadline=None)
settings.load_profile("zplan")

# Set before any worker starts, and before torch is imported here. Two cores are enough for four ranks only when
# no rank starts threads of its own.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Ranks are forked from a server that has imported these once and has run nothing: a rank starts in about 20 ms, not in
# the 2 s that torch takes, and still begins with a clean process (no groups, no tensors, no threads of another test).
PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",  # building on the meta device imports it, 2 s for every rank
    "torch.distributed",
    "torch.utils.checkpoint",
    "zplan.runtime.decoder",
    "zplan.runtime.engine",
    "zplan.runtime.initialize",
    "zplan.runtime.train",
    # Another 2 s, which most ranks have no use for but get for nothing. What is not installed is passed over.
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in "bert bloom falcon gemma2 gpt2 gpt_neox llama mixtral opt phi3 qwen2 t5 vit".split()
    ),
]


class RankFailed(RuntimeError):
    """The first rank that failed, with its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed\n{text}")
        self.rank = rank


def _leave_with_parent() -> None:
    """End this process when the test process ends, whichever way: no orphans."""
    import threading

    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _rank_main(rank: int, world_size: int, store: str, limit: float, call: bytes, results: Connection) -> None:
    _leave_with_parent()
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        fn, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit),
        )
        # Plain pickle: torch's own would hand tensors over through shared memory that dies with this process.
        answer = (True, pickle.dumps(fn(rank, world_size, *args)))
        # Nobody closes its sockets while another rank still talks.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, pickle.dumps((time.monotonic(), traceback.format_exc())))
    results.send(answer)
    results.close()
    # Skip the interpreter's teardown: threads of a broken group could hang it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(workers: list[Any], pipes: list[Connection], limit: float) -> list[Any]:
    """Every rank's result, or the first failure; raises as soon as one rank fails or dies."""
    end = time.monotonic() + limit
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [p for rank, p in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailed(late[0], f"ranks {late} not done after {limit:g} s")
        failures = []
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                good, payload = pipe.recv()
            except EOFError:
                workers[rank].join(5)
                code = workers[rank].exitcode
                how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                # A silent death comes before whatever the others say about the lost connection.
                failures.append((0.0, rank, f"the process ended without an answer: {how}"))
                continue
            if good:
                results[rank] = pickle.loads(payload)
            else:
                when, text = pickle.loads(payload)
                failures.append((when, rank, text))
        if failures:
            _, rank, text = min(failures)
            raise RankFailed(rank, text)
    return [results[rank] for rank in range(len(pipes))]


@pytest.fixture(scope="session")
def _forkserver() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@pytest.fixture
def run_ranks(_forkserver: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """`run_ranks(world_size, fn, *args, limit=60)` -> results of all ranks, in rank order.

    Runs `fn(rank, world_size, *args)` in `world_size` fresh processes with a gloo group already up. `fn` is found by
    name, so it is a module-level function of the test file; arguments and results are pickled. The first failing rank's
    traceback is raised here as a `RuntimeError`; the others are killed, as all are after `limit` seconds.
    """
    calls = 0

    def run(world_size: int, fn: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        nonlocal calls
        calls += 1
        call = pickle.dumps((fn, args))
        workers, pipes = [], []
        try:
            for rank in range(world_size):
                mine, theirs = _forkserver.Pipe(duplex=False)
                worker = _forkserver.Process(
                    target=_rank_main,
                    args=(rank, world_size, str(tmp_path / f"store{calls}"), limit, call, theirs),
                    daemon=True,
                )
                worker.start()
                theirs.close()
                workers.append(worker)
                pipes.append(mine)
            return _collect(workers, pipes, limit)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()
                worker.close()
            for pipe in pipes:
                pipe.close()

    return run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """`run(*words)` -> `(exit code, stdout, stderr)` of one command line, in this process."""
    from zplan import cli

    def call(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


@pytest.fixture
def one_rank_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that train on one rank of the CPU do so in this process instead of starting it."""
    from zplan.runtime import start
    from zplan.runtime.board import Board
    from zplan.runtime.job import Job
    from zplan.runtime.train import train

    def here(
        _module: str, arguments: list[str], *, world_size: int, folder: Path, cpu: bool, deterministic: bool
    ) -> None:
        assert world_size == 1 and cpu and not deterministic
        train(Job.read(Path(arguments[0])), Board(folder, 0))

    monkeypatch.setattr(start, "launch", here)


@pytest.fixture(scope="session")
def _host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import host_kernels

    if sys.platform != "linux" or shutil.which(host_kernels.COMPILER) is None:
        pytest.skip(f"no {host_kernels.COMPILER} of Linux here to compile kernels for the host")
    base = tmp_path_factory.getbasetemp()
    # Workers share the folder above their own.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "host-kernels"
    folder.mkdir(exist_ok=True)
    return host_kernels.HostKernels(folder)


@pytest.fixture
def host_kernels(_host_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels take tensors of the CPU. `launched` lists what ran; `backwards = True` turns the order round."""
    margins = _host_kernels.install(monkeypatch)
    yield _host_kernels
    margins.check()
