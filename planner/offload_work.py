"""What offloading moves and computes off the GPU, in one optimizer step of one rank.

Bytes are those of zplan's way of doing it: gradients go down in the reduce dtype as each reduce lands, the host updates
fp32 states, and 16-bit parameters come back up. With accumulation, gradients go down at every micro-step where they are
reduced at every micro-step (stages 2 and 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from zplan.planner.config import Choice
from zplan.planner.placement import shards_states
from zplan.planner.speeds import Speeds

HOST_STEP_BYTES = 28
"""Read and written by AdamW on the host for each element, as on the GPU."""
STATE_BYTES = 12
"""fp32 master weight and two moments of an element."""


@dataclass(frozen=True)
class OffloadWork:
    """Bytes of one rank and one optimizer step. False where nothing is offloaded.

    Attributes
    ----------
    down_bytes, up_bytes
        Over PCIe, to and from the host: gradients, and updated parameters other than those that come at every gather.
    fetch_bytes
        Over PCIe at every gather of one block: its 16-bit shard, where parameters are offloaded.
    input_bytes
        Of one checkpointed block's input, each way.
    host_bytes
        Read and written by the host's optimizer.
    share
        Of the elements.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    fetch_bytes: int = 0
    input_bytes: int = 0
    host_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    share: float = 0.0
    layers: int = 0

    def __bool__(self) -> bool:
        return bool(self.share or self.input_bytes)

    def seconds_a_gather(self, at: Speeds) -> float:
        """Until a block's shard has come up."""
        return self.fetch_bytes / at.pcie


def offload_work(  # noqa: PLR0913 - sizes of the model
    choice: Choice, numel: float, block: float, *, layers: int, hidden: int, guests: float = 0.0
) -> OffloadWork:
    """Traffic and host work of a choice.

    Parameters
    ----------
    numel, block
        Elements of the whole model and of one block, padding included.
    layers, hidden
        Of the model; they size the inputs of checkpointed blocks.
    guests
        Elements of other units that are gathered into the blocks' ring.
    """
    where, k = choice.offload, choice.accumulation
    inputs = 0
    if choice.checkpoint_offload and choice.checkpointing == "full":
        inputs = choice.micro_batch * choice.seq * hidden * choice.itemsize
    share = 0.0 if where.optimizer == "none" else where.ratio
    if not share:
        return OffloadWork(input_bytes=inputs, layers=layers)
    owned = round(numel / (choice.world_size if shards_states(choice) else 1) * share)
    times = k if choice.stage >= 2 else 1
    on_disk = owned if where.optimizer == "nvme" else 0
    fetched = 0 if where.params == "none" else round(block / choice.world_size * choice.itemsize)
    return OffloadWork(
        down_bytes=times * owned * choice.reduce_itemsize,
        up_bytes=round(owned * (1 - (layers * block + guests) / numel if fetched else 1)) * choice.itemsize,
        fetch_bytes=fetched,
        input_bytes=inputs,
        host_bytes=owned * (HOST_STEP_BYTES + choice.itemsize),
        disk_read_bytes=on_disk * STATE_BYTES,
        disk_written_bytes=on_disk * STATE_BYTES,
        share=share,
        layers=layers,
    )
