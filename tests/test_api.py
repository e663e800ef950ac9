"""`zplan.estimate` and `zplan.plan`: frozen answers, their JSON, and arguments that are refused."""

import json
from dataclasses import FrozenInstanceError

import pytest

import zplan
from zplan.planner.answer import DoesNotFit, Estimate
from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import Plan
from zplan.planner.plan_reading import parse_plan
from zplan.planner.presets import read_preset
from zplan.planner.report import report
from zplan.planner.units import GIB

HEADLINE = {"params": "7e9", "gpus": 8, "mem": 24}
SMALL = {"model": "smollm2-135m", "gpus": 2, "mem": 8, "seq": 256, "global_batch": 8}


@pytest.fixture(scope="module")
def headline():
    return zplan.estimate(**HEADLINE)


def test_the_headline(headline):
    assert isinstance(headline, Estimate) and headline.fits
    assert headline.textbook() == (112 * 10**9, 38_500_000_000, 26_250_000_000, 14 * 10**9)
    assert headline.row.choice.stage == 3 and headline.verdict.code == "shard"
    assert headline.peak_bytes == headline.row.ledger.peak_bytes() < 24 * GIB
    assert headline.lines == headline.row.ledger.lines
    assert headline.remedies == () and headline.longest_seq >= 8192
    assert headline.model.arch.hidden == 4096


def test_answers_are_frozen(headline):
    with pytest.raises(FrozenInstanceError):
        headline.longest_seq = 1
    with pytest.raises(FrozenInstanceError):
        zplan.plan(**SMALL).source = "x"


def test_json_holds_exact_bytes(headline):
    found = json.loads(headline.to_json())
    assert found["fits"] is True and found["peak_bytes"] == headline.peak_bytes
    assert [r["states_bytes"] for r in found["textbook"]] == list(headline.textbook())
    assert [r["formula"] for r in found["textbook"]] == ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]
    picked = found["stages"][3]
    kinds = sum(picked[f"{kind}_bytes"] for kind in ("states", "buffers", "activations", "overhead"))
    assert kinds == picked["peak_bytes"] == headline.peak_bytes
    device = [x for x in found["lines"] if x["tier"] == "device"]
    assert sum(x["nbytes"] * x["live_at_peak"] for x in device) == headline.peak_bytes
    assert found["model"]["num_params"] == 7 * 10**9 > found["model"]["shape_num_params"]
    assert found["not_counted"] and found["asked"] == {"params": "7e9", "gpus": 8, "mem": 24}


def test_counts_and_sizes_may_be_numbers_or_text(headline):
    assert zplan.estimate(params=7e9, gpus=8, mem="24GiB").peak_bytes == headline.peak_bytes
    assert zplan.estimate(params=7_000_000_000, gpus=8, mem=24 * 10**9 / GIB).row.capacity_bytes <= 24 * 10**9


def test_accumulation_changes_traffic_as_the_formulas_say():
    k1, k4 = (zplan.estimate(**HEADLINE, accumulation=k) for k in (1, 4))
    assert [b / a for a, b in zip(k1.textbook_traffic(), k4.textbook_traffic(), strict=True)] == [1, 1, 2.5, 4]
    # With accumulation stage 1 reduces whole fp32 sums; without, gradients travel in bf16.
    assert k4.traffic[1].reduce_bytes == 2 * k1.traffic[1].reduce_bytes
    assert k4.traffic[1].gather_bytes == k1.traffic[1].gather_bytes
    assert k4.traffic[2].reduce_bytes == 4 * k1.traffic[2].reduce_bytes
    assert k4.rows[1].peak_bytes > k1.rows[1].peak_bytes


def test_a_plan_is_for_the_shape_itself():
    plan = zplan.plan(**HEADLINE)
    assert isinstance(plan, Plan) and plan.fits and plan.choice.stage == 3
    assert not any(x.id == "states.remainder" for x in plan.lines)
    assert any(f"{plan.spec.num_params:,}" in note for note in plan.notes)


