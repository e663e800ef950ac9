"""From an out-of-memory error to a change: what each change to a config saves and costs, and the cheapest that fit.

The order is that of practice: micro-batch and accumulation, loss, buckets, stage, checkpointing, offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zplan.planner.batch import KEYS
from zplan.planner.comm import textbook_volume
from zplan.planner.costs import overlaps, reduce_numel, size_of
from zplan.planner.need import Need, Setup, need_of
from zplan.planner.oom_log import OutOfMemory
from zplan.planner.units import format_si

Edits = dict[tuple[str, ...], Any]
ZERO = "zero_optimization"

EFFICIENCY = 0.4
"""Share of the tensor cores' peak that training of decoders reaches."""
HOST_MEMORY_BYTES_S = 100e9
"""What the CPU optimizer of one node streams at; all its GPUs share it."""


@dataclass(frozen=True)
class Pace:
    """How fast one GPU works, for the time that a change costs."""

    flops: float
    """Per second, reached."""
    link_bytes_s: float
    """Between GPUs, one direction."""
    host_bytes_s: float
    """Between GPU and host, one direction."""
    source: str = ""


DEFAULT_PACE = Pace(312e12 * EFFICIENCY, 200e9, 25e9, "an A100 with NVLink, since no --gpu is given")


@dataclass(frozen=True)
class Rung:
    """One change."""

    name: str
    """`micro-batch`, `loss`, `buckets`, `stage`, `checkpointing` or `offload`."""
    what: str
    edits: Edits
    """Of the config; empty where the change is made in code or on the command line."""
    elsewhere: str
    """What to do outside the config; empty for nothing."""
    apply: Callable[[Setup], Setup]
    saved_bytes: int
    """At the peak of a step, made alone."""
    time_share: float
    """Of a step, more than now, if nothing overlapped: 0.33 is a third longer."""
    peak_bytes: int
    fits: bool
    """Made alone."""


@dataclass(frozen=True)
class Ladder:
    """What a config needs now, and all changes in order."""

    need: Need
    capacity_bytes: int
    unexplained_bytes: int
    """What the log shows beyond the estimate in the same part of the step; added to every estimate."""
    rungs: tuple[Rung, ...]
    chosen: tuple[Rung, ...]
    """The cheapest single change that fits, else the first few of the ladder that do together; empty for none."""
    fixed: Setup | None
    """With the chosen changes."""
    fixed_peak_bytes: int
    pace: Pace

    @property
    def peak_bytes(self) -> int:
        return self.need.peak_bytes + self.unexplained_bytes


def climb(setup: Setup, message: OutOfMemory | None, capacity: int, pace: Pace = DEFAULT_PACE) -> Ladder:
    """All rungs for a config that ran out of memory.

    Parameters
    ----------
    message
        From the log: what was there when it happened corrects the estimate upwards, never downwards.
    capacity
        Bytes that torch can have on the card.
    """
    need = need_of(setup)
    more = 0
    if message is not None and message.allocated is not None and message.tried is not None:
        more = max(0, message.allocated.nbytes + message.tried.nbytes - need.at(message.phase))
    seconds = step_seconds(setup, pace)
    rungs = []
    for name, what, edits, elsewhere, apply in _changes(setup, capacity - more):
        changed = apply(setup)
        peak = need_of(changed).peak_bytes + more
        saved = need.peak_bytes + more - peak
        share = step_seconds(changed, pace) / seconds - 1
        rungs.append(Rung(name, what, edits, elsewhere, apply, saved, share, peak, peak <= capacity))
    chosen, fixed = _choose(setup, rungs, capacity - more)
    at = need_of(fixed).peak_bytes + more if fixed else 0
    return Ladder(need, capacity, more, tuple(rungs), chosen, fixed, at, pace)


def _choose(setup: Setup, rungs: Sequence[Rung], room: int) -> tuple[tuple[Rung, ...], Setup | None]:
    """The single change that fits and costs least; else the ladder from its start until it fits, the needless left out.

    Of the two rungs for stages, and of those for offload, the later one includes the earlier.
    """
    single = min((r for r in rungs if r.fits), key=lambda r: r.time_share, default=None)
    if single is not None:
        return (single,), single.apply(setup)
    taken: list[Rung] = []
    for rung in rungs:
        if rung.saved_bytes <= 0:
            continue
        taken = [r for r in taken if r.name != rung.name or rung.name not in ("stage", "offload")] + [rung]
        if need_of(_all(setup, taken)).peak_bytes <= room:
            for one in sorted(taken, key=lambda r: -r.time_share):
                fewer = [r for r in taken if r is not one]
                if need_of(_all(setup, fewer)).peak_bytes <= room:
                    taken = fewer
            return tuple(taken), _all(setup, taken)
    return (), None


def _all(setup: Setup, rungs: Sequence[Rung]) -> Setup:
    for rung in rungs:
        setup = rung.apply(setup)
    return setup


Change = tuple[str, str, Edits, str, Callable[[Setup], Setup]]


def _changes(setup: Setup, room: int) -> Iterator[Change]:
    """`(name, what, edits, elsewhere, apply)` of every change that this config has left."""
    for maker in (_micro_batch, _loss, _buckets, _stages, _checkpointing, _offload):
        yield from maker(setup, room)


def _by(edits: Edits) -> Callable[[Setup], Setup]:
    return lambda setup: setup.edited(edits)


