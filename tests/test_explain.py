"""What each key does, in DeepSpeed and in zplan: every key of the schema has its sentence."""

import pytest

from zplan.planner.config_doc import treatments
from zplan.planner.dsschema import REMOVED, ZERO
from zplan.planner.errors import ZplanError
from zplan.planner.explain import BLOCKS, explain, explanation


def test_every_key_of_the_schema_and_of_the_reader_is_explained():
    for block, (words, rows) in BLOCKS.items():
        missing = {*rows, *treatments().get(block, {})} - set(words) - set(REMOVED)
        assert missing <= ({"zplan"} if block == () else set()), (block, missing)
        assert all(text and text[-1] != "." for text in words.values())
        for name in words:
            if rows and name not in rows and block:
                assert block == ("zero_optimization",) or block[-1].startswith("offload"), (block, name)


@pytest.mark.parametrize(
    ("key", "paths"),
    [
        ("reduce_bucket_size", ["zero_optimization.reduce_bucket_size"]),
        ("zero_optimization.offload_param.device", ["zero_optimization.offload_param.device"]),
        ("device", ["zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"]),
        ("enabled", ["fp16.enabled", "bf16.enabled"]),
        ("fp16.enabled", ["fp16.enabled"]),
        ("max_live_parameters", ["zero_optimization.stage3_max_live_parameters"]),
        ("ratio", ["zero_optimization.offload_optimizer.ratio"]),
        ("lr", ["optimizer.params.lr"]),
    ],
)
def test_a_key_is_found_by_its_name_or_path(key, paths):
    assert [".".join(e.path) for e in explain(key)] == paths


def test_the_text_has_both_sides_and_the_facts():
    text = explanation("reduce_bucket_size")
    for words in ("counted in elements, not bytes", "500,000,000 by default", '"auto"', "zplan      largest piece"):
        assert words in text, text
    assert "deprecated: write" in explanation("cpu_offload") and "since 0.10" in explanation("zero_hpz_partition_size")
    assert "removed" in explanation("sparse_attention")
    assert "zplan      refused" in explanation("zenflow")


def test_unknown_keys_are_refused_with_the_nearest():
    with pytest.raises(ZplanError) as caught:
        explain("stage3_param_persitence_threshold")
    assert "did you mean `stage3_param_persistence_threshold`?" in caught.value.hint
    with pytest.raises(ZplanError):
        explain("fp16.stage")


def test_no_key_of_the_zero_block_is_called_unknown():
    assert [k for k in ZERO if "does not know" in explain(f"zero_optimization.{k}")[0].zplan] == []


def test_the_command(capsys):
    from zplan.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["check", "--explain", "overlap_comm"])
    assert stopped.value.code == 0 and "streams of their own" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["check"])
    assert stopped.value.code == 2 and "no FILE is given" in capsys.readouterr().err
