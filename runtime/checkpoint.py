"""Saving and loading an engine: the protocol that all ranks follow.

[Note: save] 1. Rank 0 takes the lock and makes the partial folder; all hear where, or why not. 2. Every rank checks that it sees
it, and writes its own ranges. 3. All say whether they could. 4. Rank 0 commits and purges; all hear that it is done. Ranks
speak through the store only, so a save may run in a thread beside training.

[Note: load] Every rank reads the indices, checks that each element is there exactly once, and streams what it keeps into its final
buffers, range by range. Resident compute-dtype buffers are rebuilt from the masters like after a step: own slices
are written, the rest is gathered when it is needed next.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zplan import __version__
from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime.checkpoint_format import STATES, Damaged, DataFile, FileRecord, Manifest
from zplan.runtime.checkpoint_frozen import FrozenFiles
from zplan.runtime.checkpoint_load import check_model, load_unit, parameters_of
from zplan.runtime.checkpoint_ranges import extents, state_tensor
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.checkpoint_state import (
    aliases,
    describe_model,
    describe_training,
    plain,
    random_state,
    restore_random,
)
from zplan.runtime.checkpoint_write import Source, Written, check_shared, write_rank
from zplan.runtime.rendezvous import Rendezvous
from zplan.runtime.unit import FlatUnit

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine

Resume = Literal["latest", "auto"]


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
        self.engine = engine
        self.meeting = Rendezvous(engine.rank, engine.world_size)
        self.snapshot: dict[tuple[str, str], Tensor] = {}
        """Pinned copies by (unit, state); there from the first asynchronous save on."""
        self.frozen = FrozenFiles(engine)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    # --- saving ----------------------------------------------------------------------------------------------------------

    def save(
        self,
        root: Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        keep: int | None,
        background: bool,
    ) -> Path:
        """Write a checkpoint, or start to. Returns its folder."""
        self.between_steps("save")
        self.wait()
        if keep is not None and keep < 1:
            raise ZplanError(f"`keep={keep}` would delete the checkpoint that was just written", "keep at least 1")
        request = self._request(root, tag, client_state, overwrite=overwrite, keep=keep)
        partial, lock = self._begin(request)
        if not background:
            self._finish(request, partial, lock, self._sources(state_tensor), self.frozen.share(root))
        else:
            self._take_snapshot()
            sources = self._sources(lambda u, s: self.snapshot[u.name, s])
            frozen = self.frozen.share(root, copied=True)
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
            training=describe_training(e.training_config),
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

    def _begin(self, request: SaveRequest) -> tuple[Path, folder.WriteLock | None]:
        """Step 1 of [Note: save]: where everybody writes. A refusal is raised on every rank."""
        lock: folder.WriteLock | None = None

        def prepare() -> str:
            nonlocal lock
            if self.engine.rank != 0:
                return ""
            try:
                request.root.mkdir(parents=True, exist_ok=True)
                lock = folder.WriteLock(request.root)
                return str(folder.prepare(request.root, request.manifest.tag, overwrite=request.overwrite))
            except OSError as error:
                raise folder.unwritable(request.root, error) from None

        try:
            said = self.all_say(prepare)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return Path(said[0]), lock

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
            needed = self.all_say(lambda: str(sum(r.nbytes for r, _ in new)))
            self.all_say(lambda: check_shared(partial, sum(map(int, needed))) or "")
            written: list[DataFile | None] = []

            def write() -> str:
                record, file = write_rank(partial, self.engine.rank, sources, frozen, request.random)
                written.append(file)
                return json.dumps(asdict(record))

            records = self.all_say(write)
            files = tuple(FileRecord(**json.loads(r)) for r in records)
            self.all_say(lambda: self._commit(request, partial, files))
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
                folder.purge(request.root, request.keep, just_written=manifest.tag)
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
            for state in STATES
            for extent in extents(u, state, everything=False)
        ]

    def _take_snapshot(self) -> None:
        """Copy the states to the host. When this returns training may go on."""
        pin = self.engine.device.type == "cuda"
        for u in self.engine.trained:
            for state in STATES:
                source = state_tensor(u, state).detach()
                if (u.name, state) not in self.snapshot:
                    self.snapshot[u.name, state] = torch.empty_like(source, device="cpu", pin_memory=pin)
                self.snapshot[u.name, state].copy_(source, non_blocking=True)
        if pin:
            torch.cuda.current_stream().synchronize()

    # --- loading ---------------------------------------------------------------------------------------------------------

    def load(
        self, root: Path, tag: str | None, *, resume: Resume, weights_only: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a tag, what `latest` names, or the newest that is whole. Returns its folder and the client state."""
        self.between_steps("load")
        self.wait()
        candidates, skipped = json.loads(self.all_say(lambda: json.dumps(self._candidates(root, tag, resume)))[0])
        for name in candidates:
            try:
                found = self._load_one(folder.folder_of(root, name), weights_only=weights_only)
            except Damaged as error:
                if resume != "auto" or tag is not None:
                    raise
                skipped.append(name)
                self._note(f"skipped `{name}`: {error.message}")
                continue
            self._note(f"loaded `{root / name}`: step {found.global_step}, {found.global_samples:,} samples")
            return str(root / name), dict(found.client_state)
        if skipped:
            raise ZplanError(
                f"none of the {len(skipped)} checkpoints in `{root}` is whole: {', '.join(f'`{s}`' for s in skipped[:4])}",
                "`zplan checkpoint verify` says what is wrong with each; start anew only in another folder",
            )
        self._note(f"no checkpoint in `{root}` yet: a fresh start")
        return None, {}

    def _candidates(self, root: Path, tag: str | None, resume: Resume) -> tuple[list[str], list[str]]:
        """Tags to try, newest first, and tags that are damaged at first sight; rank 0's word counts."""
        if self.engine.rank != 0:
            return [], []
        if tag is not None:
            if not folder.folder_of(root, tag).is_dir():
                known = ", ".join(f"`{t}`" for t, _ in folder.manifests(root)[:6]) if root.is_dir() else ""
                raise ZplanError(f"there is no checkpoint `{root / tag}`", f"there are {known}" if known else None)
            return [tag], []
        if resume == "latest":
            return [folder.latest_tag(root)], []
        good, damaged = [], []
        for name, found in folder.manifests(root) if root.is_dir() else []:
            if isinstance(found, Manifest):
                good.append(name)
                continue
            if not isinstance(found, Damaged):
                raise found  # a newer version's: skipping it would throw training away
            damaged.append(name)
            self._note(f"skipped `{name}`: {found.message}")
        return good, damaged

    def _load_one(self, path: Path, *, weights_only: bool) -> Manifest:
        """Load one checkpoint on all ranks, or raise on all of them."""
        e = self.engine
        opened: list[Checkpoint] = []
        started = False

        def check() -> str:
            opened.append(Checkpoint(path))
            check_model(parameters_of(e), opened[0].manifest)
            return ""

        def fill() -> str:
            for u in e.units:
                load_unit(u, opened[0], e, weights_only=weights_only)
            return ""

        try:
            self.all_say(check)
            started = True
            with opened[0]:
                self.all_say(fill)
        except Damaged as error:
            if started:
                raise Damaged(
                    f"{error.message}; this engine's states are now partly those of `{path}`",
                    "load another checkpoint before you train on",
                ) from None
            raise
        manifest = opened[0].manifest
        e.gatherer.invalidate([u for u in e.units if u.placement.closes])
        if not weights_only:
            self._restore(opened[0])
        return manifest

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Counters, learning rate and random states."""
        e, m = self.engine, checkpoint.manifest
        e.optimizer.applied.fill_(float(m.applied_steps))
        e.global_steps, e.global_samples = m.global_step, m.global_samples
        if e.optimizer.scaler is not None:
            self._note(f"the loss scale is not in checkpoints: it begins at {e.optimizer.scaler.scale.item():g} again")
        if m.training["lr"] == e.training_config.lr:
            e.optimizer.param_groups[0]["lr"] = m.lr  # what a schedule had made of it; a new config's value wins
        if m.world_size == e.world_size:
            restore_random(checkpoint.indices[e.rank].random, e.device)
        else:
            self._note(f"random states are those of {m.world_size} ranks and this job has {e.world_size}: not restored")

    # --- both ------------------------------------------------------------------------------------------------------------

    def all_say(self, act: Callable[[], str]) -> list[str]:
        """Run `act` on every rank and return what each made of it; where one failed, all raise."""
        try:
            mine = {"text": act()}
        except ZplanError as error:
            mine = {"error": error.message, "hint": error.hint or "", "kind": type(error).__name__}
        except Exception as error:
            mine = {"error": repr(error), "hint": "", "kind": "ZplanError"}
        said = [json.loads(x) for x in self.meeting.exchange(json.dumps(mine))]
        for rank, s in enumerate(said):
            if "error" in s:
                kind = Damaged if s["kind"] == "Damaged" else ZplanError
                where = f"rank {rank}: " if len(said) > 1 and rank else ""
                raise kind(where + s["error"], s["hint"] or None)
        return [s["text"] for s in said]

    def between_steps(self, verb: str) -> None:
        e = self.engine
        if dist.is_initialized() and dist.get_backend() == "fake":
            raise ZplanError(
                f"one rank that pretends to be of {e.world_size} has nothing to {verb}", f"{verb} in a real job"
            )
        if e.reducer.micro_step:
            raise ZplanError(
                f"{verb} after micro-step {e.reducer.micro_step} of {e.choice.accumulation}: gradients of an unfinished "
                "step are in no checkpoint",
                "call `engine.step()` first, or `engine.reset_step()` to drop them",
            )

    def _note(self, text: str) -> None:
        if self.engine.rank == 0:
            print(f"zplan: {text}", file=sys.stderr)  # noqa: T201
