"""What the numbers mean, in words: the verdict, the reason for each choice, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from zplan.planner.activations import counted, prefers_eager
from zplan.planner.config import Choice
from zplan.planner.evaluation import TRAINING, Row
from zplan.planner.optimizers import kind_of
from zplan.planner.peer_rules import NAMES
from zplan.planner.placement import splits_masters
from zplan.planner.search import Search
from zplan.planner.sequence import DEFAULT_SEQ, IMAGES, made_for
from zplan.planner.tiers import TierUse
from zplan.planner.units import format_gib, format_percent, format_small

Code = Literal["one-gpu", "replicate", "shard", "no-fit", "open"]


class Decision(NamedTuple):
    """One value of the choice and where it came from."""

    name: str
    value: Any
    chosen: bool
    """Left open, so zplan chose it."""
    reason: str


class Verdict(NamedTuple):
    """The answer in words."""

    code: Code
    text: str


def gib(nbytes: int) -> str:
    return f"{format_gib(nbytes)} GiB"


def name_of(row: Row) -> str:
    """A row in words: `stage 3 on 8 GPUs`."""
    n = row.choice.num_gpus
    return "one GPU" if n == 1 else f"stage {row.choice.stage} on {n} GPUs"


def largest_line(row: Row) -> str:
    """The line that holds most in the peak phase."""
    line, count = max(row.ledger.live(row.peak_phase), key=lambda found: found[0].nbytes * found[1])
    times = f" ({count} x {format_small(line.nbytes)})" if count > 1 else ""
    return f"`{line.id}`, {gib(line.nbytes * count)}{times}"


def need(row: Row) -> str:
    """What a row needs; the upper end too where the verdict hangs on it."""
    decides = row.peak_bytes <= row.capacity_bytes - row.margin_bytes < row.high_bytes
    return gib(row.peak_bytes) + (f" (up to {format_gib(row.high_bytes)})" if decides else "")


def lack(row: Row) -> str:
    """What a row needs that does not fit: with the upper end, by which it is told how much is missing."""
    return gib(row.peak_bytes) + (f" (up to {format_gib(row.high_bytes)})" if row.high_bytes > row.peak_bytes else "")


def card_of(row: Row) -> str:
    """What it may take: the card, and what is kept free of it."""
    kept = f" less {gib(row.margin_bytes)} of margin" if row.margin_bytes else ""
    return f"{gib(row.capacity_bytes)}{kept}"


def short_by(row: Row) -> str:
    """By how much, when and because of which line a row does not fit: on the card, else beside it."""
    if row.spare_bytes < 0:
        return f"{gib(-row.spare_bytes)} over in phase `{row.peak_phase}`, where the most is {largest_line(row)}"
    return f"{over_by(row)} on a node, where the most is {_most_beside(row)}"


def over_by(row: Row) -> str:
    """What a row that does not fit lacks: of the card, or of a node's host memory or disk."""
    off = row.off_device
    if row.spare_bytes < 0:
        return f"{gib(-row.spare_bytes)} over"
    if off.host_over:
        return f"{gib(off.host_over * off.ranks)} of host memory over"
    return f"{gib(off.nvme_over * off.ranks)} of NVMe over"


def _beside_the_card(row: Row) -> str:
    """Why a row does not fit that does on the card: one sentence with the numbers of a node."""
    off = row.off_device
    host = off.host_over > 0
    need, over, what = (
        (off.host_bytes, off.host_over, "host memory") if host else (off.nvme_bytes, off.nvme_over, "NVMe")
    )
    ranks = "one rank takes" if off.ranks == 1 else f"the {off.ranks} ranks of a node take"
    return (
        f"Does not fit: {name_of(row)} fits on the card, but {ranks} {gib(need * off.ranks)} of {what}, "
        f"{gib(over * off.ranks)} more than there is; the most is {_most_beside(row)}."
    )


def _most_beside(row: Row) -> str:
    """The line that holds most of the memory beside the card that is too small."""
    tiers = ("host", "pinned") if row.off_device.host_over else ("nvme",)
    most = max((x for x in row.ledger.lines if x.tier in tiers), key=lambda x: x.total_bytes)
    return f"`{most.id}`, {gib(most.total_bytes)} a rank"


def judge_tiers(row: Row, uses: Sequence[TierUse]) -> Verdict | None:
    """The verdict where the step fits and what `zplan run` does beside it does not; None where all fits."""
    over = next((use for use in uses if use.over_bytes), None)
    if over is None or not row.fits:
        return None
    assert over.limit_bytes is not None
    device = over.tier == "device"
    what = "" if device else " of host memory a node" if "host" in over.tier else " of NVMe a node"
    need = gib(over.high_bytes if device else over.per_node_bytes)
    return Verdict(
        "no-fit",
        f"Does not fit: the steps of {name_of(row)} do, but `{over.where}` needs {need}{what}, "
        f"{gib(over.over_bytes)} more than there is.",
    )


