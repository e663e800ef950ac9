"""The built-in decoder with zplan's own kernels: activations to the byte, and the same training as without."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from phases import choose, decoder_of
from test_activations import GPT2, LLAMA, cases, expect_equal, per_phase, predict

from zplan.cuda_ops import linear_cross_entropy as lce
from zplan.cuda_ops import rms_norm
from zplan.planner import fused
from zplan.planner.errors import ZplanError
from zplan.runtime.decoder import Decoder

GRID = list(product(("bf16", "fp32"), ("none", "full"), (True, False), (("fused", "fused"), ("plain", "fused"))))


@pytest.mark.parametrize(("precision", "checkpointing", "tied", "parts"), GRID)
def test_every_phase_equals_what_an_observer_sees(precision, checkpointing, tied, parts):
    loss, kernels = parts
    choice = replace(choose(3, 10, precision, checkpointing), cross_entropy=loss, kernels=kernels)
    expect_equal(replace(LLAMA, kv_heads=2, tied=tied), choice)


@pytest.mark.parametrize(("precision", "tied"), [("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)])
def test_fused_loss_of_other_blocks(precision, tied):
    choice = replace(choose(2, 9, precision), cross_entropy="fused")
    expect_equal(replace(GPT2, tied=tied, vocab=101), choice)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_several_chunks_and_steps(precision, attention, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 7)
    choice = choose(3, 10, precision, attention=attention)
    expect_equal(LLAMA, replace(choice, cross_entropy="fused", kernels="fused"), steps=2)


@given(cases())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_any_shape_equals_what_an_observer_sees(case):
    arch, choice = case
    kernels = "fused" if arch.family == "llama" else "torch"
    expect_equal(arch, replace(choice, cross_entropy="fused", kernels=kernels))


def test_same_losses_and_gradients(monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 8)
    torch.manual_seed(0)
    inputs, labels = (torch.randint(LLAMA.vocab, (3, 10)) for _ in range(2))
    labels[0, 3] = -100
    models = [
        decoder_of(LLAMA, replace(choose(3, 10), cross_entropy=c, kernels=k))
        for c, k in (("plain", "torch"), ("fused", "fused"))
    ]
    models[1].load_state_dict(models[0].state_dict())
    losses = [m(inputs, labels) for m in models]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name: f"{n}: {text}", rtol=1e-4, atol=1e-7)


def test_what_the_kernels_save_on_a_gpu():
    """`silu(gate)` is made again in backward."""
    arch, tokens = replace(LLAMA, head_dim=16), 3 * 10
    plain = choose(3, 10, device="cuda")
    own = replace(plain, kernels="fused")
    saved = {x.id: x.nbytes for x in predict(arch, plain).lines}["act.block.saved"]
    saved_own = {x.id: x.nbytes for x in predict(arch, own).lines}["act.block.saved"]
    assert saved - saved_own == 2 * tokens * arch.ffn


def test_lines_of_the_fused_loss():
    """Both gradients live from the loss to their backward, and no line has tokens x vocabulary."""
    arch = replace(LLAMA, vocab=8000)
    ledger = predict(arch, replace(choose(4, 1024, device="cuda"), cross_entropy="fused"))
    spans = {x.id: [(ledger.phases[a], ledger.phases[b]) for a, b in x.spans] for x in ledger.lines}
    assert ledger.line("act.head.weight_sum").nbytes == 4 * arch.vocab * arch.hidden
    assert spans["act.head.weight_sum"] == [("forward.head", "backward.head")]
    assert ledger.line("act.head.output").nbytes == 2 * 4096 * arch.hidden, "the features' gradient"
    assert spans["act.head.output"] == [("forward.head", "backward.norm")]
    assert 2 * 2048 * arch.vocab <= ledger.line("act.head.forward").nbytes < 1.02 * 2 * 2048 * arch.vocab, "one chunk"
    assert max(x.nbytes for x in ledger.lines) < 2 * 4096 * arch.vocab
    assert max(per_phase(arch, choose(4, 1024, device="cuda")).values()) > 10 * 4096 * arch.vocab


@pytest.mark.parametrize("vocab", [50, 32000, 128256, 256000, 10**7])
@pytest.mark.parametrize("tokens", [1, 100, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_are_bounded(vocab, tokens, itemsize):
    chunk = fused.chunk_tokens(tokens, vocab, itemsize)
    assert 1 <= chunk <= min(tokens, 2048)
    assert chunk <= 128 or chunk * fused.padded_vocab(vocab, itemsize) * itemsize <= 2**29
    assert fused.padded_vocab(vocab, itemsize) == lce.padded_vocab(vocab, itemsize)


def test_planner_and_kernels_agree():
    assert fused.NORM_PARTS == rms_norm.PARTS and fused.CHUNK_TOKENS == lce.CHUNK


def test_what_is_not_there_is_refused():
    with pytest.raises(ZplanError, match="no cross-entropy `chunked`"):
        Decoder(LLAMA, cross_entropy="chunked")
    with pytest.raises(ZplanError, match="no fused kernels for blocks of the gpt2 family"):
        Decoder(GPT2, kernels="fused")
    with pytest.raises(ZplanError, match="no fused kernels for blocks of model_type `gpt2`"):
        predict(GPT2, replace(choose(3, 10), kernels="fused"))
    with pytest.raises(ZplanError, match="exclude each other"):
        predict(LLAMA, replace(choose(3, 10), kernels="fused", compile=True))
