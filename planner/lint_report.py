"""The linter's answer as text or JSON."""

from __future__ import annotations

from zplan.planner.costs import Cost
from zplan.planner.lint import Finding, Report
from zplan.planner.units import format_si


def lint_text(report: Report) -> str:
    """Findings by severity, costs, what becomes of "auto", and the verdict."""
    lines = [f"{report.source}: {report.kind}, {report.headline}", ""]
    for f in report.findings:
        lines += _finding(f)
    if report.findings:
        lines.append("")
    if report.costs:
        lines += [*_costs(report.costs), ""]
    if report.resolved:
        lines += [*_resolved(report.resolved), ""]
    lines.append(verdict(report))
    return "\n".join(lines) + "\n"


def _finding(f: Finding) -> list[str]:
    at = f"line {f.place[0]}, column {f.place[1]}: " if f.place else ""
    first = f"  {f.severity:<8} {f.rule}: {at}{f.message}"
    return [first, f"           -> {f.fix}"] if f.fix else [first]


def _costs(costs: tuple[Cost, ...]) -> list[str]:
    width = max(len(c.name) for c in costs)
    sizes = [("up to " if c.upper else "") + format_si(c.nbytes) for c in costs]
    most = max(map(len, sizes))
    rows = [
        f"  {c.name:<{width}}  {c.tier:<4}  {size:>{most}}  {c.formula}" for c, size in zip(costs, sizes, strict=True)
    ]
    return ["memory that it asks for, activations and working space not counted:", *rows]


def _resolved(rows: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Sizes with their values; what a trainer takes from its own options in one sentence."""
    known = [row for row in rows if row[1] != "?"]
    lines = ['"auto" becomes, with the Hugging Face Trainer or accelerate (DeepSpeed itself fills in nothing):']
    width = max((len(key) for key, _, _ in known), default=0)
    lines += [f"  {key:<{width}}  {value}  ({why})" for key, value, why in known]
    lines += [f"  {key} from {why}" for key, value, why in rows if value == "?"]
    return lines


def verdict(report: Report) -> str:
    """One line: how many of each, and whether the file is fit for use."""
    counts = [(report.count(s), s) for s in ("error", "warning", "note")]
    words = ", ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in counts if n)
    return f"{'not fit for use' if report.count('error') else 'valid'}{': ' if words else ''}{words}"


def lint_json(report: Report) -> str:
    """Everything, in exact bytes."""
    import json
    from dataclasses import asdict

    document = {
        "source": report.source,
        "kind": report.kind,
        "headline": report.headline,
        "valid": not report.count("error"),
        "findings": [asdict(f) for f in report.findings],
        "costs": [asdict(c) for c in report.costs],
        "auto": [{"key": k, "value": v, "from": w} for k, v, w in report.resolved],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
