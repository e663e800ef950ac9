"""Predicted activations of Hugging Face classes against the real classes on a CPU, phase by phase, to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import pytest
import torch
from phases import DTYPES, choose, mark_phases
from torch import nn

from zplan.planner.activations import activation_lines, counted
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import merge
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.timeline import timeline
from zplan.runtime.meter import StorageRegistry

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 64}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
CASES = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2"},
    "gemma2, not capped": {"model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": None},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    },
    "gemma3_text, capped": {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "phi3": {"model_type": "phi3", "resid_pdrop": 0.0},
    "olmo2": {"model_type": "olmo2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "qwen3_moe, as they are": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "qwen3_moe, a dense layer first": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "mlp_only_layers": [0],
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "deepseek_v3": _MLA
    | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 7,
        "first_k_dense_replace": 2,
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3, whole heads": _MLA
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "v_head_dim": 24,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
    "deepseek_v2": _MLA | {"model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v2, groups": _MLA
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
    },
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16},
    "gpt_oss, no groups": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_bias": False,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "intermediate_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "num_key_value_heads": 4,
    },
    "gpt_neox, serial": {
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_dropout": 0.0,
    },
    "stablelm": {"model_type": "stablelm"},
    "stablelm, parallel": {"model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": True},
    "phi": {"model_type": "phi", "resid_pdrop": 0.0},
    "bert": {
        "model_type": "bert",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
    },
    "opt": {
        "model_type": "opt",
        "ffn_dim": 176,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "tie_word_embeddings": True,
    },
    "gptj": _GPT | {"model_type": "gptj", "rotary_dim": 8},
    "falcon, one pair of keys and values": _GPT | {"model_type": "falcon", "tie_word_embeddings": True},
    "falcon, groups": _GPT | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, serial": _GPT | {"model_type": "falcon", "parallel_attn": False, "multi_query": False, "bias": True},
    "bloom": _GPT | {"model_type": "bloom", "tie_word_embeddings": True},
    "bloom, 6 heads": _GPT
    | {"model_type": "bloom", "n_embd": 96, "hidden_size": 96, "n_head": 6, "num_attention_heads": 6},
}
EAGER_ONLY = ("gemma2", "falcon, one", "bloom", "gpt_oss")


def predicted(config: dict, choice: Choice) -> dict[str, int]:
    arch, _ = read_architecture(config, "m")
    spec = ModelSpec("m", decoder_units(arch), arch)
    phases = timeline(spec.units).phases
    ledger = merge(phases, activation_lines(spec, choice, phases))
    return dict(zip(phases, ledger.per_phase(), strict=True))


class Both:
    """Two modules that are called in a row, as one."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        self.first, self.second = first, second

    def parameters(self):
        return chain(self.first.parameters(), self.second.parameters())

    def register_forward_pre_hook(self, hook):
        return self.first.register_forward_pre_hook(hook)

    def register_forward_hook(self, hook):
        return self.second.register_forward_hook(hook)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    if hasattr(model, "bert"):
        layers = enumerate(model.bert.encoder.layer)
        return {"embed": model.bert.embeddings, **{f"blocks.{i}": x for i, x in layers}, "head": model.cls}
    if hasattr(model, "transformer"):
        base = model.transformer
        embed = base.wte if hasattr(base, "wte") else base.word_embeddings
        if hasattr(base, "word_embeddings_layernorm"):
            embed = Both(embed, base.word_embeddings_layernorm)
        layers = {f"blocks.{i}": layer for i, layer in enumerate(base.h)}
        return {"embed": embed, **layers, "norm": base.ln_f, "head": model.lm_head}
    if hasattr(model, "gpt_neox"):
        base = model.gpt_neox
        embed, norm, head = (
            base.embed_in,
            base.final_layer_norm,
            model.embed_out if hasattr(model, "embed_out") else model.lm_head,
        )
        return {"embed": embed, **{f"blocks.{i}": x for i, x in enumerate(base.layers)}, "norm": norm, "head": head}
    base = getattr(model.model, "decoder", model.model)
    return {
        "embed": base.embed_tokens,
        **({"positions": base.embed_positions} if hasattr(base, "embed_positions") else {}),
        **{f"blocks.{i}": layer for i, layer in enumerate(base.layers)},
        "norm": next(getattr(base, n) for n in ("norm", "final_layernorm", "final_layer_norm") if hasattr(base, n)),
        "head": model.lm_head,
    }


