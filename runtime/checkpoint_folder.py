"""The folder that checkpoints lie in: who may write, what counts as committed, what is cleared away and when.

[Note: commit] Data is written into `.partial.TAG.*` beside its target and synced. Then, on rank 0 and in this order:
manifest, sync, rename to `TAG`, sync of the parent, `latest` by rename, sync. A kill at any moment leaves either the
old state or the new one. A tag that is overwritten is renamed to `.aside.TAG` first; until the new one stands there,
it counts under its own name. Older checkpoints are purged last, each renamed out of sight before it is deleted; the
deleting itself, which takes as long as a good part of a save, goes on beside training (`Sweeper`).

[Note: lock] `flock` on `.lock` excludes a second writer. The kernel drops it with the process that held it, so a
killed run leaves nothing to clean up by hand; whoever takes the lock clears what is left of unfinished saves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import threading
from pathlib import Path

from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_format import LATEST, LOCK, MANIFEST, OTHER, Damaged, Manifest, latest_text, read_latest

PARTIAL, ASIDE, PURGE = ".partial.", ".aside.", ".purge."
PROBE = "probe"
FOREIGN = ("mp_rank_*_model_states.pt", "*zero_pp_rank_*")
"""Files of DeepSpeed's checkpoints."""

_held: set[int] = set()
"""Locks of this process. A forked child (a data loader's worker) must not keep one alive after its parent's death."""


def _let_go_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


class WriteLock:
    """Exclusive right to change a checkpoint folder, until `release`. See [Note: lock]."""

    def __init__(self, root: Path) -> None:
        self.path = root / LOCK
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unwritable(self.path, error) from None
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self.fd, 200, 0).decode("utf-8", "replace").strip()
            os.close(self.fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ZplanError(
                    f"`{self.path}` can't be locked: {error.strerror}", "save to a file system that has `flock`"
                ) from None
            raise ZplanError(
                f"another run is saving into `{root}` ({holder or 'unknown process'})",
                "give each run a folder of its own, or stop the other run",
            ) from None
        _held.add(self.fd)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        if self.fd in _held:
            _held.remove(self.fd)
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)


def unwritable(path: Path, error: OSError, *, at: str = "") -> ZplanError:
    """An operating system's refusal to write, as one sentence; `at` is what of the file it was about."""
    ways = {
        errno.ENOSPC: "free some space or save elsewhere; earlier checkpoints are untouched",
        errno.EDQUOT: "free some of your quota or save elsewhere; earlier checkpoints are untouched",
        errno.EROFS: "save to a folder on a file system that is mounted for writing",
        errno.EACCES: "save to a folder that you may write",
    }
    return ZplanError(
        f"`{path}` can't be written: {error.strerror or error}" + (f" at `{at}`" if at else ""),
        ways.get(error.errno or 0, "save elsewhere; earlier checkpoints are untouched"),
    )


