"""Predicted activations of T5 against `T5ForConditionalGeneration` on a CPU, phase by phase, to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from phases import activation_ledger, choose, expect_phases, observe_class
from torch import nn

from zplan.planner.activations import profile
from zplan.planner.api import estimate
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.report import report
from zplan.planner.work import model_flops

transformers = pytest.importorskip("transformers")

SMALL = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 176,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 100,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
CASES = {
    "t5": {},
    "t5, gated, own head": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5, deeper decoder, wide heads": {"num_layers": 2, "num_decoder_layers": 5, "d_kv": 24},
}


def modules_of(model) -> dict:
    return {
        "embed": model.encoder.embed_tokens,
        **{f"encoder.{i}": layer for i, layer in enumerate(model.encoder.block)},
        "encoder_norm": model.encoder.final_layer_norm,
        **{f"decoder.{i}": layer for i, layer in enumerate(model.decoder.block)},
        "norm": model.decoder.final_layer_norm,
        "head": model.lm_head,
    }


def observed(config: dict, choice) -> dict[str, int]:
    hf = transformers.AutoConfig.for_model(**config, use_cache=False, attn_implementation=choice.attention)
    model = transformers.AutoModelForSeq2SeqLM.from_config(hf)
    if not config.get("tie_word_embeddings", True):
        # The class ties on, but checkpoints that say so have a head of their own.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    shape = (choice.micro_batch, choice.seq)

    def batch():
        found = {name: torch.randint(3, 100, shape) for name in ("input_ids", "labels")}
        if choice.padded:
            found["attention_mask"] = torch.ones(shape, dtype=torch.int64)
            found["attention_mask"][0, -1] = 0
        return found

    return observe_class(model, modules_of(model), choice, batch)


KINDS = [
    (3, 10, "bf16", "none", "sdpa"),
    (2, 33, "fp32", "full", "sdpa"),
    (1, 9, "bf16", "full", "sdpa"),
    (1, 9, "bf16", "none", "eager"),
    (3, 10, "fp32", "full", "eager"),
]


@pytest.mark.parametrize(("name", "kind"), list(product(CASES, KINDS)))
def test_every_phase_equals_what_an_observer_sees(name, kind):
    config, choice = SMALL | CASES[name], choose(*kind)
    expect_phases(config, choice, observed(config, choice))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_equal_what_an_observer_sees(kind):
    choice = replace(choose(*kind), padded=True)
    expect_phases(SMALL, choice, observed(SMALL, choice))


@pytest.mark.parametrize(
    "kind", [(3, 10, "bf16", "none", "eager"), (2, 9, "fp32", "full", "sdpa"), (3, 10, "bf16", "none", "sdpa")]
)
def test_dropout_equals_what_an_observer_sees(kind):
    config, choice = SMALL | {"dropout_rate": 0.1}, choose(*kind)
    expect_phases(config, choice, observed(config, choice))


def held(config: dict, choice) -> dict[str, int]:
    arch, _ = read_architecture(config, "m")
    ledger = activation_ledger(arch, choice)
    return dict(zip(ledger.phases, ledger.per_phase(), strict=True))


LARGE = SMALL | {"d_model": 256, "d_kv": 64, "num_layers": 5, "num_decoder_layers": 7}


def test_laws_on_cuda():
    one = replace(choose(2, 512), device="cuda")
    base = held(LARGE, one)
    for larger in (replace(one, micro_batch=3), replace(one, seq=528)):
        assert all(held(LARGE, larger)[p] >= n for p, n in base.items())
    assert max(held(LARGE, replace(one, checkpointing="full")).values()) < max(base.values())
    assert max(base.values()) < max(held(LARGE, replace(one, attention="eager")).values())


def test_padding_costs_a_bias_for_each_sequence_on_cuda():
    b, t, h = 3, 512, 4
    packed = replace(choose(b, t), device="cuda")
    saved = []
    for padded in (False, True):
        arch, _ = read_architecture(LARGE, "m")
        found = profile(ModelSpec("m", decoder_units(arch), arch), replace(packed, padded=padded))
        saved.append([found[stack].saved for stack in ("encoder", "decoder")])
    own = 2 * h * t * t
    # In place of the encoder's one for all; beside the decoder's zeros, which all layers share.
    assert [y - x for x, y in zip(*saved, strict=True)] == [(b - 1) * own, b * own]


def test_what_a_layer_keeps_on_cuda():
    """A norm keeps 8 bytes an element and a root, a layer two sums and its bias, a decoder's a causal mask too."""
    b, t, h = 2, 512, 4
    arch, _ = read_architecture(LARGE, "m")
    found = profile(ModelSpec("m", decoder_units(arch), arch), replace(choose(b, t), device="cuda"))
    u, inner, up = b * t * 256, b * t * h * 64, b * t * 176
    norm, attention = 8 * u + 4 * b * t, 8 * inner + 4 * h * b * t
    assert found["encoder"].saved == 2 * norm + 4 * u + attention + 2 * up + 2 * h * t * t
    assert found["decoder"].saved == found["encoder"].saved + norm + 2 * u + attention + t * t


def test_the_tied_table_has_a_gradient_from_head_and_decoder_before_the_encoder():
    arch, _ = read_architecture(SMALL, "m")
    ledger = activation_ledger(arch, choose(2, 8))
    line = ledger.line("grads.tied")
    assert line.nbytes == 2 * 100 * 64
    assert "backward.encoder.2" in [ledger.phases[p] for a, b in line.spans for p in range(a, b + 1)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"checkpointing": "full", "checkpoint_every": 2}, "`--checkpoint-every` is not counted"),
        ({"seq": 500}, "pads the position bias of 500 tokens to a multiple of 16"),
        ({"runtime": "deepspeed", "pp": 2}, "`--pp 2` is not counted for model_type `t5`"),
    ],
    ids=["segments", "seq", "pp"],
)
def test_what_is_not_counted_is_refused(asked, message):
    with pytest.raises(ZplanError, match=message):
        estimate("t5-base", gpus=2, mem=24, **asked)


@pytest.mark.parametrize("name", ["t5-base", "t5-11b"])
def test_an_estimate_says_how_long_both_sides_are(name):
    found = estimate(name, gpus=8, mem=80)
    assert found.counted
    assert found.row.choice.seq == 512
    assert any("into the encoder, and as many into the decoder" in note for note in found.notes)
    layers = found.model.arch.layers
    assert f"t5: {layers} + {layers} layers x " in report(found)


def test_a_layer_of_the_decoder_attends_twice():
    arch, _ = read_architecture(SMALL | {"num_decoder_layers": 3}, "m")
    spec = ModelSpec("m", decoder_units(arch), arch)
    assert model_flops(spec, 20) - model_flops(spec, 10) == 12 * (4 + 2 * 3) * 4 * 16 * 10
