"""Saving and loading an engine: the protocol that all ranks follow.

[Note: save] 1. Rank 0 takes the lock and makes the partial folder; all hear where, or why not. 2. Every rank checks
that it sees it, and writes its own ranges. 3. All say whether they could. 4. Rank 0 commits and purges; all hear that
it is done. Ranks speak through the store only, so a save may run in a thread beside training.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zplan import __version__
from zplan.planner.errors import ZplanError
from zplan.planner.saving import RANGE_NUMEL, snapshot_numel
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime.checkpoint_format import DataFile, FileRecord, Manifest
from zplan.runtime.checkpoint_frozen import FrozenFiles
from zplan.runtime.checkpoint_load import parameters_of
from zplan.runtime.checkpoint_ranges import extents, state_tensor, states_of
from zplan.runtime.checkpoint_resume import Loader, Resume
from zplan.runtime.checkpoint_state import (
    aliases,
    describe_model,
    describe_training,
    groups_to_save,
    plain,
    random_state,
)
from zplan.runtime.checkpoint_write import Source, Written, check_shared, write_rank
from zplan.runtime.halves import Halves
from zplan.runtime.rendezvous import Rendezvous
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine


@dataclass(frozen=True)
class SaveRequest:
    """One save, as every rank knows it before it starts. `manifest` is rank 0's to complete."""

    root: Path
    manifest: Manifest
    random: Mapping[str, Any]
    overwrite: bool
    keep: int | None