def judge(row: Row, single: Row) -> Verdict:
    """The verdict: one GPU is enough, memory-bound so shard, or does not fit."""
    card, n = card_of(row), row.choice.num_gpus
    if not row.fits and row.spare_bytes >= 0:
        return Verdict("no-fit", _beside_the_card(row))
    if not row.fits:
        return Verdict("no-fit", f"Does not fit: {name_of(row)} needs {lack(row)} of {card}, {short_by(row)}.")
    spare = f"at least {gib(row.spare_bytes)} to spare"
    if n == 1:
        return Verdict("one-gpu", f"One GPU is enough: it needs {need(row)} of {card}, with {spare}.")
    if single.fits:
        how = "with full checkpointing " if single.choice.checkpointing == "full" else ""
        text = f"One GPU is enough: {how}it needs {need(single)} of {card}. More GPUs only add speed; "
        return Verdict("one-gpu", f"{text}on {n}, stage {row.choice.stage} fits with {spare}.")
    alone = f"one GPU would need {need(single)} of {card}"
    if row.choice.stage == 0:
        return Verdict("replicate", f"Fits as it is: {alone}, but on {n} GPUs no sharding is needed, with {spare}.")
    return Verdict("shard", f"Memory-bound, shard: {alone}. Stage {row.choice.stage} over {n} GPUs fits with {spare}.")


def whose_buffers(row: Row) -> str:
    """A sentence on the runtime that was counted; nothing for zplan's own."""
    name = NAMES[row.choice.runtime]
    return "" if row.choice.runtime == "zplan" else f" Counted are {name}'s own buffers."


def beyond_offload(row: Row, lean: Row | None, longest_seq: int) -> str:
    """A sentence for a model of which one unit alone is too much for the card, even with all else elsewhere.

    Parameters
    ----------
    lean
        What `remedies.leanest` found for the row.
    longest_seq
        At which that row fits; 0 for none.
    """
    if lean is None or lean.spare_bytes >= 0:
        return ""
    way_out = f"Use {f'--seq {longest_seq}, ' if longest_seq else ''}a larger card, or a runtime that splits a layer"
    way_out += " over GPUs (tensor parallelism)."
    if lean.choice == row.choice:
        return f" Everything that can be is offloaded already. {way_out}"
    return (
        " Nor would it with every state offloaded and one sequence at a time: that takes "
        f"{need(lean)} in phase `{lean.peak_phase}`, where the most is {largest_line(lean)}. {way_out}"
    )


def judge_states(row: Row) -> Verdict:
    """The verdict where activations are not counted: either the states alone are too much, or it is open."""
    if not row.fits:
        return judge(row, row)
    held, spare = gib(row.peak_bytes), gib(row.spare_bytes)
    text = f"Open: {name_of(row)} holds {held} of {card_of(row)} without activations, which are not counted"
    return Verdict("open", f"{text}; they may take {spare}.")


def decisions(search: Search, row: Row, rows: Sequence[Row]) -> tuple[Decision, ...]:
    """Every value of the choice with its reason, asked or chosen."""
    reasons = dict(_reasons(search, row, rows))
    out = []
    own = row.choice.runtime == "zplan"
    defaults = [name for name in _DEFAULTS if own or name not in _ZPLAN_ONLY]
    for name in ("stage", "checkpointing", "micro_batch", "accumulation", "global_batch", *defaults):
        value = getattr(row.choice, name)
        by = search.request.fixed_by.get(name)
        reason = f"asked by {by}" if by else reasons.get(name, _DEFAULTS.get(name, ""))
        if by and name == "piece_numel":
            nbytes = format_small(value * row.choice.reduce_itemsize)
            reason = f"{reason}; elements, {nbytes} in {row.choice.reduce_dtype}"
        out.append(Decision(name, value, by is None, reason))
    return (*out, *_training_decisions(search, row.choice))


