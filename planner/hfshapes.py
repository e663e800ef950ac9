"""Config keys of the families that zplan estimates but does not run: model_type -> names, defaults, traits.

Defaults are those of the classes of transformers 5.24. What would change the parameters in a way that no row of
`planner/hfrows.py` describes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zplan.planner.hftraits import (
    V2,
    V3,
    Traits,
    baichuan,
    biases,
    chatglm,
    deepseek,
    falcon,
    first_dense,
    gemma2,
    gemma3_text,
    gpt_oss,
    llama_class,
    mixtral,
    neox,
    opt,
    phi,
    phi3,
    qwen3_moe,
    qwen3_moe_dense,
    stablelm,
    stretched,
    t5,
    vit,
    with_defaults,
)
from zplan.planner.models import LLAMA_CLASS, Architecture

if TYPE_CHECKING:
    from zplan.planner.hfconfig import Keys

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

LLAMA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")
_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_pytorch_tanh")
_GATED_TYPES = (
    *(LLAMA_CLASS, "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "olmo2", "stablelm"),
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
        max_seq=int(traits.pop("max_seq", 0)) or stretched(keys, kind, read("max_seq")),
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


def _gemma3(keys: Keys) -> Architecture:
    """A text decoder and the image tower before it."""
    from dataclasses import replace

    text, vision = keys.inner("text_config"), keys.inner("vision_config")
    tower = with_defaults(
        vision, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, image_size=224, patch_size=16
    )
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


SHAPES: dict[str, Shape] = {
    "baichuan": Shape(
        ("BaichuanForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 125696, 4096),
        tied=False,
        traits=baichuan,
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
        traits=chatglm,
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
        traits=deepseek(V2),
        dense=first_dense(0),
    ),
    "deepseek_v3": Shape(
        ("DeepseekV3ForCausalLM",),
        (61, 7168, 128, 0, 0, 18432, 129280, 4096),
        tied=False,
        traits=deepseek(V3),
        dense=first_dense(3),
    ),
    "falcon": Shape(
        ("FalconForCausalLM",),
        (32, 4544, 71, 0, 0, 0, 65024, 2048),
        tied=True,
        traits=falcon,
        names={"ffn": "ffn_hidden_size"},
    ),
    "gemma": Shape(
        ("GemmaForCausalLM",),
        (28, 3072, 16, 16, 256, 24576, 256000, 8192),
        tied=True,
        traits=lambda keys, hidden: biases(keys),
    ),
    "gemma2": Shape(
        ("Gemma2ForCausalLM",),
        (26, 2304, 8, 4, 256, 9216, 256000, 8192),
        tied=True,
        traits=gemma2,
    ),
    "gemma3_text": Shape(
        ("Gemma3ForCausalLM",),
        (26, 2304, 8, 4, 256, 9216, 262208, 131072),
        tied=True,
        traits=gemma3_text,
    ),
    "gpt_neox": Shape(
        ("GPTNeoXForCausalLM",),
        (44, 6144, 64, 0, 0, 24576, 50432, 2048),
        tied=False,
        traits=neox,
        names=UNGROUPED,
    ),
    "gpt_oss": Shape(("GptOssForCausalLM",), (36, 2880, 64, 8, 64, 2880, 201088, 131072), tied=False, traits=gpt_oss),
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
    LLAMA_CLASS: Shape(LLAMA_CLASSES, (32, 4096, 32, 0, 0, 11008, 32000, 2048), tied=False, traits=llama_class),
    "mixtral": Shape(("MixtralForCausalLM",), (32, 4096, 32, 8, 0, 14336, 32000, 131072), tied=False, traits=mixtral),
    "olmo2": Shape(
        ("Olmo2ForCausalLM",),
        (32, 4096, 32, 0, 0, 11008, 50304, 2048),
        tied=False,
        traits=lambda keys, hidden: biases(keys),
    ),
    "opt": Shape(
        ("OPTForCausalLM",),
        (12, 768, 12, 0, 0, 3072, 50272, 2048),
        tied=True,
        traits=opt,
        names={"ffn": "ffn_dim"} | UNGROUPED,
    ),
    "phi": Shape(("PhiForCausalLM",), (24, 2048, 32, 0, 0, 8192, 51200, 2048), tied=False, traits=phi),
    "phi3": Shape(("Phi3ForCausalLM",), (32, 3072, 32, 0, 0, 8192, 32064, 4096), tied=False, traits=phi3),
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
        traits=lambda keys, hidden: biases(keys),
    ),
    "qwen3_moe": Shape(
        ("Qwen3MoeForCausalLM",),
        (24, 2048, 32, 4, 0, 6144, 151936, 32768),
        tied=False,
        traits=qwen3_moe,
        dense=qwen3_moe_dense,
    ),
    "stablelm": Shape(("StableLmForCausalLM",), (32, 2560, 32, 32, 0, 6912, 50304, 4096), tied=False, traits=stablelm),
    "t5": Shape(
        ("T5ForConditionalGeneration",),
        (6, 512, 8, 0, 64, 2048, 32128, 512),
        tied=True,
        traits=t5,
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
        ("ViTForImageClassification",), (12, 768, 12, 0, 0, 3072, 1000, 197), tied=False, traits=vit, names=UNGROUPED
    ),
}
"""model_type -> how it is read."""

ARCHITECTURES = {kind: s.architectures for kind, s in SHAPES.items() if kind != LLAMA_CLASS} | {
    "gemma3": ("Gemma3ForConditionalGeneration",)
}