class Checkpoints:
    """Saves and loads of one engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        # Weakly, so that a closed engine's memory is free once nobody holds it, without the garbage collector.
        self.engine: Engine = weakref.proxy(engine)
        self.meeting = Rendezvous(engine.rank, engine.world_size)
        self.snapshot: Tensor | None = None
        """1D fp32 in host memory: the slices that this rank writes. See planner/saving.py."""
        self.copies: dict[tuple[str, str], Tensor] = {}
        """Its parts, by unit and state."""
        if engine.choice.saving == "background":
            self._make_room()
        self.frozen = FrozenFiles(engine.frozen)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        _made.add(self)
        self.sweeper = folder.Sweeper()

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        root: Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        keep: int | None,
        background: bool | None,
    ) -> Path:
        """Write a checkpoint, or start to. Returns its folder."""
        self.between_steps("save")
        foreign = self.engine.optimizer.wanted.foreign
        if foreign is not None and foreign.whole_tensors:
            raise ZplanError(
                f"states of {foreign.title} are tensors of its own and in no checkpoint yet",
                "save the weights with `engine.save_16bit_model(folder)`",
            )
        self.wait()
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ZplanError(
                f"`keep={keep!r}` would delete the checkpoint that was just written, or is no whole number",
                "keep at least 1",
            )
        if background is None:
            background = self.snapshot is not None
        if background and self.snapshot is None:
            raise ZplanError(
                "a save in the background needs room for a copy of the states, which this config has not planned",
                'plan again with --saving background, or put `"saving": "background"` into the `zplan` block',
            )
        # Written behind training, which may go to another working directory.
        absolute = root.absolute()
        request, partial, lock = self._begin(
            lambda: self._request(absolute, tag, client_state, overwrite=overwrite, keep=keep)
        )
        if not background:
            self._finish(request, partial, lock, self._sources(state_tensor), self.frozen.share(absolute))
        else:
            self._take_snapshot()
            sources = self._sources(lambda u, s: self.copies[u.name, s])
            frozen = self.frozen.share(absolute, copied=True)
            self.thread = threading.Thread(
                target=self._behind, args=(request, partial, lock, sources, frozen), name="zplan save", daemon=False
            )
            self.thread.start()
        return root / request.manifest.tag

    def wait(self) -> None:
        """Until the save that is being written is committed; raises what went wrong with it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _request(
        self, root: Path, tag: str | None, client_state: Mapping[str, Any] | None, *, overwrite: bool, keep: int | None
    ) -> SaveRequest:
        e = self.engine
        manifest = Manifest(
            tag=folder.check_tag(tag or f"global_step{e.global_steps}"),
            global_step=e.global_steps,
            global_samples=e.global_samples,
            applied_steps=round(e.optimizer.applied.item()),
            world_size=e.world_size,
            lr=float(e.optimizer.param_groups[0]["lr"]),
            loss_scale=None if e.optimizer.scaler is None else tuple(e.optimizer.scaler.state()),
            training={
                **describe_training(e.training_config),
                "optimizer": e.choice.optimizer,
                "optimizer_scalars": dict(e.optimizer.scalars_to_save()),
                "groups": groups_to_save(e.optimizer),
            },
            model=describe_model(e.module),
            parameters=parameters_of(e),
            aliases=aliases(e.module),
            files=(),
            client_state=plain(client_state),
            zplan_version=__version__,
            torch_version=torch.__version__,
            written_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        return SaveRequest(root, manifest, random_state(e.device), overwrite, keep)

    def _begin(self, ask: Callable[[], SaveRequest]) -> tuple[SaveRequest, Path, folder.WriteLock | None]:
        """Step 1 of [Note: save]: what is asked, and where everybody writes. A refusal is raised on every rank."""
        lock: folder.WriteLock | None = None
        asked: list[SaveRequest] = []

        def prepare() -> str:
            nonlocal lock
            request = ask()
            asked.append(request)
            if self.engine.rank != 0:
                return request.manifest.tag
            try:
                self.sweeper.wait()
                request.root.mkdir(parents=True, exist_ok=True)
                lock = folder.WriteLock(request.root)
                return str(folder.prepare(request.root, request.manifest.tag, overwrite=request.overwrite))
            except OSError as error:
                raise folder.unwritable(request.root, error) from None

        try:
            first, *others = self.meeting.all_say(prepare)
            self._same_tag(Path(first), others)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return asked[0], Path(first), lock

    @staticmethod
    def _same_tag(partial: Path, others: list[str]) -> None:
        """Ranks that name a checkpoint differently (by the time of day, say) would each look for their own later."""
        tag = folder.tag_of(partial)
        for rank, other in enumerate(others, 1):
            if other != tag:
                shutil.rmtree(partial, ignore_errors=True)
                raise ZplanError(f"rank 0 saves as `{tag}` and rank {rank} as `{other}`", "give all ranks one tag")

    def _finish(
        self,
        request: SaveRequest,
        partial: Path,
        lock: folder.WriteLock | None,
        sources: list[Source],
        frozen: list[Source] | Written | None,
    ) -> None:
        """Steps 2 to 4 of [Note: save]."""
        try:
            new = [*sources, *(frozen if isinstance(frozen, list) else [])]
            needed = self.meeting.all_say(lambda: str(sum(r.nbytes for r, _ in new)))
            self.meeting.all_say(lambda: check_shared(partial, sum(map(int, needed))) or "")
            written: list[DataFile | None] = []

            def write() -> str:
                record, file = write_rank(partial, self.engine.rank, sources, frozen, request.random)
                written.append(file)
                return json.dumps(asdict(record))

            records = self.meeting.all_say(write)
            files = tuple(FileRecord(**json.loads(r)) for r in records)
            self.meeting.all_say(lambda: self._commit(request, partial, files))
            self.frozen.remember(request.root / request.manifest.tag, written[0])
        except BaseException:
            if lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                lock.release()

    def _commit(self, request: SaveRequest, partial: Path, files: tuple[FileRecord, ...]) -> str:
        if self.engine.rank != 0:
            return ""
        manifest = Manifest(**{**vars(request.manifest), "files": files})
        try:
            folder.commit(request.root, partial, manifest)
            if request.keep is not None:
                self.sweeper.start(folder.hide_old(request.root, request.keep, just_written=manifest.tag))
        except OSError as error:
            raise folder.unwritable(request.root / manifest.tag, error) from None
        return ""

    def _behind(self, *args: Any) -> None:
        try:
            self._finish(*args)
        except BaseException as error:
            self.failure = error

    def _sources(self, tensor_of: Callable[[FlatUnit, str], Tensor]) -> list[Source]:
        """What this rank writes, a state of a unit after the other."""
        return [
            (extent.range, extent.of(tensor_of(u, state)))
            for u in self.engine.trained
            for state in states_of(u)
            for extent in extents(u, state, tensor_of(u, state), everything=False)
        ]

    def _make_room(self) -> None:
        """Take the snapshot's memory, once and for all saves."""
        e = self.engine
        self.snapshot = e.arena.take_host(
            "save.snapshot", snapshot_numel([u.placement for u in e.units], e.choice), torch.float32
        )
        at = 0
        for u in e.trained:
            for state in states_of(u):
                self.copies[u.name, state] = self.snapshot[at : at + u.layout.shard_numel]
                at += u.layout.shard_numel

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        """Copy the states to the host. When this returns training may go on."""
        for u in self.engine.trained:
            for state in states_of(u):
                source, copy = state_tensor(u, state), self.copies[u.name, state]
                if source.numel() == copy.numel():
                    _copy_to_host(source, copy)
                    continue
                for piece in u.layout.pieces:
                    _copy_to_host(u.own(source, piece), u.shard_of(copy, piece))
        if self.engine.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Give the snapshot's memory back, and be done with deleting."""
        self.sweeper.wait()
        if self.snapshot is not None:
            self.copies.clear()
            self.engine.arena.unlock()
            self.snapshot = None

    def load(
        self, root: Path, tag: str | None, *, resume: Resume, weights_only: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a tag, what `latest` names, or the newest that is whole. Returns its folder and the client state."""
        self.between_steps("load")
        self.wait()
        loader = Loader(self.engine, self.meeting, self.frozen)
        return loader.load(root, tag, resume=resume, weights_only=weights_only)

    # --- both --------------------------------------------------------------------------------------------------------

    def between_steps(self, verb: str) -> None:
        e = self.engine
        if dist.is_initialized() and dist.get_backend() == "fake":
            raise ZplanError(
                f"one rank that pretends to be of {e.world_size} has nothing to {verb}", f"{verb} in a real job"
            )
        if e.reducer.micro_step:
            raise ZplanError(
                f"{verb} after micro-step {e.reducer.micro_step} of {e.choice.accumulation}: gradients of an "
                "unfinished step are in no checkpoint",
                "call `engine.step()` first, or `engine.reset_step()` to drop them",
            )


_made: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


def write_to_the_end() -> None:
    """A program that ends without `close` waits here for its last save, and hears whether it failed."""
    for checkpoints in list(_made):
        writing = checkpoints.thread is not None
        try:
            checkpoints.wait()
            if writing:
                checkpoints.meeting.leave()
        except BaseException as error:
            print(f"zplan: the last save in the background failed: {error}", file=sys.stderr)  # noqa: T201


# Python's own `atexit` is too late: thread pools take no work by then. They are closed by this hook too, which runs
# what was registered last first, and theirs was when checkpoint_write.py was imported.
threading._register_atexit(write_to_the_end)  # type: ignore[attr-defined]


def _copy_to_host(source: Tensor | Halves, copy: Tensor) -> None:
    """Start a copy; masters in halves go a range at a time, each put together first."""
    if isinstance(source, Tensor):
        copy.copy_(source, non_blocking=True)
        return
    for at in range(0, copy.numel(), RANGE_NUMEL):
        cut = slice(at, at + RANGE_NUMEL)
        copy[cut].copy_(source[cut].whole(), non_blocking=True)
