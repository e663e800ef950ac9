"""What `deterministic` asks of a choice, and what torch's deterministic algorithms hold beyond their usual ones."""

from __future__ import annotations

from collections.abc import Mapping

from zplan.planner.aten_devices import BF16, FP32, tile_of
from zplan.planner.buffers import in_rank_order
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.layout import ceil_to
from zplan.planner.ledger import Line
from zplan.planner.models import Architecture

MULTIPROCESSORS, MOST_MULTIPROCESSORS = 132, 192
"""Of an H100 or H200, and more than any card has."""


def check_deterministic(choice: Choice) -> None:
    """Refuse a reduce whose order is not ours, and updates that only a norm of the whole lets ranks skip alike."""
    if in_rank_order(choice) and choice.stage == 0 and choice.optimizer_in_backward:
        raise ZplanError(
            "`deterministic` and `optimizer_in_backward` exclude each other at stage 0: ranks look at their own slices "
            "alone, and would skip a step that is not finite one by one",
            "drop one of the two, or use stage 1, 2 or 3",
        )
    if in_rank_order(choice) and choice.reduce == "scatter":
        raise ZplanError(
            '`deterministic` and "reduce": "scatter" exclude each other: the order of its sums is the library\'s',
            'leave `reduce` out, or write "exchange"',
        )


def split_lines(arch: Architecture, choice: Choice, at: Mapping[str, int]) -> tuple[Line, ...]:
    """Further copies of the fp32 gradient of the queries, each of which is added to in one order.

    The backward of flash attention keeps `ceil(multiprocessors / (B H))` of them (torch's `flash_attn/flash_api.cpp`).
    Counted for 132 multiprocessors, in every block's backward; where that holds its most at another op it is less.

    Parameters
    ----------
    at
        Index of each phase.
    """
    flash = choice.device == "cuda" and choice.attention == "sdpa" and choice.itemsize == BF16 and not choice.padded
    if not flash:
        return ()
    heads = choice.micro_batch * arch.heads
    one = heads * ceil_to(choice.seq, 128) * tile_of(arch.head_dim) * FP32
    more, most = (one * (-(-n // heads) - 1) for n in (MULTIPROCESSORS, MOST_MULTIPROCESSORS))
    spans = tuple((at[f"backward.blocks.{i}"],) * 2 for i in range(arch.layers))
    note = f"copies of the queries' gradient in deterministic attention on {MULTIPROCESSORS} multiprocessors"
    return (Line("act.kernel.attention.splits", more, spans, "activations", "device", "estimate", note, 0, most),)
