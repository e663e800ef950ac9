"""transformers models, unmodified: every stage trains like one plain process."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import any_model as m
import pytest
import torch
from torch import nn

from zplan.runtime.initialize import initialize, meta_init, summon

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
        switch_on(model, checkpointing)
    return model.train()


def switch_on(model: nn.Module, checkpointing: str) -> None:
    """The model's own switch, whose name transformers has changed."""
    how = {"use_reentrant": checkpointing == "reentrant"}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


@lru_cache
def reference(name: str, checkpointing: str = "none") -> dict[str, Any]:
    return m.reference("test_hf:build", (name, checkpointing), steps=3, world_size=2)


def check(run_ranks: Any, cases: dict[str, tuple[str, str, int]]) -> None:
    """`name -> (model, checkpointing, stage)` on two ranks, all in one start."""
    calls = {key: ("test_hf:build", (name, how), m.config(stage), 3) for key, (name, how, stage) in cases.items()}
    results = run_ranks(2, m.train_each, calls, limit=200)
    for key, (name, how, stage) in cases.items():
        m.equal([r[key] for r in results], reference(name, how))
        blocks = [unit for unit in results[0][key]["ringed"] if unit[-1].isdigit()]
        assert len(blocks) == (4 if stage == 3 else 0), key


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_causal_models_below_stage_3(run_ranks, stage):
    check(run_ranks, {name: (name, "none", stage) for name in CAUSAL})


@pytest.mark.gloo
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "plain"])
def test_causal_models_at_stage_3(run_ranks, checkpointing):
    check(run_ranks, {name: (name, checkpointing, 3) for name in CAUSAL})


# --- other families --------------------------------------------------------------------------------------------------

NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OTHERS = {
    "opt": (
        "OPTConfig",
        {
            **{"vocab_size": m.VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "dropout": 0.0},
            **{"num_hidden_layers": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        },
    ),
    "bloom": ("BloomConfig", {"vocab_size": m.VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {"vocab_size": m.VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "gpt-neox": ("GPTNeoXConfig", {**SMALL, "max_position_embeddings": 32}),
    "phi3": ("Phi3Config", {**ROPE, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}),
    "bert": ("BertConfig", {**SMALL, **NO_HIDDEN_DROPOUT, "max_position_embeddings": 32}),
    "t5": (
        "T5Config",
        {
            **{"vocab_size": m.VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 4},
            **{"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
    "vit": (
        "ViTConfig",
        {**SMALL, **NO_HIDDEN_DROPOUT, "image_size": 16, "patch_size": 4},
    ),
}
HEADS = {
    "bert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def build_other(name: str, checkpointing: str = "none") -> nn.Module:
    kind, sizes = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    config.use_cache = False
    model = getattr(transformers, HEADS.get(name, "AutoModelForCausalLM")).from_config(config)
    if checkpointing != "none":
        switch_on(model, checkpointing)
    return model.train()


def other_recipe(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> torch.Tensor:
    """Tokens for language models, a class for each sequence for BERT, images for ViT."""
    kind = type(getattr(model, "module", model)).__name__
    batch = m.tokens(step, rank, k)
    if kind.startswith(("Bert", "ViT")):
        batch["labels"] = batch["labels"][:, 0] % 2
    if kind.startswith("ViT"):
        g = torch.Generator().manual_seed(step * 7 + rank)
        batch["pixel_values"] = torch.randn(m.MICRO_BATCH, 3, 16, 16, generator=g)
        del batch["input_ids"]
    loss = model(**batch).loss
    backward(loss)
    return loss


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "none"), (3, "none"), (3, "plain")])
def test_other_families_on_three_ranks(run_ranks, stage, checkpointing):
    """Three on purpose: nothing divides evenly. Encoders, an encoder with a decoder, and images among them."""
    recipe = "test_hf:other_recipe"
    cases = {name: ("test_hf:build_other", (name, checkpointing), m.config(stage), 3, recipe) for name in OTHERS}
    results = run_ranks(3, m.train_each, cases, limit=200)
    for name in OTHERS:
        expected = m.reference("test_hf:build_other", (name,), steps=3, world_size=3, recipe=recipe)
        m.equal([r[name] for r in results], expected)
        assert bool(results[0][name]["ringed"]) == (stage == 3), name


def test_floating_inputs_are_cast_to_the_compute_dtype():
    engine, *_ = initialize(model=build_other("vit"), config=m.config(0, precision="bf16"))
    images = torch.randn(m.MICRO_BATCH, 3, 16, 16)
    out = engine(pixel_values=images, labels=torch.tensor([0, 1]))
    engine.backward(out.loss)
    engine.step()
    assert out.logits.dtype == torch.bfloat16 and images.dtype == torch.float32 and engine.grad_norm.isfinite()
    engine.close()


# --- built on the meta device
# ------------------------------------------------------------------------------------------


def from_meta(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Losses at stages 0 and 3 from the same seed, and what the model was given as initial values."""
    out: dict[str, Any] = {}
    for name in names:
        for stage in (0, 3):
            with meta_init():
                model = build(name)
            assert all(p.is_meta for p in model.parameters())
            engine, *_ = initialize(model=model, config=m.config(stage), checked=True, seed=5)
            first = m.whole(engine)
            buffers = {n: b.clone().numpy() for n, b in engine.module.named_buffers()}
            losses = []
            for step in range(2):
                loss = engine(**m.tokens(step, rank, 0)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            out[f"{name} {stage}"] = (losses, first, buffers)
            engine.close()
    return out


@pytest.mark.gloo
def test_models_built_on_meta_get_their_own_initial_values(run_ranks):
    """transformers' own rules fill weights and rotary tables; every layer draws its own."""
    names = ["llama-tied", "gpt2", "mixtral"]
    for result in run_ranks(2, from_meta, names, limit=200):
        for name in names:
            losses, first, buffers = result[f"{name} 0"]
            assert result[f"{name} 3"][0] == pytest.approx(losses, rel=1e-6)
            on_cpu = build(name)
            for key, value in on_cpu.named_buffers():
                assert (buffers[key] == value.numpy()).all(), key
            for key, value in on_cpu.named_parameters():
                assert (first[key] == result[f"{name} 3"][1][key]).all()
                assert float(first[key].std()) == pytest.approx(value.std().item(), rel=0.35, abs=1e-6), key
            weights = [v for k, v in first.items() if k.endswith(("o_proj.weight", "attn.c_proj.weight"))]
            assert len(weights) == 4 and (weights[0] != weights[1]).any()


# --- evaluation and generation between steps --------------------------------------------------------------------------


def generates(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """Greedy tokens before and after a step; ranks ask for different lengths where the model is whole."""
    engine, *_ = initialize(model=build("llama"), config=m.config(stage), checked=True)
    prompt = m.tokens(9, 0, 0)["input_ids"]
    ask = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    out: dict[str, Any] = {}
    for step in range(2):
        loss = engine(**m.tokens(step, rank, 0)).loss
        engine.eval()
        with torch.no_grad():
            out[f"eval {step}"] = engine(**m.tokens(8, 0, 0)).loss.item()
            out[f"same {step}"] = engine.module.generate(prompt, max_new_tokens=3, **ask).tolist()
            with summon(engine.module):
                out[f"each {step}"] = engine.module.generate(prompt, max_new_tokens=2 + 2 * rank, **ask).tolist()
        engine.train()
        engine.backward(loss)
        engine.step()
        out[f"loss {step}"] = loss.item()
    engine.close()
    return out


@pytest.mark.gloo
def test_generate_and_evaluate_between_steps(run_ranks):
    expected = run_ranks(1, generates, 0)[0]
    for stage in (1, 3):
        results = run_ranks(2, generates, stage)
        for rank, r in enumerate(results):
            assert r["same 0"] == expected["same 0"] and r["eval 0"] == pytest.approx(expected["eval 0"], rel=1e-6)
            assert [row[: m.SEQ + 2] for row in r["each 0"]] == expected["each 0"]
            assert len(r["each 1"][0]) == m.SEQ + 2 + 2 * rank
        assert results[0]["same 1"] == results[1]["same 1"]


# --- PEFT
# --------------------------------------------------------------------------------------------------------------


def build_peft(name: str, checkpointing: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = build(name, checkpointing)
    if checkpointing == "reentrant":
        model.enable_input_require_grads()
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for names that are on their way out
        return peft.get_peft_model(model, config)


@pytest.mark.gloo
def test_peft_adapters(run_ranks):
    pytest.importorskip("peft")
    cases = {
        f"{how} {s}": ("test_hf:build_peft", ("llama", how), m.config(s), 3)
        for how in ("none", "reentrant")
        for s in (2, 3)
    }
    results = run_ranks(2, m.train_each, cases, limit=200)
    for how in ("none", "reentrant"):
        expected = m.reference("test_hf:build_peft", ("llama", how), steps=3, world_size=2)
        for stage in (2, 3):
            m.equal([r[f"{how} {stage}"] for r in results], expected)
        assert len(results[0][f"{how} 3"]["ringed"]) == 8
