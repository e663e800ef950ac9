"""Finds ranks that run different collectives, and says what each rank did last when one waits for long.

[Note: watching] Training only appends a pair to a queue at each collective. A thread of each rank wakes every few
seconds, counts and hashes what came, and puts count and hashes into the store; rank 0's compares them. Where hashes at
one count differ, every rank tells its last collectives and the first difference becomes an error on all ranks, whether
they wait or, since sizes happened to agree, went on with wrong values. Where they agree and a rank is only behind, it
may be busy with something of its own: that is told on stderr, and is an error after `PATIENCE_S`.

A rank that waits in gloo does so in short stretches, between which it looks for an error. In NCCL it is the device that
waits, so its communicators are aborted, which ends its waits; a rank that waits on for another reason, in a barrier of
shared memory say, is ended by the thread `GRACE_S` later. gloo ends the process where sizes differ, so on the CPU
ranks shake hands before each collective (`collectives.py`), and the thread is left with ranks that stay away.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zplan.planner.errors import ZplanError
from zplan.runtime.mesh import Mesh

INTERVAL_S = 3.0
"""Between two looks of a rank's thread. A difference is an error on all ranks four looks later."""
GRACE_S = 5.0
"""For training to notice that error, before the thread ends a rank on a GPU."""
DUMP_S = 20.0
"""Without a collective, before what each rank did last is told."""
PATIENCE_S = 600.0
"""Behind the others, before that is an error."""

LAST_WORDS: list[Callable[[ZplanError], None]] = []
"""Who is told why, before the thread ends this process."""

STRIDE, MARKS = 16, 64
"""A hash is kept at every so many collectives, and so many hashes are."""


