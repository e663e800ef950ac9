"""Predicted activations of `ViTForImageClassification` against the real class on a CPU, phase by phase, to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from phases import activation_ledger, choose, expect_phases, observe_class

from zplan.planner.activations import counted
from zplan.planner.api import estimate
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.report import report

transformers = pytest.importorskip("transformers")

SMALL = {
    "model_type": "vit",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 16,
    "id2label": {i: str(i) for i in range(7)},
}
CASES = {
    "vit": {},
    "vit, no biases, two channels, a rest of pixels": {"qkv_bias": False, "num_channels": 2, "image_size": 35},
}
DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def tokens(config: dict) -> int:
    return (config["image_size"] // config["patch_size"]) ** 2 + 1


def modules_of(model) -> dict:
    return {
        "embed": model.vit.embeddings,
        **{f"blocks.{i}": layer for i, layer in enumerate(model.vit.layers)},
        "norm": model.vit.layernorm,
        "head": model.classifier,
    }


def observed(config: dict, choice) -> dict[str, int]:
    hf = transformers.AutoConfig.for_model(**config, attn_implementation=choice.attention)
    model = transformers.AutoModelForImageClassification.from_config(hf)
    pixels = (choice.micro_batch, hf.num_channels, hf.image_size, hf.image_size)

    def batch():
        return {"pixel_values": torch.rand(pixels), "labels": torch.randint(7, (choice.micro_batch,))}

    return observe_class(model, modules_of(model), choice, batch)


KINDS = [
    (3, "bf16", "none", "sdpa"),
    (2, "fp32", "full", "sdpa"),
    (3, "bf16", "full", "eager"),
    (2, "fp32", "none", "eager"),
    (1, "bf16", "none", "sdpa"),
]


@pytest.mark.parametrize(("name", "kind"), list(product(CASES, KINDS)))
def test_every_phase_equals_what_an_observer_sees(name, kind):
    config = SMALL | CASES[name]
    choice = choose(kind[0], tokens(config), *kind[1:])
    expect_phases(config, choice, observed(config, choice))


@pytest.mark.parametrize("kind", [(3, "bf16", "none", "eager"), (2, "fp32", "full", "eager")])
def test_dropout_equals_what_an_observer_sees(kind):
    config = SMALL | DROPPED
    choice = choose(kind[0], tokens(config), *kind[1:])
    expect_phases(config, choice, observed(config, choice))


def test_laws_on_cuda():
    config = SMALL | {"hidden_size": 256, "image_size": 384}
    arch, _ = read_architecture(config, "m")
    one = replace(choose(2, tokens(config)), device="cuda")

    def held(choice):
        ledger = activation_ledger(arch, choice)
        return dict(zip(ledger.phases, ledger.per_phase(), strict=True))

    changes = ({"micro_batch": 3}, {"checkpointing": "full"}, {"attention": "eager"})
    more, full, eager = (held(replace(one, **c)) for c in changes)
    assert all(more[p] >= n for p, n in held(one).items())
    assert max(full.values()) < max(held(one).values()) < max(eager.values())


def test_the_pixels_come_in_fp32_and_are_cast():
    arch, _ = read_architecture(SMALL, "m")
    pixels = 3 * 3 * 48 * 48
    for precision, cast in (("bf16", 2), ("fp32", 0)):
        lines = {x.id: x.nbytes for x in activation_ledger(arch, choose(3, 10, precision)).lines}
        assert lines["data.inputs"] == 4 * pixels
        assert lines.get("act.embed.saved", 0) == cast * pixels


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"seq": 128}, "a sequence of `vit-base` is an image, 197 tokens always"),
        ({"padded": True}, "images of model_type `vit` are all of one size"),
        ({"cross_entropy": "fused"}, "the head of model_type `vit` is no plain matrix"),
        ({"runtime": "deepspeed", "pp": 2}, "`--pp 2` is not counted for model_type `vit`"),
    ],
    ids=["seq", "padded", "loss", "pp"],
)
def test_what_has_no_place_in_it_is_refused(asked, message):
    with pytest.raises(ZplanError, match=message):
        estimate("vit-base", gpus=2, mem=24, **asked)


@pytest.mark.parametrize("changes", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_other_losses_are_not_counted(changes):
    arch, _ = read_architecture(SMALL | changes, "m")
    assert not counted(ModelSpec("m", decoder_units(arch), arch))


@pytest.mark.parametrize("name", ["vit-base", "vit-large"])
def test_an_estimate_says_what_a_sequence_is(name):
    found = estimate(name, gpus=2, mem=24, micro_batch=8)
    assert found.counted
    assert found.row.choice.seq == 197
    assert any("one image, 224 x 224 pixels in fp32: 196 patches" in note for note in found.notes)
    assert ", 1000 classes\n" in report(found)
