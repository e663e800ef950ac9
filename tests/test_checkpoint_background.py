"""Saves behind training: what is written is what was there at the call, and the copy is a line of the ledger."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.predict import predict
from zplan.runtime import checkpoint, checkpoint_write
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


def write_ranges(path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, Any]:
    """Ranges that fall on, over and between blocks of 8 KiB; the file, and what is said of it."""
    monkeypatch.setattr(checkpoint_write, "BLOCK_BYTES", 8192)
    values = [torch.rand(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)]
    ranges = [Range("weight", f"p{i}", 0, n) for i, n in enumerate(sizes)]
    file = checkpoint_write.write_data(path, list(zip(ranges, values, strict=True)))
    content = path.read_bytes()
    assert content[file.header_bytes :] == b"".join(v.numpy().tobytes() for v in values)
    assert file.nbytes == len(content) and file.header_crc32 == zlib.crc32(content[: file.header_bytes])
    for row, value in zip(file.ranges, values, strict=True):
        assert row.crc32 == zlib.crc32(value.numpy()) and content[row.offset :].startswith(value.numpy().tobytes())
    return content, replace(file, name="")


SIZES = [5, 4096, 1, 70_000, 3, 2048, 70_001, 12] * 2


def test_a_lagging_disk_that_writes_less_than_it_is_given(tmp_path, monkeypatch):
    written: list[int] = []

    def slow(fd: int, view: memoryview) -> int:
        time.sleep(0.002)
        written.append(len(view))
        return os.write(fd, view[: 1 + len(view) // 2])

    expected = write_ranges(tmp_path / "plain", SIZES, monkeypatch)
    monkeypatch.setattr(checkpoint_write, "_write", slow)
    assert write_ranges(tmp_path / "slow", SIZES, monkeypatch) == expected and len(written) > 2 * len(SIZES)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_insists_on_its_cache(tmp_path, monkeypatch, refused):
    """As tmpfs was for long: the file is made and then refused; or only the write is."""
    direct = []

    def opened(path: Path, flags: int, mode: int) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            path.touch()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.open(path, flags, mode)

    def written(fd: int, view: memoryview) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.write(fd, view)

    expected = write_ranges(tmp_path / "plain", SIZES, monkeypatch)
    monkeypatch.setattr(checkpoint_write, "_open", opened)
    monkeypatch.setattr(checkpoint_write, "_write", written)
    assert write_ranges(tmp_path / "cached", SIZES, monkeypatch) == expected
    assert direct[:2] == [refused == "write", False] and not any(direct[1:]), "asked once, then never again"


def test_whole_blocks_go_past_the_cache(tmp_path, monkeypatch):
    """All but the file's last bytes, on a disk that takes them."""
    seen: list[tuple[bool, int]] = []

    def written(fd: int, view: memoryview) -> int:
        count = os.write(fd, view)
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), count))
        return count

    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    monkeypatch.setattr(checkpoint_write, "_write", written)
    content, _ = write_ranges(tmp_path / "x", SIZES, monkeypatch)
    *blocks, last = seen
    assert set(blocks) == {(True, 8192)} and last == (False, len(content) % 8192)


def test_a_file_without_ranges(tmp_path, monkeypatch):
    """A rank of many that owns padding alone."""
    content, file = write_ranges(tmp_path / "x", [], monkeypatch)
    assert file.ranges == () and len(content) == file.header_bytes


def test_another_working_directory_does_not_move_a_save(tmp_path, monkeypatch):
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0, saving="background"), init=w.fill)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert engine.save_checkpoint("runs") == Path("runs", "global_step0")
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine.close()
    with Checkpoint(tmp_path / "runs" / "global_step0") as saved:
        assert not list(saved.verify())


ENDS = """
import sys
import workload as w
from zplan.runtime.initialize import initialize
engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0, saving="background"), init=w.fill)
engine.save_checkpoint(sys.argv[1], "last")
"""


def test_a_program_that_just_ends_has_saved(tmp_path):
    """No `close`, no wait: Python closes thread pools before it waits for threads."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, env=env, timeout=60
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    with Checkpoint(tmp_path / "last") as saved:
        assert not list(saved.verify())


def test_a_program_that_just_ends_says_why_it_has_not_saved(tmp_path, monkeypatch, capsys):
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0, saving="background"), init=w.fill)
    with monkeypatch.context() as full:
        full.setattr(checkpoint_write, "_write", lambda fd, view: os.write(-1, view))
        engine.save_checkpoint(tmp_path)
        checkpoint.write_to_the_end()
    assert "the last save in the background failed: " in capsys.readouterr().err
    engine.close()


def test_only_a_plan_for_it_has_the_line():
    from zplan.planner.config import Choice

    def line(**more: Any) -> list[int]:
        ledger = predict(w.spec(w.LLAMA), Choice(stage=3, world_size=4, seq=16, **more))
        assert ledger.peak_bytes("pinned") == sum(x.nbytes for x in ledger.lines if x.tier == "pinned")
        return [x.nbytes for x in ledger.lines if x.id == "save.snapshot"]

    padded = sum(-(-u.numel // 256) * 256 for u in w.spec(w.LLAMA).units)
    assert line() == [] and line(saving="background") == [3 * 4 * padded // 4]
