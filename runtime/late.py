"""A number that the device decides and the host reads later, without either waiting for the other.

[Note: late reads] The number is copied to pinned memory behind the step that made it, and read before the next step is
put in the queue: by then a whole forward and backward are queued behind it, so the host learns of it without leaving
the device idle.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LateRead:
    """One 0-dim fp32 tensor, as it was when `copy` was called last; 0 before."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.value = source, 0.0
        self.pinned: Tensor | None = None  # on the host: no line of the ledger
        if source.is_cuda:
            self.pinned, self.copied = torch.zeros((), dtype=torch.float32, pin_memory=True), torch.cuda.Event()

    def copy(self) -> None:
        """Have the number of this moment brought over, behind what is queued on the current stream."""
        if self.pinned is None:
            self.value = self.source.item()
        else:
            self.pinned.copy_(self.source.detach(), non_blocking=True)
            self.copied.record()

    def read(self) -> float:
        """The number; waits until the copy has arrived."""
        if self.pinned is None:
            return self.value
        self.copied.synchronize()
        return self.pinned.item()
