"""Which phase of the ledger a step is in, and who follows it."""

from __future__ import annotations

from collections.abc import Callable

PhaseListener = Callable[[str], None]

LISTENERS: list[PhaseListener] = []
"""Who follows the phases of engines that are yet to come; the last one counts."""


class Phases:
    """The phases of one engine, by the ledger's names; `listener` is called as each begins."""

    def __init__(self) -> None:
        self.listener = LISTENERS[-1] if LISTENERS else None

    def begin(self, name: str) -> None:
        if self.listener is not None:
            self.listener(name)
