"""The one error type that users see, and the did-you-mean that goes with it."""

from __future__ import annotations

from collections.abc import Iterable


class ZplanError(Exception):
    """A user's mistake or a machine's limit: one sentence with the numbers, then the way out.

    Parameters
    ----------
    message
        What went wrong, with the numbers, without a full stop.
    hint
        The way out. Printed on its own line.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.hint)


CLEAR = 0.85
"""Likeness from which on a word is a misspelling of another and of no third."""


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str | None:
    """`did you mean X?` for the nearest known word, or None when nothing is near.

    Where none is clearly meant, the `most` nearest are named.
    """
    import difflib

    words = list(known)
    clear = difflib.get_close_matches(word, words, n=1, cutoff=CLEAR)
    near = [f"`{x}`" for x in clear or difflib.get_close_matches(word, words, n=most, cutoff=0.6)]
    if not near:
        return None
    return f"did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if near[1:] else near)}?"
