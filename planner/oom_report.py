"""What to say about an out-of-memory log: the message, the line of the ledger, the ladder, and the edited config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from zplan.planner.activations import counted
from zplan.planner.errors import ZplanError
from zplan.planner.known_errors import KnownError, known_errors
from zplan.planner.ladder import DEFAULT_PACE, EFFICIENCY, Ladder, Pace, climb
from zplan.planner.need import Setup
from zplan.planner.oom_log import OutOfMemory, Size, read_messages
from zplan.planner.oom_match import Candidate, matches
from zplan.planner.relaxed import Document
from zplan.planner.units import format_gib, format_percent, format_si

OUTSIDE_BYTES = 2 * 2**30
"""What context and libraries take at most, usually; more is another process."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything about one log."""

    message: OutOfMemory | None
    """The first of the log."""
    others: int
    """Further messages."""
    known: tuple[KnownError, ...]
    matched: tuple[Candidate, ...] = ()
    ladder: Ladder | None = None
    setup: Setup | None = None


def diagnose(text: str, source: str, setup: Setup | None, capacity: int | None, pace: Pace = DEFAULT_PACE) -> Diagnosis:
    """Read a log and weigh the changes.

    Parameters
    ----------
    setup
        The config and its model; None where no model is named, then there is neither line nor ladder.
    capacity
        Bytes of the card, where the user gave it; else the log's own total.
    """
    messages, known = read_messages(text), known_errors(text)
    if not messages and not known:
        raise ZplanError(
            f"`{source}` holds no out-of-memory message of torch", "give the log that ends with it, traceback and all"
        )
    message = messages[0] if messages else None
    if message is None or setup is None:
        return Diagnosis(message, max(0, len(messages) - 1), known, setup=setup)
    room = room_of(message, capacity)
    if room is None:
        raise ZplanError(f"`{source}` does not say how much memory the card has", "give --mem or --gpu")
    weighed = counted(setup.spec) and message.phase != "save"
    ladder = climb(setup, message, room, pace) if weighed else None
    return Diagnosis(message, len(messages) - 1, known, matches(message, setup), ladder, setup)


def room_of(message: OutOfMemory, capacity: int | None) -> int | None:
    """Bytes that torch can have on the card: all that is not context, libraries and other processes."""
    total = message.total.nbytes if message.total is not None else capacity
    if total is None:
        return None
    if message.allowed is not None:
        total = min(total, message.allowed.nbytes)
    if capacity is not None:
        total = min(total, capacity)
    return total - (message.outside_bytes or 0)


def pace_of(gpu: str | None) -> Pace:
    """How fast a card of the table is, at a usual efficiency; the default where none is named."""
    if gpu is None:
        return DEFAULT_PACE
    from zplan.planner.hardware import find_gpu

    row, _ = find_gpu(gpu)
    tflops = row.bf16_tflops or row.fp16_tflops
    if not tflops:
        return DEFAULT_PACE
    host = (row.pcie_gb_s or 0) * 1e9 or DEFAULT_PACE.host_bytes_s
    # The table's NVLink figure counts both directions.
    link = (row.nvlink_gb_s or 0) * 1e9 / 2 or host
    return Pace(tflops * 1e12 * EFFICIENCY, link, host, f"{row.name} at {EFFICIENCY * 100:.0f} % of its peak")


def diagnosis_text(d: Diagnosis) -> str:
    """The answer as text."""
    lines = [*_message(d), *_taken(d), *(f"{e.cause}: {e.meaning}\n  -> {e.way_out}" for e in d.known)]
    if d.message is not None and d.setup is None:
        lines += ["", "give --model (and --seq) to name the line of the ledger and to weigh changes"]
    if d.message is not None and d.setup is not None:
        lines += _matched(d)
    if d.ladder is not None:
        lines += ["", *_ladder(d.ladder)]
    elif d.message is not None and d.message.phase == "save":
        lines += ["", _saving()]
    elif d.message is not None and d.setup is not None:
        lines += ["", f"activations of `{d.setup.spec.name}` are not counted, so no change can be weighed"]
    return "\n".join(lines) + "\n"


_PHASE_WORDS = {
    "": "at a point that the log does not show",
    "start": "before training began",
    "forward": "in forward",
    "loss": "in the loss",
    "backward": "in backward",
    "step": "in the optimizer step",
    "save": "while saving",
}


def _message(d: Diagnosis) -> list[str]:
    m = d.message
    if m is None:
        return ["no out-of-memory message, but a known error:", ""]
    who = ", ".join(f"{name} {n}" for name, n in (("rank", m.rank), ("GPU", m.gpu)) if n is not None)
    where = f" ({m.where})" if m.where else ""
    lines = [f"out of {m.device} memory {_PHASE_WORDS[m.phase]}{where}{f', {who}' if who else ''}"]
    sizes = [
        ("tried to allocate", _bytes(m.tried)),
        ("free", _bytes(m.free)),
        ("in use by it", _bytes(m.in_use)),
        ("in tensors", _bytes(m.allocated)),
        ("reserved by torch", m.reserved_bytes),
        ("outside torch", m.outside_bytes),
        ("on the card", _bytes(m.total)),
    ]
    lines += [f"  {name:<18} {format_gib(n):>8} GiB" for name, n in sizes if n is not None]
    if m.fragmented:
        lines.append("fragmentation: what torch reserves and does not use is more than what was asked for")
        lines.append("  -> PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)")
    if m.outside_bytes is not None and m.outside_bytes > OUTSIDE_BYTES:
        lines.append(f"another process or library holds {format_gib(m.outside_bytes)} GiB: see nvidia-smi")
    if d.others:
        lines.append(f"{d.others} more such message{'s' * (d.others > 1)} in the log; this is the first")
    return lines


