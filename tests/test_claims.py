"""Claims of two widely read articles with zplan's number, verdict and condition; `docs/claims.md` is made from them.

`golden/claims.csv` says each claim and its condition; verdict and number are computed here by zplan. `make golden`
(`ZPLAN_REWRITE=1`) writes both anew, and the document.
"""

import csv
import os
from collections import Counter
from pathlib import Path

import pytest
from claims_memory import MEMORY, Said
from claims_settings import SETTINGS

GOLDEN = Path(__file__).parent / "golden" / "claims.csv"
DOC = Path(__file__).parent.parent / "docs" / "claims.md"
MARK = "<!-- table: made from tests/golden/claims.csv; `make golden` rewrites it -->\n"
READ = {**MEMORY, **SETTINGS}
with GOLDEN.open(encoding="utf-8", newline="") as file:
    CLAIMS = list(csv.DictReader(file))
REWRITE = bool(os.environ.get("ZPLAN_REWRITE"))


def table(claims):
    """The document's table."""
    head = ["| claim | verdict | zplan's number | true where, or why not |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [*head, *(f"| {c['claim']} | {c['verdict']} | {c['number']} | {c['condition']} |" for c in claims)]
    )


def rewrite():
    """Verdicts and numbers as zplan says them now, in the golden file and in the document."""
    for c in CLAIMS:
        said = READ[c["id"]]()
        c["number"], c["verdict"] = said.number, said.verdict
    with GOLDEN.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(CLAIMS[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(CLAIMS)
    head, mark, _ = DOC.read_text(encoding="utf-8").partition(MARK)
    assert mark, "the line that separates text and table is gone"
    DOC.write_text(f"{head}{MARK}\n{table(CLAIMS)}\n", encoding="utf-8")


@pytest.mark.skipif(REWRITE, reason="being rewritten")
@pytest.mark.parametrize("claim", CLAIMS, ids=[c["id"] for c in CLAIMS])
def test_what_zplan_says_of_a_claim(claim):
    said = READ[claim["id"]]()
    assert (said.verdict, said.number) == (claim["verdict"], claim["number"])


@pytest.mark.parametrize(
    ("holds", "otherwise", "verdict"),
    [(True, None, "true"), (True, False, "true if"), (False, None, "false"), (False, False, "false")],
)
def test_a_verdict_is_what_the_numbers_say(holds, otherwise, verdict):
    assert Said("", holds, otherwise).verdict == verdict


def test_a_condition_that_changes_nothing_is_an_error():
    with pytest.raises(AssertionError, match="with and without"):
        Said("", holds=True, otherwise=True)


def test_every_claim_is_there_once_and_the_document_shows_them():
    if REWRITE:
        rewrite()
        pytest.skip("rewritten")
    assert sorted(READ) == sorted(c["id"] for c in CLAIMS) and len(CLAIMS) == 42
    counts = Counter(c["verdict"] for c in CLAIMS)
    print(dict(counts))  # noqa: T201 - the tally, with -s
    assert set(counts) == {"true", "true if", "false"}
    text = DOC.read_text(encoding="utf-8")
    _, mark, shown = text.partition(MARK)
    assert mark and shown == f"\n{table(CLAIMS)}\n"
