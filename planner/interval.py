"""How far a total may be off, and how much of a card is to stay free beyond that.

[Note: intervals] Every line says where its number comes from, and with it how far it may be off. What zplan allocates
and what follows from torch's ops is exact. What was measured on a machine may differ on another one of the same kind by
`SPREAD_PERCENT` of it. An estimate carries bounds of its own, with the reason in its note. The bounds of a total are
those of the phase that holds most with every line at its least, and with every line at its most. A choice fits when the
upper end does.
"""

from __future__ import annotations

from typing import NamedTuple

from zplan.planner.errors import ZplanError
from zplan.planner.units import format_bytes, format_gib, parse_bytes

WHOLE = 10_000
"""Hundredths of a per cent in one."""


class Margin(NamedTuple):
    """What stays free beyond the interval."""

    share: int = 0
    """Of the card, in hundredths of a per cent."""
    nbytes: int = 0

    def of(self, capacity_bytes: int) -> int:
        """Bytes of a card of this size."""
        return self.nbytes + capacity_bytes * self.share // WHOLE

    def told(self) -> str:
        """As it was asked for: `15%`, `2 GiB`."""
        return f"{self.share / 100:g}%" if self.share else format_bytes(self.nbytes)


def parse_margin(value: int | float | str) -> Margin:
    """A share of the card or a size.

    Examples
    --------
    >>> parse_margin("15%"), parse_margin("2GiB"), parse_margin("0")
    (Margin(share=1500, nbytes=0), Margin(share=0, nbytes=2147483648), Margin(share=0, nbytes=0))
    """
    text = str(value).strip()
    if text in ("0", "0.0", "0%"):
        return Margin()
    if not text.endswith("%"):
        return Margin(nbytes=parse_bytes(value, "--margin"))
    try:
        share = round(float(text[:-1]) * 100)
    except (ValueError, OverflowError):
        raise ZplanError(
            f"`--margin {value}` is no share that zplan can read", "write it as 15%, or as a size"
        ) from None
    if not 0 <= share < WHOLE:
        raise ZplanError(f"`--margin {value}` leaves nothing of the card", "write a share below 100%, such as 15%")
    return Margin(share=share)


def told_range(low: int, high: int) -> str:
    """Both ends in GiB: `16.71 to 18.20`; one number where they are the same.

    Examples
    --------
    >>> told_range(2**30, 2**30 + 2**29), told_range(2**30, 2**30)
    ('1.00 to 1.50', '1.00')
    """
    return format_gib(low) if low == high else f"{format_gib(low)} to {format_gib(high)}"


def told_spread(low: int, nominal: int, high: int) -> str:
    """How far the ends are from the number between them: `-3.1 % +5.4 %`, or `exact`.

    Examples
    --------
    >>> told_spread(97, 100, 105), told_spread(5, 5, 5)
    ('-3.0 % +5.0 %', 'exact')
    """
    if low == high:
        return "exact"
    return f"-{100 * (nominal - low) / nominal:.1f} % +{100 * (high - nominal) / nominal:.1f} %"
