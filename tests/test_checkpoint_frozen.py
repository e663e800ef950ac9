"""Frozen parameters: on the disk once, in every checkpoint, and back on any ranks, stage and precision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_write
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.engine import Engine
from zplan.runtime.hf_export import export_checkpoint
from zplan.runtime.initialize import initialize

TRAINED = ("norm", "q.weight", "v.weight")


def start(stage: int, precision: str = "fp32", *, blank: bool = False, saving: str = "foreground") -> Engine:
    """Only norms, queries and values are trained; with `blank` every value is 1 before a load."""
    model = w.build(w.LLAMA4)
    for name, p in model.named_parameters():
        p.requires_grad_(any(t in name for t in TRAINED))
    init = (lambda name, tensor: tensor.fill_(1.0)) if blank else w.fill
    config = w.config(stage, precision=precision, piece=16384, saving=saving)
    engine, *_ = initialize(model=model, config=config, init=init)
    return engine


def step(engine: Engine) -> None:
    engine.backward(engine(*w.batch(w.LLAMA4.vocab, engine.global_steps, engine.rank, 0)))
    engine.step()


def whole(engine: Engine) -> dict[str, Any]:
    with engine.summon():
        return {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}


def save_twice(rank: int, world_size: int, folder: str, precision: str, background: bool) -> dict[str, Any]:
    engine = start(3, precision, saving="background" if background else "foreground")
    for _ in range(2):
        step(engine)
        engine.save_checkpoint(folder)
    found = whole(engine)
    engine.close()
    return found


def load(rank: int, world_size: int, folder: str, stage: int, precision: str) -> dict[str, Any]:
    engine = start(stage, precision, blank=True)
    engine.load_checkpoint(folder)
    found = whole(engine)
    step(engine)
    engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("precision", "background"), [("fp32", False), ("bf16", True)])
def test_frozen_parameters_come_back_anywhere(run_ranks, tmp_path, precision, background):
    folder = tmp_path / "saved"
    (values, _) = run_ranks(2, save_twice, str(folder), precision, background)
    for rank in range(2):
        name = f"rank{rank:05d}.frozen.safetensors"
        first, second = (os.stat(folder / f"global_step{s}" / name) for s in (1, 2))
        assert first.st_ino == second.st_ino and first.st_nlink == 2
    with Checkpoint(folder / "global_step2") as checkpoint:
        assert not list(checkpoint.verify())
        assert checkpoint.dtype("frozen", "embed.weight") == {"fp32": "F32", "bf16": "BF16"}[precision]
        export_checkpoint(checkpoint, tmp_path / "model", dtype="bf16")
    for world_size, stage in ((2, 3), (3, 1), (1, 0)):
        for found in run_ranks(world_size, load, str(folder), stage, precision):
            assert all((found[n] == v).all() for n, v in values.items()), (world_size, stage)


@pytest.fixture
def engine() -> Any:
    made = start(0)
    yield made
    made.close()


def test_changed_values_are_written_anew(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "a")
    with engine.summon(write=True), torch.no_grad():
        engine.module.embed.weight[0, :2] = torch.tensor([0.5, 0.25])
    engine.save_checkpoint(tmp_path, "b")
    with engine.summon(write=True), torch.no_grad():
        engine.module.embed.weight[0, :2] = torch.tensor([0.25, 0.5])
    engine.save_checkpoint(tmp_path, "c", keep=1)
    engine.save_checkpoint(tmp_path / "elsewhere", "c")
    for folder in (tmp_path / "c", tmp_path / "elsewhere" / "c"):
        with Checkpoint(folder) as checkpoint:
            assert checkpoint.whole("frozen", "embed.weight", 101 * 64)[:2].tolist() == [0.25, 0.5]


def test_what_was_loaded_is_linked_too(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "a")
    other = start(0, blank=True)
    other.load_checkpoint(tmp_path)
    other.save_checkpoint(tmp_path, "b")
    other.save_checkpoint(tmp_path / "elsewhere", "b")
    other.close()
    name = "rank00000.frozen.safetensors"
    assert (tmp_path / "a" / name).samefile(tmp_path / "b" / name)
    assert (tmp_path / "elsewhere" / "b" / name).stat().st_nlink == 1


def test_a_purge_does_not_take_the_frozen_file_from_the_next(engine, tmp_path):
    for _ in range(3):
        step(engine)
        engine.save_checkpoint(tmp_path, keep=1)
    with Checkpoint(tmp_path / "global_step3") as checkpoint:
        assert not list(checkpoint.verify())


@pytest.mark.parametrize("how", ["written to", "cut short", "another run's"])
def test_a_file_that_was_touched_is_not_linked_on(engine, tmp_path, how):
    """A new checkpoint is whole even where the one before no longer is."""
    engine.save_checkpoint(tmp_path, "a")
    path = tmp_path / "a" / "rank00000.frozen.safetensors"
    content = path.read_bytes()
    if how == "another run's":
        path.rename(tmp_path / "elsewhere")
    path.write_bytes(content[:-9] if how == "cut short" else content[:-1] + bytes([content[-1] ^ 1]))
    engine.save_checkpoint(tmp_path, "b")
    with Checkpoint(tmp_path / "b") as saved:
        assert not list(saved.verify())


def test_where_there_are_no_links_the_file_is_copied(engine, tmp_path, monkeypatch):
    def no_link(source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(checkpoint_write.os, "link", no_link)
    engine.save_checkpoint(tmp_path, "a")
    engine.save_checkpoint(tmp_path, "b")
    assert (tmp_path / "b" / "rank00000.frozen.safetensors").stat().st_nlink == 1
    with Checkpoint(tmp_path / "b") as checkpoint:
        assert not list(checkpoint.verify())


def test_a_byte_of_a_frozen_file(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "a")
    path = tmp_path / "a" / "rank00000.frozen.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    message = r"rank00000.frozen.safetensors` is damaged: the crc32 of `frozen\|head.weight\|0:6464`"
    with pytest.raises(ZplanError, match=message):
        engine.load_checkpoint(tmp_path)
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert len(list(checkpoint.verify())) == 1


def test_other_parameters_frozen_is_another_model(engine, tmp_path):
    engine.save_checkpoint(tmp_path)
    trained, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(0), init=w.fill)
    with pytest.raises(ZplanError, match="`embed.weight` is frozen there and trained here"):
        trained.load_checkpoint(tmp_path)
    trained.close()
