"""What the layers of each Hugging Face decoder do differently (transformers 5.24): one row of `STYLES` a model_type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zplan.planner.aten import Aten
from zplan.planner.graph import Value
from zplan.planner.hfops import (
    Norm,
    rotate,
    rotate_front,
    rotate_front_at_once,
    rotate_front_here,
    rotate_halves,
    rotate_in_fp32,
)

Layout = Literal["serial", "post", "neox", "stablelm", "phi", "opt", "sandwich"]
Rotation = Callable[[Aten, Value, Value, Value, Value], tuple[Value, ...]]


@dataclass(frozen=True)
class Style:
    """What a model_type does differently.

    Attributes
    ----------
    layout
        How norms, attention, feed-forward part and residuals follow each other.
    qkv
        One projection each; `fused`: one for all; `heads`: one for all, with the three parts head by head.
    gated
        Whether the feed-forward part has a gate. Without one its two projections are `feed`.
    feed_fused
        Gate and up are one projection.
    head_norms
        Norm of queries and keys: `head` by head, the same once heads are `turned` before tokens, or over the `whole`
        row.
    scaled
        Embeddings are multiplied by a number.
    rotary_fp32
        Tables and rotation are in fp32.
    masks, tables
        How many of each a model makes, for layers of different kinds.
    attention
        Module of the projections, and name of the last one.
    """

    norm: Norm = "rms"
    act: str = "silu"
    layout: Layout = "serial"
    qkv: Literal["separate", "fused", "heads"] = "separate"
    gated: bool = True
    feed_fused: bool = False
    head_norms: Literal["none", "head", "turned", "whole"] = "none"
    scaled: bool = False
    rotation: Rotation | None = rotate
    rotary_fp32: bool = False
    masks: int = 1
    tables: int = 1
    attention: tuple[str, str] = ("self_attn", "o_proj")
    feed: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")


_FOUR_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

_GEMMA3 = Style(
    norm="gemma",
    act="gelu",
    scaled=True,
    layout="sandwich",
    norms=_FOUR_NORMS,
    masks=2,
    head_norms="turned",
    tables=2,
)

STYLES: dict[str, Style] = {
    "llama_class": Style(),
    "qwen2": Style(),
    "qwen3": Style(head_norms="head"),
    "qwen3_moe": Style(head_norms="head"),
    "mixtral": Style(),
    "deepseek_v2": Style(),
    "deepseek_v3": Style(),
    # Layers of their own, from code that comes with the weights: `planner/hfremote.py`.
    "internlm2": Style(attention=("attention", "wo"), norms=("attention_norm", "ffn_norm")),
    "baichuan": Style(norm="mixed"),
    "chatglm": Style(norm="mixed_olmo"),
    "gpt_oss": Style(norm="olmo", rotation=rotate_halves, masks=2),
    "gemma": Style(norm="gemma", act="gelu", scaled=True),
    "gemma2": Style(norm="gemma", act="gelu", scaled=True, layout="sandwich", norms=_FOUR_NORMS, masks=2),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Style(qkv="fused", feed_fused=True, rotation=rotate_front_at_once),
    "olmo2": Style(
        norm="olmo",
        layout="post",
        head_norms="whole",
        rotation=rotate_in_fp32,
        rotary_fp32=True,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "gpt_neox": Style(
        norm="layer",
        act="gelu",
        layout="neox",
        qkv="heads",
        gated=False,
        rotation=rotate_front,
        attention=("attention", "dense"),
        feed=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "stablelm": Style(norm="layer", layout="stablelm", rotation=rotate_front_here),
    "phi": Style(
        norm="layer",
        act="gelu_new",
        layout="phi",
        gated=False,
        rotation=rotate_front_here,
        attention=("self_attn", "dense"),
    ),
    "opt": Style(
        norm="layer",
        act="relu",
        layout="opt",
        gated=False,
        rotation=None,
        attention=("self_attn", "out_proj"),
        feed=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
    ),
    # These lay their layers out themselves: `planner/hfgpts.py`, `planner/hft5.py`, `planner/hfvit.py`.
    "gptj": Style(
        norm="layer",
        act="gelu_new",
        gated=False,
        attention=("attn", "out_proj"),
        feed=("mlp.fc_in", "mlp.fc_out"),
        norms=("ln_1",),
    ),
    "falcon": Style(norm="layer", act="gelu", gated=False, feed=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
    "bloom": Style(norm="layer", act="gelu", gated=False),
    "t5": Style(gated=False, rotation=None),
    "vit": Style(
        norm="layer",
        act="gelu",
        gated=False,
        rotation=None,
        attention=("attention", "o_proj"),
        norms=("layernorm_before", "layernorm_after"),
    ),
}
