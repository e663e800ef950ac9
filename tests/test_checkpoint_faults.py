"""What goes wrong while saving or before loading is refused or survived, and the older checkpoint stays whole."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload as w

from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_folder as cf
from zplan.runtime import checkpoint_write
from zplan.runtime.checkpoint_format import MANIFEST, Manifest, crc_of
from zplan.runtime.checkpoint_load import check_model
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize


@pytest.fixture
def engine() -> Any:
    made, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0), init=w.fill)
    yield made
    made.checkpoints.failure = None
    made.close()


def step(engine: Engine) -> None:
    engine.backward(engine(*w.batch(w.LLAMA.vocab, engine.global_steps, 0, 0)))
    engine.step()


def faults(folder: Path) -> list[str]:
    with Checkpoint(folder) as checkpoint:
        return [e.message for e in checkpoint.verify()]


def only_old_one_is_left(root: Path) -> None:
    assert cf.tags(root) == ["good"] and cf.latest_tag(root) == "good" and not faults(root / "good")


# --- saving ----------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    def write(fd: int, view: memoryview) -> int:
        nonlocal written
        written += len(view)
        if written > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, view)

    monkeypatch.setattr(checkpoint_write, "_write", write)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_is_named_and_leaves_the_old_one(tmp_path, monkeypatch, background):
    config = w.config(0, saving="background" if background else "foreground")
    engine, *_ = initialize(model=w.build(w.LLAMA), config=config, init=w.fill)
    engine.save_checkpoint(tmp_path, "good")
    engine.wait_for_checkpoint()
    full_disk(monkeypatch)
    with pytest.raises(
        ZplanError, match=r"rank00000.safetensors` can't be written: No space left.* at `\w+\|.*`"
    ) as caught:
        engine.save_checkpoint(tmp_path, "bad")
        engine.wait_for_checkpoint()
    assert "earlier checkpoints are untouched" in caught.value.hint
    only_old_one_is_left(tmp_path)
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path, "next")
    engine.close()
    assert cf.latest_tag(tmp_path) == "next" and not [p for p in tmp_path.iterdir() if p.name.startswith(cf.PARTIAL)]


def test_a_disk_that_is_too_small_is_refused_before_a_byte_is_written(engine, tmp_path, monkeypatch):
    engine.save_checkpoint(tmp_path, "good")
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 1, *real[5:]]))
    with pytest.raises(ZplanError, match=r"the checkpoint takes [\d,]+ bytes and .* has [\d,]+ free"):
        engine.save_checkpoint(tmp_path, "bad")
    only_old_one_is_left(tmp_path)


def test_a_limit_on_file_sizes_is_an_error_of_the_file(engine, tmp_path):
    """The kernel itself refuses, in the middle of a write."""
    engine.save_checkpoint(tmp_path, "good")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ZplanError, match=r"rank00000.safetensors` can't be written: File too large"):
            engine.save_checkpoint(tmp_path, "bad")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    only_old_one_is_left(tmp_path)


@pytest.mark.parametrize(
    ("call", "number"), [("mkdir", errno.EROFS), ("mkdir", errno.EACCES), ("rename", errno.EIO)], ids=lambda x: str(x)
)
def test_a_folder_that_refuses_is_named(engine, tmp_path, monkeypatch, call, number):
    engine.save_checkpoint(tmp_path, "good")

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name.startswith(cf.PARTIAL):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(ZplanError, match=f"{tmp_path}.* can't be written: {os.strerror(number)}"):
        engine.save_checkpoint(tmp_path, "bad")
    monkeypatch.undo()
    only_old_one_is_left(tmp_path)


def test_a_read_only_folder_is_named_and_left_as_it_is(engine):
    """Root may write anywhere, so it is somebody else for a moment."""
    with tempfile.TemporaryDirectory() as name:
        root, me = Path(name), os.geteuid()
        engine.save_checkpoint(root, "good")
        root.chmod(0o555)
        try:
            if me == 0:
                os.seteuid(65534)
            with pytest.raises(ZplanError, match=f"{root}.* can't be written: Permission denied") as caught:
                engine.save_checkpoint(root, "bad")
        finally:
            os.seteuid(me)
            root.chmod(0o755)
        assert caught.value.hint == "save to a folder that you may write"
        only_old_one_is_left(root)


def test_two_writers_on_one_folder(engine, tmp_path):
    """The lock of a live process refuses; that of a killed one is gone with it."""
    engine.save_checkpoint(tmp_path, "good")
    code = (
        "import sys; from pathlib import Path; from zplan.runtime.checkpoint_folder import WriteLock\n"
        "lock = WriteLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ZplanError, match=rf"another run is saving into .*process {other.pid} on"):
            engine.save_checkpoint(tmp_path, "bad")
        only_old_one_is_left(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    engine.save_checkpoint(tmp_path, "next")
    assert cf.latest_tag(tmp_path) == "next"


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path):
    lock = cf.WriteLock(tmp_path)
    (up, say), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(say, b"x")
        os.read(wait, 1)  # lives until the parent says so
        os._exit(0)
    try:
        os.read(up, 1)
        cf._held.remove(lock.fd)
        os.close(lock.fd)  # as death closes it: without unlocking
        cf.WriteLock(tmp_path).release()
    finally:
        for fd in (end, up, say, wait):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_tag_that_exists(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "good", client_state={"a": 1})
    with pytest.raises(ZplanError, match="good` exists") as caught:
        engine.save_checkpoint(tmp_path, "good")
    assert "overwrite" in caught.value.hint
    only_old_one_is_left(tmp_path)
    engine.save_checkpoint(tmp_path, "good", client_state={"a": 2}, overwrite=True)
    only_old_one_is_left(tmp_path)
    assert engine.load_checkpoint(tmp_path)[1] == {"a": 2}


def test_a_folder_that_is_another_one_on_this_node_is_told_before_a_byte_is_written(engine, tmp_path, monkeypatch):
    """What a node sees whose disk is its own: no probe, or the probe of somebody else's save."""
    engine.save_checkpoint(tmp_path, "good")
    real = cf.prepare
    for damage in (lambda probe: probe.unlink(), lambda probe: probe.write_text(".partial.bad.00000000")):

        def elsewhere(*args: Any, damage: Callable[[Path], Any] = damage, **more: Any) -> Path:
            partial = real(*args, **more)
            damage(partial / cf.PROBE)
            return partial

        monkeypatch.setattr(cf, "prepare", elsewhere)
        with pytest.raises(ZplanError, match="and this rank does not see it") as caught:
            engine.save_checkpoint(tmp_path, "bad")
        assert "all nodes share" in caught.value.hint
        only_old_one_is_left(tmp_path)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(cf.PARTIAL)]


