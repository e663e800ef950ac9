"""fp32 masters in two halves: no bit is lost, and the step is that of whole masters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import zplan
from zplan.cuda_ops.halves import merge, split
from zplan.runtime.adamw import Row, TorchFused, TorchHalves
from zplan.runtime.halves import Halves, round_whole, values_of
from zplan.runtime.initialize import initialize
from zplan.runtime.norms import Scalars


def halves_of(values):
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, high, low, torch.empty_like(values, dtype=torch.int32))
    return high, low


ANY = st.integers(0, 2**32 - 1)
BETWEEN = st.integers(0, 2**16 - 1).map(lambda n: (n << 16) | 0x8000)


@given(arrays(np.uint32, 64, elements=st.one_of(ANY, BETWEEN)))
def test_every_number_comes_back(bits):
    values = torch.from_numpy(bits.view(np.float32).copy())
    high, low = halves_of(values)
    back = merge(high, low, torch.empty_like(values), torch.empty_like(values, dtype=torch.int32))
    nan = values.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    assert back[nan].isnan().all() and high[nan].isnan().all()
    # Rounded as torch rounds, but what lies exactly between two goes to the larger magnitude.
    tie = (torch.from_numpy(bits.astype(np.int64)) & 0xFFFF) == 0x8000
    assert torch.equal(high[~nan & ~tie], values.bfloat16()[~nan & ~tie])
    assert (high[~nan & tie].float().abs() > values[~nan & tie].abs()).all()


def test_slices_that_follow_one_another_are_one_tensor():
    flat = torch.randn(30)
    high = torch.zeros(30, dtype=torch.bfloat16)
    kept = Halves([high[2:10], high[14:22]], torch.zeros(16, dtype=torch.int16))
    own = torch.cat([flat[2:10], flat[14:22]])
    kept.copy_(own)
    assert kept.numel() == 16 and kept.nbytes == 64 and torch.equal(kept.whole(), own)
    assert torch.equal(values_of(kept[5:12]), own[5:12])
    kept[7:9].copy_(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert kept.whole()[6:10].tolist() == [own[6], 1.0, 2.0, own[9]]
    other = torch.empty(30, dtype=torch.bfloat16)
    round_whole(flat, other)
    assert torch.equal(other[2:7], kept.high[0][:5]), "every rank rounds alike"


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_the_step_is_that_of_whole_masters(skip, grads):
    torch.manual_seed(0)
    whole = torch.randn(1000)
    high, low = halves_of(whole)
    states = [[torch.zeros(1000) for _ in range(2)] for _ in range(2)]
    s = Scalars(torch.zeros(7))
    s.skip.fill_(skip)
    s.scale.fill_(2.0)
    group = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    narrow = grads == torch.bfloat16
    ours, theirs = TorchHalves(torch.empty((3 if narrow else 2) * 300), bf16_grads=narrow), TorchFused("adamw")
    for step in range(5):
        s.applied.fill_(step + 1.0)
        grad = torch.randn(1000).to(grads)
        ours.update([Row(None, grad.clone(), tuple(states[0]), 0, high, low)], s, group)
        # Whole vectors in both: kernels of the CPU may round the last few of a tensor in another way.
        for cut in torch.arange(1000).split(300):
            at = slice(int(cut[0]), int(cut[-1]) + 1)
            part = tuple(x[at] for x in states[1])
            theirs.update([Row(whole[at], grad[at].float(), part, 0, None)], s, group)
        assert torch.equal(merge(high, low, torch.empty(1000), torch.empty(1000, dtype=torch.int32)), whole)
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


def config(stage):
    return {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}


def written(rank, world_size, stage):
    """Masters before and after a `summon` that writes to one element of each unit."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
    engine, *_ = initialize(model=model, config=config(stage))
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    before = [values_of(u.weights).clone() for u in engine.trained]
    low = [u.low.clone() for u in engine.trained]
    with zplan.summon(model, write=True):
        for block in model:
            block[0].bias.data[3] = 0.5
    after = [values_of(u.weights).clone() for u in engine.trained]
    found = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    halves = sum(int((a == 0.5).sum()) for a in after)
    engine.close()
    return found, halves, sum(int(x.count_nonzero()) for x in low)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_summon_writes_is_kept_and_nothing_else_changes(run_ranks, stage):
    rows = run_ranks(2, written, stage)
    assert all(low for _, _, low in rows), "masters have more bits than the weights"
    changed = [found for found, _, _ in rows]
    # At stage 0 every rank keeps everything.
    assert (changed if stage == 0 else [sum(changed)]) == ([4, 4] if stage == 0 else [4])
    assert [n for _, n, _ in rows] == changed


def test_a_zero_written_outside_summon_is_one():
    """What lies under it is of the value that was there."""
    engine, *_ = initialize(model=nn.Linear(64, 64), config=config(0))
    (unit,) = engine.trained
    unit.low.fill_(-5)
    with torch.no_grad():
        engine.module.weight.zero_()
        engine.module.bias.fill_(-0.0)
    assert not values_of(unit.weights)[: 64 * 65].any()
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    assert values_of(unit.weights).isfinite().all() and engine.module.weight.isfinite().all()
    engine.close()