class Watchdog:
    """One rank's side. See [Note: watching].

    Parameters
    ----------
    instance
        Number of the engine in this process, which all ranks make in the same order.
    """

    def __init__(self, mesh: Mesh, instance: int) -> None:
        self.mesh, self.prefix = mesh, f"zplan/watch/{instance}"
        self.queue: deque[tuple[str, str]] = deque()
        self.verdict: ZplanError | None = None
        self.count, self.hash = 0, 0
        self.marks: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self.recent: deque[tuple[int, str]] = deque(maxlen=STRIDE * MARKS)
        self.moved, self.told = time.monotonic(), 0
        self.stopped, self.noticed = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        if mesh.world_size > 1 and dist.get_backend() != "fake":
            self.store = dist.distributed_c10d._get_default_store()
            self.thread = threading.Thread(target=self._watch, name="zplan watchdog", daemon=True)
            self.thread.start()

    # --- training's side ---------------------------------------------------------------------------------------------

    def note(self, kind: str, unit: str) -> None:
        """A collective is about to be issued."""
        self._raise_verdict()
        if self.thread is not None:
            self.queue.append((kind, unit))

    def wait(self, work: Any) -> None:
        """Wait for a collective of gloo, unless ranks turn out to have run apart."""
        while True:
            try:
                work.wait(timedelta(seconds=INTERVAL_S))
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error) or work.is_completed():
                    raise
            self._raise_verdict()

    def _raise_verdict(self) -> None:
        if self.verdict is not None:
            self.noticed.set()
            raise self.verdict

    def stop(self) -> None:
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(timeout=1.0)

    # --- the thread's ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        # A mesh that closes without a word to `stop` is that of an engine that was not made in the end.
        while not (self.stopped.wait(INTERVAL_S) or self.mesh.closed):
            try:
                self._look()
            except RuntimeError:  # the store has gone, with the job
                return
            if self.verdict is not None:
                self._free()
                self._insist()
                return

    def _look(self) -> None:
        self._take_in()
        if self.store.check([f"{self.prefix}/verdict"]):
            said = json.loads(self.store.get(f"{self.prefix}/verdict"))
            self.verdict = ZplanError(said["message"], said["hint"])
            return
        quiet = time.monotonic() - self.moved
        asked = self.store.check([f"{self.prefix}/tell"])
        post = {
            "count": self.count,
            "quiet": quiet,
            "last": self.recent[-1][1] if self.recent else "none",
            "marks": list(self.marks),
            "recent": list(self.recent) if asked or quiet >= DUMP_S / 2 else [],
        }
        self.store.set(f"{self.prefix}/{self.mesh.rank}", json.dumps(post))
        if self.mesh.rank == 0:
            keys = [f"{self.prefix}/{r}" for r in range(self.mesh.world_size)]
            if self.store.check(keys):
                self._compare([json.loads(self.store.get(k)) for k in keys])

    def _take_in(self) -> None:
        while self.queue:
            kind, unit = self.queue.popleft()
            text = f"{kind} of {unit}"
            self.count, self.hash = self.count + 1, zlib.crc32(text.encode(), self.hash)
            self.recent.append((self.count, text))
            if self.count % STRIDE == 0:
                self.marks.append((self.count, self.hash))
            self.moved = time.monotonic()

    def _compare(self, posts: list[dict[str, Any]]) -> None:
        """Rank 0: look for a difference, then for ranks that wait."""
        if any(differ(posts[0]["marks"], p["marks"]) is not None for p in posts):
            self.store.set(f"{self.prefix}/tell", "1")
        if all(p["recent"] for p in posts):
            at = min((n for p in posts if (n := differ(posts[0]["recent"], p["recent"])) is not None), default=None)
            if at is not None:
                said = [dict(map(tuple, p["recent"])).get(at, "nothing") for p in posts]
                self._judge(f"ranks run different collectives: number {at} is {_by_rank(said)}")
                return
        behind = min(p["count"] for p in posts) < max(p["count"] for p in posts)
        quiet = min(p["quiet"] for p in posts)
        if not behind or quiet < DUMP_S:
            return
        told = "; ".join(
            f"rank {r}: number {p['count']}, {p['last']}, {p['quiet']:.0f} s ago" for r, p in enumerate(posts)
        )
        if quiet >= PATIENCE_S:
            self._judge(f"no rank has issued a collective for {quiet:.0f} s and some are behind: {told}")
        elif self.told != max(p["count"] for p in posts):
            self.told = max(p["count"] for p in posts)
            sys.stderr.write(f"zplan: ranks wait for one another. Last collectives: {told}\n")

    def _judge(self, message: str) -> None:
        hint = (
            "every rank must run the same modules in the same order, and as often; `ZPLAN_CHECK=1` stops where it began"
        )
        self.store.set(f"{self.prefix}/verdict", json.dumps({"message": message, "hint": hint}))
        self.verdict = ZplanError(message, hint)

    def _free(self) -> None:
        """End waits of the device: NCCL's communicators are aborted, and the next call raises the verdict.

        An abort itself waits where the device is in a barrier of shared memory, so each has a thread of its own, which
        is waited for no longer than `GRACE_S`.
        """
        assert self.verdict is not None
        groups = [g for g in {self.mesh.gathers, self.mesh.reduces} if g is not None and dist.get_backend(g) == "nccl"]
        if groups:
            sys.stderr.write(f"zplan: error: {self.verdict.message}\n")
        aborts = [threading.Thread(target=g._get_backend(self.mesh.device).abort, daemon=True) for g in groups]
        for abort in aborts:
            abort.start()
        end = time.monotonic() + GRACE_S
        for abort in aborts:
            abort.join(max(0.0, end - time.monotonic()))

    def _insist(self) -> None:
        """End this process where training has not noticed the verdict: its device waits for what never comes."""
        if self.mesh.device.type != "cuda" or self.noticed.wait(GRACE_S) or self.stopped.is_set():
            return
        assert self.verdict is not None
        for tell in LAST_WORDS:
            tell(self.verdict)
        os._exit(1)


def differ(a: list[Any], b: list[Any]) -> int | None:
    """The first count at which two lists of `(count, what)` say different things of the same count."""
    mine = dict(map(tuple, a))
    return next((n for n, what in map(tuple, b) if mine.get(n, what) != what), None)


def _by_rank(said: list[str]) -> str:
    """`all_gather of a on ranks 0, 2 and all_gather of b on rank 1`."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(said):
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"{text} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for text, r in ranks.items())