def test_a_plan_reads_back_equal_and_byte_for_byte():
    for asked in (SMALL, HEADLINE, {**SMALL, "device": "cpu", "precision": "fp32", "stage": 3}):
        plan = zplan.plan(**asked)
        text = plan.to_json()
        again = parse_plan(json.loads(text), "plan.json")
        assert again == plan and again.to_json() == text


def test_a_plan_that_does_not_fit_is_refused_with_the_way_out():
    with pytest.raises(DoesNotFit) as caught:
        zplan.plan(params="7e9", gpus=4, mem=24)
    assert "Does not fit" in caught.value.message and "8 GPUs at stage 3 (--gpus 8)" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        ({"offload_ratio": 0.5}, "`--offload-ratio 0.5` offloads nothing", "add --offload cpu"),
        ({"offload": "cpu", "offload_ratio": 0}, "`--offload-ratio 0` is no share", "above 0 and up to 1"),
        ({"offload": "cpu", "offload_ratio": True}, "`--offload-ratio True` is no share", "above 0 and up to 1"),
        ({"offload": "cpu", "offload_params": "cpu", "stage": 2}, "`--offload-params cpu` needs", "--stage 3"),
        ({"offload": "disk"}, "`--offload disk` is unknown", "--offload none"),
        ({"offload": "cpux"}, "`--offload cpux` is unknown", "cpu"),
        ({"offload_params": "disk"}, "`--offload-params disk` is unknown", "--offload-params none"),
        ({"offload_params": "cpu"}, "`--offload-params cpu` leaves the larger optimizer", "add --offload cpu"),
        ({"reduce_dtype": "fp8"}, "`--reduce-dtype fp8` is unknown", "fp32, bf16"),
        ({"optimizer": "adamww"}, "`--optimizer adamww` is unknown", "did you mean `adamw`?"),
        ({"precision": "fp8"}, "`--precision fp8` is not built yet", "bf16, fp16 or fp32"),
        ({"precision": "bf61"}, "`--precision bf61` is unknown", "did you mean `bf16`?"),
        ({"checkpointing": "half"}, "`--checkpointing half` is unknown", "none, selective, full"),
        ({"attention": "flash"}, "`--attention flash` is unknown", "sdpa, eager"),
        ({"stage": 4}, "`--stage 4` is no ZeRO stage", "0, 1, 2 or 3"),
        ({"micro_batch": 0}, "`--micro-batch 0` is not a whole number of at least 1", "1 or more"),
        ({"accumulation": -1}, "`--accumulation -1`", "1 or more"),
        ({"seq": 1.5}, "`--seq 1.5`", "1 or more"),
        ({"gpus": 0}, "`--gpus 0`", "1 or more"),
        ({"global_batch": 10**18}, "beyond anything zplan plans for", "1,000,000,000 or less"),
        ({"gpus": True}, "`--gpus True`", "1 or more"),
        ({"mem": "-24"}, "`--mem -24` is negative", "24 (GiB)"),
        ({"mem": float("nan")}, "`--mem nan`", "24 (GiB)"),
        ({"mem": 0}, "`--mem 0` is zero", "24 (GiB)"),
        ({"params": float("inf")}, "`--params inf`", "7e9"),
        ({"params": "-7e9"}, "`--params -7e9` is negative", "7e9"),
        ({"params": None}, "neither --model nor --params is given", "--params 7e9"),
        ({"model": "gpt2"}, "both --model and --params are given", "--params 7e9"),
        ({"params": None, "model": 3}, "`model` is 3", "a name, a path or a hub id"),
        ({"gpu": 4090}, "`gpu` is 4090", "`zplan gpus`"),
        ({"config": 3}, "`config` is 3", "a path or a mapping"),
        ({"config": {"train_micro_batch_size_per_gpu": 1e30}}, "is beyond anything zplan plans for", "or less"),
        ({"config": {"train_batch_size": 10**12}}, "asks for 1,000,000,000,000 as global-batch", "check"),
        ({"global_batch": 100}, "100 / 8 = 12.5", "use 96 or 104"),
        ({"global_batch": 64, "micro_batch": 2, "accumulation": 3}, "is not 2 x 3 x 8 GPUs = 48", "use 48"),
    ],
)
def test_arguments_that_are_refused(asked, message, hint):
    with pytest.raises(ZplanError) as caught:
        zplan.estimate(**{**HEADLINE, **asked})
    assert message in caught.value.message and hint in caught.value.hint


