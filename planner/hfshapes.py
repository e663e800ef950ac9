"""Config keys of the families that zplan estimates but does not run: model_type -> names, defaults, traits.

Defaults are those of the classes of transformers 5.24. What would change the parameters in a way that no row of
`planner/hfunits.py` describes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zplan.planner.models import Architecture

if TYPE_CHECKING:
    from zplan.planner.hfconfig import Keys

Traits = dict[str, int | bool]

NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
}
UNGROUPED = {"kv_heads": "num_attention_heads"}
"""For classes that know no key-value heads of their own."""
GPT_NAMES = {
    "kv_heads": "n_head",
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn": "n_inner",
    "max_seq": "n_positions",
}


FIRST_BAICHUAN_VOCAB = 64_000

_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_pytorch_tanh")
_GATED_TYPES = (
    *("qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "olmo2", "stablelm"),
    *("deepseek_v2", "deepseek_v3", "internlm2", "baichuan"),
)
ACTIVATIONS = {
    **{kind: _SILU for kind in _GATED_TYPES},
    **{kind: _GELU for kind in ("gemma", "gemma2", "gemma3_text", "gpt_neox")},
    "phi": ("gelu_new",),
    "opt": ("relu",),
    "gptj": ("gelu_new",),
    "bert": _GELU,
    "vit": _GELU,
}
"""Of the types whose activations are counted: what their op lists are for."""


@dataclass(frozen=True)
class Shape:
    """How one model_type's config is read.

    Attributes
    ----------
    architectures
        Classes that the rows describe.
    defaults
        Layers, width, heads, key-value heads (0: as many as heads), head width (0: width / heads), feed-forward width
        (0: four times the width), vocabulary, positions.
    tied
        Default of `tie_word_embeddings`.
    names
        Keys that differ from `NAMES`.
    traits
        The family's traits.
    """

    architectures: tuple[str, ...]
    defaults: tuple[int, int, int, int, int, int, int, int]
    tied: bool
    traits: Callable[[Keys, int], Traits] = lambda keys, hidden: {}
    names: Mapping[str, str] = field(default_factory=dict)
    dense: Callable[[Keys, int], tuple[int, ...]] = lambda keys, layers: ()


def read_shape(kind: str, keys: Keys) -> Architecture:
    """The shape that a config of `model_type` `kind` describes."""
    if kind == "gemma3":
        return _gemma3(keys)
    shape = SHAPES[kind]
    default = dict(zip(NAMES, shape.defaults, strict=True))
    names = {**NAMES, **shape.names}

    def read(name: str, otherwise: int = 0) -> int:
        return keys.integer(names[name], default[name] or otherwise)

    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if kind in ACTIVATIONS and keys.config.get(name) is not None:
            keys.refuse(name, keys.config[name], ACTIVATIONS[kind])
    layers, hidden, heads = read("layers"), read("hidden"), read("heads")
    traits = shape.traits(keys, hidden)
    head_dim = 0 if "own_heads" in traits else read("head_dim", _divided(keys, hidden, heads))
    traits.pop("own_heads", None)
    kv_heads = traits.pop("kv_heads", 0) or read("kv_heads", heads)
    if heads % kv_heads:
        keys.fail(f"has {heads} heads and {kv_heads} key-value heads, which do not divide them", "check its heads")
    return Architecture(
        family=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=head_dim or traits["qk_head_dim"],
        ffn=read("ffn", 4 * hidden),
        vocab=int(traits.pop("vocab", 0)) or read("vocab"),
        max_seq=int(traits.pop("max_seq", 0)) or read("max_seq"),
        tied=keys.flag("tie_word_embeddings", default=shape.tied),
        traits=tuple(sorted(traits.items())),
        dense_layers=shape.dense(keys, layers),
    )


def taken_as(arch: Architecture) -> tuple[str, ...]:
    """What is assumed of a batch that `--micro-batch` and `--seq` do not say."""
    if arch.family == "vit":
        size, patches = arch.trait("image"), arch.max_seq - 1
        return (f"a sequence is one image, {size} x {size} pixels in fp32: {patches} patches and a class token",)
    if arch.family == "gemma3":
        return ("batches are text alone: the image tower has states and gradient buffers, and no activations",)
    if arch.family == "t5":
        return ("--seq tokens go into the encoder, and as many into the decoder",)
    return ()


def _divided(keys: Keys, hidden: int, heads: int) -> int:
    if hidden % heads and keys.config.get("head_dim") is None:
        keys.fail(f"has {heads} heads, which do not divide its width {hidden}", "check its heads and width")
    return hidden // heads


def _biases(keys: Keys, name: str = "attention_bias", *, default: bool = False) -> Traits:
    """Biases on all four attention projections, or none."""
    bias = keys.flag(name, default=default)
    return {"qkv_bias": bias, "o_bias": bias}


def _rotary(keys: Keys, hidden: int, default: float, name: str = "partial_rotary_factor") -> int:
    """Width of the rotated front of each head."""
    block = keys.inner("rope_parameters" if "rope_parameters" in keys.config else "rope_scaling")
    share = block.number("partial_rotary_factor", keys.number(name, default))
    head_dim = keys.integer("head_dim", hidden // keys.integer("num_attention_heads", None))
    return int(head_dim * share)


def _stablelm(keys: Keys, hidden: int) -> Traits:
    keys.refuse("qk_layernorm", keys.flag("qk_layernorm", default=False), (False,))
    serial = not keys.flag("use_parallel_residual", default=False)
    rotary = _rotary(_with(keys, num_attention_heads=32), hidden, 0.25)
    return {"qkv_bias": keys.flag("use_qkv_bias", default=False), "serial": serial, "rotary": rotary}


def _phi(keys: Keys, hidden: int) -> Traits:
    keys.refuse("qk_layernorm", keys.flag("qk_layernorm", default=False), (False,))
    return {"qkv_bias": True, "o_bias": True, "rotary": _rotary(_with(keys, num_attention_heads=32), hidden, 0.5)}


def _phi3(keys: Keys, hidden: int) -> Traits:
    return {"rotary": _rotary(_with(keys, num_attention_heads=32), hidden, 1.0)}


def _neox(keys: Keys, hidden: int) -> Traits:
    return {
        "bias": keys.flag("attention_bias", default=True),
        "parallel": keys.flag("use_parallel_residual", default=True),
        "rotary": _rotary(_with(keys, num_attention_heads=64), hidden, 0.25, "rotary_pct"),
    }


def _gemma2(keys: Keys, hidden: int) -> Traits:
    """A cap that is there and null is none; one that is not there is the class's."""
    traits = _gemma3_text(keys, hidden)
    for name, key in (("capped_scores", "attn_logit_softcapping"), ("capped_logits", "final_logit_softcapping")):
        traits[name] = keys.config.get(key, True) is not None
    return traits


