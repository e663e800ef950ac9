"""SIGKILL at random moments of saving: a whole checkpoint always remains, and what is resumed is what was trained."""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workload as w

from zplan.runtime import checkpoint_folder as cf
from zplan.runtime.checkpoint_ranges import extents, state_tensor, states_of
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize

SAVES_BEFORE = 1
LONGEST = 0.06
"""Seconds after the first save at which a kill falls at the latest; a save takes about 0.02."""


def fingerprint(engine: Engine) -> int:
    """crc32 of the masters and moments that this rank keeps."""
    crc = 0
    for u in engine.units:
        for state in states_of(u):
            for extent in extents(u, state, state_tensor(u, state), everything=False):
                crc = zlib.crc32(extent.of(state_tensor(u, state)).detach().numpy().tobytes(), crc)
    return crc


def train_and_save(rank: int, world_size: int, store: str, root: str, log: str, background: bool) -> None:
    """Resume, then train and save without end; writes `step crc32` of every step that it has seen to the log."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(3, piece=16384, saving="background"), init=w.fill)
    engine.load_checkpoint(root, resume="auto")
    fd = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        os.write(fd, f"{engine.global_steps} {fingerprint(engine)}\n".encode())
        engine.backward(engine(*w.batch(w.LLAMA.vocab, engine.global_steps, rank, 0)))
        engine.step()
        engine.save_checkpoint(root, keep=2, background=background, overwrite=engine.global_steps % 2 == 0)


class Attempt:
    """One run that is killed."""

    def __init__(self, context: Any, folder: Path, number: int, world_size: int, background: bool) -> None:
        self.root, self.log = folder / "saved", folder / "log"
        args = (world_size, str(folder / f"store{number}"), str(self.root), str(self.log), background)
        self.ranks = [context.Process(target=train_and_save, args=(r, *args), daemon=True) for r in range(world_size)]
        self.before = self.log_lines()
        for rank in self.ranks:
            rank.start()

    def log_lines(self) -> int:
        path = Path(f"{self.log}.0")
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill(self, rng: random.Random, *, all_ranks: bool) -> None:
        """Wait for a few saves, then kill at a random moment: all at once, or one rank and the others later."""
        end = time.monotonic() + 30
        while self.log_lines() < self.before + 1 + SAVES_BEFORE:
            assert time.monotonic() < end and all(r.is_alive() for r in self.ranks), "a run that nobody killed ended"
            time.sleep(0.002)
        time.sleep(rng.random() * LONGEST)
        first = self.ranks if all_ranks else [rng.choice(self.ranks)]
        for rank in first:
            rank.kill()
        if not all_ranks:
            time.sleep(rng.random() * 0.02)
        for rank in self.ranks:
            rank.kill()
            rank.join()
            rank.close()

    def newest(self) -> int:
        """Step of the newest checkpoint; it, and what `latest` names, must be whole."""
        found = [m for _, m in cf.manifests(self.root)]
        assert found, "no checkpoint remains"
        for tag in {found[0].tag, cf.latest_tag(self.root)}:
            with Checkpoint(cf.folder_of(self.root, tag)) as checkpoint:
                assert not list(checkpoint.verify())
        return found[0].global_step


def kill_many(context: Any, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a run again and again, sync and async, one rank and two, all ranks or one."""
    rng = random.Random(seed)
    counts: dict[str, int] = {}
    for world_size in (1, 2):
        here = folder / f"world{world_size}"
        here.mkdir()
        step = 0
        for number in range(kills // 2):
            background, all_ranks = number % 2 == 1, number % 4 < 2
            attempt = Attempt(context, here, number, world_size, background)
            attempt.kill(rng, all_ranks=all_ranks)
            newest = attempt.newest()
            assert newest >= step, f"step {step} was committed, and {newest} is what remains"
            step = newest
            left = sum(p.name.startswith((cf.PARTIAL, cf.ASIDE, cf.PURGE)) for p in attempt.root.iterdir())
            counts["in a save"] = counts.get("in a save", 0) + bool(left)
        for rank in range(world_size):
            same_at_every_step(Path(f"{attempt.log}.{rank}"))
        counts[f"steps at world {world_size}"] = step
    return counts


def same_at_every_step(log: Path) -> None:
    """Whatever was resumed, a step has the states that it had before."""
    seen: dict[str, str] = {}
    for line in log.read_text().splitlines():
        step, crc = line.split()
        assert seen.setdefault(step, crc) == crc, f"step {step} came back with other states"


@pytest.mark.gloo
def test_a_few_kills(_forkserver, tmp_path):
    kill_many(_forkserver, tmp_path, 8, seed=int.from_bytes(os.urandom(4), "big"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills(_forkserver, tmp_path, capsys):
    found: dict[str, Any] = kill_many(_forkserver, tmp_path, 200, seed=0)
    assert found["in a save"] >= 50, f"kills missed the saves: {found}"
    with capsys.disabled():
        sys.stdout.write(f"\n200 kills: {found}\n")
