"""The rules of choosing, checked against brute force over real ledgers of small models."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zplan
from zplan.planner.batch import Batch
from zplan.planner.errors import ZplanError
from zplan.planner.evaluation import MARGIN
from zplan.planner.halving import largest_multiple
from zplan.planner.hardware import Hardware
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.remedies import remedies
from zplan.planner.request import make_request
from zplan.planner.search import STAGES, Search
from zplan.planner.sequence import NO_LIMIT, ended_by
from zplan.planner.sources import Model, model_from
from zplan.planner.textbook import runtime_rate
from zplan.planner.units import GIB, MIB
from zplan.planner.verdict import decisions, judge

ARCH = Architecture("llama", 6, 256, 4, 2, 64, 704, 2000, 4096, tied=False)
TINY = Model(ModelSpec("tiny", decoder_units(ARCH), ARCH), "a test")


def search(mem_bytes, *, world=4, model=TINY, remainder=True, **asked):
    return Search(model, Hardware(world, 1, mem_bytes), make_request({"device": "cpu", **asked}), remainder=remainder)


def peak(s, stage, micro=1, accumulation=1, checkpointing="none"):
    return s.row(s.choice(stage, Batch(micro, accumulation, s.hardware.world_size), checkpointing)).peak_bytes


def test_the_lowest_stage_that_fits_is_picked():
    s = search(GIB)
    lean = [peak(s, stage, checkpointing="full") for stage in STAGES]
    assert lean[0] > lean[1] >= lean[2] > lean[3]
    for mem, stage in ((lean[0], 0), (lean[0] - 1, 1), (lean[1] - 1, 3), (lean[3], 3)):
        found = search(mem)
        assert found.pick(found.rows()).choice.stage == stage
    found = search(lean[3] - 1)
    row = found.pick(found.rows())
    assert not row.fits and row.choice.stage == 3 and row.spare_bytes == -1


def test_checkpointing_is_left_out_only_where_a_tenth_stays_free():
    none = peak(search(GIB), 0)
    roomy = -(-none * MARGIN // (MARGIN - 1))
    for mem, expected in ((roomy, "none"), (roomy - MARGIN, "full"), (none, "full")):
        assert search(mem).best(0, [Batch(1, 1, 4)]).choice.checkpointing == expected
    # Asked for, it is kept wherever it fits at all.
    assert search(none, checkpointing="none").best(0, [Batch(1, 1, 4)]).fits


@settings(max_examples=25)
@given(st.integers(30, 400), st.sampled_from([1, 6, 16]), st.sampled_from(STAGES))
def test_the_micro_batch_is_the_largest_that_fits(mib, per_rank, stage):
    s = search(mib * MIB, global_batch=per_rank * 4)
    row = s.best(stage, s.batches(4))
    assert row.choice.global_batch == per_rank * 4

    def fitting(checkpointing, good):
        divisors = [m for m in range(1, per_rank + 1) if per_rank % m == 0]
        rows = {m: s.row(s.choice(stage, Batch(m, per_rank // m, 4), checkpointing)) for m in divisors}
        return max((m for m, r in rows.items() if good(r)), default=None)

    none = fitting("none", lambda r: r.roomy)
    full = fitting("full", lambda r: r.fits)
    expected = ("none", none) if none else ("full", full or 1)
    assert (row.choice.checkpointing, row.choice.micro_batch) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [(1, 1)]),
        ({"micro_batch": 3}, [(3, 1)]),
        ({"accumulation": 5}, [(1, 5)]),
        ({"global_batch": 24}, [(1, 6), (2, 3), (3, 2), (6, 1)]),
        ({"global_batch": 24, "micro_batch": 2}, [(2, 3)]),
        ({"global_batch": 24, "accumulation": 2}, [(3, 2)]),
    ],
)
def test_batches_that_may_be_chosen(asked, expected):
    assert [(b.micro, b.accumulation) for b in search(GIB, **asked).batches(4)] == expected


def test_a_batch_that_does_not_split_names_the_nearest():
    with pytest.raises(ZplanError) as caught:
        search(GIB, world=8, global_batch=100).batches(8)
    assert caught.value.message == "`--global-batch 100` does not split over 8 GPUs: 100 / 8 = 12.5 sequences a GPU"
    assert caught.value.hint == "use 96 or 104"


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3), st.integers(1, 5000), st.integers(2, 10**6))
def test_largest_multiple_is_brute_force(room, slope, square, near, below):
    def spare(x):
        return room - slope * x - square * x * x // 100

    if spare(below) >= 0:
        return
    calls = []
    found = largest_multiple(lambda x: calls.append(x) or spare(x), 128, below=below, near=near)
    assert found % 128 == 0 and (found == 0 or spare(found) >= 0)
    assert spare(found + 128) < 0 or found + 128 >= below
    assert len(calls) < 40


def test_the_longest_sequence_fits_and_the_next_does_not():
    s = search(160 * MIB, seq=256)
    row = s.pick(s.rows())
    longest = s.longest_seq(row)
    assert 256 < longest < ARCH.max_seq and longest % 128 == 0
    assert s.row(replace(row.choice, seq=longest)).fits
    assert not s.row(replace(row.choice, seq=longest + 128)).fits
    s = search(64 * GIB)
    assert s.longest_seq(s.pick(s.rows())) == ARCH.max_seq
    s = search(MIB)
    assert s.longest_seq(s.pick(s.rows())) == 0


def test_an_assumed_shape_has_no_limit_of_its_own():
    model = model_from(None, 10**7)
    s = search(24 * GIB, model=model)
    assert s.seq == 2048 and s.longest_seq(s.pick(s.rows())) > 131072


def test_what_a_shape_lacks_is_a_line_of_its_own():
    model = model_from(None, 10**7)
    missing = 10**7 - model.spec.num_params
    assert missing > 0
    for stage in STAGES:
        row = search(GIB, model=model).best(stage, [Batch(1, 1, 4)])
        assert row.ledger.line("states.remainder").nbytes == runtime_rate(row.choice).of(missing, 4)
    plan = search(GIB, model=model, remainder=False).best(0, [Batch(1, 1, 4)])
    assert not any(x.id == "states.remainder" for x in plan.ledger.lines)


@pytest.mark.parametrize(
    ("name", "seq", "said"),
    [("gpt2", 2048, "position table of `gpt2`, 1024 tokens"), ("mistral-7b-v0.1", 8192, "sliding window")],
)
def test_sequences_that_a_model_cannot_run(name, seq, said):
    model = model_from(name, None)
    with pytest.raises(ZplanError) as caught:
        search(GIB, model=model, seq=seq)
    assert said in caught.value.message and caught.value.hint == f"use --seq {min(seq // 2, 4096)} or less"
    assert search(GIB, model=model, seq=seq // 2).seq == seq // 2


def test_sequences_that_a_model_is_not_made_for():
    model = model_from("llama-2-7b", None)
    with pytest.raises(ZplanError) as caught:
        search(GIB, model=model, seq=8192)
    assert "`--seq 8192` is more than `llama-2-7b` is made for, 4096 tokens" in caught.value.message
    assert caught.value.hint == "use --seq 4096 or less, or --beyond-limit to count it all the same"
    request = make_request({"seq": 8192, "beyond_limit": True})
    assert Search(model, Hardware(4, 1, GIB), request).seq == 8192
    with pytest.raises(ZplanError, match="position table"):
        Search(model_from("gpt2", None), Hardware(4, 1, GIB), replace(request, fixed={"seq": 2048}))
    scaled = replace(model.spec.arch, rope_scaling=(("factor", 2.0), ("rope_type", "linear")))
    spec = replace(model.spec, arch=scaled)
    assert search(GIB, model=model._replace(spec=spec), seq=8192).seq == 8192
    assert search(GIB, model=model_from(None, 7 * 10**9), seq=16384).seq == 16384  # an assumed shape has no limit


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    **{"num_key_value_heads": 4, "vocab_size": 100, "max_position_embeddings": 1024},
}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 1024),
    ],
    ids=["linear", "dynamic", "yarn", "yarn, counted already"],
)
def test_scaling_in_a_config_raises_the_limit(tmp_path, kind, scaling, limit):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": kind, "rope_scaling": scaling}))
    model = model_from(str(tmp_path), None)
    assert search(GIB, model=model).seq == min(2048, limit)
    assert search(GIB, model=model, seq=limit).seq_limit == limit
    with pytest.raises(ZplanError, match=f"is made for, {limit} tokens"):
        search(GIB, model=model, seq=limit + 1)


def test_what_ends_the_longest_sequence_is_said():
    llama, mistral, vit = (model_from(name, None).arch for name in ("llama-2-7b", "mistral-7b-v0.1", "vit-base"))
    assert ended_by(llama, 4096, assumed=False) == ended_by(mistral, 4096, assumed=False) == "the model's limit"
    assert ended_by(vit, 197, assumed=False) == "the model's limit"
    assert ended_by(llama, 3968, assumed=False) == "in steps of 128"
    assert ended_by(llama, NO_LIMIT, assumed=False) == "longer ones are not looked at"
    assert "no limit of its own" in ended_by(llama, NO_LIMIT, assumed=True)


def test_one_gpu_alone_keeps_the_global_batch():
    s = search(64 * GIB, global_batch=16)
    single = s.single()
    assert (single.choice.world_size, single.choice.stage, single.choice.global_batch) == (1, 0, 16)
    assert search(64 * GIB, micro_batch=2).single().choice.global_batch == 2


def verdict(s):
    row = s.pick(s.rows())
    return judge(row, s.single())


def test_verdicts():
    lean = [peak(search(GIB), stage, checkpointing="full") for stage in STAGES]
    assert verdict(search(GIB)).code == "one-gpu" and verdict(search(GIB)).text.startswith("One GPU is enough")
    assert verdict(search(GIB, world=1)).code == "one-gpu"
    found = verdict(search(lean[3]))
    assert found.code == "shard" and "Memory-bound, shard" in found.text and "0.00 GiB to spare" in found.text
    found = verdict(search(lean[3] - MIB))
    assert found.code == "no-fit" and "0.00 GiB over in phase `" in found.text and "where the most is `" in found.text


def test_every_open_value_is_marked_chosen_with_its_reason():
    s = search(GIB, seq=512, stage=2)
    rows = s.rows()
    found = {d.name: d for d in decisions(s, s.pick(rows), rows)}
    assert not found["seq"].chosen and found["seq"].reason == "asked by --seq"
    assert not found["stage"].chosen and found["stage"].value == 2
    for name in ("checkpointing", "micro_batch", "accumulation", "precision", "attention", "ring_slots", "optimizer"):
        assert found[name].chosen and found[name].reason


def test_remedies_are_evaluated_and_hold():
    """Each remedy, asked for as it says, fits."""
    lean = [peak(search(GIB, world=2, seq=256, micro_batch=4), stage, 4, checkpointing="full") for stage in STAGES]
    asked = {"seq": 256, "micro_batch": 4, "stage": 1, "checkpointing": "none"}
    s = search(lean[3] + MIB, world=2, **asked)
    row = s.pick(s.rows())
    assert not row.fits
    found = remedies(s, row)
    assert {"stage 3 and full checkpointing"} < {r.what for r in found}
    for r in found:
        words = dict(zip(*[iter(r.option.replace("--", "").split())] * 2, strict=True))
        changed = {**asked, **{k.replace("-", "_"): int(v) if v.isdigit() else v for k, v in words.items()}}
        world = changed.pop("gpus", 2)
        again = search(lean[3] + MIB, world=world, **changed)
        again_row = again.pick(again.rows())
        assert again_row.fits and again_row.peak_bytes == r.peak_bytes, r


def test_a_larger_card_is_named():
    s = Search(TINY, Hardware(1, 1, 64 * MIB), make_request({}))
    (card,) = [r for r in remedies(s, s.pick(s.rows())) if "a card of" in r.what]
    assert card.option.startswith('--gpu "') and card.spare_bytes > 0


def test_the_headline_choice():
    model = model_from(None, 7 * 10**9)
    s = Search(model, Hardware(8, 1, 24 * GIB), make_request({}))
    row = s.pick(s.rows())
    assert (row.choice.stage, row.choice.checkpointing, row.choice.micro_batch, row.choice.seq) == (3, "full", 1, 2048)
    assert GIB < row.spare_bytes and s.longest_seq(row) > 8192
    assert [r.fits for r in s.rows()] == [False, False, False, True]
    json.dumps([d.value for d in decisions(s, row, s.rows())])


def least(**asked):
    """Peak of the row to run, and of one large micro-batch."""
    rows = [zplan.estimate(params="7e9", gpus=1, **asked, **more).row for more in BATCHES]
    return [r.peak_bytes for r in rows], rows[0]


BATCHES = ({"global_batch": 8}, {"micro_batch": 8, "accumulation": 1}, {"micro_batch": 1, "accumulation": 8})


def test_the_row_that_misses_by_least_is_the_leanest_of_its_batches():
    """Without accumulation one rank keeps bf16 gradients, so that one large micro-batch is leaner than eight."""
    (found, large, small), row = least(mem=90)
    assert not row.fits and found == min(large, small) == large


def test_one_gpu_is_asked_alike_alone_and_beside_others():
    alone = zplan.estimate(params="7e9", gpus=1, mem=100, global_batch=2)
    beside = zplan.estimate(params="7e9", gpus=2, mem=100, global_batch=2)
    assert alone.fits and beside.single.peak_bytes == alone.row.peak_bytes


def test_less_accumulation_is_offered_where_it_is_what_does_not_fit():
    answer = zplan.estimate(params="7e9", gpus=1, mem=100, micro_batch=1, accumulation=2)
    assert not answer.fits
    assert "--micro-batch 2 --accumulation 1" in [r.option for r in answer.remedies]
