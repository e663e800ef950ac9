"""Folded peaks beside whole ledgers: the same bytes in the same phase, for every kind."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.answer import open_search
from zplan.planner.batch import Batch
from zplan.planner.comm import traffic
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.folding import FRONT, fold, foldable
from zplan.planner.hardware import Hardware
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.request import make_request
from zplan.planner.search import Search
from zplan.planner.sources import Model, model_from
from zplan.planner.units import GIB


def llama(layers, **other):
    values = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 160, "vocab": 256, "max_seq": 4096, "tied": False}
    arch = Architecture("llama", layers, 64, **{**values, **other})
    return ModelSpec("tiny", decoder_units(arch), arch)


def gpt2(layers):
    arch = Architecture("gpt2", layers, 64, 4, 4, 16, 256, 256, 4096, tied=True)
    return ModelSpec("tiny", decoder_units(arch), arch)


SPECS = {
    "untied": llama(40),
    "tied": llama(11, tied=True),
    "gpt2": gpt2(13),
    "shallow": llama(4),
    "deep-and-narrow-vocabulary": llama(126, vocab=64),
}


def held(spec, choice, hardware=None):
    """The row of a search, and the whole ledger it stands for."""
    s = Search(
        Model(spec, "a test"), hardware or Hardware(choice.world_size, 1, GIB, "H200 SXM 141GB"), make_request({})
    )
    row = s.row(choice)
    return row, row.ledger


choices = st.builds(
    Choice,
    stage=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 8, 1024]),
    micro_batch=st.sampled_from([1, 3]),
    accumulation=st.sampled_from([1, 2, 5]),
    seq=st.sampled_from([1, 64, 4000]),
    precision=st.sampled_from(["bf16", "fp32", "fp16"]),
    checkpointing=st.sampled_from(["none", "full"]),
    attention=st.sampled_from(["sdpa", "eager"]),
    ring_slots=st.sampled_from([2, 3, 9]),
    piece_numel=st.sampled_from([1000, 32 * 2**20]),
    device=st.sampled_from(["cuda", "cpu"]),
    saving=st.sampled_from(["foreground", "background"]),
)


@settings(max_examples=120)
@given(st.sampled_from(sorted(SPECS)), choices)
def test_a_folded_peak_is_that_of_the_whole_ledger(name, choice):
    assert foldable(choice)
    row, ledger = held(SPECS[name], choice)
    assert row.peak_bytes == ledger.peak_bytes()
    assert row.peak_phase == ledger.peak_phase()
    assert (row.low_bytes, row.high_bytes) == ledger.interval()
    kinds = Counter()
    for line, n in ledger.live(row.peak_phase):
        kinds[line.kind] += n * line.nbytes
    assert {k: n for k, n in row.kinds.items() if n} == kinds


@pytest.mark.parametrize(
    "name", ["gemma-2-2b", "qwen3-8b", "phi-2", "bert-large", "mixtral-8x7b", "t5-base", "gpt-oss-20b"]
)
@pytest.mark.parametrize("stage", [1, 3])
def test_classes_of_hugging_face(name, stage):
    model = model_from(name, None)
    for checkpointing in ("none", "full"):
        choice = Choice(stage, 4, 2, 1, 512, checkpointing=checkpointing, attention="eager")
        row, ledger = held(model.spec, choice)
        assert (row.peak_bytes, row.peak_phase) == (ledger.peak_bytes(), ledger.peak_phase())
        assert (row.low_bytes, row.high_bytes) == ledger.interval()


def test_every_phase_of_a_fold_is_that_phase_of_the_ledger():
    spec, choice = SPECS["untied"], Choice(3, 8, 2, 1, 64)
    folding = fold(spec, ring_slots=2)
    vectors = folding.vectors(choice, lambda phases: ())
    per_phase = [sum(v) for v in zip(*vectors.values(), strict=True)]
    _, ledger = held(spec, choice)
    overhead = ledger.per_phase(kind="overhead")[0]
    whole = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
    assert len(folding.phases) < len(whole)
    assert per_phase == [whole[p] - overhead for p in folding.phases]
    assert f"forward.blocks.{FRONT - 1}" in folding.phases and "backward.blocks.39" in folding.phases


def test_unequal_blocks_are_not_folded():
    spec = llama(20)
    frozen = ModelSpec(
        "half", tuple(u if u.name != "blocks.7" else type(u)(u.name, u.kind, u.params[:-1]) for u in spec.units)
    )
    assert len(fold(spec, ring_slots=2).specs) == 2
    assert len(fold(ModelSpec(spec.name, frozen.units, spec.arch), ring_slots=2).specs) == 1
    assert len(fold(llama(7), ring_slots=2).specs) == 1
    assert len(fold(spec, ring_slots=30).specs) == 1


def test_a_wrong_fold_would_be_seen():
    """The extrapolation is by blocks: one block more is one slope more."""
    choice = Choice(0, 1, 1, 1, 64)
    a, b, c = (held(llama(n), choice)[0].peak_bytes for n in (20, 21, 60))
    assert c == a + 40 * (b - a)


def test_refusals_come_through_a_fold():
    with pytest.raises(ZplanError, match="positions of tiny"):
        held(gpt2(13), Choice(0, 1, seq=5000))


@pytest.mark.parametrize("tuning", [{"lora": 8}, {"lora": 8, "qlora": True}, {"lora": 4, "lora_embeddings": True}])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_bases_with_adapters(tuning, stage):
    search = open_search(make_request({"model": "llama-3.2-1b", "gpus": 4, "gpu": "H200", **tuning}), remainder=True)
    for checkpointing in ("none", "full"):
        row = search.row(search.choice(stage, Batch(2, 1, 4), checkpointing))
        assert len(search.folding(row.choice).specs) == 2
        assert (row.peak_bytes, row.peak_phase) == (row.ledger.peak_bytes(), row.ledger.peak_phase())
        assert search.traffic(row.choice) == traffic(search.model.spec, row.choice)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SPECS)), choices)
def test_folded_traffic_is_that_of_the_whole_model(name, choice):
    s = Search(Model(SPECS[name], "a test"), Hardware(choice.world_size, 1, GIB), make_request({}))
    assert s.traffic(choice) == traffic(SPECS[name], choice)
