"""Side streams and events on CUDA; on the CPU the same calls do nothing, since everything runs in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch


class Streams:
    """One stream for gathers and one for reduces, beside whichever stream computes.

    Buffers that cross streams are never freed by garbage collection: their owner makes the computing stream wait
    first, so no `record_stream` is needed. Without `overlap` everything runs on the computing stream.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        self.on_cuda = device.type == "cuda"
        beside = self.on_cuda and overlap
        self.gather = torch.cuda.Stream(device) if beside else None
        self.reduce = torch.cuda.Stream(device) if beside else None
        self.watch: Callable[[Literal["exposed"]], AbstractContextManager[None]] | None = None
        """Times what compute waits for; None for nobody."""

    def mark(self) -> torch.cuda.Event | None:
        """Event on the current stream, or None on the CPU."""
        if not self.on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event of another one."""
        if event is None:
            return
        here = torch.cuda.current_stream()
        if self.watch is None or here in (self.gather, self.reduce):
            here.wait_event(event)
            return
        with self.watch("exposed"):
            here.wait_event(event)

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
