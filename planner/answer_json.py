"""An estimate as one JSON document, in exact bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from zplan.planner.evaluation import Row
from zplan.planner.ledger import Kind, Ledger, Line, Tier
from zplan.planner.models import adapter_values, architecture_values
from zplan.planner.textbook import TEXTBOOK, runtime_rate
from zplan.planner.writing import render

if TYPE_CHECKING:
    from zplan.planner.activity import Activity
    from zplan.planner.answer import Estimate


SCHEMA_VERSION = 1


def estimate_json(e: Estimate) -> str:
    """The document `zplan estimate --json` prints."""
    from zplan import __version__

    arch = e.model.arch
    document = {
        "schema_version": SCHEMA_VERSION,
        "zplan_version": __version__,
        "fits": e.fits,
        "activations_counted": e.counted,
        "estimate_only": list(e.estimate_only),
        "peak_bytes": e.peak_bytes,
        "peak_between_bytes": [e.row.low_bytes, e.row.high_bytes],
        "verdict": e.verdict._asdict(),
        "asked": dict(e.request.asked),
        "chosen": [d._asdict() for d in e.decisions],
        "model": {
            "name": e.model.spec.name,
            "source": e.model.source,
            "assumed": e.model.assumed,
            "num_params": e.model.num_params,
            "shape_num_params": e.model.shape_params,
            "trained_num_params": e.model.reckoned_params,
            "adapters": adapter_values(e.model.spec.adapters),
            "architecture": architecture_values(arch),
            "num_active_params": e.model.spec.num_active,
            "estimate_only": not arch.runnable,
        },
        "hardware": {**e.hardware._asdict(), "notes": list(e.hardware.notes)},
        "textbook": [
            {"stage": s, "states_bytes": n, "formula": r.formula(), "sent_bytes": t}
            for s, (n, r, t) in enumerate(zip(e.textbook(), TEXTBOOK, e.textbook_traffic(), strict=True))
        ],
        "stages": [{**row_json(r), **t._asdict()} for r, t in zip(e.rows, e.traffic, strict=True)],
        "times": _times(e),
        "untimed": e.untimed,
        "one_gpu": row_json(e.single),
        "longest_seq": e.longest_seq,
        "remedies": [asdict(r) for r in e.remedies],
        "lines": [_line(x, n) for x, n in _live(e.row.ledger, e.row.peak_phase)],
        "tiers": [{**use._asdict(), "over_bytes": use.over_bytes} for use in e.tiers],
        "activities": [_activity(a) for a in e.activities],
        "not_counted": list(e.not_counted),
        "notes": list(e.notes),
    }
    return render(document) + "\n"


def _times(e: Estimate) -> list[dict[str, Any]]:
    """By stage as in `stages`; empty where no time can be told."""
    if not e.timings:
        return []
    from zplan.planner.timing import timing_json

    return [{"stage": t.choice.stage, **timing_json(t)} for t in e.timings]


def row_json(row: Row) -> dict[str, Any]:
    """One stage's row."""
    return {
        "runtime": row.choice.runtime,
        "stage": row.choice.stage,
        "world_size": row.choice.world_size,
        "checkpointing": row.choice.checkpointing,
        "micro_batch": row.choice.micro_batch,
        "accumulation": row.choice.accumulation,
        "seq": row.choice.seq,
        "rate": runtime_rate(row.choice).formula(),
        **{f"{kind}_bytes": row.kinds.get(kind, 0) for kind in get_args(Kind)},
        "peak_bytes": row.peak_bytes,
        "peak_phase": row.peak_phase,
        "low_bytes": row.low_bytes,
        "high_bytes": row.high_bytes,
        "margin_bytes": row.margin_bytes,
        "capacity_bytes": row.capacity_bytes,
        "spare_bytes": row.spare_bytes,
        "off_device": row.off_device._asdict(),
        "fits": row.fits,
    }


def _activity(a: Activity) -> dict[str, Any]:
    low, high = a.ledger.interval()
    return {
        "name": a.name,
        "device_bytes": a.device_bytes,
        "low_bytes": low,
        "high_bytes": high,
        "host_bytes": a.host_bytes,
        "phase": a.phase,
        "every_rank": a.every_rank,
        "plain": a.plain,
        "note": a.note,
        "lines": [_line(x, n) for x, n in _live(a.ledger, a.phase)],
    }


def _line(line: Line, live: int) -> dict[str, Any]:
    low, high = line.bounds
    return {**line._asdict(), "low": low, "high": high, "spans": len(line.spans), "live_at_peak": live}


def _live(ledger: Ledger, phase: str) -> list[tuple[Line, int]]:
    """Every line with the instances alive in a phase."""
    live = {(x.id, x.tier): n for tier in get_args(Tier) for x, n in ledger.live(phase, tier)}
    return [(x, live.get((x.id, x.tier), 0)) for x in ledger.lines]