def save_with_a_full_disk_on_rank_1(rank: int, world_size: int, folder: str) -> list[str]:
    """Messages of a save that one rank can't finish; then one that all can."""
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(3, piece=16384), init=w.fill)
    engine.save_checkpoint(folder, "good")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            full_disk(patch)
        try:
            engine.save_checkpoint(folder, "bad")
        except ZplanError as error:
            said.append(error.message)
    only_old_one_is_left(Path(folder))
    engine.save_checkpoint(folder, "next")
    engine.close()
    return said


@pytest.mark.gloo
def test_one_ranks_full_disk_is_an_error_of_all_and_its_lost_file_is_named(run_ranks, tmp_path):
    for said in run_ranks(2, save_with_a_full_disk_on_rank_1, str(tmp_path)):
        assert len(said) == 1 and said[0].startswith("rank 1: ") and "rank00001.safetensors` can't be" in said[0]
    (tmp_path / "next" / "rank00001.safetensors").unlink()
    with pytest.raises(ZplanError, match=r"rank00001.safetensors` is missing: rank 1's part"):
        Checkpoint(tmp_path / "next")
    assert not faults(tmp_path / "good")


def test_the_background_needs_a_plan_for_it(engine, tmp_path):
    with pytest.raises(ZplanError, match="room for a copy of the states") as caught:
        engine.save_checkpoint(tmp_path, background=True)
    assert '"saving": "background"' in caught.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["", ".x", "a/b", "latest", "..", "x" * 201])
def test_a_tag_that_is_no_folder_name(engine, tmp_path, tag):
    if tag:
        with pytest.raises(ZplanError, match="can't be a tag"):
            engine.save_checkpoint(tmp_path, tag)
    else:
        assert engine.save_checkpoint(tmp_path, tag) == tmp_path / "global_step0"


