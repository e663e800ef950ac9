"""transformers models, unmodified: every stage trains like one plain process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import any_model as m
import pytest
import torch
from torch import nn

from zplan.runtime.engine import initialize, meta_init, summon

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": m.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}
ROPE = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
GPT2 = {"vocab_size": m.VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CAUSAL = {
    "llama": ("LlamaConfig", ROPE),
    "llama-tied": ("LlamaConfig", {**ROPE, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**GPT2, **NO_DROPOUT}),
    "qwen2": ("Qwen2Config", ROPE),
    "gemma2": ("Gemma2Config", {**ROPE, "head_dim": 8, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {**ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(name: str, checkpointing: str = "none") -> nn.Module:
    """A model of `CAUSAL` with random weights, in training mode; checkpointing by the model's own switch."""
    kind, sizes = CAUSAL[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes, use_cache=False))
    if checkpointing != "none":
        how = {"use_reentrant": checkpointing == "reentrant"}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(how)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return model.train()


@lru_cache
def reference(name: str, checkpointing: str = "none") -> dict[str, Any]:
    return m.reference("test_hf:build", (name, checkpointing), steps=3, world_size=2)


def check(run_ranks: Any, cases: dict[str, tuple[str, str, int]]) -> None:
    """`name -> (model, checkpointing, stage)` on two ranks, all in one start."""
    calls = {key: ("test_hf:build", (name, how), m.config(stage), 3) for key, (name, how, stage) in cases.items()}
    results = run_ranks(2, m.train_each, calls, limit=200)
    for key, (name, how, stage) in cases.items():
        m.equal([r[key] for r in results], reference(name, how))
        assert len(results[0][key]["ringed"]) == (4 if stage == 3 else 0), key


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_causal_models_below_stage_3(run_ranks, stage):
    check(run_ranks, {name: (name, "none", stage) for name in CAUSAL})


@pytest.mark.gloo
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "plain"])
def test_causal_models_at_stage_3(run_ranks, checkpointing):
    check(run_ranks, {name: (name, checkpointing, 3) for name in CAUSAL})
