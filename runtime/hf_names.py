"""The reference decoder's parameters under the names of `transformers`, and the `config.json` that goes with them."""

from __future__ import annotations

from typing import Any

from zplan.planner.models import Architecture, Param, decoder_units

LLAMA = {
    "norm1.": "input_layernorm.",
    "norm2.": "post_attention_layernorm.",
    **{f"{x}.": f"self_attn.{x}_proj." for x in "qkvo"},
    **{f"{x}.": f"mlp.{x}_proj." for x in ("gate", "up", "down")},
}
GPT2 = {
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
    "qkv.": "attn.c_attn.",
    "o.": "attn.c_proj.",
    "up.": "mlp.c_fc.",
    "down.": "mlp.c_proj.",
}
"""Within a block."""

LLAMA_TOP = {"embed.": "model.embed_tokens.", "norm.": "model.norm.", "head.": "lm_head."}
GPT2_TOP = {
    "embed.": "transformer.wte.",
    "positions.": "transformer.wpe.",
    "norm.": "transformer.ln_f.",
    "head.": "lm_head.",
}


def hf_name(arch: Architecture, name: str) -> str:
    """The name of a decoder parameter in a model folder.

    Examples
    --------
    >>> from zplan.planner.models import Architecture
    >>> hf_name(Architecture("gpt2", 1, 8, 1, 1, 8, 32, 9, 4, tied=True), "blocks.0.qkv.weight")
    'transformer.h.0.attn.c_attn.weight'
    """
    llama = arch.family == "llama"
    top, block = (LLAMA_TOP, LLAMA) if llama else (GPT2_TOP, GPT2)
    if not name.startswith("blocks."):
        return _replaced(name, top)
    _, index, rest = name.split(".", 2)
    return f"{'model.layers' if llama else 'transformer.h'}.{index}.{_replaced(rest, block)}"


def _replaced(name: str, table: dict[str, str]) -> str:
    prefix = name[: name.index(".") + 1]
    return table[prefix] + name[len(prefix) :]


def is_transposed(arch: Architecture, param: Param) -> bool:
    """Whether the model folder has the matrix the other way round: GPT-2's linear layers are (in, out)."""
    return arch.family == "gpt2" and param.name.startswith("blocks.") and len(param.shape) == 2


def decoder_params(arch: Architecture) -> list[Param]:
    """Every unique parameter of the decoder, in forward order."""
    return [p for u in decoder_units(arch) for p in u.params]


def hf_config(arch: Architecture) -> dict[str, Any]:
    """Keys of the `config.json` that makes `transformers` build this model."""
    if arch.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "layer_norm_epsilon": arch.norm_eps,
            "n_embd": arch.hidden,
            "n_head": arch.heads,
            "n_inner": arch.ffn,
            "n_layer": arch.layers,
            "n_positions": arch.max_seq,
            "tie_word_embeddings": arch.tied,
            "vocab_size": arch.vocab,
        }
    windowed = arch.window is not None
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
        "model_type": "mistral" if windowed else "llama",
        "attention_dropout": 0.0,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "hidden_size": arch.hidden,
        "intermediate_size": arch.ffn,
        "max_position_embeddings": arch.max_seq,
        "num_attention_heads": arch.heads,
        "num_hidden_layers": arch.layers,
        "num_key_value_heads": arch.kv_heads,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": arch.tied,
        "vocab_size": arch.vocab,
    }
    if windowed:
        config["sliding_window"] = arch.window
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    if arch.rope_scaling:
        config["rope_scaling"] = dict(arch.rope_scaling)
    return config