def _training_decisions(search: Search, choice: Choice) -> Iterator[Decision]:
    """The optimizer, and whatever else was asked about how to train; limits of the runtime are named."""
    from zplan.planner.runnable import limits

    a = search.model.spec.adapters
    if a is not None:
        beside = ", embedding and head in full" if a.embeddings else ""
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in a.targets))
        base = "; base in 4 bits" if a.quantized else ""
        yield Decision("lora", f"rank {a.rank}", chosen=False, reason=f"asked by --lora; on {names}{beside}{base}")
    if choice.optimizer_in_backward:
        by = search.request.fixed_by.get("optimizer_in_backward")
        reason = f"asked by {by}" if by else "nothing clips, and with all gradients at once nothing fits"
        yield Decision("optimizer_in_backward", value=True, chosen=not by, reason=reason)
    cannot = {limit.key: limit.why for limit in limits(choice)}
    for name in ("offload", *TRAINING):
        by = search.request.fixed_by.get(name)
        if not by and name not in ("offload", "optimizer"):
            continue
        why = cannot.get("--" + name.replace("_", "-"))
        kept = name == "offload" and choice.runtime == "zplan"
        reason = f"asked by {by}" if by else "zplan's runtime keeps all on the GPU" if kept else "the default"
        value = choice.offload.told() if name == "offload" else getattr(choice, name)
        yield Decision(name, value, not by, f"{reason}; estimate only: {why}" if why else reason)


_DEFAULTS: dict[str, str] = {
    "seq": "",
    "precision": "",
    "attention": "torch's fused attention keeps no score matrix",
    "cross_entropy": "torch's, from whole logits in fp32; `fused` never holds them in full",
    "kernels": "torch's own norms, gates and rotary embeddings",
    "ring_slots": "one block computes while the next is gathered",
    "piece_numel": "elements of one reduce, long enough for full bandwidth",
    "device": "a GPU unless --device cpu",
    "compile": "eager blocks keep what the ledger says, to the byte",
    "reduce": "",
    "transport": "",
    "saving": "training waits for a checkpoint, and no copy of the states lies in host memory",
}
"""Choices with a plain default, and why that default."""

_ZPLAN_ONLY = ("ring_slots", "piece_numel", "saving", "kernels", "compile", "reduce", "transport")
"""Those that no other runtime knows."""


def _reasons(search: Search, row: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    c = row.choice
    yield "stage", _stage_reason(search, row, rows)
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
    yield "precision", _precision_reason(search, c)
    yield from _link_reasons(search, c)
    if prefers_eager(search.model.arch):
        yield "attention", "its class refuses or masks torch's fused attention"
    elif search.no_shared_heads({"device": c.device, "precision": c.precision}):
        yield "attention", f"{search.hardware.gpu} has no fused attention whose heads share keys and values"
    if search.model.assumed:
        yield "seq", "the default; an assumed shape has no limit"
    elif search.model.arch.family in IMAGES:
        yield "seq", "an image: its patches and a class token"
    else:
        yield "seq", f"the smaller of {DEFAULT_SEQ} and the model's {made_for(search.model.arch)}"


def _precision_reason(search: Search, c: Choice) -> str:
    """What lies in which dtype, and in which gradients are reduced."""
    if not search.hardware.bf16:
        return f"{search.hardware.gpu} does not compute in bf16"
    masters = kind_of(c.optimizer).master
    weights = {
        "zplan": "bf16 weights beside fp32 master weights" if masters else "bf16 weights without fp32 master weights",
        "deepspeed": "bf16 weights beside fp32 master weights",
        "fsdp2": "bf16 copies of fp32 weights",
        "ddp": "fp32 weights under autocast",
    }[c.runtime]
    if splits_masters(c):
        weights = "bf16 weights that are the upper halves of fp32 master weights"
    reduced = c.precision if c.runtime == "deepspeed" else c.reduce_dtype
    return weights + (f"; {reduced} reduction" if c.world_size > 1 else "")


def _stage_reason(search: Search, row: Row, rows: Sequence[Row]) -> str:
    c = row.choice
    if not row.fits:
        return "nothing fits; this misses by least"
    if c.world_size == 1:
        return "one GPU has nobody to share with"
    lowest = next(r for r in rows if r.fits)
    time, other = search.time(c), search.time(lowest.choice)
    if row is not lowest and time is not None and other is not None:
        more = format_percent(round(1e6 * (other.total - time.total)), round(1e6 * time.total))
        return f"the fastest that fits; stage {lowest.choice.stage} takes {more} longer"
    why = "it moves least" if time is None else "nothing that fits is faster by a hundredth"
    if not c.stage:
        return f"it fits without sharding, and {why}"
    lower = next((r for r in reversed(rows) if r.choice.stage < c.stage), None)
    if lower is None:
        return f"the lowest that {NAMES[c.runtime]} has for what is asked"
    return f"the lowest that fits, and {why}; stage {lower.choice.stage} is {over_by(lower)}"


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
    if without.spare_bytes < 0:
        kept = " less the margin" if without.margin_bytes else ""
        return f"without it {lack(without)} are needed, {gib(-without.spare_bytes)} more than the card has{kept}"
    share = format_percent(without.spare_bytes, without.capacity_bytes)
    if without.roomy:
        return "it fits without too, but no faster"
    return f"without it only {share} of the card stay free; a tenth is kept"
