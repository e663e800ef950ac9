"""What the numbers mean, in words: the verdict, the reason for each choice, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zplan.planner.activations import counted, prefers_eager
from zplan.planner.config import REDUCE_ITEMSIZE, Choice
from zplan.planner.search import DEFAULT_SEQ, STAGES, Row, Search
from zplan.planner.units import format_gib, format_percent, format_small

Code = Literal["one-gpu", "replicate", "shard", "no-fit", "open"]


@dataclass(frozen=True)
class Decision:
    """One value of the choice and where it came from."""

    name: str
    value: Any
    chosen: bool
    """Left open, so zplan chose it."""
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The answer in words."""

    code: Code
    text: str


def gib(nbytes: int) -> str:
    return f"{format_gib(nbytes)} GiB"


def name_of(row: Row) -> str:
    """A row in words: `stage 3 on 8 GPUs`."""
    n = row.choice.world_size
    return "one GPU" if n == 1 else f"stage {row.choice.stage} on {n} GPUs"


def largest_line(row: Row) -> str:
    """The line that holds most in the peak phase."""
    line, count = max(row.ledger.live(row.peak_phase), key=lambda found: found[0].nbytes * found[1])
    times = f" ({count} x {format_small(line.nbytes)})" if count > 1 else ""
    return f"`{line.id}`, {gib(line.nbytes * count)}{times}"


def short_by(row: Row) -> str:
    """By how much, when and because of which line a row does not fit."""
    return f"{gib(-row.spare_bytes)} over in phase `{row.peak_phase}`, where the most is {largest_line(row)}"


def judge(row: Row, single: Row) -> Verdict:
    """The verdict: one GPU is enough, memory-bound so shard, or does not fit."""
    card, n = gib(row.capacity_bytes), row.choice.world_size
    if not row.fits:
        return Verdict(
            "no-fit", f"Does not fit: {name_of(row)} needs {gib(row.peak_bytes)} of {card}, {short_by(row)}."
        )
    spare = f"{gib(row.spare_bytes)} to spare"
    if n == 1:
        return Verdict("one-gpu", f"One GPU is enough: it needs {gib(row.peak_bytes)} of {card}, {spare}.")
    if single.fits:
        how = "with full checkpointing " if single.choice.checkpointing == "full" else ""
        text = f"One GPU is enough: {how}it needs {gib(single.peak_bytes)} of {card}. More GPUs only add speed; "
        return Verdict("one-gpu", f"{text}on {n}, stage {row.choice.stage} fits with {spare}.")
    need = f"one GPU would need {gib(single.peak_bytes)} of {card}"
    if row.choice.stage == 0:
        return Verdict("replicate", f"Fits as it is: {need}, but on {n} GPUs no sharding is needed, with {spare}.")
    return Verdict("shard", f"Memory-bound, shard: {need}. Stage {row.choice.stage} over {n} GPUs fits with {spare}.")


def judge_states(row: Row) -> Verdict:
    """The verdict where activations are not counted: either the states alone are too much, or it is open."""
    if not row.fits:
        return judge(row, row)
    held, spare = gib(row.peak_bytes), gib(row.spare_bytes)
    text = f"Open: {name_of(row)} holds {held} of {gib(row.capacity_bytes)} without activations, which are not counted"
    return Verdict("open", f"{text}; they may take {spare}.")


def decisions(search: Search, row: Row, rows: Sequence[Row]) -> tuple[Decision, ...]:
    """Every value of the choice with its reason, asked or chosen."""
    reasons = dict(_reasons(search, row, rows))
    out = []
    for name in ("stage", "checkpointing", "micro_batch", "accumulation", "global_batch", *_DEFAULTS):
        value = getattr(row.choice, name)
        by = search.request.fixed_by.get(name)
        reason = f"asked by {by}" if by else reasons.get(name, _DEFAULTS.get(name, ""))
        if by and name == "piece_numel":
            reason = f"{reason}; elements, {format_small(value * REDUCE_ITEMSIZE)} in fp32"
        out.append(Decision(name, value, by is None, reason))
    for name, value in (("offload", "none"),):
        asked = name in search.request.asked
        out.append(Decision(name, value, not asked, f"asked by --{name}" if asked else "the only one built yet"))
    return tuple(out)