def test_a_config_fixes_what_it_names():
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**7},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 0.5,
    }
    plan = zplan.plan("smollm2-135m", gpus=8, mem=24, config=config)
    c = plan.choice
    assert (c.stage, c.micro_batch, c.accumulation, c.piece_numel) == (2, 4, 2, 10**7)
    assert (plan.training.lr, plan.training.clip) == (3e-4, 0.5)
    by = {d.name: d for d in plan.decisions}
    assert by["stage"].reason == "asked by `config`" and by["seq"].chosen
    assert parse_plan(json.loads(plan.to_json()), "p") == plan


def test_a_train_batch_alone_means_one_micro_step():
    found = zplan.estimate("smollm2-135m", gpus=2, mem=80, seq=64, config={"train_batch_size": 8})
    assert (found.row.choice.micro_batch, found.row.choice.accumulation) == (4, 1)
    assert any("one micro-step" in n for n in found.notes)


def test_flag_and_config_must_agree():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    assert zplan.estimate(**HEADLINE, config=config, stage=2).row.choice.stage == 2
    with pytest.raises(ZplanError, match="`--stage 1` and `config`.*disagree"):
        zplan.estimate(**HEADLINE, config=config, stage=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`layers` of .* is 1,000,000,000"),
        ({"hidden_size": 10**30}, "is beyond anything"),
        ({"hidden_size": 10**6, "intermediate_size": 10**8}, "has 9,728,064,065,000,000 parameters"),
    ],
)
def test_a_shape_beyond_all_sizes_is_refused_at_once(tmp_path, sizes, message):
    config = {"model_type": "llama", "num_attention_heads": 8, "intermediate_size": 64, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "vocab_size": 32000, **sizes}))
    with pytest.raises(ZplanError, match=message):
        zplan.estimate(tmp_path, gpus=8, mem=24)


def test_a_model_may_be_a_path(tmp_path):
    config = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "vocab_size": 320}))
    plan = zplan.plan(tmp_path, gpus=2, mem=24)
    assert plan.asked["model"] == str(tmp_path) and parse_plan(json.loads(plan.to_json()), "p") == plan


def test_an_assumed_shape_has_no_limit_to_note():
    assert zplan.estimate(**HEADLINE, seq=2**21).notes == ()


def test_a_bucket_is_told_in_bytes_too():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"reduce_bucket_size": 5e9}}
    by = {d.name: d for d in zplan.estimate(**HEADLINE, config=config).decisions}
    assert by["piece_numel"].reason == "asked by `config`; elements, 18.63 GiB in fp32"


def test_remedies_of_a_model_without_activations_claim_no_fit(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**(read_preset("falcon-40b") or {}), "alibi": True}))
    text = report(zplan.estimate(str(path), gpus=8, mem=80))
    assert "Would leave room for activations with 16 GPUs" in text and "Would fit" not in text


def test_notes_of_config_and_model_come_along():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"sub_group_size": 5e7}}
    found = zplan.estimate("gpt2", gpus=8, mem=24, config=config)
    assert any("changes nothing" in n for n in found.notes) and any("dropout" in n for n in found.notes)
    found = zplan.estimate("llama-2-7b", gpus=8, mem=80, seq=8192, beyond_limit=True)
    assert any("longer than what `llama-2-7b` is made for, 4096 tokens" in n for n in found.notes)


def test_public_names():
    assert {"estimate", "plan", "ZplanError"} <= set(dir(zplan))
    with pytest.raises(AttributeError):
        _ = zplan.estimat


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq": "8192"}, "`--seq '8192'` is not a whole number"),
        ({"beyond_limit": "yes"}, "`beyond_limit` is 'yes'"),
        ({"offline": 1}, "`offline` is 1"),
        ({"qlora": "nf4"}, "`qlora` is 'nf4'"),
    ],
)
def test_arguments_of_another_type_are_refused(given, message):
    with pytest.raises(ZplanError, match=message):
        zplan.estimate(**HEADLINE, **given)