@pytest.mark.parametrize("state", [{"a": torch.ones(1)}, {"a": float("nan")}, {1: 2}, {"a": [{2: 3}]}], ids=str)
def test_client_state_that_json_would_not_give_back(engine, tmp_path, state):
    with pytest.raises(ZplanError, match="client_state"):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert not list(tmp_path.iterdir())


def test_arguments_of_the_wrong_kind(engine, tmp_path):
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    (tmp_path / "file").write_text("")
    for words, message in (
        ({"tag": 5}, "`5` can't be a tag"),
        ({"tag": "file", "overwrite": True}, "file` is a file"),
        ({"keep": 1.5}, "`keep=1.5`"),
        ({"client_state": [1]}, "`client_state` is a list"),
        ({"client_state": cyclic}, "`client_state` can't be saved"),
    ):
        with pytest.raises(ZplanError, match=message):
            engine.save_checkpoint(tmp_path, **words)


def disagree(rank: int, world_size: int, folder: str) -> list[str]:
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(3), init=w.fill)
    said = []
    for words in ({"tag": f"at-{rank}"}, {"client_state": {"a": object()} if rank else {}}):
        with pytest.raises(ZplanError) as caught:
            engine.save_checkpoint(folder, **words)
        said.append(caught.value.message)
    engine.save_checkpoint(folder)
    engine.close()
    return said


@pytest.mark.gloo
def test_what_one_rank_asks_otherwise_is_an_error_of_all(run_ranks, tmp_path):
    ranks = run_ranks(2, disagree, str(tmp_path))
    assert ranks[0] == ranks[1] and ranks[0][0] == "rank 0 saves as `at-0` and rank 1 as `at-1`"
    assert ranks[0][1].startswith("rank 1: `client_state` can't be saved") and cf.tags(tmp_path) == ["global_step0"]


def test_kept_are_the_last_ones(engine, tmp_path):
    for _ in range(4):
        step(engine)
        engine.save_checkpoint(tmp_path, keep=2)
    (tmp_path / "global_step3" / MANIFEST).write_text("{")
    step(engine)
    engine.save_checkpoint(tmp_path, keep=1)
    # What can't be read is nobody's to delete.
    assert sorted(cf.tags(tmp_path)) == ["global_step3", "global_step5"]
    with pytest.raises(ZplanError, match="would delete"):
        engine.save_checkpoint(tmp_path, keep=0)


def test_a_save_in_the_middle_of_a_step_is_refused(tmp_path):
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0, 2), init=w.fill)
    engine.backward(engine(*w.batch(w.LLAMA.vocab, 0, 0, 0)))
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ZplanError, match="after micro-step 1 of 2"):
            call(tmp_path)
    engine.close()


