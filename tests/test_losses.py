"""Kinds of cross-entropy against modules that take it so, phase by phase on a CPU, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from phases import activation_ledger, choose, observe_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zplan
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.losses import LOSS_CHUNKS
from zplan.planner.models import Architecture
from zplan.planner.plan_reading import parse_plan
from zplan.runtime.decoder import Decoder

LLAMA = Architecture("llama", 4, 64, 4, 2, 16, 176, 700, 64, tied=False)
GPT2 = Architecture("gpt2", 3, 64, 4, 4, 16, 256, 700, 64, tied=True)


class ChunkedHead(nn.Linear):
    """Head and loss of one chunk of tokens after the other; each is run again in backward."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        size = -(-rows.shape[0] // LOSS_CHUNKS)
        losses = [
            checkpoint(self.part, xs, ys, use_reentrant=False, preserve_rng_state=False)
            for xs, ys in zip(rows.split(size), labels.view(-1).split(size), strict=True)
        ]
        return torch.stack(losses).sum() / labels.numel()

    def part(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.weight).float(), labels, reduction="sum")


class Lossy(Decoder):
    def __init__(self, arch: Architecture, choice: Choice) -> None:
        super().__init__(arch, checkpointing=choice.checkpointing, attention=choice.attention)
        self.kind = choice.cross_entropy
        if self.kind == "chunked":
            self.head = ChunkedHead(arch.hidden, arch.vocab, bias=False)
            if arch.tied:
                self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "chunked":
            return self.head(self.features(ids), labels)
        return F.cross_entropy(self.head(self.features(ids)).flatten(0, 1), labels.view(-1))


def observe(arch: Architecture, choice: Choice) -> dict[str, int]:
    return observe_step(Lossy(arch, choice), choice)


@pytest.mark.parametrize(
    ("kind", "arch", "batch", "seq", "precision", "checkpointing"),
    [
        ("bf16", LLAMA, 3, 10, "bf16", "none"),
        ("bf16", GPT2, 2, 9, "bf16", "full"),
        ("chunked", LLAMA, 3, 10, "bf16", "none"),
        ("chunked", LLAMA, 4, 16, "fp32", "full"),
        ("chunked", replace(LLAMA, tied=True), 2, 7, "bf16", "full"),
        ("chunked", GPT2, 1, 5, "bf16", "none"),
        ("chunked", replace(GPT2, tied=False), 3, 11, "fp32", "none"),
    ],
)
def test_every_phase_equals_what_an_observer_sees(kind, arch, batch, seq, precision, checkpointing):
    choice = replace(choose(batch, seq, precision, checkpointing), cross_entropy=kind)
    mine = activation_ledger(arch, choice)
    expected = dict(zip(mine.phases, mine.per_phase(), strict=True))
    wrong = {p: (expected[p], n) for p, n in observe(arch, choice).items() if expected[p] != n}
    assert not wrong, wrong


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_kind_holds_less_than_the_one_before(device):
    arch = replace(LLAMA, vocab=32000, head_dim=16)
    choice = choose(4, 512, "bf16", "full", "sdpa", device)
    peaks = [
        activation_ledger(arch, replace(choice, cross_entropy=k)).peak_bytes() for k in ("plain", "bf16", "chunked")
    ]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    # The published table, in bytes a logit: 12 at the backward of the plain loss, 6 without a cast.
    logits = 4 * 512 * 32000
    assert 12 * logits <= peaks[0] < 13 * logits and 6 * logits <= peaks[1] < 7 * logits
    # On a CPU the fused loss runs in plain torch, with temporaries of its own.
    fused = activation_ledger(arch, replace(choice, cross_entropy="fused")).peak_bytes()
    assert device == "cpu" or fused < peaks[1]


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("kind", ["bf16", "chunked", "fused"])
def test_classes_whose_loss_is_patched(kind):
    """Estimates: the class itself takes its loss in fp32 from whole logits."""
    arch, _ = read_architecture({"model_type": "qwen2", **SMALL}, "m")
    choice = choose(2, 512, "bf16", "full", "sdpa", "cuda")
    plain, other = activation_ledger(arch, choice), activation_ledger(arch, replace(choice, cross_entropy=kind))
    assert other.peak_bytes() < plain.peak_bytes()
    assert {x.source for x in other.lines} == {"estimate"}


@pytest.mark.parametrize(("kind", "family"), [("fused", "gemma2"), ("chunked", "phi")])
def test_heads_that_are_more_than_a_matrix_are_refused(kind, family):
    arch, _ = read_architecture({"model_type": family, **SMALL, "head_dim": 16}, "m")
    with pytest.raises(ZplanError, match=f"the head of model_type `{family}` is no plain matrix"):
        activation_ledger(arch, replace(choose(1, 8, "bf16", "none", "eager"), cross_entropy=kind))


ASKED = {"gpus": 2, "mem": 8, "seq": 64}


@pytest.mark.parametrize("kind", ["bf16", "chunked", "fused"])
def test_what_was_asked_comes_back(kind):
    plan = zplan.plan("smollm2-135m", **ASKED, cross_entropy=kind)
    assert parse_plan(json.loads(plan.to_json()), "p") == plan
    assert f"--loss {kind}" in plan.command()
    said = [x for x in plan.estimate_only if x.startswith(f"`--loss {kind}`: ")]
    assert len(said) == (kind != "fused")


def test_nothing_to_leave_out_in_fp32():
    with pytest.raises(ZplanError, match="leaves out a cast to fp32, and all is fp32"):
        zplan.estimate("smollm2-135m", **ASKED, cross_entropy="bf16", precision="fp32")
