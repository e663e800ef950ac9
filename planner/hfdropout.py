"""Dropout of Hugging Face classes (transformers 5.24), as traits of the architecture.

It costs bytes by being there at all, whatever its probability: `dropout` of what a branch adds to the hidden states,
`embed_dropout` of the embeddings, `attention_dropout` of the probabilities. Fused attention on a GPU keeps none of the
last: it draws the mask again from a seed. The classes of Llama, Mistral and GPT-2 train without here, as zplan's own
decoder does, and a note says so.
"""

from __future__ import annotations

from dataclasses import replace

from zplan.planner.hfconfig import Keys
from zplan.planner.models import Architecture

DROPOUTS: dict[str, dict[str, tuple[str, float]]] = {
    "bert": {"dropout": ("hidden_dropout_prob", 0.1), "attention_dropout": ("attention_probs_dropout_prob", 0.1)},
    "vit": {"dropout": ("hidden_dropout_prob", 0.0), "attention_dropout": ("attention_probs_dropout_prob", 0.0)},
    "t5": {"dropout": ("dropout_rate", 0.1), "attention_dropout": ("dropout_rate", 0.1)},
    "opt": {"dropout": ("dropout", 0.1), "attention_dropout": ("attention_dropout", 0.0)},
    "gpt_neox": {
        "dropout": ("hidden_dropout", 0.0),
        "embed_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    "phi": {
        "dropout": ("resid_pdrop", 0.0),
        "embed_dropout": ("embd_pdrop", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    "gptj": {
        "dropout": ("resid_pdrop", 0.0),
        "embed_dropout": ("embd_pdrop", 0.0),
        "attention_dropout": ("attn_pdrop", 0.0),
    },
    "falcon": {"dropout": ("hidden_dropout", 0.0), "branch_dropout": ("attention_dropout", 0.0)},
    "bloom": {"dropout": ("hidden_dropout", 0.0), "attention_dropout": ("attention_dropout", 0.0)},
    "phi3": {"dropout": ("resid_pdrop", 0.0), "attention_dropout": ("attention_dropout", 0.0)},
    **{
        name: {"attention_dropout": ("attention_dropout", 0.0)}
        for name in (
            *("llama_class", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "olmo2"),
            *("deepseek_v2", "deepseek_v3", "gpt_oss"),
        )
    },
}
"""model_type -> trait -> the config's key and the class's default."""


def with_dropout(arch: Architecture, keys: Keys) -> Architecture:
    """The shape with a trait for each kind of dropout that the config asks for."""
    table = DROPOUTS[arch.family]
    asked = tuple((trait, True) for trait, (key, default) in table.items() if keys.number(key, default) > 0)
    return replace(arch, traits=(*arch.traits, *asked))