_DEFAULTS: dict[str, str] = {
    "seq": "",
    "optimizer": "two fp32 moments and an fp32 master weight",
    "precision": "16-bit weights with fp32 master weights and reduction",
    "attention": "torch's fused attention keeps no score matrix",
    "cross_entropy": "torch's, from whole logits in fp32; `fused` never holds them in full",
    "kernels": "torch's own norms, gates and rotary embeddings",
    "ring_slots": "one block computes while the next is gathered",
    "piece_numel": "128 MiB in fp32: long enough for full bandwidth",
    "device": "a GPU unless --device cpu",
    "compile": "eager blocks keep what the ledger says, to the byte",
    "reduce": "",
    "transport": "",
    "saving": "training waits for a checkpoint, and no copy of the states lies in host memory",
}
"""Choices with a plain default, and why that default."""


def _reasons(search: Search, row: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    c = row.choice
    lower = rows[STAGES.index(c.stage) - 1] if c.stage else None
    if not row.fits:
        yield "stage", "nothing fits; this misses by least"
    elif c.world_size == 1:
        yield "stage", "one GPU has nobody to share with"
    elif lower is None:
        yield "stage", "it fits without sharding, which moves least"
    else:
        over = gib(-lower.spare_bytes)
        yield "stage", f"the lowest that fits, so it moves least; stage {lower.choice.stage} is {over} over"
    yield "checkpointing", _checkpointing_reason(search, row)
    train = search.request.get("global_batch")
    if train is None:
        yield "micro_batch", "the smallest; raise it while it fits"
        yield "accumulation", "one micro-step a step"
        yield "global_batch", f"{c.micro_batch} x {c.accumulation} x {c.world_size}"
    else:
        per_rank = f"{train // c.world_size} sequences a GPU"
        what = "the largest that fits and divides" if row.fits else "the smallest that divides"
        yield "micro_batch", f"{what} {per_rank}"
        yield "accumulation", f"{per_rank} / {c.micro_batch}"
    yield from _link_reasons(search, c)
    if prefers_eager(search.model.arch):
        yield "attention", "its class refuses or masks torch's fused attention"
    if search.model.assumed:
        yield "seq", "the default; an assumed shape has no limit"
    else:
        yield "seq", f"the smaller of {DEFAULT_SEQ} and the model's {search.seq_limit}"


def _link_reasons(search: Search, c: Choice) -> Iterator[tuple[str, str]]:
    """Why gradients and parameters travel as they do."""
    if c.reduce == "exchange":
        yield "reduce", "on one host gradients travel in the compute dtype and are added up in fp32"
    else:
        yield "reduce", f"over {search.hardware.nodes} nodes an fp32 reduce-scatter, which knows the network"
    if c.transport == "copies":
        yield "transport", "NVLink joins all GPUs of the node: copy engines move parameters while every SM computes"
    elif c.device == "cpu":
        yield "transport", "what CPUs have"
    elif search.hardware.nodes > 1:
        yield "transport", "over several nodes there is no common memory"
    else:
        yield "transport", "copies need GPUs that reach each other over NVLink, which this card is not known to have"


def _checkpointing_reason(search: Search, row: Row) -> str:
    if not counted(search.model.spec):
        return "open, as activations are not counted"
    if row.choice.checkpointing == "none":
        return (
            f"it fits without, and {format_percent(max(row.spare_bytes, 0), row.capacity_bytes)} of the card stay free"
        )
    without = search.row(replace(row.choice, checkpointing="none"))
    if not without.fits:
        return f"without it {gib(without.peak_bytes)} are needed, {gib(-without.spare_bytes)} more than the card has"
    share = format_percent(without.spare_bytes, without.capacity_bytes)
    return f"without it only {share} of the card stay free; a tenth is kept"
