"""What people really wrote and ran into, as golden facts: config files, reports, and the fragments of two articles.

Each row of `golden/config_cases.json` is a config (or a file of `golden/configs`) and what must be said about it. Where
a report and DeepSpeed's code disagree, the code counts, and `why` says so.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from zplan.planner.batch import KEYS, solve_batch
from zplan.planner.known_errors import known_errors
from zplan.planner.lint import Subject, check_document
from zplan.planner.lint_script import check_script
from zplan.planner.loss_scale import LossScale
from zplan.planner.relaxed import read_document
from zplan.planner.textbook import Rate
from zplan.runtime.arena import Arena
from zplan.runtime.precision import LossScaler

GOLDEN = Path(__file__).parent / "golden"
ROWS = json.loads((GOLDEN / "config_cases.json").read_text(encoding="utf-8"))
ASKS = [(row, ask) for row in ROWS for ask in row["asks"]]
IDS = [f"{row['id']}-{row['asks'].index(ask)}" for row, ask in ASKS]


def text_of(row, ask):
    """The config as text, with the values that an ask puts in."""
    if "file" in {**row, **ask} and "config" not in ask:
        text = (GOLDEN / "configs" / {**row, **ask}["file"]).read_text(encoding="utf-8")
        if "set" not in ask:
            return text
        config = json.loads(text)
    else:
        config = json.loads(json.dumps(ask.get("config", row.get("config", {}))))
    for path, value in ask.get("set", {}).items():
        *parents, key = path.split(".")
        block = config
        for name in parents:
            block = block[name]
        block[key] = value
    return json.dumps(config, indent=2)


def report_of(row, ask):
    at = dict(ask.get("at", {}))
    if "release" in at:
        at["release"] = tuple(at["release"])
    if "script" in row:
        return check_script(row["script"], "train.py", Subject(**at))
    return check_document(read_document(text_of(row, ask), "ds.json"), "ds.json", Subject(**at))


def rules(report, *severities):
    return sorted(f.rule for f in report.findings if f.severity in severities)


def words_of(report, rule):
    return " | ".join(f"{f.message} -> {f.fix}" for f in report.findings if f.rule == rule)


def check_lists(report, ask):
    """Rules by severity: `errors` and `warnings` are all there may be."""
    for name, severity in (("errors", "error"), ("warnings", "warning")):
        if name in ask:
            assert rules(report, severity) == sorted(ask[name])
    assert set(ask.get("lint", ())) <= report.rules
    assert not set(ask.get("not_lint", ())) & report.rules
    assert not set(ask.get("not_errors", ())) & set(rules(report, "error"))


def check_words(report, ask):
    for rule, words in ask.get("says", {}).items():
        assert [w for w in words if w not in words_of(report, rule)] == []
    for rule, words in ask.get("silent", {}).items():
        assert [w for w in words if w in words_of(report, rule)] == []
    for rule, lines in ask.get("lines", {}).items():
        assert [f.place[0] for f in report.findings if f.rule == rule] == lines
    assert [w for w in ask.get("headline", ()) if w not in report.headline] == []


def check_numbers(report, ask):
    costs = {c.name: c.nbytes for c in report.costs}
    assert {name: costs.get(name) for name in ask.get("costs", {})} == ask.get("costs", {})
    assert not set(ask.get("no_costs", ())) & set(costs)
    resolved = {key: value for key, value, _ in report.resolved}
    assert {key: resolved.get(key) for key in ask.get("resolved", {})} == ask.get("resolved", {})


def check_triple(row, ask):
    config = json.loads(text_of(row, ask))
    given = {name: config.get(getattr(KEYS, name)) for name in ("train", "micro", "accumulation")}
    batch = solve_batch(**given, world_size=ask["at"]["gpus"], names=KEYS)
    assert [batch.micro, batch.accumulation, batch.train] == ask["triple"]


def check_scale(wanted):
    """Overflow as long as the scale is above what the gradients bear."""
    scaler = LossScaler(LossScale(power=wanted["power"], hysteresis=wanted["hysteresis"]), Arena(torch.device("cpu")))
    halvings = skipped = 0
    while scaler.scale.item() > wanted["until"]:
        before = scaler.scale.item()
        scaler.update(torch.tensor(1.0))
        skipped += 1
        halvings += scaler.scale.item() == before / 2
    assert (halvings, skipped) == (wanted["halvings"], wanted["skipped"])


@pytest.mark.parametrize(("row", "ask"), ASKS, ids=IDS)
def test_what_is_said_is_right(row, ask):
    if "log" in ask:
        assert [e.cause for e in known_errors("\n".join(ask["log"]))] == [ask["cause"]]
        return
    if "rate" in ask:
        rate = ask["rate"]
        assert Rate(0, rate["bytes"]).of(rate["num_params"], rate["ranks"]) == rate["nbytes"]
        return
    report = report_of(row, ask)
    check_lists(report, ask)
    check_words(report, ask)
    check_numbers(report, ask)
    if "triple" in ask:
        check_triple(row, ask)
    if "scale" in ask:
        check_scale(ask["scale"])


KNOWN_ASKS = frozenset(
    "at set config file errors warnings lint not_lint not_errors says silent lines headline costs no_costs resolved "
    "triple scale log cause rate why".split()
)


def test_the_tally():
    """All files, all reports of four kinds that are sure, all fragments; and no ask that nothing looks at."""
    kinds = Counter(row.get("kind", row["id"].rstrip("0123456789").rstrip("-")) for row in ROWS)
    print(f"{len(ROWS)} rows, {len(ASKS)} asks: {dict(kinds)}")  # noqa: T201 - the tally, with -s
    assert {k: kinds[k] for k in ("file", "config-error", "numerics", "checkpoint", "hang", "F")} == {
        "file": 23,
        "config-error": 20,
        "numerics": 2,
        "checkpoint": 3,
        "hang": 1,
        "F": 13,
    }
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert [
        ask for _, ask in ASKS if not ask.keys() <= KNOWN_ASKS or ask.keys() <= {"at", "set", "config", "why"}
    ] == []
    assert {p.name for p in (GOLDEN / "configs").iterdir()} == {row["file"] for row in ROWS if "file" in row}


DEEPSPEEDS = [row["file"] for row in ROWS if "file" in row and "accelerate" not in row["file"] and row["file"] < "37"]


@pytest.mark.witness
@pytest.mark.parametrize("name", DEEPSPEEDS)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_deepspeed_itself_refuses_the_files_marked_so(name, tmp_path):
    """Witness: DeepSpeed's own reader and config class, on one rank."""
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    file = GOLDEN / "configs" / name
    text = file.read_text(encoding="utf-8")
    report = check_document(read_document(text, name), name, Subject(consumer="deepspeed", gpus=1))
    given = str(file)
    if name.startswith("34"):  # the config of a trainer, DeepSpeed's block inside
        given = tmp_path / "inner.json"
        given.write_text(json.dumps(json.loads(text)["deepspeed"]), encoding="utf-8")
    try:
        DeepSpeedConfig(str(given))
        refused = False
    except Exception:  # noqa: BLE001 - pydantic's, assertions and type errors all mean no
        refused = True
    assert any(f.refused for f in report.findings) is refused, [(f.rule, f.message) for f in report.findings]
