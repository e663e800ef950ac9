"""Saves behind training: what is written is what was there at the call, and the copy is a line of the ledger."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.predict import predict
from zplan.runtime import checkpoint_write
from zplan.runtime.checkpoint_format import Range
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.checkpoint_report import differences
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Comparison, Meter


def step(engine: Engine) -> None:
    batch = w.batch(w.LLAMA.vocab, engine.global_steps, engine.rank, 0)
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    del batch, loss


def save_both_ways(rank: int, world_size: int, folder: str, stage: int, precision: str) -> Comparison:
    """A foreground save and a slow background one of the same step, while training goes on; bytes of two steps."""
    with Meter(torch.device("cpu")) as meter:
        config = w.config(stage, precision=precision, piece=16384, saving="background")
        engine, *_ = initialize(model=w.build(w.LLAMA), config=config, init=w.fill)
        meter.attach(engine)
        for _ in range(2):
            step(engine)
        compared = meter.compare(predict(w.spec(w.LLAMA), engine.choice))
    engine.save_checkpoint(folder, "foreground", background=False)
    go, real = threading.Event(), checkpoint_write._write

    def slow(fd: int, view: memoryview) -> int:
        assert go.wait(30)
        return real(fd, view)

    checkpoint_write._write = slow
    engine.save_checkpoint(folder, "background")
    step(engine)
    assert engine.checkpoints.thread is not None and engine.checkpoints.thread.is_alive()
    go.set()
    engine.close()
    return compared


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [(2, 3, "fp32"), (2, 3, "bf16"), (2, 1, "fp32"), (2, 0, "bf16"), (1, 0, "fp32")],
)
def test_what_was_there_at_the_call_is_written(run_ranks, tmp_path, world_size, stage, precision):
    compared = run_ranks(world_size, save_both_ways, str(tmp_path), stage, precision)
    with Checkpoint(tmp_path / "foreground") as a, Checkpoint(tmp_path / "background") as b:
        assert not differences(a, b) and not list(b.verify())
    for c in compared:
        assert not c.off_by_more_than(0.0), c.off_by_more_than(0.0)
        (row,) = [r for r in c.lines if r.name == "save.snapshot"]
        assert row.measured == row.predicted > 0


def test_ranges_that_pass_through_host_memory_arrive(tmp_path, monkeypatch):
    """As from a GPU: more ranges than there are buffers, of many sizes, to a disk that lags behind."""
    written: list[int] = []

    def slow(fd: int, view: memoryview) -> int:
        time.sleep(0.002)
        written.append(len(view))
        return os.write(fd, view[: 1 + len(view) // 2])

    monkeypatch.setattr(checkpoint_write, "_write", slow)
    sizes = [5, 4096, 1, 70_000, 3, 3, 70_001, 12] * 2
    values = [torch.rand(n) for n in sizes]
    files = []
    for direct in (True, False):
        monkeypatch.setattr(checkpoint_write, "in_place", lambda tensor, direct=direct: direct)
        ranges = [Range("weight", f"p{i}", 0, n) for i, n in enumerate(sizes)]
        file = checkpoint_write.write_data(tmp_path / f"{direct}", list(zip(ranges, values, strict=True)))
        files.append(((tmp_path / f"{direct}").read_bytes(), file.ranges))
    assert files[0] == files[1] and len(written) > 2 * len(sizes)
    assert files[0][0].endswith(b"".join(v.numpy().tobytes() for v in values))


def test_only_a_plan_for_it_has_the_line():
    from zplan.planner.config import Choice

    def line(**more: Any) -> list[int]:
        ledger = predict(w.spec(w.LLAMA), Choice(stage=3, world_size=4, seq=16, **more))
        assert ledger.peak_bytes("pinned") == sum(x.nbytes for x in ledger.lines if x.tier == "pinned")
        return [x.nbytes for x in ledger.lines if x.id == "save.snapshot"]

    padded = sum(-(-u.numel // 256) * 256 for u in w.spec(w.LLAMA).units)
    assert line() == [] and line(saving="background") == [3 * 4 * padded // 4]
