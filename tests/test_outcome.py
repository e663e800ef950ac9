"""What a run leaves behind, and how it is shown."""

import json
import re
from pathlib import Path

import pytest

from zplan.runtime.data import Corpus
from zplan.runtime.job import Job
from zplan.runtime.outcome import Line, Measured, Outcome, read_measured, write_measured
from zplan.runtime.progress import Memory, Progress, StepRecord


def rank(number: int, *, off: int = 0, stray: int = 0, device: str = "cpu") -> Measured:
    lines = (Line("optim.scalars", "idle | step", 24, 24), Line("act.head", "loss | step", 1000, 1000 + off))
    peaks = (Line("peak", "idle", 24, 24), Line("peak", "loss", 1024, 1024 + off))
    return Measured(number, device, lines, peaks, (Line("born in loss", "a | b", 0, stray),) if stray else ())


def test_equal_bytes_are_good_and_one_byte_is_not():
    assert Outcome((), (rank(0), rank(1))).good(0.0)
    assert not Outcome((), (rank(0), rank(1, off=1))).good(0.0)
    assert not Outcome((), (rank(0, off=-1),)).good(0.0)


def test_tolerance_is_a_share_of_the_larger_side():
    assert Outcome((), (rank(0, off=10),)).good(0.01)
    assert not Outcome((), (rank(0, off=-11),)).good(0.01)


def test_unclaimed_bytes_are_never_good():
    assert not Outcome((), (rank(0, stray=1),)).good(1.0)


def test_the_table_shows_the_worst_rank():
    text = Outcome((), (rank(0), rank(1, off=7, stray=3))).table(0.0)
    cells = [re.split(r" {2,}", row) for row in text.splitlines()]
    assert cells[0] == ["rank 1", "predicted B", "measured B", "difference"]
    assert cells[2:] == [
        ["optim.scalars", "24", "24", "0"],
        ["act.head", "1,000", "1,007", "+7"],
        ["not in the plan: born in loss", "0", "3", "+3"],
        ["peak of `loss`", "1,024", "1,031", "+7"],
        [""],
        ["2 ranks, 2 lines, 2 phases: 3 not equal to the byte, on ranks 1"],
    ]


def test_long_lists_of_differences_are_cut():
    peaks = tuple(Line("peak", f"forward.blocks.{i}", 10, 11) for i in range(30))
    text = Outcome((), (Measured(0, "cpu", (), peaks, ()),)).table(0.0)
    assert text.count("peak of `forward.blocks.") == 9 and "... and 21 more such rows" in text
    assert "30 not equal to the byte" in text


def test_verdict_when_all_is_equal():
    assert Outcome((), (rank(0), rank(1))).verdict(0.0) == (
        "2 ranks, 2 lines, 2 phases: measured equals predicted to the byte"
    )
    assert Outcome((), (rank(0),)).verdict(0.01).endswith("within 1.000%")


def test_one_step_is_not_measured():
    assert "takes two steps" in Outcome((), ()).table(0.0)


def test_json_holds_everything():
    document = json.loads(Outcome(({"step": 1, "loss": 2.0},), (rank(0, off=1),)).to_json(0.0))
    assert document["ok"] is False and document["steps"][0]["loss"] == 2.0
    assert document["ranks"][0]["lines"][1] == {
        "name": "act.head",
        "where": "loss | step",
        "predicted": 1000,
        "measured": 1001,
        "bound": False,
    }


def test_comparisons_travel_by_file(tmp_path):
    class Comparison:
        lines, peaks, unattributed = rank(0).lines, rank(0).peaks, (Line("x", "y", 0, 5),)

    for number in (1, 0):
        write_measured(tmp_path, number, "cpu", Comparison())
    found = read_measured(tmp_path)
    assert [m.rank for m in found] == [0, 1]
    assert (found[1].lines, found[1].peaks, found[1].stray) == (rank(0).lines, rank(0).peaks, (Line("x", "y", 0, 5),))


@pytest.mark.parametrize("corpus", [None, Corpus(Path("t.uint16"), "uint16", 5, 1, 1)])
def test_a_job_reads_back_as_written(tmp_path, corpus):
    job = Job("script", tmp_path, Path("plan.json"), corpus, steps=3, script=Path("a b.py"), arguments=("--x", "ü"))
    assert Job.read(job.write()) == job


class Terminal:
    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("live", "expected"), [(False, [1, 4, 8, 10]), (True, range(1, 11))])
def test_progress_prints_every_few_steps_and_overwrites_on_a_terminal(tmp_path, live, expected):
    out = Terminal(live)
    progress = Progress(10, 4, out)
    for step in range(1, 11):
        progress.add(StepRecord(step, 3.25, 1.0, 0.5, 1024, Memory("live", 5 * 2**20, 6 * 2**20)))
    assert out.text.count("loss 3.2500  grad norm 1.000  2,048 tokens/s  0.500 s  5.0 MiB live, peak 6.0") == len(
        expected
    )
    assert out.text.count("\n") == 4
    assert ("\r" in out.text) == live
    progress.write(tmp_path / "steps.jsonl")
    assert [json.loads(x)["step"] for x in (tmp_path / "steps.jsonl").read_text().splitlines()] == list(range(1, 11))
