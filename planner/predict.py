"""From a model and a choice to the ledger of one rank: the place where all line families meet."""

from __future__ import annotations

from zplan.planner.activations import activation_lines
from zplan.planner.buffers import buffer_lines
from zplan.planner.config import Choice
from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.models import ModelSpec
from zplan.planner.placement import place
from zplan.planner.saving import saving_lines
from zplan.planner.states import state_lines
from zplan.planner.timeline import Timeline, timeline


def predict(spec: ModelSpec, choice: Choice, *, overheads: tuple[Line, ...] = (), rank: int | None = 0) -> Ledger:
    """Ledger of one rank over one training step in steady state.

    Parameters
    ----------
    spec
        A model whose architecture is known; activations follow `runtime/decoder.py`.
    choice
        Stage, ranks, batch, precision.
    overheads
        Further lines over the same phases, such as those of `hardware.overhead_lines`.
    rank
        Whose, where ranks differ: DeepSpeed's stages 1 and 2. None is the one that holds most.

    Returns
    -------
    Ledger
        Bytes are exact where a line's source is `allocated` or `derived`. Of another runtime than zplan's: its own.
    """
    if choice.runtime != "zplan":
        from zplan.planner.peer import peer_ledger

        return peer_ledger(spec, choice, overheads=overheads, rank=rank)
    time = timeline(spec.units)
    return merge(time.phases, shard_lines(spec, choice, time), batch_lines(spec, choice, time), overheads)


def shard_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """Lines that depend on stage, ranks and buffers, and not on the batch: [Note: parts] in `planner/folding.py`."""
    placements = place(spec, choice)
    lines = [
        *state_lines(placements, choice, time),
        *buffer_lines(placements, choice, time),
        *saving_lines(placements, choice, time),
    ]
    if choice.offload.optimizer == "none":
        return lines
    from zplan.planner.offload import move_lines

    return move_lines(lines, placements, choice, time)


def batch_lines(spec: ModelSpec, choice: Choice, time: Timeline) -> list[Line]:
    """Lines that depend on batch, sequence and checkpointing, and not on stage or ranks."""
    return list(activation_lines(spec, choice, time.phases))