def class_config(config: dict) -> dict:
    """Without a width of heads where that follows from other keys."""
    follows = config["model_type"] in ("falcon", "deepseek_v2", "deepseek_v3")
    return {k: v for k, v in config.items() if not (follows and k == "head_dim")}


def observed(config: dict, choice: Choice) -> dict[str, int]:
    hf = transformers.AutoConfig.for_model(
        **class_config(config), use_cache=False, attn_implementation=choice.attention
    )
    auto = transformers.AutoModelForMaskedLM if hf.model_type == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(hf).to(DTYPES[choice.precision])
    model.train()
    if choice.checkpointing == "full":
        # Without the state of the random number generator, which is 5 KB on the host a layer.
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    registry = StorageRegistry()
    mark_phases(modules_of(model), registry)
    shape = (choice.micro_batch, choice.seq)
    with registry:
        registry.adopt(*model.parameters(), *model.buffers())
        states = registry.live_bytes
        registry.enter("forward.embed")
        inputs, labels = torch.randint(3, 100, shape), torch.randint(3, 100, shape)
        mask = None
        if choice.padded:
            mask = torch.ones(shape, dtype=torch.int64)
            mask[0, -1] = 0
        loss = model(input_ids=inputs, labels=labels, attention_mask=mask).loss
        registry.enter("backward.loss")
        loss.backward()
        registry.enter("step")
        del inputs, labels, loss, mask
        registry.enter("idle")
    assert registry.live_bytes == states, "something outlived the step"
    return {phase: peak - states for phase, peak in registry.peaks.items() if phase != "idle"}


KINDS = [
    (3, 10, "bf16", "none", "sdpa"),
    (2, 33, "fp32", "full", "sdpa"),
    (1, 9, "bf16", "none", "eager"),
    # Long enough for a peak in attention.
    (3, 40, "bf16", "full", "eager"),
]
FUSED, MADE_AGAIN = KINDS[0], KINDS[3]


def runs(name: str, kind: tuple[int, int, str, str, str]) -> bool:
    """The class of gemma2 refuses fused attention, and gemma3 masks it from its window on."""
    return kind[4] == "eager" or not (name.startswith(EAGER_ONLY) or (name == "gemma3_text" and kind[1] > 32))


def long_one(name: str, kind: tuple[int, int, str, str, str]) -> bool:
    """Eager attention made again, where the class has fused attention and its rotated parts do not end the list."""
    return kind is MADE_AGAIN and runs(name, FUSED) and not name.startswith(("llama", "phi", "stablelm"))


GRID = [
    pytest.param(name, *kind, marks=[pytest.mark.slow] if long_one(name, kind) else [])
    for name, kind in product(CASES, KINDS)
    if runs(name, kind)
]


@pytest.mark.parametrize(("name", "batch", "seq", "precision", "checkpointing", "attention"), GRID)
def test_every_phase_equals_what_an_observer_sees(name, batch, seq, precision, checkpointing, attention):
    config, choice = SMALL | CASES[name], choose(batch, seq, precision, checkpointing, attention)
    expected, seen = predicted(config, choice), observed(config, choice)
    del expected["idle"]
    wrong = {p: (n, seen.get(p, 0)) for p, n in expected.items() if n != seen.get(p, 0)}
    assert not wrong, wrong


def test_what_the_lists_leave_out_is_refused():
    window = SMALL | CASES["gemma3_text"]
    with pytest.raises(ZplanError, match="with windows of 32 tokens .* fused attention of 32 tokens"):
        predicted(window, choose(1, 32, "bf16", "none"))
    assert predicted(window, choose(1, 32, "bf16", "none", "eager"))
    for name in ("gemma2", "bloom", "gpt_oss"):
        with pytest.raises(ZplanError, match=f"`{name}` refuses fused attention"):
            predicted(SMALL | CASES[name], choose(1, 8, "bf16", "none"))
    with pytest.raises(ZplanError, match="4 heads on one key-value head has no kernel"):
        predicted(SMALL | CASES["falcon, one pair of keys and values"], choose(1, 8, "bf16", "none"))
    grouped = replace(choose(1, 8, "fp32", "none"), device="cuda")
    with pytest.raises(ZplanError, match="4 heads on 2 key-value heads in fp32"):
        predicted(SMALL | CASES["qwen2"], grouped)


def test_lines_of_classes_are_estimates():
    arch, _ = read_architecture(SMALL | CASES["qwen3"], "m")
    spec = ModelSpec("m", decoder_units(arch), arch)
    lines = activation_lines(spec, choose(1, 8, "bf16", "none"), timeline(spec.units).phases)
    assert {x.source for x in lines} == {"estimate"}


