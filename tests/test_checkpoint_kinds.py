"""Checkpointing in segments, selectively and to the host: lines against modules that do so, on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from phases import activation_ledger, choose, observe_step
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zplan
from zplan.planner.activations import profile
from zplan.planner.config import Choice
from zplan.planner.emit import emit
from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.plan_reading import parse_plan
from zplan.runtime.decoder import Decoder, rotary_tables

LLAMA = Architecture("llama", 7, 64, 4, 2, 16, 176, 100, 64, tied=False)
GPT2 = Architecture("gpt2", 5, 64, 4, 4, 16, 256, 100, 64, tied=True)

aten = torch.ops.aten
KEPT = (aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Decoder):
    """The decoder with checkpoints of its own making, as torch's documentation writes them."""

    def __init__(self, arch: Architecture, choice: Choice) -> None:
        super().__init__(arch, attention=choice.attention)
        self.choice = choice

    def features(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        x = self.embed(ids)
        if self.arch.family == "llama":
            tables = rotary_tables(self.arch, t, device=x.device, dtype=x.dtype)
        else:
            tables = ()
            x = x + self.positions(torch.arange(t, device=ids.device))
        every = self.choice.checkpoint_every
        further = {"use_reentrant": False, "preserve_rng_state": False}
        if self.choice.checkpointing == "selective":
            further["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
        for start in range(0, self.arch.layers, every):
            blocks = self.blocks[start : start + every]
            run = blocks[0] if every == 1 else partial(in_turn, blocks)
            x = checkpoint(run, x, *tables, **further)
        return self.norm(x)


def in_turn(blocks, x: Tensor, *tables: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, *tables)
    return x


def observe(arch: Architecture, choice: Choice) -> dict[str, int]:
    return observe_step(Checkpointed(arch, choice), choice)


def wrong_phases(arch: Architecture, choice: Choice) -> dict[str, tuple[int, int]]:
    mine = activation_ledger(arch, choice)
    expected = dict(zip(mine.phases, mine.per_phase(), strict=True))
    return {p: (expected[p], n) for p, n in observe(arch, choice).items() if expected[p] != n}


@pytest.mark.parametrize(
    ("arch", "every", "precision", "attention"),
    [
        (LLAMA, 2, "bf16", "sdpa"),
        (LLAMA, 3, "fp32", "sdpa"),
        (LLAMA, 3, "bf16", "eager"),
        (LLAMA, 7, "bf16", "sdpa"),
        (LLAMA, 9, "bf16", "sdpa"),
        (GPT2, 2, "bf16", "sdpa"),
        (replace(GPT2, tied=False), 4, "fp32", "eager"),
        (replace(LLAMA, layers=1), 2, "bf16", "sdpa"),
    ],
)
def test_segments_equal_what_an_observer_sees(arch, every, precision, attention):
    choice = replace(choose(3, 10, precision, "full", attention), checkpoint_every=every)
    assert not (wrong := wrong_phases(arch, choice)), wrong


@pytest.mark.parametrize(
    ("arch", "precision", "attention"),
    [
        (LLAMA, "bf16", "sdpa"),
        (LLAMA, "fp32", "sdpa"),
        (LLAMA, "bf16", "eager"),
        (GPT2, "bf16", "sdpa"),
        (replace(GPT2, layers=2), "fp32", "eager"),
    ],
)
def test_selective_equals_what_an_observer_sees(arch, precision, attention):
    choice = choose(3, 10, precision, "selective", attention)
    assert not (wrong := wrong_phases(arch, choice)), wrong


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_offloaded_inputs_wait_in_pinned_memory(device, every):
    base = replace(choose(3, 16, "bf16", "full", "sdpa", device), checkpoint_every=every)
    here, away = activation_ledger(LLAMA, base), activation_ledger(LLAMA, replace(base, checkpoint_offload=True))
    line = away.line("act.block.checkpoint")
    hidden = 3 * 16 * LLAMA.hidden * 2
    assert (line.tier, line.nbytes, line.instances) == ("pinned", hidden, -(-LLAMA.layers // every))
    assert away.peak_bytes("pinned") == line.total_bytes and here.peak_bytes("pinned") == 0
    at = away.phases.index("loss")
    # At the turn the device holds none of them; the last block's output is the norm's, not a checkpoint.
    assert here.per_phase()[at] - away.per_phase()[at] == line.total_bytes
    first = away.phases.index("reduce.embed")
    assert here.per_phase()[first] == away.per_phase()[first]


def test_kinds_between_none_and_full():
    choice = choose(4, 64, "bf16", "none", "sdpa", "cuda")
    saved = {
        kind: profile(ModelSpec("m", decoder_units(LLAMA), LLAMA), replace(choice, checkpointing=kind))["block"].saved
        for kind in ("none", "selective", "full")
    }
    assert saved["full"] < saved["selective"] < saved["none"]


def test_a_segment_of_all_blocks_saves_their_input_alone():
    choice = replace(choose(3, 16, "bf16", "full"), checkpoint_every=LLAMA.layers)
    mine = activation_ledger(LLAMA, choice)
    assert not any(x.id.startswith("act.block.saved") for x in mine.lines)
    # What the whole segment saves is made again in the last block's backward.
    recomputed = [x for x in mine.lines if x.id.startswith("act.block.recomputed")]
    assert recomputed and max(last for x in recomputed for _, last in x.spans) > mine.phases.index("backward.blocks.1")


@pytest.mark.parametrize("every", [1, 2, 4, 8])
def test_more_blocks_a_segment_keep_less_and_make_more_again(every):
    arch = replace(LLAMA, layers=16)
    at = [
        activation_ledger(arch, replace(choose(2, 64, "bf16", "full"), checkpoint_every=c)) for c in (every, 2 * every)
    ]
    turn = at[0].phases.index("loss")
    assert at[0].per_phase()[turn] > at[1].per_phase()[turn]
    last = at[0].phases.index("backward.blocks.15")
    assert at[0].per_phase()[last] < at[1].per_phase()[last] + at[0].per_phase()[turn] - at[1].per_phase()[turn]


ASKED = {"gpus": 2, "mem": 8, "seq": 64}


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"checkpointing": "selective"}, "--checkpointing selective"),
        ({"checkpoint_every": 3}, "--checkpoint-every 3"),
        ({"checkpoint_offload": True}, "--checkpoint-offload"),
    ],
)
def test_what_was_asked_comes_back_and_is_estimate_only(asked, key):
    plan = zplan.plan("smollm2-135m", **ASKED, **asked)
    assert plan.estimate_only[0].startswith(f"`{key}`: ")
    assert parse_plan(json.loads(plan.to_json()), "p") == plan
    assert plan.choice.checkpointing == asked.get("checkpointing", "full")
    with pytest.raises(ZplanError, match=f"`{key}` has no words in the format `deepspeed`"):
        emit(plan, "deepspeed")


def test_segments_and_checkpointing_must_agree():
    with pytest.raises(ZplanError, match="--checkpoint-every is about checkpointed blocks, .* is `none`"):
        zplan.estimate("smollm2-135m", **ASKED, checkpoint_every=2, checkpointing="none")
    one = zplan.estimate("smollm2-135m", **ASKED, checkpoint_every=1)
    assert one.row.choice.checkpointing == "none" and one.estimate_only == ()
