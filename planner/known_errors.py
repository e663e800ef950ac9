"""What common errors of training logs mean, where the message alone does not say it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """One error by the words of its message."""

    cause: str
    """A short name."""
    pattern: str
    """A regular expression over one line."""
    meaning: str
    way_out: str


KNOWN: tuple[KnownError, ...] = (
    KnownError(
        "mixed-dtype-group",
        r"same dtype|only support.{0,30}one dtype|must have the same dtype|uniform (original )?(parameter )?dtype",
        "parameters of one group have different dtypes, and flat buffers hold one dtype",
        "cast the model to one dtype before it is wrapped, or give each dtype an optimizer group of its own",
    ),
    KnownError(
        "loss-scale-at-minimum",
        r"loss scale already at minimum|overflowed at the minimum loss scale",
        "gradients are not finite at the smallest loss scale, so something else than the scale is wrong",
        "train in bf16, lower the learning rate, and look at the first non-finite parameter",
    ),
    KnownError(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting .{0,40}collective",
        "one rank waits for a collective that another never began: an expert without tokens at stage 3, ranks in "
        "different branches, or one that died",
        "name the expert blocks as leaf modules; look for the rank whose last sequence number is lowest",
    ),
    KnownError(
        "host-out-of-memory",
        r"exitcode\s*:\s*-9\b|exits with return code = -9\b|died with <Signals\.SIGKILL|oom-kill|Out of memory: Killed",
        "the kernel killed a process: the node's memory ran out, not the card's",
        "offload less, load the model shard by shard, or take a node with more memory",
    ),
    KnownError(
        "batch-triple",
        r"train_batch_size is not equal to micro_batch_per_gpu",
        "the three batch sizes and the number of ranks that DeepSpeed saw do not multiply",
        "leave one of the three out; where it saw 1 rank, start it with its launcher",
    ),
)


def known_errors(text: str) -> tuple[KnownError, ...]:
    """The errors that a log shows, each once, in the order of the table.

    Examples
    --------
    >>> [e.cause for e in known_errors("Current loss scale already at minimum - cannot decrease scale anymore.")]
    ['loss-scale-at-minimum']
    """
    return tuple(e for e in KNOWN if re.search(e.pattern, text, re.IGNORECASE))
