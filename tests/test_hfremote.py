"""Predicted activations of models whose code comes with their weights, against modules of ours of the same steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from phases import DTYPES, choose, observe
from remote_models import Remote

from zplan.planner.activations import REMOTE_SPREAD, activation_lines, counted
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import merge
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.timeline import timeline

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 176, "vocab_size": 100}
CASES = {
    "internlm2": SMALL
    | {
        "model_type": "internlm2",
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "bias": False,
        "rope_scaling": None,
    },
    "internlm2, no groups": SMALL | {"model_type": "internlm2", "num_hidden_layers": 3, "bias": False},
    "baichuan": SMALL | {"model_type": "baichuan", "num_hidden_layers": 5, "max_position_embeddings": 64},
    "chatglm": {
        **{"model_type": "chatglm", "num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16},
        **{"multi_query_group_num": 2, "ffn_hidden_size": 176, "padded_vocab_size": 100, "seq_length": 64},
        "add_qkv_bias": True,
    },
}
KINDS = [(3, 10, "bf16", "none"), (2, 33, "fp32", "full"), (1, 9, "bf16", "full"), (2, 9, "fp32", "none")]
ONLY_FUSED = ("baichuan", "chatglm")
GRID = [
    (name, *kind, attention)
    for name, kind, attention in product(CASES, KINDS, ("sdpa", "eager"))
    if attention == "sdpa" or name not in ONLY_FUSED
]


def spec_of(config):
    arch, notes = read_architecture(config, "m")
    return ModelSpec("m", decoder_units(arch), arch), notes


def predicted(config, choice):
    spec, _ = spec_of(config)
    phases = timeline(spec.units).phases
    ledger = merge(phases, activation_lines(spec, choice, phases))
    return dict(zip(phases, ledger.per_phase(), strict=True))


@pytest.mark.parametrize(("name", "batch", "seq", "precision", "checkpointing", "attention"), GRID)
def test_every_phase_equals_what_an_observer_sees(name, batch, seq, precision, checkpointing, attention):
    """All but the embedding's, where masks are made."""
    config, choice = CASES[name], choose(batch, seq, precision, checkpointing, attention)
    arch = spec_of(config)[0].arch
    assert arch is not None
    model = Remote(arch, attention, checkpointing).to(DTYPES[precision])
    blocks = {f"blocks.{i}": layer for i, layer in enumerate(model.layers)}
    modules = {"embed": model.embed, **blocks, "norm": model.norm, "head": model.head}
    seen = observe(model, modules, choice, model, (3, 100))
    expected = predicted(config, choice)
    wrong = {p: (n, seen[p]) for p, n in expected.items() if p not in ("idle", "forward.embed") and n != seen[p]}
    assert not wrong, wrong


@pytest.mark.parametrize("name", CASES)
def test_lines_say_that_nothing_was_there_to_check_them(name):
    spec, notes = spec_of(CASES[name])
    assert any("no class of transformers is there" in note for note in notes)
    lines = activation_lines(spec, choose(2, 16), timeline(spec.units).phases)
    assert {x.source for x in lines} == {"estimate"}
    line = max(lines, key=lambda x: x.nbytes)
    assert line.low is not None and line.high is not None
    assert line.high - line.low == 2 * (line.nbytes * REMOTE_SPREAD // 100)


def test_what_is_left_out():
    for name in ONLY_FUSED:
        with pytest.raises(ZplanError, match=f"`{name}` has no other attention"):
            predicted(CASES[name], choose(1, 8, attention="eager"))
    with pytest.raises(ZplanError, match="padded batches are not counted for model_type `internlm2`"):
        predicted(CASES["internlm2"], replace(choose(1, 8), padded=True))
    with pytest.raises(ZplanError, match="no plain matrix"):
        predicted(CASES["baichuan"], replace(choose(1, 8), cross_entropy="fused"))
    thirteen = {k: v for k, v in CASES["baichuan"].items() if k != "max_position_embeddings"}
    assert counted(spec_of(CASES["baichuan"])[0]) and not counted(spec_of(thirteen)[0])


def test_a_plain_head_of_the_first_baichuan():
    first, second = (predicted(CASES["baichuan"] | {"vocab_size": n}, choose(2, 8)) for n in (64_000, 63_999))
    # The second one keeps the normed matrix from its forward to its backward, and more of it in between.
    assert second["loss"] - first["loss"] > 63_999 * 64 * 2 - 2 * 8 * 100 * 4
