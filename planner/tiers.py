"""The memories beside a card: what the ranks of a node take of the host and of NVMe, and whether there is that much.

A node's ranks share its host memory, pinned or not, and its disks. What one rank may take is an equal share of what
`--host-mem` and `--nvme` say a node has; left out, nothing is checked, and the need is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from zplan.planner.ledger import Tier

if TYPE_CHECKING:
    from zplan.planner.activity import Activity
    from zplan.planner.folding import Vectors
    from zplan.planner.hardware import Hardware
    from zplan.planner.ledger import Ledger


class OffDevice(NamedTuple):
    """What one rank takes at most beside its card, and its share of what a node has."""

    host_bytes: int = 0
    nvme_bytes: int = 0
    host_limit: int | None = None
    nvme_limit: int | None = None
    ranks: int = 1
    """Of a node, which share what it has."""

    @classmethod
    def of(cls, vectors: Vectors, hardware: Hardware, world_size: int) -> OffDevice:
        """From live bytes by phase, with every line at its most."""
        ranks = min(world_size, hardware.gpus_per_node)
        host, nvme = (None if n is None else n // ranks for n in (hardware.host_mem_bytes, hardware.nvme_bytes))
        return cls(max(vectors.get("host", [0])), max(vectors.get("nvme", [0])), host, nvme, ranks)

    @property
    def host_over(self) -> int:
        """Bytes a rank beyond its share of host memory; 0 where it fits or nothing is known."""
        return 0 if self.host_limit is None else max(0, self.host_bytes - self.host_limit)

    @property
    def nvme_over(self) -> int:
        return 0 if self.nvme_limit is None else max(0, self.nvme_bytes - self.nvme_limit)

    @property
    def fits(self) -> bool:
        return not self.host_over and not self.nvme_over


Memory = Literal["device", "host", "pinned", "host and pinned", "nvme"]


class TierUse(NamedTuple):
    """What one memory holds at its fullest, over the step and all that `zplan run` does beside it."""

    tier: Memory
    nbytes: int
    """Of one rank."""
    high_bytes: int
    """The same with every line at its most."""
    per_node_bytes: int
    """Of the ranks of a node, at most."""
    limit_bytes: int | None
    """What there is: of the device on a card, of the others on a node. None where that is not known."""
    where: str
    """Activity and phase."""

    def figures(self) -> tuple[int, int, int, int | None, str]:
        """All but the name."""
        return self.nbytes, self.high_bytes, self.per_node_bytes, self.limit_bytes, self.where

    @property
    def over_bytes(self) -> int:
        """What is missing, of a card or of a node; 0 where it fits or nothing is known."""
        need = self.high_bytes if self.tier == "device" else self.per_node_bytes
        return 0 if self.limit_bytes is None else max(0, need - self.limit_bytes)


STEP = "step"
_MEMORIES: dict[Memory, tuple[Tier, ...]] = {
    "device": ("device",),
    "host": ("host",),
    "pinned": ("pinned",),
    "host and pinned": ("host", "pinned"),
    "nvme": ("nvme",),
}


def tier_uses(
    step: Ledger, others: Sequence[Activity], hardware: Hardware, world_size: int, margin_bytes: int
) -> tuple[TierUse, ...]:
    """One row for each memory that holds anything.

    Parameters
    ----------
    step
        Ledger of the training step.
    others
        Activities of every rank that a plain `zplan run` may come to.
    margin_bytes
        What stays free of a card.
    """
    ranks = min(world_size, hardware.gpus_per_node)
    limits: dict[Memory, int | None] = {
        "device": hardware.mem_bytes - margin_bytes,
        "host and pinned": hardware.host_mem_bytes,
        "nvme": hardware.nvme_bytes,
    }
    ledgers = [(STEP, step), *((a.name, a.ledger) for a in others)]
    found = []
    for memory, tiers in _MEMORIES.items():
        high, nbytes, where = max((_fullest(ledger, tiers, name) for name, ledger in ledgers), key=lambda x: x[0])
        if high or memory == "device":
            found.append(TierUse(memory, nbytes, high, high * ranks, limits.get(memory), where))
    rows = {use.tier: use for use in found}
    if "pinned" not in rows and "host" in rows:  # one row says it all
        whole = rows.pop("host and pinned")
        rows["host"] = TierUse("host", *whole.figures())
    return tuple(rows.values())


def _fullest(ledger: Ledger, tiers: Sequence[Tier], name: str) -> tuple[int, int, str]:
    """`(bytes at most, bytes, activity and phase)` of the phase that holds most."""
    at_most = [sum(column) for column in zip(*(ledger.at_most(t) for t in tiers), strict=True)]
    nominal = [sum(column) for column in zip(*(ledger.per_phase(t) for t in tiers), strict=True)]
    at = at_most.index(max(at_most))
    return at_most[at], max(nominal), f"{name}: {ledger.phases[at]}"
