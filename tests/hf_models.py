"""Small random transformers models of many families, and the micro-step that each is trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import any_model as m
import torch
import transformers
from phases import switch_on
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Extents that the families share."""

    vocab: int
    hidden: int
    ffn: int
    positions: int
    image: int
    heads: int = 4
    layers: int = 4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SMALL = Sizes(vocab=m.VOCAB, hidden=32, ffn=48, positions=32, image=16)
WIDE = Sizes(vocab=512, hidden=256, ffn=512, positions=256, image=64)
"""Large enough for a GPU's own kernels of attention and matrix products."""

CAUSAL = ("llama", "llama-tied", "gpt2", "qwen2", "gemma2", "mixtral")
OTHERS = ("opt", "bloom", "falcon", "gpt-neox", "phi3", "bert", "t5", "vit")
ALL = (*CAUSAL, *OTHERS, "llama-lora")

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HEADS = {
    "bert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def config_of(name: str, s: Sizes = SMALL) -> tuple[str, dict[str, Any]]:
    """Class of a family's config, and its keys."""
    tokens = {"vocab_size": s.vocab}
    depth = {"num_attention_heads": s.heads, "num_hidden_layers": s.layers}
    plain = {**tokens, **depth, "hidden_size": s.hidden, "intermediate_size": s.ffn}
    placed = {**plain, "max_position_embeddings": s.positions}
    rope = {**placed, "num_key_value_heads": 2}
    gpt = {"n_embd": s.hidden, "n_layer": s.layers, "n_head": s.heads, "n_positions": s.positions, **NO_DROPOUT}
    opt = {"ffn_dim": s.ffn, "dropout": 0.0, "word_embed_proj_dim": s.hidden}
    t5 = {"d_model": s.hidden, "d_kv": s.head_dim, "d_ff": s.ffn, "num_heads": s.heads}
    t5_depth = {"num_layers": s.layers, "num_decoder_layers": s.layers, "dropout_rate": 0.0}
    return {
        "llama": ("LlamaConfig", rope),
        "llama-tied": ("LlamaConfig", {**rope, "tie_word_embeddings": True}),
        "gpt2": ("GPT2Config", {**tokens, **gpt}),
        "qwen2": ("Qwen2Config", rope),
        "gemma2": ("Gemma2Config", {**rope, "head_dim": s.head_dim, "sliding_window": 4}),
        "mixtral": ("MixtralConfig", {**rope, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "opt": (
            "OPTConfig",
            {**tokens, **depth, **opt, "hidden_size": s.hidden, "max_position_embeddings": s.positions},
        ),
        "bloom": ("BloomConfig", {**tokens, "hidden_size": s.hidden, "n_layer": s.layers, "n_head": s.heads}),
        "falcon": ("FalconConfig", {**tokens, **depth, "hidden_size": s.hidden}),
        "gpt-neox": ("GPTNeoXConfig", placed),
        "phi3": ("Phi3Config", {**rope, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}),
        "bert": ("BertConfig", {**placed, **NO_HIDDEN_DROPOUT}),
        "t5": ("T5Config", {**tokens, **t5, **t5_depth, "decoder_start_token_id": 0}),
        "vit": ("ViTConfig", {**plain, **NO_HIDDEN_DROPOUT, "image_size": s.image, "patch_size": s.image // 4}),
    }[name]


def build(name: str, checkpointing: str = "none", sizes: Sizes = SMALL) -> nn.Module:
    """A model with random weights, in training mode; checkpointing by its own switch, `plain` or `reentrant`."""
    if name == "llama-lora":
        return _with_adapters(build("llama", checkpointing, sizes))
    kind, keys = config_of(name, sizes)
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**keys)
    config.use_cache = False
    model = getattr(transformers, HEADS.get(name, "AutoModelForCausalLM")).from_config(config)
    if checkpointing != "none":
        switch_on(model, use_reentrant=checkpointing == "reentrant")
    return model.train()


class Adapter(nn.Module):
    """A frozen linear map and a trained one of rank 2 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(requires_grad=False)
    model.enable_input_require_grads()
    torch.manual_seed(1)
    for layer in model.model.layers:
        for part in ("q_proj", "v_proj"):
            setattr(layer.self_attn, part, Adapter(getattr(layer.self_attn, part)))
    return model.train()


def batch(model: nn.Module, size: tuple[int, int], seed: int, sizes: Sizes = SMALL) -> dict[str, Tensor]:
    """Random tokens with labels for language models, a class for each sequence for BERT, images for ViT."""
    kind = type(model).__name__
    g = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, sizes.vocab, size, generator=g) for _ in range(2))
    if not kind.startswith(("Bert", "ViT")):
        return {"input_ids": ids, "labels": labels}
    classes = labels[:, 0] % 2
    if kind.startswith("Bert"):
        return {"input_ids": ids, "labels": classes}
    return {"pixel_values": torch.randn(size[0], 3, sizes.image, sizes.image, generator=g), "labels": classes}


def recipe(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """One micro-step of a model or its engine."""
    data = batch(getattr(model, "module", model), (m.MICRO_BATCH, m.SEQ), step * 10_000 + rank * 100 + k)
    loss = model(**data).loss
    backward(loss)
    return loss
