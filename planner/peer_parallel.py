"""A model as one rank of tensor, pipeline and context parallelism holds it, for DeepSpeed and FSDP2.

[Note: parallel] What a rank then holds is told from its own, smaller model, and marked an estimate:

- tensor ranks share heads, key-value heads and feed-forward columns, and with FSDP2 the rows of embedding and head too
  (DeepSpeed's AutoTP, torch's `parallelize_module`); what lies between the matrices is whole on each of them;
- context ranks share the tokens of a sequence and, like data-parallel ranks, all states; attention exchanges its
  inputs and its output among them (DeepSpeed's Ulysses, torch's ring attention);
- pipeline stages share the blocks evenly; the first also has the embedding, the last the last norm, the head and the
  loss. In 1F1B the first stage holds as many micro-batches as there are stages. The stage that holds most counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zplan.planner.config import Choice
from zplan.planner.ledger import Line
from zplan.planner.models import ModelSpec, Unit, decoder_units
from zplan.planner.peer_sizes import line
from zplan.planner.timeline import Timeline

ENDS = ("norm", "head")
"""Kinds of units that only the last pipeline stage has."""


@dataclass(frozen=True)
class Share:
    """What one rank runs, over the phases of `spec`."""

    spec: ModelSpec
    choice: Choice
    """With the parallel sizes gone: they are in the model, the sequence and the ranks."""
    units: tuple[Unit, ...]
    """Those whose parameters it holds."""
    in_flight: int
    """Micro-batches whose activations are held at once."""
    last: bool
    """Whether it has the head and the loss."""


def is_parallel(choice: Choice) -> bool:
    return choice.num_gpus > choice.world_size


def shares(spec: ModelSpec, choice: Choice) -> list[Share]:
    """What ranks run that may hold most: all alike without a pipeline, else the first and the last stage."""
    tp, pp, cp = choice.tensor_parallel, choice.pipeline_parallel, choice.context_parallel
    own = replace(choice, seq=choice.seq // cp, world_size=choice.world_size * cp)
    own = replace(own, tensor_parallel=1, pipeline_parallel=1, context_parallel=1)
    if not is_parallel(choice):
        return [Share(spec, own, spec.units, 1, last=True)]
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    vocab = -(-arch.vocab // tp) if choice.runtime == "fsdp2" else arch.vocab
    small = replace(
        arch,
        heads=arch.heads // tp,
        kv_heads=arch.kv_heads // tp,
        ffn=arch.ffn // tp,
        vocab=vocab,
        layers=arch.layers // pp,
    )
    units = decoder_units(small)
    part = ModelSpec(spec.name, units, small)
    if pp == 1:
        return [Share(part, own, units, 1, last=True)]
    first = tuple(u for u in units if u.kind not in ENDS)
    # A tied head is a copy of the embedding's table on the last stage.
    last = units if arch.tied else tuple(u for u in units if u.kind != "embed")
    return [
        Share(part, own, first, min(pp, choice.accumulation), last=False),
        Share(part, own, last, 1, last=True),
    ]


def shared_activations(share: Share, whole: Choice, lines: Iterable[Line], time: Timeline) -> Iterator[Line]:
    """Activation lines of one rank, from those of the model it runs."""
    if not is_parallel(whole):
        yield from lines
        return
    kept = [x for x in lines if share.last or not _of_the_end(x.id)]
    yield from (x._replace(source="estimate") for x in kept)
    waiting = sum(
        x.total_bytes for x in kept if x.id.startswith(("act.block.saved", "act.block.output", "act.embed.output"))
    )
    note = f"1F1B: {share.in_flight} micro-batches in flight on the first stage"
    span = [(0, time.last_backward)]
    nbytes = (share.in_flight - 1) * waiting
    yield line("act.pipeline", nbytes, span, "activations", note, source="estimate")
    if whole.context_parallel > 1:
        arch = share.spec.arch
        assert arch is not None
        tokens = share.choice.micro_batch * share.choice.seq
        nbytes = share.choice.itemsize * tokens * arch.head_dim * 2 * (arch.heads + arch.kv_heads)
        note = "queries, keys, values and output of one block on their way between context ranks"
        yield line("act.context", nbytes, [time.always], "activations", note, source="estimate")


def _of_the_end(line_id: str) -> bool:
    """Whether a line is of the last norm, the head or the loss."""
    words = line_id.split(".")
    return any(word in ("norm", "head", "loss", "tied") for word in words[1:3])


def over(lines: Iterable[Line], time: Timeline) -> Iterator[Line]:
    """Lines over all phases, over those of another model."""
    for x in lines:
        yield x._replace(spans=(time.always,) * x.instances)