@pytest.mark.parametrize("point", range(8))
def test_dying_at_any_point_of_an_overwrite_leaves_a_good_tag(engine, tmp_path, monkeypatch, point):
    """Every rename, unlink and deletion of a commit in turn is the last thing that happens."""
    engine.save_checkpoint(tmp_path, "good")
    calls = 0

    class Killed(BaseException):
        pass

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:
                raise Killed
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    with pytest.raises(Killed) if point < 6 else _nothing():
        engine.save_checkpoint(tmp_path, "good", overwrite=True)
    monkeypatch.undo()
    assert engine.load_checkpoint(tmp_path)[0] and not faults(cf.folder_of(tmp_path, "good"))
    engine.save_checkpoint(tmp_path, "good", overwrite=True)
    only_old_one_is_left(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "good", "latest"]


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(engine, tmp_path) -> Path:
    """A folder with steps 1 and 2."""
    for _ in range(2):
        step(engine)
        engine.save_checkpoint(tmp_path)
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that says something else, with a crc32 that fits."""
    raw = json.loads(path.read_text())
    raw.pop("crc32")
    raw |= changes
    path.write_text(json.dumps({"crc32": crc_of(raw), **raw}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte of the manifest": (lambda f: flip(f / MANIFEST, 200), r"manifest.json` is damaged"),
    "a byte of a number in the manifest": (
        lambda f: flip(f / MANIFEST, (f / MANIFEST).read_bytes().index(b'"global_step": 2') + 15),
        r"manifest.json` is damaged: its crc32",
    ),
    "a byte of an index": (lambda f: flip(f / "rank00000.json", 300), r"rank00000.json` is damaged: its crc32"),
    "a byte of the data": (
        lambda f: flip(f / "rank00000.safetensors", -5),
        r"rank00000.safetensors` is damaged: the crc32 of `exp_avg_sq\|head.weight\|0:6464`",
    ),
    "a missing data file": (
        lambda f: (f / "rank00000.safetensors").unlink(),
        r"rank00000.safetensors` is missing: rank 0's part",
    ),
    "a missing index": (lambda f: (f / "rank00000.json").unlink(), r"rank00000.json` is missing: rank 0's part"),
    "a missing manifest": (lambda f: (f / MANIFEST).unlink(), r"is no checkpoint: it has no `manifest.json`"),
    "a short data file": (
        lambda f: os.truncate(f / "rank00000.safetensors", 1000),
        r"rank00000.safetensors` has 1,000 bytes and its index says",
    ),
    "a file too few": (
        lambda f: rewrite(f / MANIFEST, files=[]),
        r"does not cover its parameters: `weight\|embed.weight\|0:6464` missing,.* and 86 more",
    ),
    "an element twice": (
        lambda f: rewrite(f / MANIFEST, files=json.loads((f / MANIFEST).read_text())["files"] * 2),
        r"does not cover its parameters: `weight\|embed.weight\|0:6464` twice",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_older_one_is_taken(engine, two, capsys, what):
    damage, message = DAMAGE[what]
    damage(two / "global_step2")
    with pytest.raises(ZplanError, match=message) as caught:
        engine.load_checkpoint(two)
    assert "--resume auto" in caught.value.hint
    path, _ = engine.load_checkpoint(two, resume="auto")
    assert path == str(two / "global_step1") and engine.global_steps == 1
    said = capsys.readouterr().err
    assert "skipped `global_step2`: " in said and "loaded" in said


def test_a_byte_of_a_data_files_header_is_found_by_verify(two):
    """Loading does not need the header, whose content the index has; `verify` reads everything."""
    flip(two / "global_step2" / "rank00000.safetensors", 12)
    assert "the crc32 of its header" in faults(two / "global_step2")[0]


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_a_byte_of_latest(engine, two, at):
    size = (two / "latest").stat().st_size
    if at < size:
        flip(two / "latest", at)
        with pytest.raises(ZplanError, match="latest` is damaged"):
            engine.load_checkpoint(two)
    assert engine.load_checkpoint(two, resume="auto")[0] == str(two / "global_step2")


def test_a_missing_latest_is_no_fresh_start(engine, two):
    (two / "latest").unlink()
    with pytest.raises(ZplanError, match="has no `latest`, and no tag was named; there are `global_step2`"):
        engine.load_checkpoint(two)
    with pytest.raises(ZplanError, match="there is no checkpoint"):
        engine.load_checkpoint(two, "global_step7")
    with pytest.raises(ZplanError, match="has no `latest`"):
        engine.load_checkpoint(two / "nowhere")
    assert engine.load_checkpoint(two, "global_step1")[0]


def test_auto_never_starts_afresh_beside_a_checkpoint(engine, two, tmp_path, capsys):
    """One tag's folder, a file, or a `latest` whose checkpoint is gone: there is or was something to go on from."""
    for resume in ("latest", "auto"):
        with pytest.raises(ZplanError, match=r"global_step2` is a checkpoint.*the tag `global_step2`"):
            engine.load_checkpoint(two / "global_step2", resume=resume)
        with pytest.raises(ZplanError, match="is no folder"):
            engine.load_checkpoint(two / "latest", resume=resume)
    shutil.rmtree(two / "global_step2")
    assert engine.load_checkpoint(two, resume="auto")[0] == str(two / "global_step1")
    assert "skipped `global_step2`, which `latest` names: it is not there" in capsys.readouterr().err
    shutil.rmtree(two / "global_step1")
    with pytest.raises(ZplanError, match="none of the 1 checkpoints"):
        engine.load_checkpoint(two, resume="auto")
    with pytest.raises(ZplanError, match="`resume='atuo'` is unknown"):
        engine.load_checkpoint(two, resume="atuo")