@pytest.mark.parametrize("name", CASES)
def test_laws_on_cuda(name):
    large = {"num_hidden_layers": 5, "max_position_embeddings": 8192, "head_dim": 64}
    config = SMALL | large | CASES[name] | ({"n_positions": 8192} if "n_positions" in CASES[name] else {})
    if config["hidden_size"] // config["num_attention_heads"] < 64:
        config |= {"hidden_size": 256, "n_embd": 256, "word_embed_proj_dim": 256}
    start = replace(choose(2, 1024, "bf16", "none", "eager"), device="cuda")
    held = predicted(config, start)
    for larger in (replace(start, micro_batch=3), replace(start, seq=1025)):
        assert all(predicted(config, larger)[p] >= n for p, n in held.items())
    full = predicted(config, replace(start, checkpointing="full"))
    assert max(full.values()) < max(held.values())
    if not name.startswith((*EAGER_ONLY, "gemma3_text")):
        assert max(predicted(config, replace(start, attention="sdpa")).values()) < max(held.values())


def test_layers_of_two_kinds_are_not_counted():
    config = SMALL | CASES["qwen3_moe"]
    for changes, expected in (({}, True), ({"decoder_sparse_step": 2}, False)):
        arch, _ = read_architecture(config | changes, "m")
        assert counted(ModelSpec("m", decoder_units(arch), arch)) is expected


DROPPED = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox, serial": {"hidden_dropout": 0.1},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "qwen2": {"attention_dropout": 0.1},
    "deepseek_v3": {"attention_dropout": 0.1},
    "gpt_oss": {"attention_dropout": 0.1},
    "gptj": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "falcon, groups": {"hidden_dropout": 0.1},
    "falcon, serial": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("kind", [(3, 10, "bf16", "none", "eager"), (2, 9, "fp32", "full", "eager")])
def test_dropout_equals_what_an_observer_sees(name, kind):
    config, choice = SMALL | CASES[name] | DROPPED[name], choose(*kind)
    expected, seen = predicted(config, choice), observed(config, choice)
    del expected["idle"]
    wrong = {p: (n, seen.get(p, 0)) for p, n in expected.items() if n != seen.get(p, 0)}
    assert not wrong, wrong


def test_dropout_of_fused_attention():
    config = SMALL | CASES["bert"] | {"attention_probs_dropout_prob": 0.1}
    with pytest.raises(ZplanError, match="fused attention on a CPU takes no dropout"):
        predicted(config, choose(1, 8, "bf16", "none"))
    # On a GPU it keeps a seed, which is there without dropout too.
    gpu = replace(choose(2, 64, "bf16", "none"), device="cuda")
    assert predicted(config, gpu) == predicted(config | {"attention_probs_dropout_prob": 0.0}, gpu)


def test_masks_of_dropout_on_a_gpu_are_bytes():
    config, choice = SMALL | CASES["opt"], replace(choose(2, 64, "bf16", "none"), device="cuda")
    turn = {p: predicted(config | {"dropout": p}, choice)["loss"] for p in (0.0, 0.1)}
    hidden = 2 * 64 * SMALL["hidden_size"]
    # Two masks a layer; the sums that follow need nothing of what was dropped.
    assert turn[0.1] - turn[0.0] == 2 * SMALL["num_hidden_layers"] * hidden


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "opt", "phi", "olmo2", "deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("kind", [(3, 10, "bf16", "none", "sdpa"), (2, 9, "fp32", "full", "sdpa")])
def test_padded_batches_equal_what_an_observer_sees(name, kind):
    """All but the embedding's phase, where each class makes its mask in its own way."""
    config, choice = SMALL | CASES[name], replace(choose(*kind), padded=True)
    expected, seen = predicted(config, choice), observed(config, choice)
    wrong = {p: (expected[p], n) for p, n in seen.items() if p != "forward.embed" and expected[p] != n}
    assert not wrong, wrong


def test_a_mask_is_kept_by_every_layer():
    config, choice = SMALL | CASES["qwen2"], replace(choose(2, 64, "bf16", "none"), device="cuda")
    packed, padded = predicted(config, choice), predicted(config, replace(choice, padded=True))
    bias = 2 * 64 * 64 * 2
    assert padded["loss"] - packed["loss"] >= SMALL["num_hidden_layers"] * bias
