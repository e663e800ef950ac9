"""Traced saved sets against the planner's formulas, and against transformers' models as a witness."""

from itertools import product

import pytest
import torch
from torch import nn

from zplan.planner.activations import profile
from zplan.planner.config import Choice
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.runtime.decoder import Decoder
from zplan.runtime.trace import trace_units, unit_names

B, T, C, F, V = 3, 10, 64, 256, 100
U = B * T * C
LLAMA = Architecture("llama", 2, C, 4, 2, 16, F, V, 64, tied=False)
GPT2 = Architecture("gpt2", 2, C, 4, 4, 16, F, V, 64, tied=True)
MASK = B * T * T * 2
"""Bytes of the additive mask that transformers hands to fused attention, which autograd saves."""


def planned(arch, **choice):
    spec = ModelSpec("test", decoder_units(arch), arch)
    return profile(spec, Choice(0, 1, micro_batch=B, seq=T, device="cpu", **choice))


def ids():
    return torch.zeros(B, T, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arch", "precision", "checkpointing", "attention"),
    list(product((LLAMA, GPT2), ("bf16", "fp32"), ("none", "full"), ("sdpa", "eager"))),
    ids=lambda x: getattr(x, "family", x),
)
def test_the_decoder_saves_what_the_planner_says(arch, precision, checkpointing, attention):
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    with torch.device("meta"):
        model = Decoder(arch, checkpointing=checkpointing, attention=attention).to(dtype)
    traced = trace_units(model, ids(), ids(), units=[u.name for u in decoder_units(arch)])
    expected = planned(arch, precision=precision, checkpointing=checkpointing, attention=attention)
    for name, unit in expected.items():
        trace = traced["blocks.0" if name == "block" else name]
        assert trace.saved == unit.saved
        assert sorted(n for _, n in trace.detail) == sorted(n for _, n in unit.detail)


def test_a_large_model_is_traced_without_its_bytes():
    arch = Architecture("llama", 2, 8192, 64, 8, 128, 28672, 128256, 8192, tied=False)
    with torch.device("meta"):
        model = Decoder(arch).to(torch.bfloat16)
    tokens = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    saved = trace_units(model, tokens, tokens)["blocks.0"].saved
    spec = ModelSpec("test", decoder_units(arch), arch)
    assert saved == profile(spec, Choice(0, 1, seq=8192, device="cpu"))["block"].saved


def test_nothing_of_the_caller_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    before = {n: p.clone() for n, p in model.named_parameters()}
    x = torch.ones(2, 4)
    assert trace_units(model, x)["0"].saved == 0, "the linear saves the caller's input and its own weight"
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_units_are_the_elements_of_module_lists():
    with torch.device("meta"):
        assert unit_names(Decoder(GPT2)) == ("embed", "positions", "blocks.0", "blocks.1", "norm", "head")


def test_llama_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=C,
        intermediate_size=F,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=V,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    traced = trace_units(model, input_ids=ids(), labels=ids())
    # Normalised rows in 16 bits where ours are in fp32, for two norms; keys and values repeated for all heads; a mask.
    repeated = 2 * (1 - 0.5) * 2 * U
    assert traced["model.layers.0"].saved == planned(LLAMA)["block"].saved - 4 * U + repeated + MASK


def test_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=C,
        n_layer=2,
        n_head=4,
        vocab_size=V,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    traced = trace_units(model, input_ids=ids(), labels=ids())
    # GELU in Python saves five tensors of (T, F) where the fused one's neighbours save two; a mask.
    assert traced["transformer.h.0"].saved == planned(GPT2)["block"].saved + 3 * 2 * B * T * F + MASK
    assert traced["transformer.ln_f"].saved == planned(GPT2)["norm"].saved
