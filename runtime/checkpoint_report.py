"""What `zplan checkpoint` shows: the list of a folder, what is wrong in a checkpoint, how two differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zplan.planner.errors import ZplanError
from zplan.planner.report import table
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime.checkpoint_format import MANIFEST, Manifest, Parameter
from zplan.runtime.checkpoint_read import Checkpoint


def resolve(path: Path, tag: str | None) -> Path:
    """A checkpoint's folder from what was typed: the folder of all with a tag or `latest`, or the one itself."""
    if tag is None and (path / MANIFEST).exists():
        return path
    if not path.is_dir():
        raise ZplanError(f"there is no folder `{path}`", "check the path")
    found = folder.folder_of(path, folder.latest_tag(path) if tag is None else tag)
    if not found.is_dir():
        known = ", ".join(f"`{t}`" for t, _ in folder.manifests(path)[:6])
        raise ZplanError(f"there is no checkpoint `{path / str(tag)}`", f"there are {known}" if known else None)
    return found


@dataclass(frozen=True)
class Listed:
    """One row of `zplan checkpoint list`. `problem` is None for a checkpoint whose files are all there."""

    tag: str
    latest: bool
    manifest: Manifest | None
    problem: str | None

    def to_mapping(self) -> dict[str, Any]:
        """JSON values."""
        m = self.manifest
        shown = ("global_step", "global_samples", "world_size", "zplan_version", "written_at")
        more = {} if m is None else {**{k: getattr(m, k) for k in shown}, "nbytes": m.nbytes, **_how(m)}
        return {"tag": self.tag, "latest": self.latest, "problem": self.problem, **more}


def _how(m: Manifest) -> dict[str, Any]:
    return {"stage": m.training["stage"], "precision": m.training["precision"]}


def listing(root: Path) -> list[Listed]:
    """Every committed tag, newest first. Files are counted and sized, their content is not read."""
    folder.refuse_inside(root)
    try:
        latest = folder.latest_tag(root)
    except ZplanError:
        latest = ""
    out = []
    for tag, found in folder.manifests(root):
        problem = None
        if isinstance(found, Manifest):
            try:
                Checkpoint(folder.folder_of(root, tag))
            except ZplanError as error:
                problem = error.message
        else:
            problem = found.message
        out.append(Listed(tag, tag == latest, found if isinstance(found, Manifest) else None, problem))
    return out


def list_table(root: Path) -> str:
    """The list as text."""
    rows = []
    found = listing(root)
    for x in found:
        m = x.manifest
        name = f"{x.tag} *" if x.latest else x.tag
        if m is None:
            rows.append([name, *["-"] * 7, x.problem or ""])
            continue
        how = _how(m)
        size = f"{m.nbytes / 1e9:,.3f}"
        cells = [m.global_step, f"{m.global_samples:,}", m.world_size, how["stage"], how["precision"], size]
        rows.append([name, *map(str, cells), m.written_at, x.problem or "complete"])
    if not rows:
        return f"no checkpoint in {root}\n"
    head = ["tag", "step", "samples", "ranks", "stage", "precision", "GB", "written", "state"]
    lines = table(head, rows, "lrrrrlrll")
    notes = ["", "* is what `latest` names." if any(x.latest for x in found) else "`latest` names none of them."]
    notes.append("Not checked here: the content of data files; `zplan checkpoint verify` reads every byte.")
    return "\n".join([*lines, *notes]) + "\n"


@dataclass(frozen=True)
class Difference:
    """One state of one parameter in two checkpoints: elements that differ, and by how much at most."""

    state: str
    name: str
    num_different: int
    largest: float


def differences(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Where the states of two checkpoints of one model differ. Bit for bit: a NaN equals the same NaN.

    Raises
    ------
    ZplanError
        When they are of different models.
    """
    ours, theirs = a.manifest.parameters, b.manifest.parameters
    if set(ours) != set(theirs):
        here, there = (
            {p.name: f"{p.shape} {'frozen' if p.frozen else 'with ' + ', '.join(p.states)}" for p in side}
            for side in (ours, theirs)
        )
        odd = next(n for n in [*here, *there] if here.get(n) != there.get(n))
        raise ZplanError(
            f"the checkpoints are of different models: `{odd}` is {here.get(odd, 'missing')} in the first and "
            f"{there.get(odd, 'missing')} in the second"
        )
    out = []
    for p in ours:
        for state in p.states:
            count, largest = _compare(a, b, state, p)
            if count:
                out.append(Difference(state, p.name, count, largest))
    return out


def _compare(a: Checkpoint, b: Checkpoint, state: str, p: Parameter) -> tuple[int, float]:
    """Elements that differ in their bits, and the largest difference of numbers (NaN where they are not numbers)."""
    if a.dtype(state, p.name) != b.dtype(state, p.name):
        return p.numel, float("nan")
    count, largest = 0, 0.0
    for at, values in a.read(state, p.name, 0, p.numel):
        other = np.empty_like(values)
        for start, part in b.read(state, p.name, at, at + values.size):
            other[start - at : start - at + part.size] = part
        bits = [x.view(np.uint8).reshape(x.size, -1) for x in (values, other)]
        differ = (bits[0] != bits[1]).any(axis=1)
        if differ.any():
            count += int(differ.sum())
            if a.dtype(state, p.name) != "F32":
                largest = float("nan")
                continue
            with np.errstate(invalid="ignore"):
                apart = np.abs(values[differ].astype(np.float64) - other[differ]).max()
            largest = max(largest, float(apart))
    return count, largest


def facts_that_differ(a: Manifest, b: Manifest) -> list[str]:
    """Counters and client state that are not alike, one sentence each."""
    names = ("global_step", "global_samples", "applied_steps", "lr", "client_state")
    return [f"{n}: {getattr(a, n)} and {getattr(b, n)}" for n in names if getattr(a, n) != getattr(b, n)]