def _micro_batch(setup: Setup, room: int) -> Iterator[Change]:
    """The largest smaller micro-batch that fits, else 1; the global batch stays."""
    smaller = setup.smaller_batches()
    found = None
    for micro, accumulation in smaller:
        edits: Edits = {(KEYS.micro,): micro, (KEYS.accumulation,): accumulation}
        found = (edits, micro, accumulation)
        if need_of(setup.edited(edits)).peak_bytes <= room:
            break
    if found is None:
        return
    edits, micro, accumulation = found
    elsewhere = ""
    if setup.view.config.get(KEYS.micro) == "auto" or setup.view.subject.micro_batch is not None:
        elsewhere = f"--per_device_train_batch_size {micro} --gradient_accumulation_steps {accumulation}"
    # The setup's own numbers must follow even where a launcher passes them.
    yield "micro-batch", f"micro-batch {micro}, accumulation {accumulation}", edits, elsewhere, _by_batch(edits, micro)


def _by_batch(edits: Edits, micro: int) -> Callable[[Setup], Setup]:
    def apply(setup: Setup) -> Setup:
        changed = setup.edited(edits)
        subject = changed.view.subject
        if subject.micro_batch is None:
            return changed
        return replace(changed, view=replace(changed.view, subject=replace(subject, micro_batch=micro)))

    return apply


def _loss(setup: Setup, room: int) -> Iterator[Change]:
    if not setup.chunked_loss:
        what, how = (
            "chunked or fused cross-entropy",
            "in code: the loss in chunks of tokens, or Liger's fused linear loss",
        )
        yield "loss", what, {}, how, lambda s: replace(s, chunked_loss=True)


def _buckets(setup: Setup, room: int) -> Iterator[Change]:
    """Buckets of at most 5e7 elements, but none below the largest tensor, and one instead of two."""
    view, stage = setup.view, setup.view.stage
    if stage == 0:
        return
    largest = max((p.numel for p in setup.spec.params()), default=1)
    edits: Edits = {}
    words = []
    numel, least = reduce_numel(view), max(largest, 50_000_000)
    if numel is not None and numel > least:
        edits[ZERO, "reduce_bucket_size"] = least
        words.append(f"reduce bucket of {least:,} elements")
    if stage in (1, 2) and overlaps(view):
        edits[ZERO, "overlap_comm"] = False
        words.append("one bucket instead of two (overlap_comm false)")
    if stage == 3:
        block = max((u.numel for u in setup.spec.units), default=1)
        live = size_of(view, "stage3_max_live_parameters")
        for key, most in (("stage3_max_live_parameters", 2 * block), ("stage3_max_reuse_distance", 2 * block)):
            if live is not None and live > most:
                edits[ZERO, str(view.zero_path(key)[-1])] = most
        if live is not None and live > 2 * block:
            words.append(f"at most two units gathered ({2 * block:,} elements)")
    if edits:
        yield "buckets", "; ".join(words), edits, "", _by(edits)


def _stages(setup: Setup, room: int) -> Iterator[Change]:
    if setup.world_size == 1:
        return
    for stage in range(setup.view.stage + 1, 4):
        edits: Edits = {(ZERO, "stage"): stage}
        yield "stage", f"stage {stage}", edits, "", _by(edits)


def _checkpointing(setup: Setup, room: int) -> Iterator[Change]:
    if setup.checkpointing == "none":
        how = "in code: model.gradient_checkpointing_enable(), or --gradient_checkpointing"
        yield "checkpointing", "full checkpointing", {}, how, lambda s: replace(s, checkpointing="full")


def _offload(setup: Setup, room: int) -> Iterator[Change]:
    view = setup.view
    edits: Edits = {}
    stage = view.stage
    if stage == 0:
        edits[ZERO, "stage"] = stage = 2
    if view.offload("optimizer") == "none":
        edits[ZERO, "offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        host = format_si(16 * setup.spec.num_params)
        yield "offload", f"optimizer states on the CPU ({host} over all nodes)", edits, "", _by(edits)
    if view.offload("param") == "none" and (stage == 3 or setup.world_size > 1):
        both: Edits = {**edits, (ZERO, "stage"): 3, (ZERO, "offload_param"): {"device": "cpu", "pin_memory": True}}
        what = "parameters and states on the CPU" if edits else "parameters on the CPU"
        yield "offload", what, both, "", _by(both)


def step_seconds(setup: Setup, pace: Pace) -> float:
    """Seconds of one optimizer step if nothing overlapped: products, traffic between GPUs, and with the host.

    Six operations a parameter and token, eight with full checkpointing, which runs forward again.
    """
    c, params = setup.choice, setup.spec.num_active or setup.spec.num_params
    tokens = c.micro_batch * c.accumulation * c.seq
    products = (8 if c.checkpointing == "full" else 6) * params * tokens / pace.flops
    num, n = setup.spec.num_params, c.world_size
    sent = textbook_volume(c.stage, c.accumulation) * num * c.itemsize * (n - 1) / n / pace.link_bytes_s
    return products + sent + _host_seconds(setup, pace)


def _host_seconds(setup: Setup, pace: Pace) -> float:
    c, view, num = setup.choice, setup.view, setup.spec.num_params
    seconds = 0.0
    if view.offload("optimizer") != "none":
        share = num / c.world_size
        # Gradients down in every micro-step, weights up once; the CPU reads and writes master, moments and gradient.
        moved = share * c.itemsize * (c.accumulation + 1) / pace.host_bytes_s
        seconds += moved + 28 * num / max(1, view.subject.nodes) / HOST_MEMORY_BYTES_S
    if view.offload("param") != "none":
        seconds += 2 * c.accumulation * num / c.world_size * c.itemsize / pace.host_bytes_s
    return seconds
