"""Predicted activations against an observer of live storages, phase by phase, to the byte."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from phases import allocator_peaks, choose, decoder_of, observe_step

from zplan.planner.activations import BATCH_PHASES, activation_lines, profile
from zplan.planner.aten_devices import FP32, INT64, SORT_ABOVE
from zplan.planner.config import ITEMSIZE, Choice
from zplan.planner.errors import ZplanError
from zplan.planner.ledger import Ledger, merge
from zplan.planner.models import Architecture, ModelSpec, decoder_units

LLAMA = Architecture("llama", 2, 64, 4, 4, 16, 176, 100, 64, tied=False)
GPT2 = Architecture("gpt2", 2, 64, 4, 4, 16, 256, 100, 64, tied=True)
LLAMA3_ROPE = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 32),
    ("rope_type", "llama3"),
)


def spec_of(arch: Architecture) -> ModelSpec:
    return ModelSpec("test", decoder_units(arch), arch)


def ledger_phases(arch: Architecture) -> tuple[str, ...]:
    units = decoder_units(arch)
    backward = (
        f"{pass_}.{u.name}"
        for u in reversed(units)
        for pass_ in (("backward", "reduce") if u.params else ("backward",))
    )
    return ("idle", *(f"forward.{u.name}" for u in units), "loss", "backward.loss", *backward, "step")


def predict(arch: Architecture, choice: Choice) -> Ledger:
    phases = ledger_phases(arch)
    return merge(phases, activation_lines(spec_of(arch), choice, phases))


def per_phase(arch: Architecture, choice: Choice) -> dict[str, int]:
    ledger = predict(arch, choice)
    return dict(zip(ledger.phases, ledger.per_phase(), strict=True))


def observe(arch: Architecture, choice: Choice, *, steps: int = 1) -> dict[str, int]:
    return observe_step(decoder_of(arch, choice), choice, steps=steps)


def expect_equal(arch: Architecture, choice: Choice, *, steps: int = 1) -> None:
    predicted = per_phase(arch, choice)
    # Between steps the loop makes a batch while it still has that of the step before, and its loss.
    assert predicted.pop("idle") == 2 * choice.micro_batch * choice.seq * INT64 + FP32
    observed = observe(arch, choice, steps=steps)
    wrong = {p: (predicted.get(p), observed.get(p)) for p in {*predicted, *observed}}
    assert not (wrong := {p: pair for p, pair in wrong.items() if pair[0] != pair[1]}), wrong


GRID = list(
    product(
        (LLAMA, replace(LLAMA, kv_heads=2, tied=True), GPT2, replace(GPT2, tied=False)),
        ("bf16", "fp32"),
        ("none", "full"),
        ("sdpa", "eager"),
    )
)


@pytest.mark.parametrize(
    ("arch", "precision", "checkpointing", "attention"),
    GRID,
    ids=[f"{a.family}-g{a.kv_heads}-{'tied' if a.tied else 'own'}-{p}-{c}-{x}" for a, p, c, x in GRID],
)
def test_every_phase_equals_what_an_observer_sees(arch, precision, checkpointing, attention):
    expect_equal(arch, choose(3, 10, precision, checkpointing, attention))


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("layers", [1, 3, 4, 6])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_any_number_of_blocks(arch, layers, checkpointing):
    expect_equal(replace(arch, layers=layers), choose(2, 5, checkpointing=checkpointing))


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 9), (4, 1)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_extents_of_one_copy_differently(arch, batch, seq, attention):
    expect_equal(arch, choose(batch, seq, attention=attention))


@pytest.mark.parametrize(
    "scaling", [(), (("factor", 2.0), ("rope_type", "linear")), LLAMA3_ROPE], ids=["none", "linear", "llama3"]
)
def test_rotary_tables(scaling):
    # A vocabulary of 2 and one block: the tables' way there is the embedding's peak.
    expect_equal(replace(LLAMA, layers=1, vocab=2, hidden=3, head_dim=64, rope_scaling=scaling), choose(1, 2))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_later_steps_are_like_the_first(checkpointing):
    expect_equal(LLAMA, choose(2, 6, checkpointing=checkpointing), steps=3)


@st.composite
def cases(draw):
    layers, vocab, ffn = draw(st.integers(1, 5)), draw(st.integers(2, 90)), draw(st.integers(1, 70))
    kv_heads, tied = draw(st.integers(1, 3)), draw(st.booleans())
    if draw(st.booleans()):
        heads, head_dim = kv_heads * draw(st.integers(1, 3)), 2 * draw(st.integers(2, 9))
        arch = Architecture("llama", layers, draw(st.integers(1, 50)), heads, kv_heads, head_dim, ffn, vocab, 64, tied)
    else:
        head_dim = draw(st.integers(1, 11))
        arch = Architecture("gpt2", layers, kv_heads * head_dim, kv_heads, kv_heads, head_dim, ffn, vocab, 64, tied)
    return arch, choose(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from(["bf16", "fp32"])),
        draw(st.sampled_from(["none", "full"])),
        draw(st.sampled_from(["sdpa", "eager"])),
    )


@given(cases())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_shape_equals_what_an_observer_sees(case):
    expect_equal(*case)


@given(cases(), st.sampled_from(["cpu", "cuda"]))
@settings(max_examples=40)
def test_laws(case, device):
    arch, choice = case
    # Heads that flash attention on CUDA takes without padding.
    wide = 8 * arch.head_dim
    hidden = arch.heads * wide if arch.family == "gpt2" else arch.hidden
    arch, choice = replace(arch, head_dim=wide, hidden=hidden), replace(choice, device=device)
    here = per_phase(arch, choice)
    for larger in (replace(choice, micro_batch=choice.micro_batch + 1), replace(choice, seq=choice.seq + 1)):
        there = per_phase(arch, larger)
        assert all(there[p] >= n for p, n in here.items())
    deeper = per_phase(replace(arch, layers=arch.layers + 1), choice)
    assert max(deeper.values()) >= max(here.values())
    none, full = (profile(spec_of(arch), replace(choice, checkpointing=c))["block"] for c in ("none", "full"))
    assert full.saved <= none.saved


def test_one_byte_off_is_noticed():
    ledger = predict(LLAMA, choose(3, 10))
    broken = [x._replace(nbytes=x.nbytes + 1) if x.id == "act.block.saved" else x for x in ledger.lines]
    observed = observe(LLAMA, choose(3, 10))
    assert Ledger(ledger.phases, tuple(broken)).per_phase()[2] == observed["forward.blocks.0"] + 1


def test_lines_have_true_lifetimes():
    ledger = predict(replace(LLAMA, layers=5), choose(3, 10))
    span = {x.id: [(ledger.phases[a], ledger.phases[b]) for a, b in x.spans] for x in ledger.lines}
    assert span["data.inputs"] == span["data.labels"] == [BATCH_PHASES]
    assert span["act.loss.value"] == [("idle", "idle"), ("loss", "step")]
    assert span["act.block.saved"] == [(f"forward.blocks.{i}", f"backward.blocks.{i}") for i in range(5)]
    until = ("backward.embed", *(f"backward.blocks.{i}" for i in range(4)))
    assert sorted(span["grads.block"]) == [(f"reduce.blocks.{i}", until[i]) for i in range(5)]
    assert span["act.head.output"] == [("forward.head", "loss")]
    assert {x.kind for x in ledger.lines} == {"activations"}
    assert {x.source for x in ledger.lines} == {"derived"}


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_unit_gradients_are_their_parameters(tied):
    arch = replace(LLAMA, tied=tied)
    ledger = predict(arch, choose(3, 10))
    for unit in decoder_units(arch):
        if unit.params:
            name = "block" if unit.kind == "block" else unit.name
            assert ledger.line(f"grads.{name}").nbytes == unit.numel * ITEMSIZE["bf16"]
    if tied:
        assert ledger.line("grads.tied").nbytes == arch.vocab * arch.hidden * ITEMSIZE["bf16"]


def test_other_micro_batches_and_sequences_are_not_simulated_again(monkeypatch):
    from zplan.planner import simulation

    predict(LLAMA, choose(3, 10))
    monkeypatch.setattr(simulation, "DecoderTape", None)
    assert predict(LLAMA, choose(5, 2048)).peak_bytes() > predict(replace(LLAMA, layers=2), choose(3, 10)).peak_bytes()


@pytest.mark.parametrize(
    ("batch", "seq", "vocab", "expected"),
    [
        # Measured on an H200 at widths 1024 and 2048, less what the other lines of the phase hold.
        (2, 2048, 32000, 48 * 4096 + 4 * 1024 * 4096 + 409 * (4 * 1024 + 8) + 16),
        # A vocabulary smaller than the batch: no more stretches than one for each entry and ten ids.
        (4, 1000, 257, 24 * 4000 + 24 * 257 + 8 * 400 + 4 * 1024 * (400 + 257) + 16),
        (1, SORT_ABOVE, 32000, 0),
    ],
    ids=["fewer tokens than rows", "more tokens than rows", "not sorted"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_sorting_the_ids_in_the_embeddings_backward_on_cuda(batch, seq, vocab, expected, precision):
    arch = replace(LLAMA, hidden=1024, vocab=vocab)
    lines = {x.id: x.nbytes for x in predict(arch, choose(batch, seq, precision, device="cuda")).lines}
    assert lines.get("act.kernel.embed.backward", 0) == expected


PHILOX = 24
"""Bytes of the seed and offset that flash attention saves, dropout or not."""


def test_saved_bytes_of_a_llama_block_on_cuda_are_the_published_formula():
    """The published `u(20 + 4g) + 8Tf + 4Ta + 8T` is for norms written in Python, which save an fp32 copy.

    u = T * hidden for T tokens, g = kv_heads / heads. A fused norm keeps its input and one fp32 number a row instead:
    u(12 + 4g).
    """
    arch = Architecture("llama", 2, 64, 4, 2, 16, 176, 100, 64, tied=False)
    tokens, g = 3 * 10, 0.5
    u = tokens * arch.hidden
    published = u * (12 + 4 * g) + 8 * tokens * arch.ffn + 4 * tokens * arch.heads + 8 * tokens
    assert profile(spec_of(arch), choose(3, 10, device="cuda"))["block"].saved == published + PHILOX


def test_saved_bytes_of_a_llama_block_on_a_cpu():
    """There torch's own norm is a chain of ops that keeps the normalised rows in fp32 before the weight, where the
    published formula has them in 16 bits: 4u more for the two norms.
    """
    arch = Architecture("llama", 2, 64, 4, 2, 16, 176, 100, 64, tied=False)
    tokens, g = 3 * 10, 0.5
    u = tokens * arch.hidden
    published = u * (20 + 4 * g) + 8 * tokens * arch.ffn + 4 * tokens * arch.heads + 8 * tokens
    assert profile(spec_of(arch), choose(3, 10))["block"].saved == published + 4 * u


def test_saved_bytes_of_a_gpt2_block_on_cuda_are_the_published_formula():
    """Published, without dropout: `16u + 4Tf + 4Ta`, which leaves out two fp32 statistics a row and norm: + 16T."""
    tokens = 3 * 10
    u = tokens * GPT2.hidden
    saved = profile(spec_of(GPT2), choose(3, 10, device="cuda"))["block"].saved
    assert saved == 16 * u + 4 * tokens * GPT2.ffn + 4 * tokens * GPT2.heads + 16 * tokens + PHILOX


def test_profile_names_what_a_block_saves():
    detail = profile(spec_of(LLAMA), choose(3, 10))["block"].detail
    rows = 3 * 10 * LLAMA.ffn * 2
    assert dict(detail) | {"gate": rows, "up": rows, "silu(gate)": rows, "silu(gate) * up": rows} == dict(detail)


@pytest.mark.parametrize(
    ("arch", "seq", "message"),
    [
        (GPT2, 65, "a sequence of 65 tokens is longer than the 64 positions of test"),
        (replace(LLAMA, head_dim=2), 8, "heads of width 2"),
        (replace(LLAMA, head_dim=5), 8, "heads of width 5"),
        (replace(LLAMA, head_dim=12), 8, "heads of width 12 are padded by flash attention"),
    ],
    ids=["positions", "narrow", "odd", "padded"],
)
def test_what_the_table_does_not_cover_is_refused(arch, seq, message):
    with pytest.raises(ZplanError, match=message):
        predict(arch, choose(1, seq, device="cuda"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_phase_equals_what_the_cuda_allocator_saw(family, precision, attention, checkpointing):
    arch = Architecture(family, 3, 512, 8, 4 if family == "llama" else 8, 64, 1408, 4096, 1024, tied=False)
    choice = choose(4, 1024, precision, checkpointing, attention, "cuda")
    measured = allocator_peaks(arch, choice)
    wrong = {p: (n, measured[p]) for p, n in per_phase(arch, choice).items() if n != measured[p]}
    assert not wrong, wrong
