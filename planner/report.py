"""Estimates and plans as text: the verdict first, then the tables, the choice, and what is not counted.

Colour only repeats what the words say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zplan.planner.comm import textbook_volume
from zplan.planner.evaluation import Row
from zplan.planner.interval import told_range, told_spread
from zplan.planner.peer_rules import NAMES
from zplan.planner.sequence import IMAGES, ended_by
from zplan.planner.stacks import stacks_of
from zplan.planner.textbook import TEXTBOOK
from zplan.planner.units import format_count, format_gb, format_gib, format_percent, format_small

if TYPE_CHECKING:
    from zplan.planner.answer import Estimate
    from zplan.planner.ledger import Kind, Ledger, Line
    from zplan.planner.plan_file import Plan
    from zplan.planner.remedies import Remedy
    from zplan.planner.sources import Model
    from zplan.planner.verdict import Decision

RULE_OF_THUMB = 60
"""Per cent of the card that habit gives to model states."""

KINDS: tuple[Kind, ...] = ("states", "buffers", "activations", "overhead")

SMALL = 2**30 // 200
"""Bytes below which a line would show as 0.00 GiB; such lines are summed up."""

WIDTH = 112
"""Columns of running text."""

GREEN, RED = "32", "31"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Lines of a table, indented by two.

    Parameters
    ----------
    head
        Column titles; when all are empty there is no title line.
    rows
        Cells.
    align
        One letter a column: `l` or `r`.
    """
    shown = [head, *rows] if any(head) else rows
    widths = [max(len(r[i]) for r in shown) for i in range(len(head))]
    for row in shown:
        cells = [c.ljust(w) if a == "l" else c.rjust(w) for c, w, a in zip(row, widths, align, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()


def report(e: Estimate, *, colour: bool = False) -> str:
    """The text of an estimate."""
    verdict = "\n".join(textwrap.wrap(e.verdict.text, WIDTH))
    if colour:
        verdict = f"\033[{GREEN if e.fits else RED}m{verdict}\033[0m"
    head = [verdict, *estimate_only_rows(e.estimate_only)]
    parts = [head, _question(e), _textbook(e), _runtime(e), _time(e), _choice(e), _lines(e)]
    parts += [_tiers(e), *([_activities(e)] if e.activities else []), _not_counted(e)]
    return "\n\n".join("\n".join(p) for p in parts) + "\n"


def estimate_only_rows(told: Sequence[str]) -> list[str]:
    """What zplan's runtime can't do of an answer; nothing where it can do all."""
    return textwrap.wrap(f"Estimate only, zplan can't run it: {'; '.join(told)}.", WIDTH) if told else []


def _question(e: Estimate) -> list[str]:
    """The model and the machine."""
    a, m = e.model.arch, e.model
    kv = "" if a.kv_heads == a.heads else f" ({a.kv_heads} key-value)"
    tied = ", tied head" if a.tied else ""
    heads = f"{a.heads} heads{kv} of {a.head_dim}"
    words = f"{a.vocab} classes" if a.family in IMAGES else f"vocabulary {a.vocab}"
    layers = " + ".join(map(str, stacks_of(a).values()))
    shape = f"{layers} layers x {a.hidden}, {heads}, feed-forward {a.ffn}, {words}{tied}"
    if m.assumed:
        out = [
            f"Model     {format_count(m.num_params)} parameters; the shape is assumed: Llama-like,",
            f"          {shape}",
        ]
    else:
        out = [
            f"Model     {m.spec.name}, {format_count(m.num_params)} parameters{_active(m)}, from {m.source}",
            f"          {a.family}: {shape}",
        ]
    if m.spec.adapters:
        trained, frozen = m.reckoned_params, format_gib(m.frozen_bytes(e.row.choice.itemsize))
        out.append(f"          trained: {format_count(trained)} parameters; the frozen base takes {frozen} GiB whole")
    if m.missing_params:
        share = format_percent(m.missing_params, m.num_params)
        out.append(f"          it has {m.shape_params:,}; the line states.remainder stands for the other {share}")
    out.append(f"Machine   {e.hardware.told()}")
    for name, nbytes in (("Host", e.hardware.host_mem_bytes), ("NVMe", e.hardware.nvme_bytes)):
        if nbytes:
            out.append(f"{name:9} {format_gib(nbytes)} GiB a node")
    return out


def _active(m: Model) -> str:
    active = m.spec.num_active
    return "" if active is None else f" ({format_count(active)} active)"


def _textbook(e: Estimate) -> list[str]:
    """Model states and volume as textbooks count them, and what habit concludes."""
    rows, below = [], []
    for stage, (nbytes, rate, sent) in enumerate(zip(e.textbook(), TEXTBOOK, e.textbook_traffic(), strict=True)):
        habit = nbytes * 100 <= e.hardware.mem_bytes * RULE_OF_THUMB
        below += [stage] if habit else []
        volume = f"{textbook_volume(stage, e.row_of(stage).choice.accumulation)}P"
        share = f"{100 * nbytes / e.hardware.mem_bytes:.0f} %"
        rows.append([str(stage), rate.formula(), format_gb(nbytes), format_gib(nbytes), share, volume, format_gb(sent)])
    beside = ", and the frozen base beside them, split at stage 3" if e.model.spec.adapters else ""
    by_habit = f"stage {below[0]}" if below else "no stage"
    computed = f"stage {e.row.choice.stage}" if e.row.fits else "no stage"
    lines = "All lines counted" if e.counted else "All lines but activations"
    rule = f"Rule of thumb, states at most {RULE_OF_THUMB} % of the card: {by_habit}"
    return [
        f"Textbook: model states of one GPU (P = {format_count(e.model.reckoned_params)}, "
        f"N = {e.hardware.world_size}){beside}",
        *table(["stage", "formula", "GB", "GiB", "of card", "sends", "GB a step"], rows, "llrrrrr"),
        f"  {rule}. {lines}, below: {computed}.",
    ]


def _runtime(e: Estimate) -> list[str]:
    """What the runtime holds, by stage."""
    rows = [
        _runtime_row(r, t.total_bytes, picked=r is e.row, counted=e.counted)
        for r, t in zip(e.rows, e.traffic, strict=True)
    ]
    c = e.row.choice
    head = ["stage", "checkpt", "batch", *KINDS, "peak", "at most", "of card", "sent GB", "fits", "peak phase"]
    return [
        f"{NAMES[c.runtime]}: GiB of one GPU in its peak phase ({c.precision}, sequence {c.seq}; "
        "batch = micro-batch x accumulation)",
        *table(head, rows, "lllrrrrrrrrll"),
    ]


def _runtime_row(row: Row, sent: int, *, picked: bool, counted: bool) -> list[str]:
    kinds = {kind: format_gib(n) for kind, n in row.kinds.items()}
    if not counted:
        kinds["activations"] = "?"
    fits = f"yes, {format_gib(row.spare_bytes)} spare" if counted else f"open, {format_gib(row.spare_bytes)} left"
    return [
        f"{row.choice.stage}{' *' if picked else ''}",
        row.choice.checkpointing,
        f"{row.choice.micro_batch} x {row.choice.accumulation}",
        *(kinds.get(kind, format_gib(0)) for kind in KINDS),
        format_gib(row.peak_bytes),
        format_gib(row.high_bytes),
        f"{100 * row.peak_bytes / row.capacity_bytes:.0f} %",
        format_gb(sent),
        fits if row.fits else f"no, {_over(row)}",
        row.peak_phase,
    ]


def _over(row: Row) -> str:
    off = row.off_device
    if row.spare_bytes < 0:
        return f"{format_gib(-row.spare_bytes)} over"
    if off.host_over:
        return f"host {format_gib(off.host_over * off.ranks)} over"
    return f"NVMe {format_gib(off.nvme_over * off.ranks)} over"


def _time(e: Estimate) -> list[str]:
    """How long a step takes, by stage, and what sets it."""
    if not e.timings:
        return [f"Step time: none is told, as {e.untimed}; the lowest stage that fits moves least"]
    from zplan.planner.timing import assumptions, timing_rows

    head, *rows = timing_rows(e)
    return [
        "Step time of each row above, the exposed part of each bound, and its ratio to the same choice at other stages",
        *table(head, rows, "l" + "r" * (len(head) - 1)),
        *("  " + line for line in textwrap.wrap(assumptions(e), WIDTH)),
    ]


def _choice(e: Estimate) -> list[str]:
    """The choice with its reasons; how far it reaches, or what would make it fit."""
    out = ["The choice (* above)" if e.row.fits else "The nearest choice (* above), which does not fit"]
    out += decision_rows(e.decisions)
    if e.fits:
        ended = ended_by(e.model.arch, e.longest_seq, assumed=e.model.assumed)
        out.append(f"  Longest sequence of this choice: {e.longest_seq:,} tokens ({ended}); of any: --max seq.")
    for i, r in enumerate(e.remedies):
        lead = ("Would fit with" if e.counted else "Would leave room for activations with") if i == 0 else f"{'or':>14}"
        out.append(f"  {lead} {r.what}: {format_gib(r.spare_bytes)} GiB to spare ({r.option})")
        out[-1] += _price_of(r)
        if r.estimate_only:
            out[-1] += ", estimate only: zplan can't run it"
    if not e.row.fits and not any(not r.estimate_only for r in e.remedies):
        out.append("  No change that zplan can run makes it fit.")
    return out


def _price_of(r: Remedy) -> str:
    """What a change saves at the peak, and what it costs: seconds of a step times GPUs, over its tokens."""
    saved = f"saves {format_gib(r.saved_bytes)} GiB" if r.saved_bytes > 0 else ""
    slower = (
        ""
        if r.longer is None
        else f"{100 * abs(r.longer):.1f} % {'more' if r.longer >= 0 else 'less'} GPU time a token"
    )
    return "".join(f", {part}" for part in (saved, slower) if part)


def decision_rows(decisions: Sequence[Decision]) -> Iterator[str]:
    """Every value, whether it was asked or chosen, and why."""
    rows = [[d.name.replace("_", "-"), _value(d.value), "chosen" if d.chosen else "asked", d.reason] for d in decisions]
    return table(["", "", "", ""], rows, "llll")


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value)


def _lines(e: Estimate) -> list[str]:
    """The ledger of the choice in its peak phase, largest first."""
    live = sorted(e.row.ledger.live(e.row.peak_phase), key=lambda found: -found[0].nbytes * found[1])
    shown = [(x, n) for x, n in live if n * x.nbytes >= SMALL]
    rows = [[x.id, x.kind, _times(n, x.nbytes), format_gib(n * x.nbytes), _source(x, n)] for x, n in shown]
    small = sum(n * x.nbytes for x, n in live[len(shown) :])
    if small:
        rows.append([f"{len(live) - len(shown)} smaller lines", "", "", format_gib(small), "--json lists them"])
    rows.append(["total", "", "", format_gib(e.row.peak_bytes), f"{e.row.peak_bytes:,} bytes"])
    return [
        f"Lines of stage {e.row.choice.stage} in its peak phase, {e.row.peak_phase}",
        *table(["line", "kind", "bytes", "GiB", "source"], rows, "llrrl"),
        _interval(e.row),
    ]


def _interval(row: Row) -> str:
    """Between what the total lies, and what is kept free beyond that."""
    low, high = row.low_bytes, row.high_bytes
    if low == high:
        text = "The total is exact: every line is allocated by zplan or follows from torch's own ops."
    else:
        spread = told_spread(low, row.peak_bytes, high)
        text = f"The total is {told_range(low, high)} GiB ({spread}), by the sources of its lines. "
        text += "It fits when the upper end does."
    margin = f" Beyond that {format_gib(row.margin_bytes)} GiB stay free (--margin)." if row.margin_bytes else ""
    return "  " + text + margin


def _times(count: int, nbytes: int) -> str:
    return f"{count} x {format_small(nbytes)}" if count > 1 else format_small(nbytes)


def _source(line: Line, count: int) -> str:
    """Where the number of so many instances comes from, and between what they lie."""
    low, high = (count * bound for bound in line.bounds)
    between = f" {told_range(low, high)}" if low != high and line.source != "allocated" else ""
    return f"{line.source}{between}: {line.note}" if line.note else f"{line.source}{between}"


def _tiers(e: Estimate) -> list[str]:
    """What each memory holds at its fullest, of a GPU and of a node."""
    rows = []
    for use in e.tiers:
        whose = "a GPU" if use.tier == "device" else "a node"
        limit = "" if use.limit_bytes is None else f"{format_gib(use.limit_bytes)} {whose}"
        over = f"{format_gib(use.over_bytes)} over" if use.over_bytes else "yes" if limit else ""
        cells = [format_gib(n) for n in (use.nbytes, use.high_bytes, use.per_node_bytes)]
        rows.append([use.tier.replace("nvme", "NVMe"), *cells, limit, over, use.where])
    ranks = e.hardware.gpus_per_node
    return [
        f"Memories at their fullest, GiB ({ranks} GPU{'s' * (ranks > 1)} a node)",
        *table(["", "a GPU", "at most", "a node", "of", "fits", "where"], rows, "lrrrrll"),
    ]


def _activities(e: Estimate) -> list[str]:
    """Beside the steps: what every other activity of a run holds."""
    ledgers = [("step *", e.row.ledger, e.row.peak_phase, "", True)]
    ledgers += [(a.name, a.ledger, a.phase, a.note, a.every_rank) for a in e.activities]
    rows = []
    for name, ledger, phase, note, every_rank in ledgers:
        device, host = _sizes(ledger)
        node = host * (e.hardware.gpus_per_node if every_rank else 1)
        over = device > e.row.capacity_bytes - e.row.margin_bytes or node > (e.hardware.host_mem_bytes or node)
        rows.append([name, format_gib(device), format_gib(host), "no" if over else "yes", phase, note])
    return [
        "Beside the steps: GiB of one GPU and of its rank on the host, at most",
        *table(["", "device", "host", "fits", "phase", ""], rows, "lrrlll"),
    ]


def _sizes(ledger: Ledger) -> tuple[int, int]:
    """Device and host at most, pinned memory included."""
    host = max(a + b for a, b in zip(ledger.at_most("host"), ledger.at_most("pinned"), strict=True))
    return ledger.interval()[1], host


def _not_counted(e: Estimate) -> list[str]:
    return ["Not counted", *(f"  - {x}" for x in e.not_counted)]


def plan_report(plan: Plan, files: Sequence[str]) -> str:
    """What `zplan plan` prints: the choice, what it needs, and where it was written."""
    c = plan.choice
    low, high = plan.ledger.interval()
    spare = format_gib(plan.hardware.mem_bytes - high)
    between = f" ({told_range(low, high)})" if low != high else ""
    batch = f"micro-batch {c.micro_batch} x accumulation {c.accumulation} x {c.world_size} = {c.global_batch} sequences"
    out = [
        f"Stage {c.stage}, checkpointing {c.checkpointing}, {batch} of {c.seq} tokens",
        f"Peak {format_gib(plan.peak_bytes)} GiB{between} in phase {plan.ledger.peak_phase()}, {spare} GiB to spare "
        f"({plan.hardware.told()})",
        *estimate_only_rows(plan.estimate_only),
        "",
        *decision_rows((*plan.decisions, *_setting_rows(plan))),
        "",
        *(f"wrote {name}" for name in files),
    ]
    return "\n".join(out) + "\n"


def _setting_rows(plan: Plan) -> Iterator[Decision]:
    """Values of the config that decide no bytes."""
    from zplan.planner.verdict import Decision

    for name in ("lr", "betas", "eps", "weight_decay", "clip"):
        value = getattr(plan.training, name)
        shown = " ".join(f"{x:g}" for x in value) if isinstance(value, tuple) else f"{value:g}"
        chosen = name not in plan.settings
        yield Decision(name, shown, chosen, "a default, not a recommendation" if chosen else "asked by --config")
    schedule = plan.training.schedule
    if schedule is not None:
        yield Decision("schedule", schedule.words(plan.training.lr), chosen=False, reason="asked by --config")
