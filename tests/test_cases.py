"""What people measured, ran out of memory with, and published, as golden facts: zplan says the right answer to each.

`golden/cases.csv` has one row a case: the facts of a public report, and a `check` of what a right answer says. A fact
may carry why it is not held: `left_out` (which fact is missing), `wrong` (zplan says something else), or `code` (the
report disagrees with the code of the tool that it speaks of, whose number then stands in the row). `python -m pytest -s
-k tally` prints the tally.
"""

import csv
import json
from pathlib import Path

import case_reading as reading
import pytest
from case_asking import KNOWN_FACTS, Given, check

GOLDEN = Path(__file__).parent / "golden" / "cases.csv"
with GOLDEN.open(encoding="utf-8", newline="") as file:
    CASES = list(csv.DictReader(file))
FACTS = [(case, fact) for case in CASES for fact in json.loads(case["check"])]
HELD = [(case, fact) for case, fact in FACTS if not {"left_out", "wrong"} & set(fact)]
OPEN = [(case, fact) for case, fact in FACTS if {"left_out", "wrong"} & set(fact)]
WAYS = ("quantity", "verdict", "lint", "cause", "relation")


def name_of(pair):
    case, fact = pair
    way = next(w for w in WAYS if w in fact)
    number = json.loads(case["check"]).index(fact)
    return f"{case['id']}-{number}-{fact['quantity'] if way == 'quantity' else way}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def half_a_digit(number):
    """A bound holds to the digits that it is written with."""
    return 0.5 * 10.0 ** -len(str(number).partition(".")[2])


def is_right(case, fact, folder):
    """Whether zplan's answer is what the fact says; and the answer, for a message."""
    given = Given(case["model"], {**json.loads(case["setup"]), **fact.get("at", {})}, folder)
    if "verdict" in fact:
        found = reading.verdict(given)
        return found == fact["verdict"], found
    if "lint" in fact:
        rules = check(given).rules
        return set(fact["lint"]) <= rules, sorted(rules)
    if "cause" in fact:
        return reading.named(given, fact["cause"]), fact["cause"]
    if "relation" in fact:
        assert fact["relation"] == "does-not-fit for any number of GPUs"
        found = reading.any_number_of_gpus(given)
        return found == {"does-not-fit"}, found
    found = reading.read(given, fact["quantity"])
    if "value" in fact:
        return abs(found - fact["value"]) <= fact["tolerance"], found
    low, high = (fact[end] if end in fact else None for end in ("min", "max"))
    above = low is None or found >= low - half_a_digit(low)
    return above and (high is None or found <= high + half_a_digit(high)), found


@pytest.mark.parametrize(("case", "fact"), HELD, ids=map(name_of, HELD))
def test_zplan_says_what_is_right(case, fact, folder):
    right, found = is_right(case, fact, folder)
    assert right, f"{case['what']}: {fact}, and zplan says {found}"


@pytest.mark.parametrize(("case", "fact"), OPEN, ids=map(name_of, OPEN))
def test_what_is_not_held_is_not_held(case, fact, folder):
    """When zplan learns to answer one of these, its row must say so."""
    if fact.get("quantity", "").rpartition("_")[0] in reading.UNREAD:
        return
    assert not is_right(case, fact, folder)[0]


def test_every_word_of_a_case_is_read():
    """No fact of a report is in the file and ignored: what moves no number is listed as such."""
    words = {key for case in CASES for key in json.loads(case["setup"])}
    words |= {key for _, fact in FACTS for key in fact.get("at", {})}
    assert words <= KNOWN_FACTS
    asked = {fact["quantity"].rpartition("_")[0] for _, fact in FACTS if "quantity" in fact}
    asked |= {fact["quantity"] for _, fact in FACTS if "quantity" in fact}
    assert set(reading.QUANTITIES) <= asked and set(reading.UNREAD) <= asked


def test_the_tally():
    """Nine tenths of the cases run as a whole, and each fact that does not says which one is missing."""
    kinds = {case["kind"] for case in CASES}
    unrun = {case["id"] for case, fact in FACTS if "left_out" in fact}
    wrong = {case["id"] for case, fact in FACTS if "wrong" in fact}
    print(  # noqa: T201 - the tally, with -s
        f"{len(CASES)} cases, {len(CASES) - len(unrun | wrong)} right as a whole, {len(unrun)} not run as a whole, "
        f"{len(wrong)} wrong; {len(FACTS)} facts, {len(HELD)} right"
    )
    assert kinds == {"measured", "oom", "throughput"} and len({case["id"] for case in CASES}) == len(CASES) == 63
    assert len(unrun) <= 0.1 * len(CASES) and len(wrong) <= 1
    assert (len(FACTS), len(HELD)) == (223, 213)
    assert all(len(fact[k]) > 40 for _, fact in FACTS for k in ("left_out", "wrong", "code") if k in fact)
