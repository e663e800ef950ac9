"""Side streams and events on CUDA; on the CPU the same calls do nothing, since everything runs in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Streams:
    """One stream for gathers and one for reduces, beside whichever stream computes.

    Buffers that cross streams are never freed by garbage collection: their owner makes the computing stream wait
    first, so no `record_stream` is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.gather = torch.cuda.Stream(device) if self.on_cuda else None
        self.reduce = torch.cuda.Stream(device) if self.on_cuda else None

    def mark(self) -> torch.cuda.Event | None:
        """Event on the current stream, or None on the CPU."""
        if not self.on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event of another one."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