def check_tag(tag: str) -> str:
    """A tag is one folder name that nothing else here uses."""
    if (
        not isinstance(tag, str)
        or not tag
        or tag.startswith(".")
        or tag == LATEST
        or len(tag) > 200
        or set(tag) & set("/\\\n\0")
    ):
        raise ZplanError(
            f"`{tag}` can't be a tag", f"a tag is one folder name, not `{LATEST}` and without a dot in front"
        )
    return tag


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, content: bytes) -> None:
    """A whole small file, on the disk when this returns. It must not exist."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


# --- writing: rank 0, under the lock ---------------------------------------------------------------------------------


def prepare(root: Path, tag: str, *, overwrite: bool) -> Path:
    """Clear what unfinished saves left, and make an empty partial folder with a probe in it."""
    recover(root)
    if (root / tag).exists() and not (root / tag).is_dir():
        raise ZplanError(f"`{root / tag}` is a file", "save under another tag")
    if (root / tag).exists() and not overwrite:
        raise ZplanError(f"`{root / tag}` exists", "save under another tag, or overwrite it with `overwrite=True`")
    partial = root / f"{PARTIAL}{tag}.{secrets.token_hex(4)}"
    partial.mkdir()
    write_synced(partial / PROBE, partial.name.encode())
    return partial


def tag_of(partial: Path) -> str:
    """The tag that a partial folder is for."""
    return partial.name.removeprefix(PARTIAL).rsplit(".", 1)[0]


def recover(root: Path) -> None:
    """Finish or undo what a killed writer left behind."""
    for path in root.iterdir():
        if path.name.startswith(ASIDE):
            target = root / path.name.removeprefix(ASIDE)
            if not target.exists():
                path.rename(target)
                sync_folder(root)
                continue
        if path.name.startswith((ASIDE, PARTIAL, PURGE)):
            shutil.rmtree(path, ignore_errors=True)  # a dying rank may still write there; the next save tries again


def commit(root: Path, partial: Path, manifest: Manifest) -> None:
    """Make a written folder the newest checkpoint. See [Note: commit]."""
    target, aside = root / manifest.tag, root / f"{ASIDE}{manifest.tag}"
    write_synced(partial / MANIFEST, manifest.to_json())
    (partial / PROBE).unlink()
    sync_folder(partial)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    sync_folder(root)
    point_latest(root, manifest.tag)
    shutil.rmtree(aside, ignore_errors=True)


def point_latest(root: Path, tag: str) -> None:
    """Let `latest` name a tag, in one step."""
    new = root / f"{PARTIAL}{LATEST}"
    new.unlink(missing_ok=True)
    write_synced(new, latest_text(tag))
    new.rename(root / LATEST)
    sync_folder(root)


def hide_old(root: Path, keep: int, *, just_written: str) -> list[Path]:
    """Rename all but the newest `keep` checkpoints out of sight; what can't be read is not counted and not touched.

    Returns
    -------
    list
        What is left to delete. `recover` does it where nobody else did.
    """
    known = [tag for tag, m in manifests(root) if isinstance(m, Manifest)]
    old = [tag for tag in known[keep:] if tag != just_written]
    hidden = [root / f"{PURGE}{tag}.{secrets.token_hex(4)}" for tag in old]
    for tag, path in zip(old, hidden, strict=True):
        (root / tag).rename(path)
    if hidden:
        sync_folder(root)
    return hidden


class Sweeper:
    """Deletes hidden folders beside what else goes on."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def start(self, hidden: list[Path]) -> None:
        self.wait()
        if hidden:
            self.thread = threading.Thread(target=self._sweep, args=(hidden,), name="zplan purge", daemon=False)
            self.thread.start()

    def wait(self) -> None:
        """Until all is deleted, so that its space counts as free."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    @staticmethod
    def _sweep(hidden: list[Path]) -> None:
        for path in hidden:
            shutil.rmtree(path, ignore_errors=True)


# --- looking: anybody, without the lock ------------------------------------------------------------------------------


def folder_of(root: Path, tag: str) -> Path:
    """Where a tag lies: under its own name, or aside when a kill fell between two renames."""
    path, aside = root / tag, root / f"{ASIDE}{tag}"
    return aside if not path.exists() and aside.exists() else path


def tags(root: Path) -> list[str]:
    """Every tag that was committed, damaged or not, in no order."""
    if not root.is_dir():
        raise ZplanError(f"there is no folder `{root}`", "check the path")
    names = {p.name.removeprefix(ASIDE) for p in root.iterdir() if not p.name.startswith((PARTIAL, PURGE))}
    return [n for n in names if not n.startswith(".") and _is_tag(n, folder_of(root, n))]


def _is_tag(name: str, folder: Path) -> bool:
    """Whether somebody saved into this folder, whatever is left of it; logs and model folders may lie beside."""
    if not folder.is_dir():
        return False
    return name.startswith("global_step") or any(next(folder.glob(p), None) for p in (MANIFEST, "rank[0-9]*", *FOREIGN))


def refuse_inside(root: Path) -> None:
    """Refuse what is no folder of checkpoints but one of them, or a file: there, `auto` would find nothing."""
    if root.exists() and not root.is_dir():
        raise ZplanError(f"`{root}` is no folder", "check the path")
    refuse_foreign(root)
    if any(next(root.glob(p), None) for p in (MANIFEST, "rank[0-9]*")):
        raise ZplanError(
            f"`{root}` is a checkpoint, and its name is a tag",
            f"name the folder `{root.parent}` and the tag `{root.name}`",
        )


def refuse_foreign(folder: Path) -> None:
    """Name a checkpoint that DeepSpeed wrote as what it is."""
    if not folder.is_dir():
        return
    for pattern in FOREIGN:
        for path in folder.glob(pattern):
            raise ZplanError(
                f"`{folder}` is a DeepSpeed checkpoint (`{path.name}`)",
                f"`zplan checkpoint import {folder} NEW_FOLDER` makes one of it that loads on any ranks",
            )


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, checked against its own crc32."""
    path = folder / MANIFEST
    if not path.exists():
        refuse_foreign(folder)
    try:
        return Manifest.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise Damaged(f"`{folder}` is no checkpoint: it has no `{MANIFEST}`", OTHER) from None
    except OSError as error:
        raise Damaged(f"`{path}` can't be read: {error.strerror}", OTHER) from None
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"`{path}` is damaged: {error!r}", OTHER) from None


def manifests(root: Path) -> list[tuple[str, Manifest | ZplanError]]:
    """(tag, manifest or what is wrong with it), newest first; unreadable ones last.

    Newest is what was written last: who went back to an earlier step and saved from there has left the later ones.
    """
    found: list[tuple[str, Manifest | ZplanError]] = []
    for tag in tags(root):
        try:
            found.append((tag, read_manifest(folder_of(root, tag))))
        except ZplanError as error:
            found.append((tag, error))
    return sorted(found, key=_age, reverse=True)


def _age(row: tuple[str, Manifest | ZplanError]) -> tuple[str, int]:
    return (row[1].written_at, row[1].global_step) if isinstance(row[1], Manifest) else ("", -1)


def named_by_latest(root: Path) -> str | None:
    """What `latest` names, there or not; None where it can't be read."""
    try:
        return read_latest((root / LATEST).read_bytes(), str(root / LATEST))
    except (OSError, ZplanError):
        return None


def latest_tag(root: Path) -> str:
    """What `latest` names. A missing `latest` is an error, never a fresh start."""
    path = root / LATEST
    try:
        text = path.read_bytes()
        if text and b"crc32" not in text:
            refuse_foreign(root / text.decode("utf-8", "replace").strip())
        tag = read_latest(text, str(path))
    except (FileNotFoundError, NotADirectoryError):
        refuse_inside(root)
        found = [tag for tag, _ in manifests(root)] if root.is_dir() else []
        what = f"there are {', '.join(f'`{t}`' for t in found[:4])}" if found else "there is no checkpoint in it"
        raise ZplanError(
            f"`{root}` has no `{LATEST}`, and no tag was named; {what}",
            "name a tag, or use `--resume auto`" if found else "check the path",
        ) from None
    except OSError as error:
        raise Damaged(f"`{path}` can't be read: {error.strerror}", "name a tag, or use `--resume auto`") from None
    if not folder_of(root, tag).is_dir():
        raise Damaged(f"`{path}` names `{tag}`, and `{root / tag}` is not there", "name a tag, or use `--resume auto`")
    return tag
