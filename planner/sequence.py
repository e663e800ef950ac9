"""How long a sequence of a model may be, and how long it is where nobody says.

A sequence of a vision model is one image: its patches and a class token, always equally many.
"""

from __future__ import annotations

from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture

POSITION_TABLES = ("gpt2", "opt", "bert", "gptj", "chatglm")
"""Families that cannot run a longer sequence than they have positions for. ChatGLM has as many angles in a table."""
IMAGES = ("vit",)
"""Families whose sequence is an image."""
NO_LIMIT = 2**20
"""Tokens up to which is searched, where a model may go beyond its limit and of assumed shapes, which have none."""
DEFAULT_SEQ = 2048
SEQ_STEP = 128


def default_seq(arch: Architecture) -> int:
    """Tokens where none are asked for: an image's own, else `DEFAULT_SEQ` or the most that the model is made for."""
    return arch.max_seq if arch.family in IMAGES else min(DEFAULT_SEQ, made_for(arch), arch.window or NO_LIMIT)


def check_seq(arch: Architecture, name: str, seq: int) -> None:
    """Refuse a sequence that a model cannot run.

    Parameters
    ----------
    name
        Of the model.
    seq
        Tokens that were asked for.
    """
    if arch.family in IMAGES and seq != arch.max_seq:
        raise ZplanError(
            f"`--seq {seq}`: a sequence of `{name}` is an image, {arch.max_seq} tokens always", "leave --seq out"
        )
    if arch.window and seq > arch.window:
        raise ZplanError(
            f"`--seq {seq}` is beyond the sliding window of `{name}`, {arch.window} tokens, "
            "and windowed attention is not built yet",
            f"use --seq {arch.window} or less",
        )
    if arch.family in POSITION_TABLES and seq > arch.max_seq:
        raise ZplanError(
            f"`--seq {seq}` is beyond the position table of `{name}`, {arch.max_seq} tokens",
            f"use --seq {arch.max_seq} or less",
        )


def made_for(arch: Architecture) -> int:
    """Tokens of a sequence that a model is made for.

    A config that scales positions linearly may give the limit before that or after it: the larger is taken.
    """
    scaling = dict(arch.rope_scaling)
    factor = float(scaling["factor"]) if scaling.get("rope_type") == "linear" else 1.0
    return int(arch.max_seq * max(1.0, factor))


def check_limit(arch: Architecture, name: str, seq: int) -> None:
    """Refuse a sequence that a model can run but was not made for."""
    limit = made_for(arch)
    if seq > limit:
        raise ZplanError(
            f"`--seq {seq}` is more than `{name}` is made for, {limit} tokens",
            f"use --seq {limit} or less, or --beyond-limit to count it all the same",
        )


def ended_by(arch: Architecture, longest: int, *, assumed: bool) -> str:
    """What a longest sequence that fits was ended by."""
    if assumed:
        return f"in steps of {SEQ_STEP}; an assumed shape has no limit of its own"
    if longest == NO_LIMIT != made_for(arch):
        return "longer ones are not looked at"
    limited = longest in (made_for(arch), arch.window) or longest % SEQ_STEP
    return "the model's limit" if limited else f"in steps of {SEQ_STEP}"