def _bytes(size: Size | None) -> int | None:
    return None if size is None else size.nbytes


def _taken(d: Diagnosis) -> list[str]:
    """What a config does not say and the ladder needs."""
    if d.setup is None:
        return []
    c = d.setup.choice
    return [
        f"taken: stage {c.stage}, {c.world_size} GPU{'s' * (c.world_size > 1)}, micro-batch {c.micro_batch} x "
        f"{c.accumulation}, {c.seq:,} tokens, {c.precision}, checkpointing {c.checkpointing}, {c.attention} attention",
    ]


def _matched(d: Diagnosis) -> list[str]:
    assert d.message is not None
    if not d.matched:
        tried = d.message.tried
        why = "no tensor of this config has that size" if tried else "the log does not say what was asked for"
        if tried is not None and tried.nbytes in (2 * 2**20, 20 * 2**20):
            why = "a block of that size serves any small tensor: memory was full already"
        return [f"line of the ledger: none by its size, for {why}"]
    lines = ["line of the ledger:"]
    width = max(len(c.line) for c in d.matched)
    return lines + [f"  {c.line:<{width}}  {c.what}, {c.nbytes:,} B" for c in d.matched]


def _saving() -> str:
    return (
        "saving gathers whole weights: set `stage3_gather_16bit_weights_on_model_save` to false and convert the "
        "checkpoint afterwards, or save sharded"
    )


def _ladder(ladder: Ladder) -> list[str]:
    lines = [f"now {format_gib(ladder.peak_bytes)} GiB at the peak of a step, of {format_gib(ladder.capacity_bytes)}:"]
    parts = [f"{name} {format_si(n)}" for name, n in ladder.need.fixed]
    most = max((n for _, n in ladder.need.moving), default=0)
    parts.append(f"activations {format_si(most)}")
    if ladder.unexplained_bytes:
        parts.append(f"seen in the log beyond that {format_si(ladder.unexplained_bytes)}")
    lines.append(f"  {' + '.join(parts)}")
    if ladder.unexplained_bytes > ladder.need.peak_bytes // 2:
        lines.append("the log shows far more than this model and config explain: check --model, --gpus, --micro-batch,")
        lines.append("--seq and --checkpointing, and what else lies on the card")
    lines += ["", "what each change saves, and the time it costs if nothing overlaps:"]
    width = max((len(r.what) for r in ladder.rungs), default=0)
    for r in ladder.rungs:
        verdict = "fits" if r.fits else "not enough alone"
        time = f"+{format_percent(round(r.time_share * 1000), 1000)}" if r.time_share > 0.0005 else "none"
        saves = format_gib(max(0, r.saved_bytes))
        lines.append(f"  {r.what:<{width}}  saves {saves:>7} GiB  time {time:>7}  {verdict}")
    if not ladder.rungs:
        lines.append("  nothing is left to change in this config")
    lines += ["", *_chosen(ladder)]
    lines.append(f"time is that of {ladder.pace.source}; memory an estimate of DeepSpeed's, corrected by the log")
    return lines


def _chosen(ladder: Ladder) -> list[str]:
    if not ladder.chosen:
        return ["no set of these changes fits: more GPUs, a larger card, shorter sequences, or a smaller model"]
    words = ", and ".join(r.what for r in ladder.chosen)
    lines = [f"change: {words} -> {format_gib(ladder.fixed_peak_bytes)} GiB"]
    for r in ladder.chosen:
        lines += [f"  {'.'.join(path)}: {json.dumps(value)}" for path, value in r.edits.items()]
        if r.elsewhere:
            lines.append(f"  {r.elsewhere}")
    return lines


def fixed_file(d: Diagnosis, document: Document) -> dict[str, Any]:
    """The whole file with the chosen changes.

    Raises
    ------
    ZplanError
        When there is no ladder, or nothing on it fits.
    """
    if d.ladder is None or d.setup is None:
        raise ZplanError("there is no change to write", "name --model, and give the log of a training step")
    if d.ladder.fixed is None:
        raise ZplanError("no set of changes to this config fits", "more GPUs, a larger card, or shorter sequences")
    config = dict(d.ladder.fixed.view.config)
    prefix = d.setup.view.prefix
    return {**document.value, str(prefix[0]): config} if prefix else config


def diagnosis_json(d: Diagnosis) -> str:
    """The answer in exact bytes."""
    from dataclasses import asdict

    document: dict[str, Any] = {
        "message": None if d.message is None else asdict(d.message),
        "messages": 0 if d.message is None else d.others + 1,
        "known": [{"cause": e.cause, "meaning": e.meaning, "way_out": e.way_out} for e in d.known],
        "lines": [asdict(c) for c in d.matched],
    }
    if d.ladder is not None:
        ladder = d.ladder
        document["ladder"] = {
            "peak_bytes": ladder.peak_bytes,
            "capacity_bytes": ladder.capacity_bytes,
            "unexplained_bytes": ladder.unexplained_bytes,
            "changes": [
                {
                    "name": r.name,
                    "what": r.what,
                    "edits": {".".join(path): value for path, value in r.edits.items()},
                    "elsewhere": r.elsewhere,
                    "saved_bytes": r.saved_bytes,
                    "time_share": round(r.time_share, 4),
                    "peak_bytes": r.peak_bytes,
                    "fits": r.fits,
                }
                for r in ladder.rungs
            ],
            "chosen": [r.what for r in ladder.chosen],
            "config": None if ladder.fixed is None else dict(ladder.fixed.view.config),
            "fixed_peak_bytes": ladder.fixed_peak_bytes,
        }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
