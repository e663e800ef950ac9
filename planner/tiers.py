"""The memories beside a card: what the ranks of a node take of the host and of NVMe, and whether there is that much.

A node's ranks share its host memory, pinned or not, and its disks. What one rank may take is an equal share of what
`--host-mem` and `--nvme` say a node has; left out, nothing is checked, and the need is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zplan.planner.folding import Vectors
    from zplan.planner.hardware import Hardware


@dataclass(frozen=True)
class OffDevice:
    """What one rank takes at most beside its card, and its share of what a node has."""

    host_bytes: int = 0
    nvme_bytes: int = 0
    host_limit: int | None = None
    nvme_limit: int | None = None

    @classmethod
    def of(cls, vectors: Vectors, hardware: Hardware, world_size: int) -> OffDevice:
        """From live bytes by phase, with every line at its most."""
        ranks = min(world_size, hardware.gpus_per_node)
        host, nvme = (None if n is None else n // ranks for n in (hardware.host_mem_bytes, hardware.nvme_bytes))
        return cls(max(vectors.get("host", [0])), max(vectors.get("nvme", [0])), host, nvme)

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