def test_other_folders_beside_checkpoints_are_nobodys(engine, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("")
    assert engine.load_checkpoint(tmp_path, resume="auto") == (None, {})
    assert cf.tags(tmp_path) == []


def test_auto_stays_on_the_branch_that_was_gone_back_to(engine, two):
    """Who goes back to step 1 and saves from there has left the later step 2, whatever its number."""
    rewrite(two / "global_step2" / MANIFEST, written_at="2020-01-01T00:00:00Z")
    engine.load_checkpoint(two, "global_step1")
    engine.save_checkpoint(two, "again", keep=2)
    assert sorted(cf.tags(two)) == ["again", "global_step1"]
    engine.save_checkpoint(two, "global_step3")
    rewrite(two / "global_step3" / MANIFEST, written_at="2020-01-01T00:00:00Z", global_step=3)
    assert engine.load_checkpoint(two, resume="auto")[0] != str(two / "global_step3") and engine.global_steps == 1


def test_a_newer_version_is_refused_even_by_auto(engine, two):
    rewrite(two / "global_step2" / MANIFEST, schema_version=7)
    for how in ("latest", "auto"):
        with pytest.raises(ZplanError, match=r"schema version 7 .* reads versions 1 to 2") as caught:
            engine.load_checkpoint(two, resume=how)
        assert "upgrade" in caught.value.hint


def test_an_older_schema_is_migrated_and_an_unknown_one_refused(engine, two):
    """Version 1 did not name the moments of each parameter: they were AdamW's."""
    path = two / "global_step2" / MANIFEST
    now = Manifest.from_json(path.read_bytes(), "x")
    old = [{k: v for k, v in p.items() if k != "moments"} for p in json.loads(path.read_text())["parameters"]]
    rewrite(path, schema_version=1, parameters=old)
    assert Manifest.from_json(path.read_bytes(), "x") == now and not faults(two / "global_step2")
    assert engine.load_checkpoint(two)[0] == str(two / "global_step2")
    rewrite(path, schema_version=0)
    with pytest.raises(ZplanError, match=r"schema version 0 .* reads versions 1 to 2") as caught:
        engine.load_checkpoint(two)
    assert "with the zplan that wrote it" in caught.value.hint


def test_another_optimizers_moments_are_refused(two):
    """Its weights alone may be taken."""
    manifest = Manifest.from_json((two / "global_step2" / MANIFEST).read_bytes(), "x")
    mine = tuple(replace(p, moments=("momentum_buffer",)) for p in manifest.parameters)
    message = "of `embed.weight` it has `exp_avg`, `exp_avg_sq`, and this one keeps `momentum_buffer`"
    with pytest.raises(ZplanError, match=message) as caught:
        check_model(mine, manifest)
    assert "weights_only=True" in caught.value.hint
    check_model(mine, manifest, weights_only=True)


def test_auto_starts_afresh_only_where_there_is_nothing(engine, two, tmp_path, capsys):
    assert engine.load_checkpoint(tmp_path / "new", resume="auto") == (None, {})
    assert "a fresh start" in capsys.readouterr().err
    for tag in ("global_step1", "global_step2"):
        flip(two / tag / MANIFEST, 100)
    with pytest.raises(ZplanError, match="none of the 2 checkpoints in .* is whole"):
        engine.load_checkpoint(two, resume="auto")


def test_another_model_is_refused_before_anything_is_overwritten(engine, two):
    other, *_ = initialize(model=w.build(w.GPT2), config=w.config(0), init=w.fill)
    before = other.units[0].flat.clone()
    with pytest.raises(ZplanError, match="is of another model: `positions.weight` is missing"):
        other.load_checkpoint(two)
    assert torch.equal(other.units[0].flat, before)
    other.close()


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_deepspeed_folder_is_called_by_its_name(engine, tmp_path, name):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / name).write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step5")
    for call in ({}, {"tag": "global_step5"}, {"resume": "auto"}):
        with pytest.raises(ZplanError, match=f"is a DeepSpeed checkpoint .`{name}`.") as caught:
            engine.load_checkpoint(tmp_path, **call)
        assert "zplan checkpoint import" in caught.value.hint


def test_a_manifest_round_trips(two):
    text = (two / "global_step2" / MANIFEST).read_bytes()
    manifest = Manifest.from_json(text, "x")
    assert Manifest.from_json(manifest.to_json(), "x") == manifest and manifest.global_step == 2
