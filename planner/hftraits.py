"""What else shapes the parameters of a Hugging Face class, read from its config: one function for each that needs one.

A trait that no row of `planner/hfrows.py` and no op list describes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zplan.planner.hfconfig import Keys


Traits = dict[str, int | bool]


FIRST_BAICHUAN_VOCAB = 64_000


def biases(keys: Keys, name: str = "attention_bias", *, default: bool = False) -> Traits:
    """Biases on all four attention projections, or none."""
    bias = keys.flag(name, default=default)
    return {"qkv_bias": bias, "o_bias": bias}


def llama_class(keys: Keys, hidden: int) -> Traits:
    return {**biases(keys), "mlp_bias": keys.flag("mlp_bias", default=False)}


def stretched(keys: Keys, kind: str, tokens: int) -> int:
    """Tokens that a config's rotary scaling reaches. Qwen2.5's YaRN leaves `max_position_embeddings` as it was before.

    Gemma 3 gives the length after its linear scaling, and `longrope` and `llama3` do likewise.
    """
    block = keys.rope()
    rope, factor = block.text("rope_type", block.text("type", "default")), block.number("factor", 1.0)
    if rope == "yarn":
        return max(tokens, int(factor * block.integer("original_max_position_embeddings", tokens)))
    linear = rope in ("linear", "dynamic") and not kind.startswith("gemma3")
    return max(tokens, int(factor * tokens)) if linear else tokens


def _rotary(keys: Keys, hidden: int, default: float, name: str = "partial_rotary_factor") -> int:
    """Width of the rotated front of each head."""
    block = keys.inner("rope_parameters" if "rope_parameters" in keys.config else "rope_scaling")
    share = block.number("partial_rotary_factor", keys.number(name, default))
    head_dim = keys.integer("head_dim", hidden // keys.integer("num_attention_heads", None))
    return int(head_dim * share)


def stablelm(keys: Keys, hidden: int) -> Traits:
    keys.refuse("qk_layernorm", keys.flag("qk_layernorm", default=False), (False,))
    serial = not keys.flag("use_parallel_residual", default=False)
    rotary = _rotary(with_defaults(keys, num_attention_heads=32), hidden, 0.25)
    return {"qkv_bias": keys.flag("use_qkv_bias", default=False), "serial": serial, "rotary": rotary}


def phi(keys: Keys, hidden: int) -> Traits:
    keys.refuse("qk_layernorm", keys.flag("qk_layernorm", default=False), (False,))
    return {
        "qkv_bias": True,
        "o_bias": True,
        "rotary": _rotary(with_defaults(keys, num_attention_heads=32), hidden, 0.5),
    }


def phi3(keys: Keys, hidden: int) -> Traits:
    return {"rotary": _rotary(with_defaults(keys, num_attention_heads=32), hidden, 1.0)}


def neox(keys: Keys, hidden: int) -> Traits:
    return {
        "bias": keys.flag("attention_bias", default=True),
        "parallel": keys.flag("use_parallel_residual", default=True),
        "rotary": _rotary(with_defaults(keys, num_attention_heads=64), hidden, 0.25, "rotary_pct"),
    }


def gemma2(keys: Keys, hidden: int) -> Traits:
    """A cap that is there and null is none; one that is not there is the class's."""
    traits = gemma3_text(keys, hidden) | {"other_layer": _other_layer(keys, 2)}
    for name, key in (("capped_scores", "attn_logit_softcapping"), ("capped_logits", "final_logit_softcapping")):
        traits[name] = keys.config.get(key, True) is not None
    return traits


def gemma3_text(keys: Keys, hidden: int) -> Traits:
    """The class reads `attn_logit_softcapping` and does not use it."""
    return {
        **biases(keys),
        "window": keys.integer("sliding_window", 4096),
        "other_layer": _other_layer(keys, keys.integer("sliding_window_pattern", 6)),
        "capped_logits": keys.config.get("final_logit_softcapping") is not None,
    }


def _other_layer(keys: Keys, pattern: int) -> int:
    """Number of the first layer of another kind than the first one, 0 where all are alike.

    Without `layer_types` the last one of each `pattern` layers has no window.
    """
    kinds = keys.config.get("layer_types")
    if not kinds:
        return pattern - 1
    return next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)


