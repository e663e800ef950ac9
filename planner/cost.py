"""What a whole training takes: steps, hours, GPU-hours and money, from the time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from zplan.planner.errors import ZplanError

if TYPE_CHECKING:
    from zplan.planner.step_time import StepTime

HOUR = 3600.0


@dataclass(frozen=True)
class Goal:
    """How much is to be trained, and what a GPU costs."""

    tokens: int | None = None
    epochs: int | None = None
    examples: int | None = None
    """Sequences of an epoch, each of the plan's full length."""
    price: float | None = None
    """Of one GPU for one hour, in any currency."""

    def __post_init__(self) -> None:
        counted = self.epochs is not None or self.examples is not None
        if self.tokens is not None and counted:
            raise ZplanError("--tokens and --epochs with --examples say the same", "give one of the two")
        if counted and (self.epochs is None or self.examples is None):
            there, other = ("--epochs", "--examples") if self.examples is None else ("--examples", "--epochs")
            raise ZplanError(f"{there} is given without {other}", f"add {other}, or give --tokens")
        if self.price is not None and self.tokens is None and not counted:
            raise ZplanError(
                "--price is given, but not how much is trained", "add --tokens, or --epochs and --examples"
            )

    @property
    def asked(self) -> bool:
        return self.tokens is not None or self.epochs is not None

    def num_tokens(self, seq: int) -> int | None:
        """Tokens to train on at sequences of this length; None where nothing was asked."""
        if self.tokens is not None:
            return self.tokens
        return self.epochs * self.examples * seq if self.epochs and self.examples else None


class Cost(NamedTuple):
    """Of a whole training. The last step may be partly empty, and is paid for."""

    steps: int
    hours: float
    gpu_hours: float
    price: float | None

    def told(self) -> str:
        """In words: `66.4 hours, 531 GPU hours, cost 1,328`."""
        price = "" if self.price is None else f", cost {self.price:,.0f}"
        return f"{self.hours:,.1f} hours, {self.gpu_hours:,.0f} GPU hours{price}"


def cost(goal: Goal, time: StepTime, *, seq: int, world_size: int) -> Cost | None:
    """Cost of a goal; None where none was asked.

    Examples
    --------
    >>> from zplan.planner.step_time import StepTime
    >>> t = StepTime(3.6, 0, 0, 0, 0, 0, 0, "", 10_000, 0.4)
    >>> cost(Goal(tokens=10**7, price=2.5), t, seq=1000, world_size=8)
    Cost(steps=1000, hours=1.0, gpu_hours=8.0, price=20.0)
    """
    tokens = goal.num_tokens(seq)
    if tokens is None:
        return None
    steps = -(-tokens // time.tokens)
    hours = steps * time.total / HOUR
    price = None if goal.price is None else hours * world_size * goal.price
    return Cost(steps, hours, hours * world_size, price)