def _gemma3_text(keys: Keys, hidden: int) -> Traits:
    """The class reads `attn_logit_softcapping` and does not use it."""
    return {
        **_biases(keys),
        "window": keys.integer("sliding_window", 4096),
        "capped_logits": keys.config.get("final_logit_softcapping") is not None,
    }


def _opt(keys: Keys, hidden: int) -> Traits:
    keys.refuse("word_embed_proj_dim", keys.integer("word_embed_proj_dim", 768), (hidden,))
    for name, value in (("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True)):
        keys.refuse(name, keys.flag(name, default=value), (value,))
    keys.refuse("_remove_final_layer_norm", keys.flag("_remove_final_layer_norm", default=False), (False,))
    return {"bias": keys.flag("enable_bias", default=True)}


def _falcon(keys: Keys, hidden: int) -> Traits:
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


def _baichuan(keys: Keys, hidden: int) -> Traits:
    """The 7B rotates and says how many positions it has. The 13B has ALiBi, a mask that outlives its step: not counted.

    The first Baichuan, of 64,000 tokens, has a plain head; the second one norms its head's rows.
    """
    return {
        "normed_head": keys.integer("vocab_size", 125696) != FIRST_BAICHUAN_VOCAB,
        "not_counted": "max_position_embeddings" not in keys.config,
    }


def _chatglm(keys: Keys, hidden: int) -> Traits:
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
        return {"experts": experts, "experts_per_token": per_token, **_biases(keys)}

    return read


_EXPERTS = {"num_experts": 128, "n_routed_experts": 256, "num_local_experts": 8}


def _qwen3_moe(keys: Keys, hidden: int) -> Traits:
    return _sparse("num_experts")(keys, hidden) | {
        "expert_ffn": keys.integer("moe_intermediate_size", 768),
        "scores_summed": keys.flag("norm_topk_prob", default=False),
        "scores_cast": True,
    }


def _qwen3_moe_dense(keys: Keys, layers: int) -> tuple[int, ...]:
    step, only = keys.integer("decoder_sparse_step", 1), keys.config.get("mlp_only_layers") or []
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)


def _mixtral(keys: Keys, hidden: int) -> Traits:
    traits = _sparse("num_local_experts")(_with(keys, num_experts_per_tok=2), hidden)
    return traits | {"expert_ffn": keys.integer("intermediate_size", 14336), "scores_summed": True}


def _gpt_oss(keys: Keys, hidden: int) -> Traits:
    traits = _sparse("num_local_experts")(_with(keys, num_experts_per_tok=4, num_local_experts=128), hidden)
    return {
        **traits,
        **_biases(keys, default=True),
        "expert_ffn": keys.integer("intermediate_size", 2880),
        "window": keys.integer("sliding_window", 128),
    }


def _deepseek(defaults: Mapping[str, int]) -> Callable[[Keys, int], Traits]:
    def read(given: Keys, hidden: int) -> Traits:
        for name in ("attention_bias", "mlp_bias"):
            given.refuse(name, given.flag(name, default=False), (False,))
        given.refuse("moe_layer_freq", given.integer("moe_layer_freq", 1), (1,))
        keys = _with(given, **defaults)
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


def _first_dense(default: int) -> Callable[[Keys, int], tuple[int, ...]]:
    return lambda keys, layers: tuple(range(min(layers, keys.integer("first_k_dense_replace", default, least=0))))


def _with(keys: Keys, **defaults: int) -> Keys:
    """The same config with defaults for keys that it lacks."""
    return type(keys)({**defaults, **{k: v for k, v in keys.config.items() if v is not None}}, keys.where)


def _t5(keys: Keys, hidden: int) -> Traits:
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


def _vit(keys: Keys, hidden: int) -> Traits:
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


def _gemma3(keys: Keys) -> Architecture:
    """A text decoder and the image tower before it."""
    from dataclasses import replace

    text, vision = keys.inner("text_config"), keys.inner("vision_config")
    tower = _with(vision, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, image_size=224, patch_size=16)
    # A head that pools the patches is built with the tower although nothing reads it.
    keys.refuse("vision_use_head", vision.flag("vision_use_head", default=True), (False,))
    from zplan.planner.hfdropout import with_dropout

    arch = with_dropout(read_shape("gemma3_text", text), text)
    patch = tower.integer("patch_size", None)
    traits: Traits = {
        # The class with the tower leaves its logits as they are.
        "capped_logits": False,
        "vision": tower.integer("hidden_size", None),
        "vision_ffn": tower.integer("intermediate_size", None),
        "vision_layers": tower.integer("num_hidden_layers", None),
        "channels": tower.integer("num_channels", 3),
        "patch": patch,
        "patches": (tower.integer("image_size", None) // patch) ** 2,
    }
    tied = keys.flag("tie_word_embeddings", default=True)
    return replace(arch, family="gemma3", tied=tied, traits=tuple(sorted({**dict(arch.traits), **traits}.items())))


_V2 = {
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
_V3 = {
    **_V2,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}

SHAPES: dict[str, Shape] = {
    "baichuan": Shape(
        ("BaichuanForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 125696, 4096),
        tied=False,
        traits=_baichuan,
        names=UNGROUPED,
    ),
    "bert": Shape(
        ("BertForMaskedLM",),
        (12, 768, 12, 0, 0, 3072, 30522, 512),
        tied=True,
        traits=lambda keys, hidden: {"types": keys.integer("type_vocab_size", 2)},
        names=UNGROUPED,
    ),
    "bloom": Shape(
        ("BloomForCausalLM",),
        (2, 64, 8, 0, 0, 0, 250880, 2048),
        tied=True,
        traits=lambda keys, hidden: {
            "bias": True,
            "normed_residual": keys.flag("apply_residual_connection_post_layernorm", default=False),
        },
        # Its positions are biases on the scores; `seq_length` is what it was trained with.
        names={"layers": "n_layer", "heads": "n_head", "kv_heads": "n_head", "ffn": "n_inner", "max_seq": "seq_length"},
    ),
    "chatglm": Shape(
        ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        (28, 4096, 32, 0, 0, 13696, 65024, 2048),
        tied=False,
        traits=_chatglm,
        names={
            "layers": "num_layers",
            "kv_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "ffn": "ffn_hidden_size",
            "vocab": "padded_vocab_size",
            "max_seq": "seq_length",
        },
    ),
    "deepseek_v2": Shape(
        ("DeepseekV2ForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 102400, 2048),
        tied=False,
        traits=_deepseek(_V2),
        dense=_first_dense(0),
    ),
    "deepseek_v3": Shape(
        ("DeepseekV3ForCausalLM",),
        (61, 7168, 128, 0, 0, 18432, 129280, 4096),
        tied=False,
        traits=_deepseek(_V3),
        dense=_first_dense(3),
    ),
    "falcon": Shape(
        ("FalconForCausalLM",),
        (32, 4544, 71, 0, 0, 0, 65024, 2048),
        tied=True,
        traits=_falcon,
        names={"ffn": "ffn_hidden_size"},
    ),
    "gemma": Shape(
        ("GemmaForCausalLM",),
        (28, 3072, 16, 16, 256, 24576, 256000, 8192),
        tied=True,
        traits=lambda keys, hidden: _biases(keys),
    ),
    "gemma2": Shape(
        ("Gemma2ForCausalLM",),
        (26, 2304, 8, 4, 256, 9216, 256000, 8192),
        tied=True,
        traits=_gemma2,
    ),
    "gemma3_text": Shape(
        ("Gemma3ForCausalLM",),
        (26, 2304, 8, 4, 256, 9216, 262208, 131072),
        tied=True,
        traits=_gemma3_text,
    ),
    "gpt_neox": Shape(
        ("GPTNeoXForCausalLM",),
        (44, 6144, 64, 0, 0, 24576, 50432, 2048),
        tied=False,
        traits=_neox,
        names=UNGROUPED,
    ),
    "gpt_oss": Shape(("GptOssForCausalLM",), (36, 2880, 64, 8, 64, 2880, 201088, 131072), tied=False, traits=_gpt_oss),
    "gptj": Shape(
        ("GPTJForCausalLM",),
        (28, 4096, 16, 0, 0, 0, 50400, 2048),
        tied=False,
        traits=lambda keys, hidden: {"rotary": keys.integer("rotary_dim", 64)},
        names=GPT_NAMES,
    ),
    "internlm2": Shape(
        ("InternLM2ForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 103168, 2048),
        tied=False,
        traits=lambda keys, hidden: {"bias": keys.flag("bias", default=True)},
    ),
    "mixtral": Shape(("MixtralForCausalLM",), (32, 4096, 32, 8, 0, 14336, 32000, 131072), tied=False, traits=_mixtral),
    "olmo2": Shape(
        ("Olmo2ForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 50304, 2048),
        tied=False,
        traits=lambda keys, hidden: _biases(keys),
    ),
    "opt": Shape(
        ("OPTForCausalLM",),
        (12, 768, 12, 0, 0, 3072, 50272, 2048),
        tied=True,
        traits=_opt,
        names={"ffn": "ffn_dim"} | UNGROUPED,
    ),
    "phi": Shape(("PhiForCausalLM",), (24, 2048, 32, 0, 0, 8192, 51200, 2048), tied=False, traits=_phi),
    "phi3": Shape(("Phi3ForCausalLM",), (32, 3072, 32, 0, 0, 8192, 32064, 4096), tied=False, traits=_phi3),
    "qwen2": Shape(
        ("Qwen2ForCausalLM",),
        (32, 4096, 32, 32, 0, 22016, 151936, 32768),
        tied=False,
        traits=lambda keys, hidden: {"qkv_bias": True},
    ),
    "qwen3": Shape(
        ("Qwen3ForCausalLM",),
        (32, 4096, 32, 32, 128, 22016, 151936, 32768),
        tied=False,
        traits=lambda keys, hidden: _biases(keys),
    ),
    "qwen3_moe": Shape(
        ("Qwen3MoeForCausalLM",),
        (24, 2048, 32, 4, 0, 6144, 151936, 32768),
        tied=False,
        traits=_qwen3_moe,
        dense=_qwen3_moe_dense,
    ),
    "stablelm": Shape(("StableLmForCausalLM",), (32, 2560, 32, 32, 0, 6912, 50304, 4096), tied=False, traits=_stablelm),
    "t5": Shape(
        ("T5ForConditionalGeneration",),
        (6, 512, 8, 0, 64, 2048, 32128, 512),
        tied=True,
        traits=_t5,
        names={
            "layers": "num_layers",
            "hidden": "d_model",
            "heads": "num_heads",
            "kv_heads": "num_heads",
            "head_dim": "d_kv",
            "ffn": "d_ff",
        },
    ),
    "vit": Shape(
        ("ViTForImageClassification",), (12, 768, 12, 0, 0, 3072, 1000, 197), tied=False, traits=_vit, names=UNGROUPED
    ),
}
"""model_type -> how it is read."""

ARCHITECTURES = {kind: s.architectures for kind, s in SHAPES.items()} | {"gemma3": ("Gemma3ForConditionalGeneration",)}