def opt(keys: Keys, hidden: int) -> Traits:
    keys.refuse("word_embed_proj_dim", keys.integer("word_embed_proj_dim", 768), (hidden,))
    for name, value in (("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True)):
        keys.refuse(name, keys.flag(name, default=value), (value,))
    keys.refuse("_remove_final_layer_norm", keys.flag("_remove_final_layer_norm", default=False), (False,))
    return {"bias": keys.flag("enable_bias", default=True)}


def falcon(keys: Keys, hidden: int) -> Traits:
    new = keys.flag("new_decoder_architecture", default=False)
    parallel = keys.flag("parallel_attn", default=True)
    heads = keys.integer("num_attention_heads", 71)
    groups = keys.integer("num_kv_heads", heads) if new else 1 if keys.flag("multi_query", default=True) else heads
    two = new and keys.integer("num_ln_in_parallel_attn", 2) == 2
    bias = keys.flag("bias", default=False)
    keys.refuse("activation", keys.text("activation", "gelu"), ("gelu",))
    return {
        "grouped": new,
        "not_counted": keys.flag("alibi", default=False),
        "kv_heads": groups,
        "two_norms": two,
        "input_norm": not two,
        "serial": not (new or parallel),
        "bias": bias,
        "parallel": new or parallel,
    }


def baichuan(keys: Keys, hidden: int) -> Traits:
    """The 7B rotates and says how many positions it has. The 13B has ALiBi, a mask that outlives its step: not counted.

    The first Baichuan, of 64,000 tokens, has a plain head; the second one norms its head's rows.
    """
    return {
        "normed_head": keys.integer("vocab_size", 125696) != FIRST_BAICHUAN_VOCAB,
        "not_counted": "max_position_embeddings" not in keys.config,
    }


def chatglm(keys: Keys, hidden: int) -> Traits:
    keys.refuse("add_bias_linear", keys.flag("add_bias_linear", default=False), (False,))
    for name in ("rmsnorm", "post_layer_norm", "multi_query_attention"):
        keys.refuse(name, keys.flag(name, default=True), (True,))
    for name in ("apply_residual_connection_post_layernorm", "fp32_residual_connection"):
        keys.refuse(name, keys.flag(name, default=False), (False,))
    return {"qkv_bias": keys.flag("add_qkv_bias", default=False)}


def _sparse(count: str, *, shared: bool = False) -> Callable[[Keys, int], Traits]:
    """Experts under the key `count`; `shared`: some that every token passes."""

    def read(keys: Keys, hidden: int) -> Traits:
        experts = keys.integer(count, _EXPERTS[count])
        per_token = keys.integer("num_experts_per_tok", 0 if shared else 8, least=0)
        if not 1 <= per_token <= experts:
            keys.fail(
                f"has {experts} experts of which a token takes {per_token}", f"check `{count}`, `num_experts_per_tok`"
            )
        return {"experts": experts, "experts_per_token": per_token, **biases(keys)}

    return read


_EXPERTS = {"num_experts": 128, "n_routed_experts": 256, "num_local_experts": 8}


def qwen3_moe(keys: Keys, hidden: int) -> Traits:
    return _sparse("num_experts")(keys, hidden) | {
        "expert_ffn": keys.integer("moe_intermediate_size", 768),
        "scores_summed": keys.flag("norm_topk_prob", default=False),
        "scores_cast": True,
    }


def qwen3_moe_dense(keys: Keys, layers: int) -> tuple[int, ...]:
    step, only = keys.integer("decoder_sparse_step", 1), keys.config.get("mlp_only_layers") or []
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)


def mixtral(keys: Keys, hidden: int) -> Traits:
    traits = _sparse("num_local_experts")(with_defaults(keys, num_experts_per_tok=2), hidden)
    return traits | {"expert_ffn": keys.integer("intermediate_size", 14336), "scores_summed": True}


def gpt_oss(keys: Keys, hidden: int) -> Traits:
    traits = _sparse("num_local_experts")(with_defaults(keys, num_experts_per_tok=4, num_local_experts=128), hidden)
    return {
        **traits,
        **biases(keys, default=True),
        "expert_ffn": keys.integer("intermediate_size", 2880),
        "window": keys.integer("sliding_window", 128),
        "other_layer": _other_layer(keys, 2),
    }


def deepseek(defaults: Mapping[str, int]) -> Callable[[Keys, int], Traits]:
    def read(given: Keys, hidden: int) -> Traits:
        for name in ("attention_bias", "mlp_bias"):
            given.refuse(name, given.flag(name, default=False), (False,))
        given.refuse("moe_layer_freq", given.integer("moe_layer_freq", 1), (1,))
        keys = with_defaults(given, **defaults)
        heads = keys.integer("num_attention_heads", None)
        nope, rope = keys.integer("qk_nope_head_dim", None), keys.integer("qk_rope_head_dim", None)
        value, kv_rank = keys.integer("v_head_dim", None), keys.integer("kv_lora_rank", None)
        # null means no low-rank queries; a key that is not there, the class's default.
        low = given.config.get("q_lora_rank", defaults["q_lora_rank"]) is not None
        expert_ffn = keys.integer("moe_intermediate_size", None)
        shared = keys.integer("n_shared_experts", None, least=0)
        sparse = _sparse("n_routed_experts", shared=True)(keys, hidden)
        return {
            **{k: v for k, v in sparse.items() if "bias" not in k},
            "own_heads": True,
            "qk_head_dim": nope + rope,
            "rope": rope,
            "kv_rank": kv_rank,
            "kv_b": heads * (nope + value),
            "q_b": heads * (nope + rope),
            "values": heads * value,
            "q_rank": keys.integer("q_lora_rank", None) if low else 0,
            "q_low": low,
            "q_full": not low,
            "expert_ffn": expert_ffn,
            "shared_ffn": shared * expert_ffn,
            **_groups(keys, int(sparse["experts"])),
        }

    return read


def _groups(keys: Keys, experts: int) -> Traits:
    """How tokens are routed: V3 chooses groups of experts first always, V2 where its `topk_method` says so."""
    third = keys.config["model_type"] == "deepseek_v3"
    traits: Traits = {}
    if third:
        traits["scores_summed"] = keys.flag("norm_topk_prob", default=True)
        traits["pairs"] = keys.flag("rope_interleave", default=True)
    else:
        method = keys.text("topk_method", "greedy")
        keys.refuse("topk_method", method, ("greedy", "group_limited_greedy"))
        if method == "greedy":
            return traits
    groups, top = (keys.integer(name, n if third else None) for name, n in (("n_group", 8), ("topk_group", 4)))
    if experts % groups or top > groups or (third and experts < 2 * groups):
        keys.fail(
            f"has {experts} experts in {groups} groups, of which a token takes {top}", "check `n_group`, `topk_group`"
        )
    return traits | {"groups": groups, "top_groups": top}


def first_dense(default: int) -> Callable[[Keys, int], tuple[int, ...]]:
    return lambda keys, layers: tuple(range(min(layers, keys.integer("first_k_dense_replace", default, least=0))))


def with_defaults(keys: Keys, **defaults: int) -> Keys:
    """The same config with defaults for keys that it lacks."""
    return type(keys)({**defaults, **{k: v for k, v in keys.config.items() if v is not None}}, keys.where)


def t5(keys: Keys, hidden: int) -> Traits:
    words = keys.text("feed_forward_proj", "relu").split("-")
    gated = words[0] == "gated"
    act = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    return {
        f"act_{act}": True,
        "not_counted": act not in ("relu", "gelu_new", "silu", "gelu"),
        "gated": gated,
        "plain": not gated,
        "buckets": keys.integer("relative_attention_num_buckets", 32),
        "decoder_layers": keys.integer("num_decoder_layers", keys.integer("num_layers", 6)),
        "max_seq": 512,
    }


def vit(keys: Keys, hidden: int) -> Traits:
    patch, image = keys.integer("patch_size", 16), keys.integer("image_size", 224)
    patches = (image // patch) ** 2 + 1
    labels = keys.config.get("id2label")
    vocab = keys.integer("num_labels", len(labels) if labels else 2)
    # One number or several at once have another loss.
    single = vocab > 1 and keys.text("problem_type", "single_label_classification") == "single_label_classification"
    return {
        "not_counted": not single,
        "patch": patch,
        "channels": keys.integer("num_channels", 3),
        "image": image,
        "patches": patches,
        "bias": keys.flag("qkv_bias", default=True),
        "vocab": vocab,
        "max_seq": patches,
    }


V2 = {
    "num_attention_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
V3 = {
    **V2,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}
