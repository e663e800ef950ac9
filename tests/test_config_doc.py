"""docs/config.md is what the code says; `ZPLAN_REWRITE=1` (`make golden`) writes it anew."""

import json
import os
from pathlib import Path

import pytest

from zplan.planner import dskeys
from zplan.planner.config_doc import config_tables
from zplan.planner.dsconfig import from_mapping
from zplan.planner.dsschema import BF16, FP16, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, REMOVED, TOP, UNPREFIXED, ZERO
from zplan.planner.errors import ZplanError
from zplan.planner.relaxed import read_document

DOC = Path(__file__).parent.parent / "docs" / "config.md"
MARK = "<!-- tables: made from the code; `make golden` rewrites them -->\n"


def test_the_tables_are_current():
    text = DOC.read_text(encoding="utf-8")
    head, mark, tables = text.partition(MARK)
    assert mark, "the line that separates text and tables is gone"
    if os.environ.get("ZPLAN_REWRITE"):
        DOC.write_text(f"{head}{mark}\n{config_tables()}", encoding="utf-8")
        pytest.skip("rewritten")
    assert tables == f"\n{config_tables()}"


def test_every_known_key_has_a_row():
    tables = config_tables()
    known = (
        *dskeys.TOP_HONOURED,
        *dskeys.TOP_NEUTRAL,
        *dskeys.TOP_INERT,
        *dskeys.BF16_NEUTRAL,
        *dskeys.ZERO_HONOURED,
        *dskeys.ZERO_MAPPED,
        *dskeys.ZERO_NEUTRAL,
        *dskeys.ZERO_INERT,
        *dskeys.OPTIMIZER_HONOURED,
    )
    assert [key for key in known if f"| `{key}` |" not in tables] == []


def test_every_key_of_deepspeeds_schema_has_a_row():
    tables = config_tables()
    known = {*ZERO, *OFFLOAD_OPTIMIZER, *OFFLOAD_PARAM, *BF16, *FP16, *TOP} - {*REMOVED, *UNPREFIXED}
    assert [key for key in sorted(known) if f"| `{key}` |" not in tables] == []


CONFIGS = Path(__file__).parent / "golden" / "configs"
OF_DEEPSPEED = [p for p in sorted(CONFIGS.glob("[0-3]*.json")) if p.name[:2] not in ("30", "31", "34", "37", "38")]
"""The others are of accelerate and of trainers with keys of their own."""


@pytest.mark.parametrize("path", OF_DEEPSPEED, ids=lambda p: p.name)
def test_keys_that_people_write_are_honoured_or_mapped(path):
    """Whatever is wrong with a value, no key asks for something that is not built, autotuning apart."""
    config = read_document(path.read_text(encoding="utf-8"), path.name).value
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    try:
        from_mapping(json.loads(json.dumps(config)), world_size=1)
    except ZplanError as e:
        assert ("not built yet" in e.message) is ("autotuning" in config), e.message


@pytest.mark.parametrize("key", [k for k in dskeys.TOP_NEUTRAL if "either" not in dskeys.TOP_NEUTRAL[k].__name__])
def test_what_the_table_calls_refused_is_refused(key):
    """A value that no neutral key takes for nothing."""
    with pytest.raises(ZplanError, match=f"`{key}`"):
        from_mapping({"train_batch_size": 1, key: {"enabled": True, "x": 3}}, world_size=1)
