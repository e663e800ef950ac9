"""Parameters of the Hugging Face classes, by name and shape, as rows of text.

A row that starts a line is `unit parameter extents`; `blocks NAME COUNT PREFIX` starts a list of blocks, and the
indented rows below it are one block's parameters. Extents are sums of letters with factors, such as `Q+2K` or `3C`;
[Note: letters] says which. A row that ends in `?word` is there only when that word holds for the model or the layer.

[Note: letters] C width, Q query heads x head width, K key-value heads x head width, D head width, H heads, F
feed-forward width, V vocabulary, T positions. Everything else is a trait of the architecture by its own name. Words: a
trait that is true; `untied`; and by layer `first`, `dense`, `sparse`.
"""

from __future__ import annotations

_ATTENTION = """
 self_attn.q_proj.weight Q C
 self_attn.q_proj.bias Q ?qkv_bias
 self_attn.k_proj.weight K C
 self_attn.k_proj.bias K ?qkv_bias
 self_attn.v_proj.weight K C
 self_attn.v_proj.bias K ?qkv_bias
 self_attn.o_proj.weight C Q
 self_attn.o_proj.bias C ?o_bias"""
_HEAD_NORMS = """
 self_attn.q_norm.weight D
 self_attn.k_norm.weight D"""
_GATED = """
 mlp.gate_proj.weight F C
 mlp.up_proj.weight F C
 mlp.down_proj.weight C F"""
_GATED_WITH_BIASES = """
 mlp.gate_proj.weight F C
 mlp.gate_proj.bias F ?mlp_bias
 mlp.up_proj.weight F C
 mlp.up_proj.bias F ?mlp_bias
 mlp.down_proj.weight C F
 mlp.down_proj.bias C ?mlp_bias"""
_EXPERTS = """
 mlp.gate.weight experts C ?sparse
 mlp.experts.gate_up_proj experts 2expert_ffn C ?sparse
 mlp.experts.down_proj experts C expert_ffn ?sparse"""
_GATED_WHERE_DENSE = """
 mlp.gate_proj.weight F C ?dense
 mlp.up_proj.weight F C ?dense
 mlp.down_proj.weight C F ?dense"""
_NORMS = """
 input_layernorm.weight C
 post_attention_layernorm.weight C"""
_NORM_BIASES = """
 input_layernorm.bias C
 post_attention_layernorm.bias C"""
_FOUR_NORMS = (
    _NORMS
    + """
 pre_feedforward_layernorm.weight C
 post_feedforward_layernorm.weight C"""
)


def _decoder(*block: str, model: str = "model", norm_bias: bool = False, head_bias: bool = False) -> str:  # noqa: FBT001, FBT002
    """The frame of most decoders."""
    rows = [f"embed {model}.embed_tokens.weight V C", f"blocks blocks layers {model}.layers", *block]
    rows += [f"norm {model}.norm.weight C", *([f"norm {model}.norm.bias C"] if norm_bias else [])]
    rows += ["head lm_head.weight V C ?untied", *(["head lm_head.bias V"] if head_bias else [])]
    return "\n".join(rows)


_MLA = """
 self_attn.q_proj.weight q_b C ?q_full
 self_attn.q_a_proj.weight q_rank C ?q_low
 self_attn.q_a_layernorm.weight q_rank ?q_low
 self_attn.q_b_proj.weight q_b q_rank ?q_low
 self_attn.kv_a_proj_with_mqa.weight kv_rank+rope C
 self_attn.kv_a_layernorm.weight kv_rank
 self_attn.kv_b_proj.weight kv_b kv_rank
 self_attn.o_proj.weight C values"""
_SHARED_EXPERTS = """
 mlp.shared_experts.gate_proj.weight shared_ffn C ?sparse
 mlp.shared_experts.up_proj.weight shared_ffn C ?sparse
 mlp.shared_experts.down_proj.weight C shared_ffn ?sparse"""
_DEEPSEEK = _decoder(_MLA, _GATED_WHERE_DENSE, _EXPERTS, _SHARED_EXPERTS, _NORMS)

