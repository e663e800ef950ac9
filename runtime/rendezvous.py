"""Ranks agree through the store, never through a collective: a save may run beside training.

The store is polled with short questions. A blocking wait would hold the connection that other threads use.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import torch.distributed as dist

from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_format import Damaged

_instances = itertools.count()
"""Made in the same order on all ranks, so keys of two of them never meet."""


class Rendezvous:
    """All ranks tell each other one text at a time, in step. One thread per rank at a time.

    Parameters
    ----------
    timeout_s
        How long to wait for a rank that does not speak: as long as the slowest write may take.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_s: float = 1800.0) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.sequence = 0
        self.prefix = f"zplan/meet/{next(_instances)}"

    def exchange(self, text: str) -> list[str]:
        """What every rank says at this point, in rank order. Returns on every rank only after all have spoken."""
        if self.world_size == 1:
            return [text]
        store = dist.distributed_c10d._get_default_store()
        self.sequence += 1
        store.set(self._key(self.sequence, self.rank), text)
        if self.rank == 0:
            keys = [self._key(self.sequence, r) for r in range(self.world_size)]
            self._await(store, keys)
            said = [store.get(k).decode() for k in keys]
            store.set(self._key(self.sequence, "all"), json.dumps(said))
            # Everybody who has spoken now has read the answer before.
            self._forget(store, "all")
        else:
            self._await(store, [self._key(self.sequence, "all")])
            said = json.loads(store.get(self._key(self.sequence, "all")))
        self._forget(store, self.rank)
        return said

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """Before this process ends: rank 0, whose process may hold the store, goes when all have read what was said."""
        if self.world_size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        if self.rank:
            store.set(f"{self.prefix}/left/{self.rank}", "")
            return
        end = time.monotonic() + timeout_s
        while not store.check([f"{self.prefix}/left/{r}" for r in range(1, self.world_size)]):
            if time.monotonic() > end:
                return  # they failed, or never saved; what was committed stays
            time.sleep(0.01)

    def all_say(self, act: Callable[[], str]) -> list[str]:
        """Run `act` on every rank and return what each made of it; where one failed, all raise."""
        try:
            mine = {"text": act()}
        except ZplanError as error:
            mine = {"error": error.message, "hint": error.hint or "", "kind": type(error).__name__}
        except Exception as error:
            mine = {"error": repr(error), "hint": "", "kind": "ZplanError"}
        said = [json.loads(x) for x in self.exchange(json.dumps(mine))]
        for rank, s in enumerate(said):
            if "error" in s:
                kind = Damaged if s["kind"] == "Damaged" else ZplanError
                where = f"rank {rank}: " if len(said) > 1 and rank else ""
                raise kind(where + s["error"], s["hint"] or None)
        return [s["text"] for s in said]

    def _key(self, sequence: int, who: int | str) -> str:
        return f"{self.prefix}/{sequence}/{who}"

    def _forget(self, store: dist.Store, who: int | str) -> None:
        if self.sequence > 1:
            store.delete_key(self._key(self.sequence - 1, who))

    def _await(self, store: dist.Store, keys: list[str]) -> None:
        end, pause = time.monotonic() + self.timeout_s, 0.0002
        while not store.check(keys):
            if time.monotonic() > end:
                silent = [k.rsplit("/", 1)[1] for k in keys if not store.check([k])]
                raise ZplanError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for {', '.join(f'rank {s}' for s in silent)}",
                    "look at those ranks: a rank that is gone or hangs in I/O stops all others",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
