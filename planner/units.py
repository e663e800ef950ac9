"""Counts and bytes as people write them: the only code that parses or prints them.

`7e9`, `7B`, `1.3b` and `7_000_000_000` are counts; `24` (GiB), `24GB`, `24 GiB` and `512MiB` are bytes. Arithmetic is
exact: floats appear only where a number is rounded for show.
"""

from __future__ import annotations

import re

from zplan.planner.errors import ZplanError

GIB = 2**30
MIB = 2**20

_COUNTS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
"""Powers of ten."""

_BYTES = {
    "": GIB,
    "b": 1,
    **{p: 2 ** (10 * i) for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 2 ** (10 * i) for i, p in enumerate("kmgt", 1)},
    **{f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)},
}
"""A bare letter is binary, as in the tools that print `24G` for a card."""

_NUMBER = re.compile(r"\s*(\d[\d_,]{0,99})?(?:\.(\d{1,99}))?(?:[eE]([+-]?\d{1,3}))?\s*([A-Za-z]*)\s*")

MAX_COUNT = 10**15
MAX_BYTES = 2**50


def _refuse(value: object, name: str, example: str) -> ZplanError:
    if len(str(value)) > 60:
        value = f"{str(value)[:60]}..."
    if isinstance(value, str) and value.strip().startswith("-"):
        return ZplanError(f"`{name} {value}` is negative", f"write a positive number, such as {example}")
    return ZplanError(f"`{name} {value}` is not a size that zplan can read", f"write it as {example}")


def _split(value: int | float | str, name: str, example: str) -> tuple[int, int, str]:
    """`(digits, exponent, suffix)`: the number is `digits * 10**exponent`, exactly."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _refuse(value, name, example)
    text = value if isinstance(value, str) else repr(value)
    match = _NUMBER.fullmatch(text)
    if not match or not (match[1] or match[2]):
        raise _refuse(value, name, example)
    whole, fraction, exponent, suffix = match[1] or "0", match[2] or "", match[3] or "0", match[4].lower()
    return int(whole.replace("_", "").replace(",", "") + fraction), int(exponent) - len(fraction), suffix


def _scaled(digits: int, exponent: int, factor: int) -> tuple[int, int]:
    """`digits * 10**exponent * factor` as quotient and rest."""
    if exponent >= 0:
        return digits * 10**exponent * factor, 0
    scale: int = 10 ** (-exponent)
    return divmod(digits * factor, scale)


def parse_count(value: int | float | str, name: str = "--params") -> int:
    """A positive whole count.

    Parameters
    ----------
    value
        `7e9`, `7B`, `350M`, `7_000_000_000`, or a number.
    name
        The option it was given to, for the error.

    Examples
    --------
    >>> parse_count("1.3b"), parse_count("7e9"), parse_count("350M")
    (1300000000, 7000000000, 350000000)
    """
    digits, exponent, suffix = _split(value, name, "7e9, 7B or 350M")
    if suffix not in _COUNTS:
        raise _refuse(value, name, "7e9, 7B or 350M")
    count, rest = _scaled(digits, exponent + _COUNTS[suffix], 1)
    if rest:
        raise ZplanError(f"`{name} {value}` is not a whole number", "write a whole number, such as 7e9, 7B or 350M")
    return _in_range(count, MAX_COUNT, value, name, "write a positive number, such as 7e9, 7B or 350M")


def parse_bytes(value: int | float | str, name: str = "--mem") -> int:
    """A positive number of bytes; parts of a byte are dropped. A bare number is GiB.

    Examples
    --------
    >>> parse_bytes("24") == parse_bytes("24 GiB") == 24 * 2**30, parse_bytes("24GB"), parse_bytes("512MiB")
    (True, 24000000000, 536870912)
    """
    example = "24 (GiB), 24GB or 512MiB"
    digits, exponent, suffix = _split(value, name, example)
    if suffix not in _BYTES:
        raise _refuse(value, name, example)
    nbytes, _ = _scaled(digits, exponent, _BYTES[suffix])
    return _in_range(nbytes, MAX_BYTES, value, name, f"write it as {example}; a bare number is GiB")


def _in_range(number: int, most: int, value: object, name: str, hint: str) -> int:
    if number <= 0:
        raise ZplanError(f"`{name} {value}` is zero", hint)
    if number > most:
        raise ZplanError(f"`{name} {value}` is beyond anything zplan plans for", hint)
    return number


def format_count(count: int) -> str:
    """A count in full, or short where that is exact; `parse_count` reads it back.

    Examples
    --------
    >>> format_count(7_000_000_000), format_count(1_300_000_000), format_count(6_738_415_616)
    ('7B', '1.3B', '6,738,415,616')
    """
    for letter, power in (("T", 12), ("B", 9), ("M", 6)):
        hundredths, rest = divmod(count * 100, 10**power)
        if count >= 10**power and not rest:
            return f"{hundredths // 100}.{hundredths % 100:02d}".rstrip("0").rstrip(".") + letter
    return f"{count:,}"


def format_bytes(nbytes: int) -> str:
    """Bytes in the largest binary unit in which they are whole; `parse_bytes` reads them back.

    Examples
    --------
    >>> format_bytes(24 * 2**30), format_bytes(24_000_000_000), format_bytes(1040)
    ('24 GiB', '23437500 KiB', '1040 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def format_gib(nbytes: int) -> str:
    """GiB with two decimals, for columns.

    Examples
    --------
    >>> format_gib(24_000_000_000), format_gib(-2**29)
    ('22.35', '-0.50')
    """
    return f"{nbytes / GIB:.2f}"


def format_gb(nbytes: int) -> str:
    """GB (10**9) with one decimal, or two where the second is not zero: as textbooks print them.

    Examples
    --------
    >>> format_gb(112_000_000_000), format_gb(38_500_000_000), format_gb(26_250_000_000)
    ('112.0', '38.5', '26.25')
    """
    text = f"{nbytes / 10**9:.2f}"
    return text[:-1] if text.endswith("0") else text


def format_si(nbytes: int) -> str:
    """Bytes in GB, MB or KB (powers of 1000), as buckets of so many elements are spoken of.

    Examples
    --------
    >>> format_si(1_000_000_000), format_si(19_600_000_000), format_si(400_000), format_si(2_500_000)
    ('1.0 GB', '19.6 GB', '400 KB', '2.5 MB')
    """
    if nbytes >= 10**9:
        return f"{format_gb(nbytes)} GB"
    unit, size = ("MB", 10**6) if nbytes >= 10**6 else ("KB", 10**3)
    return f"{nbytes / size:.3g} {unit}"


def format_small(nbytes: int) -> str:
    """Bytes rounded for reading: GiB or MiB with two decimals, KiB or B below.

    Examples
    --------
    >>> format_small(3 * 2**30), format_small(5 * 2**20), format_small(700)
    ('3.00 GiB', '5.00 MiB', '700 B')
    """
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def format_percent(part: int, whole: int) -> str:
    """A share with one decimal, or two below one per cent.

    Examples
    --------
    >>> format_percent(1, 3), format_percent(1, 700)
    ('33.3 %', '0.14 %')
    """
    share = 100 * part / whole
    return f"{share:.2f} %" if abs(share) < 1 else f"{share:.1f} %"