_FUSED_BLOCK = """
 self_attention.query_key_value.weight Q+2K C
 self_attention.query_key_value.bias Q+2K ?bias
 self_attention.dense.weight C Q
 self_attention.dense.bias C ?bias
 mlp.dense_h_to_4h.weight F C
 mlp.dense_h_to_4h.bias F ?bias
 mlp.dense_4h_to_h.weight C F
 mlp.dense_4h_to_h.bias C ?bias"""

_VISION_BLOCK = """
 layer_norm1.weight vision
 layer_norm1.bias vision
 self_attn.k_proj.weight vision vision
 self_attn.k_proj.bias vision
 self_attn.v_proj.weight vision vision
 self_attn.v_proj.bias vision
 self_attn.q_proj.weight vision vision
 self_attn.q_proj.bias vision
 self_attn.out_proj.weight vision vision
 self_attn.out_proj.bias vision
 layer_norm2.weight vision
 layer_norm2.bias vision
 mlp.fc1.weight vision_ffn vision
 mlp.fc1.bias vision_ffn
 mlp.fc2.weight vision vision_ffn
 mlp.fc2.bias vision"""

_T5_SELF = """
 layer.0.SelfAttention.q.weight Q C
 layer.0.SelfAttention.k.weight Q C
 layer.0.SelfAttention.v.weight Q C
 layer.0.SelfAttention.o.weight C Q
 layer.0.SelfAttention.relative_attention_bias.weight buckets H ?first
 layer.0.layer_norm.weight C"""
_T5_CROSS = """
 layer.1.EncDecAttention.q.weight Q C
 layer.1.EncDecAttention.k.weight Q C
 layer.1.EncDecAttention.v.weight Q C
 layer.1.EncDecAttention.o.weight C Q
 layer.1.layer_norm.weight C"""
_T5_FEED = """
 layer.{n}.DenseReluDense.wi.weight F C ?plain
 layer.{n}.DenseReluDense.wi_0.weight F C ?gated
 layer.{n}.DenseReluDense.wi_1.weight F C ?gated
 layer.{n}.DenseReluDense.wo.weight C F
 layer.{n}.layer_norm.weight C"""

