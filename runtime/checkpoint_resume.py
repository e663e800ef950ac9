"""Which checkpoint to go on from, and all ranks' part in loading it.

[Note: load] Every rank reads the indices, checks that each element is there exactly once, and streams what it keeps
into its final buffers, range by range. Resident compute-dtype buffers are rebuilt from the masters like after a step:
own slices are written, the rest is gathered when it is needed next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime.checkpoint_format import OTHER, Damaged, Manifest
from zplan.runtime.checkpoint_frozen import FrozenFiles
from zplan.runtime.checkpoint_load import check_model, load_unit, parameters_of
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.checkpoint_state import restore_groups, restore_random
from zplan.runtime.rendezvous import Rendezvous

if TYPE_CHECKING:
    from zplan.runtime.engine import Engine

Resume = Literal["latest", "auto"]


class Loader:
    """One load. All methods but `load` run on every rank alike."""

    def __init__(self, engine: Engine, meeting: Rendezvous, frozen: FrozenFiles) -> None:
        self.engine, self.meeting, self.frozen = engine, meeting, frozen

    def load(
        self, root: Path, tag: str | None, *, resume: Resume, weights_only: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a tag, what `latest` names, or the newest that is whole. Returns its folder and the client state."""
        if resume not in ("latest", "auto"):
            raise ZplanError(f"`resume={resume!r}` is unknown", "say `latest` or `auto`, or name a tag")
        said = self.meeting.all_say(lambda: json.dumps(self._candidates(root, tag, resume)))
        candidates, skipped = json.loads(said[0])
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
                f"none of the {len(skipped)} checkpoints in `{root}` is whole: "
                + ", ".join(f"`{s}`" for s in skipped[:4]),
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
        folder.refuse_inside(root)
        good, damaged = [], []
        for name, found in folder.manifests(root) if root.is_dir() else []:
            if isinstance(found, Manifest):
                good.append(name)
                continue
            if not isinstance(found, Damaged):
                raise found  # a newer version's: skipping it would throw training away
            damaged.append(name)
            self._note(f"skipped `{name}`: {found.message}")
        named = folder.named_by_latest(root)
        if named is not None and named not in (*good, *damaged):
            damaged.append(named)
            self._note(f"skipped `{named}`, which `latest` names: it is not there")
        return good, damaged

    def _load_one(self, path: Path, *, weights_only: bool) -> Manifest:
        """Load one checkpoint on all ranks, or raise on all of them."""
        e = self.engine
        opened: list[Checkpoint] = []
        started = False

        def check() -> str:
            opened.append(Checkpoint(path))
            check_model(parameters_of(e), opened[0].manifest, weights_only=weights_only)
            return ""

        def fill() -> str:
            for u in e.units:
                load_unit(u, opened[0], e, weights_only=weights_only)
            return ""

        try:
            self.meeting.all_say(check)
            started = True
            with opened[0]:
                self.meeting.all_say(fill)
        except Damaged as error:
            if started:
                raise Damaged(
                    f"{error.message}; this engine's states are now partly those of `{path}`",
                    f"load another checkpoint before you train on: {OTHER}",
                ) from None
            raise
        manifest = opened[0].manifest
        e.gatherer.invalidate([u for u in e.units if u.placement.closes])
        if manifest.world_size == e.world_size:
            self.frozen.adopt(path.absolute(), opened[0].indices[e.rank])
        if not weights_only:
            self._restore(opened[0])
        return manifest

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Counters, learning rate and random states."""
        e, m = self.engine, checkpoint.manifest
        e.optimizer.applied.fill_(float(m.applied_steps))
        e.optimizer.restore_scalars(m.training.get("optimizer_scalars", {}))
        e.global_steps, e.global_samples = m.global_step, m.global_samples
        if e.optimizer.scaler is not None:
            if m.loss_scale is not None:
                e.optimizer.scaler.restore(list(m.loss_scale))
            else:
                scale = e.optimizer.scaler.scale.item()
                self._note(f"a checkpoint of {m.training['precision']} has no loss scale: it begins at {scale:g}")
        if (groups := m.training.get("groups")) is not None:
            if not restore_groups(e.optimizer, groups):
                self._note("other parameter groups than those saved: learning rates and the like are the config's")
        elif m.training["lr"] == e.training_config.lr:  # imported, or of an older zplan
            e.optimizer.set_lr(m.lr)  # what a schedule had made of it; a new config's value wins
        if buffers := m.model.get("buffers"):
            self._note(f"`{buffers[0]}` and all other buffers ({len(buffers)}) are not in it: they stay as they are")
        random = {} if m.world_size != e.world_size else checkpoint.indices[e.rank].random
        if random:
            restore_random(random, e.device)
        elif m.world_size == e.world_size:
            self._note("random states are not in it: not restored")
        else:
            self._note(f"random states are those of {m.world_size} ranks and this job has {e.world_size}: not restored")

    def _note(self, text: str) -> None:
        if self.engine.rank == 0:
            print(f"zplan: {text}", file=sys.stderr)  # noqa: T201
