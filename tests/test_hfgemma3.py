"""Predicted activations of Gemma 3 with its image tower, in batches of text, against the real class on a CPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from phases import choose, expect_phases, observe_class

from zplan.planner.api import estimate
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.work import matrix_params

transformers = pytest.importorskip("transformers")

TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    "use_cache": False,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}
SMALL = {"model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_id": 99}
CASES = {
    "gemma3": {"text_config": TEXT},
    # The class uses neither cap.
    "gemma3, capped, own head": {
        "text_config": TEXT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "tie_word_embeddings": False,
    },
}
DROPPED = {"text_config": TEXT | {"attention_dropout": 0.1}}


def modules_of(model) -> dict:
    base = model.model.language_model
    return {
        "embed": base.embed_tokens,
        **{f"blocks.{i}": layer for i, layer in enumerate(base.layers)},
        "norm": base.norm,
        "head": model.lm_head,
    }


def observed(config: dict, choice) -> dict[str, int]:
    hf = transformers.AutoConfig.for_model(**config, use_cache=False, attn_implementation=choice.attention)
    model = transformers.AutoModelForImageTextToText.from_config(hf)
    shape = (choice.micro_batch, choice.seq)
    return observe_class(
        model,
        modules_of(model),
        choice,
        lambda: {name: torch.randint(3, 99, shape) for name in ("input_ids", "labels")},
    )


KINDS = [
    (3, 10, "bf16", "none", "sdpa"),
    (2, 31, "fp32", "full", "sdpa"),
    (1, 9, "bf16", "none", "eager"),
    (3, 40, "fp32", "full", "eager"),
]
TOWER = ("vision", "projector")


@pytest.mark.parametrize(("name", "kind"), list(product(CASES, KINDS)))
def test_every_phase_equals_what_an_observer_sees(name, kind):
    config, choice = SMALL | CASES[name], choose(*kind)
    expect_phases(config, choice, observed(config, choice), but=TOWER)


PATTERNS = {
    # The third and the sixth of seven layers have no window; on the tape the fourth stands for the fifth and sixth.
    "every third": {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "the last one": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "none": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4},
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in PATTERNS for k in (KINDS[0], KINDS[3])], ids=str)
def test_what_layers_of_a_kind_share_lives_until_the_first_of_them(name, kind):
    config, choice = SMALL | {"text_config": TEXT | PATTERNS[name]}, choose(*kind)
    expect_phases(config, choice, observed(config, choice), but=TOWER)


def test_without_a_list_the_sixth_layer_is_the_first_without_a_window():
    text = {k: v for k, v in TEXT.items() if k != "layer_types"}
    for more, number in (({}, 5), ({"sliding_window_pattern": 3}, 2)):
        arch, _ = read_architecture(text | more, "m")
        assert arch.trait("other_layer") == number


def test_dropout_equals_what_an_observer_sees():
    config, choice = SMALL | DROPPED, choose(3, 10, "bf16", "none", "eager")
    expect_phases(config, choice, observed(config, choice), but=TOWER)


def test_the_tower_multiplies_nothing_and_has_states():
    tower, text = SMALL | CASES["gemma3"], dict(TEXT)
    specs = []
    for config in (tower, text):
        arch, _ = read_architecture(config, "m")
        specs.append(ModelSpec("m", decoder_units(arch), arch))
    with_tower, alone = specs
    assert matrix_params(with_tower) == matrix_params(alone)
    assert with_tower.num_params > alone.num_params


def test_windows_are_counted_with_eager_attention():
    with pytest.raises(ZplanError, match="with windows of 1024 tokens model_type `gemma3` masks fused attention"):
        estimate("gemma-3-4b", gpus=8, mem=80, attention="sdpa")
    found = estimate("gemma-3-4b", gpus=8, mem=80)
    assert found.counted
    assert (found.row.choice.seq, found.row.choice.attention) == (2048, "eager")


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-3-12b", "gemma-3-27b"])
def test_an_estimate_says_that_batches_are_text(name):
    found = estimate(name, gpus=8, mem=80, seq=1000)
    assert found.counted
    assert any("batches are text alone" in note for note in found.notes)
    assert not any(line.id.startswith(("act.vision", "act.projector")) for line in found.lines)
    assert any(line.id.startswith("params.") for line in found.lines)