TABLES: dict[str, str] = {
    "baichuan": _decoder("\n self_attn.W_pack.weight 3C C\n self_attn.o_proj.weight C C", _GATED, _NORMS),
    "bert": """
embed bert.embeddings.word_embeddings.weight V C
embed bert.embeddings.position_embeddings.weight T C
embed bert.embeddings.token_type_embeddings.weight types C
embed bert.embeddings.LayerNorm.weight C
embed bert.embeddings.LayerNorm.bias C
blocks blocks layers bert.encoder.layer
 attention.self.query.weight C C
 attention.self.query.bias C
 attention.self.key.weight C C
 attention.self.key.bias C
 attention.self.value.weight C C
 attention.self.value.bias C
 attention.output.dense.weight C C
 attention.output.dense.bias C
 attention.output.LayerNorm.weight C
 attention.output.LayerNorm.bias C
 intermediate.dense.weight F C
 intermediate.dense.bias F
 output.dense.weight C F
 output.dense.bias C
 output.LayerNorm.weight C
 output.LayerNorm.bias C
head cls.predictions.bias V
head cls.predictions.transform.dense.weight C C
head cls.predictions.transform.dense.bias C
head cls.predictions.transform.LayerNorm.weight C
head cls.predictions.transform.LayerNorm.bias C
head cls.predictions.decoder.weight V C ?untied""",
    "bloom": f"""
embed transformer.word_embeddings.weight V C
embed transformer.word_embeddings_layernorm.weight C
embed transformer.word_embeddings_layernorm.bias C
blocks blocks layers transformer.h{_NORMS}{_NORM_BIASES}{_FUSED_BLOCK}
norm transformer.ln_f.weight C
norm transformer.ln_f.bias C
head lm_head.weight V C ?untied""",
    "chatglm": """
embed transformer.embedding.word_embeddings.weight V C
blocks blocks layers transformer.encoder.layers
 input_layernorm.weight C
 self_attention.query_key_value.weight Q+2K C
 self_attention.query_key_value.bias Q+2K ?qkv_bias
 self_attention.dense.weight C Q
 post_attention_layernorm.weight C
 mlp.dense_h_to_4h.weight 2F C
 mlp.dense_4h_to_h.weight C F
norm transformer.encoder.final_layernorm.weight C
head transformer.output_layer.weight V C ?untied""",
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "falcon": f"""
embed transformer.word_embeddings.weight V C
blocks blocks layers transformer.h{_FUSED_BLOCK}
 ln_attn.weight C ?two_norms
 ln_attn.bias C ?two_norms
 ln_mlp.weight C ?two_norms
 ln_mlp.bias C ?two_norms
 input_layernorm.weight C ?input_norm
 input_layernorm.bias C ?input_norm
 post_attention_layernorm.weight C ?serial
 post_attention_layernorm.bias C ?serial
norm transformer.ln_f.weight C
norm transformer.ln_f.bias C
head lm_head.weight V C ?untied""",
    "gemma": _decoder(_ATTENTION, _GATED, _NORMS),
    "gemma2": _decoder(_ATTENTION, _GATED, _FOUR_NORMS),
    "gemma3_text": _decoder(_ATTENTION, _HEAD_NORMS, _GATED, _FOUR_NORMS),
    "gemma3": f"""
vision_embed model.vision_tower.embeddings.patch_embedding.weight vision channels patch patch
vision_embed model.vision_tower.embeddings.patch_embedding.bias vision
vision_embed model.vision_tower.embeddings.position_embedding.weight patches vision
blocks vision vision_layers model.vision_tower.encoder.layers{_VISION_BLOCK}
vision_norm model.vision_tower.post_layernorm.weight vision
vision_norm model.vision_tower.post_layernorm.bias vision
projector model.multi_modal_projector.mm_input_projection_weight vision C
projector model.multi_modal_projector.mm_soft_emb_norm.weight vision
{_decoder(_ATTENTION, _HEAD_NORMS, _GATED, _FOUR_NORMS, model="model.language_model")}""",
    "gpt_neox": f"""
embed gpt_neox.embed_in.weight V C
blocks blocks layers gpt_neox.layers{_NORMS}{_NORM_BIASES}
 attention.query_key_value.weight 3C C
 attention.query_key_value.bias 3C ?bias
 attention.dense.weight C C
 attention.dense.bias C ?bias
 mlp.dense_h_to_4h.weight F C
 mlp.dense_h_to_4h.bias F
 mlp.dense_4h_to_h.weight C F
 mlp.dense_4h_to_h.bias C
norm gpt_neox.final_layer_norm.weight C
norm gpt_neox.final_layer_norm.bias C
head lm_head.weight V C ?untied""",
    "gpt_oss": _decoder(
        "\n self_attn.sinks H",
        _ATTENTION,
        """
 mlp.router.weight experts C
 mlp.router.bias experts
 mlp.experts.gate_up_proj experts C 2expert_ffn
 mlp.experts.gate_up_proj_bias experts 2expert_ffn
 mlp.experts.down_proj experts expert_ffn C
 mlp.experts.down_proj_bias experts C""",
        _NORMS,
    ),
    "gptj": """
embed transformer.wte.weight V C
blocks blocks layers transformer.h
 ln_1.weight C
 ln_1.bias C
 attn.k_proj.weight C C
 attn.v_proj.weight C C
 attn.q_proj.weight C C
 attn.out_proj.weight C C
 mlp.fc_in.weight F C
 mlp.fc_in.bias F
 mlp.fc_out.weight C F
 mlp.fc_out.bias C
norm transformer.ln_f.weight C
norm transformer.ln_f.bias C
head lm_head.weight V C ?untied
head lm_head.bias V""",
    "internlm2": """
embed model.tok_embeddings.weight V C
blocks blocks layers model.layers
 attention.wqkv.weight Q+2K C
 attention.wqkv.bias Q+2K ?bias
 attention.wo.weight C Q
 attention.wo.bias C ?bias
 feed_forward.w1.weight F C
 feed_forward.w3.weight F C
 feed_forward.w2.weight C F
 attention_norm.weight C
 ffn_norm.weight C
norm model.norm.weight C
head output.weight V C ?untied""",
    "mixtral": _decoder(_ATTENTION, _EXPERTS, _NORMS),
    "olmo2": _decoder(
        _ATTENTION,
        """
 self_attn.q_norm.weight Q
 self_attn.k_norm.weight K""",
        _GATED,
        """
 post_attention_layernorm.weight C
 post_feedforward_layernorm.weight C""",
    ),
    "opt": """
embed model.decoder.embed_tokens.weight V C
positions model.decoder.embed_positions.weight T+2 C
blocks blocks layers model.decoder.layers
 self_attn.k_proj.weight C C
 self_attn.k_proj.bias C ?bias
 self_attn.v_proj.weight C C
 self_attn.v_proj.bias C ?bias
 self_attn.q_proj.weight C C
 self_attn.q_proj.bias C ?bias
 self_attn.out_proj.weight C C
 self_attn.out_proj.bias C ?bias
 self_attn_layer_norm.weight C
 self_attn_layer_norm.bias C
 fc1.weight F C
 fc1.bias F ?bias
 fc2.weight C F
 fc2.bias C ?bias
 final_layer_norm.weight C
 final_layer_norm.bias C
norm model.decoder.final_layer_norm.weight C
norm model.decoder.final_layer_norm.bias C
head lm_head.weight V C ?untied""",
    "phi": f"""
embed model.embed_tokens.weight V C
blocks blocks layers model.layers{_ATTENTION.replace("o_proj", "dense")}
 mlp.fc1.weight F C
 mlp.fc1.bias F
 mlp.fc2.weight C F
 mlp.fc2.bias C
 input_layernorm.weight C
 input_layernorm.bias C
norm model.final_layernorm.weight C
norm model.final_layernorm.bias C
head lm_head.weight V C ?untied
head lm_head.bias V""",
    "phi3": _decoder(
        """
 self_attn.o_proj.weight C Q
 self_attn.qkv_proj.weight Q+2K C
 mlp.gate_up_proj.weight 2F C
 mlp.down_proj.weight C F""",
        _NORMS,
    ),
    "llama_class": _decoder(_ATTENTION, _GATED_WITH_BIASES, _NORMS),
    "qwen2": _decoder(_ATTENTION, _GATED, _NORMS),
    "qwen3": _decoder(_ATTENTION, _HEAD_NORMS, _GATED, _NORMS),
    "qwen3_moe": _decoder(_ATTENTION, _HEAD_NORMS, _GATED_WHERE_DENSE, _EXPERTS, _NORMS),
    "stablelm": _decoder(
        _ATTENTION,
        _GATED,
        """
 input_layernorm.weight C
 input_layernorm.bias C
 post_attention_layernorm.weight C ?serial
 post_attention_layernorm.bias C ?serial""",
        norm_bias=True,
    ),
    "t5": f"""
embed shared.weight V C
blocks encoder layers encoder.block{_T5_SELF}{_T5_FEED.format(n=1)}
encoder_norm encoder.final_layer_norm.weight C
blocks decoder decoder_layers decoder.block{_T5_SELF}{_T5_CROSS}{_T5_FEED.format(n=2)}
norm decoder.final_layer_norm.weight C
head lm_head.weight V C ?untied""",
    "vit": """
embed vit.embeddings.cls_token 1 1 C
embed vit.embeddings.position_embeddings 1 patches C
embed vit.embeddings.patch_embeddings.projection.weight C channels patch patch
embed vit.embeddings.patch_embeddings.projection.bias C
blocks blocks layers vit.layers
 attention.q_proj.weight C C
 attention.q_proj.bias C ?bias
 attention.k_proj.weight C C
 attention.k_proj.bias C ?bias
 attention.v_proj.weight C C
 attention.v_proj.bias C ?bias
 attention.o_proj.weight C C
 attention.o_proj.bias C
 layernorm_before.weight C
 layernorm_before.bias C
 layernorm_after.weight C
 layernorm_after.bias C
 mlp.fc1.weight F C
 mlp.fc1.bias F
 mlp.fc2.weight C F
 mlp.fc2.bias C
norm vit.layernorm.weight C
norm vit.layernorm.bias C
head classifier.weight V C
head classifier.bias V""",
}
"""model_type -> rows. Names are those of transformers 5.24; baichuan, chatglm and internlm2 have their own code."""
