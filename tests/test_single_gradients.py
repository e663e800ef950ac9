"""Gradients of one rank without accumulation: kept in bf16, made fp32 where something is added, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zplan
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.placement import single_gradients
from zplan.planner.textbook import runtime_rate
from zplan.runtime.halves import values_of
from zplan.runtime.initialize import initialize


def engine_of(**keys):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False)) for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "gradient_clipping": 1.0, **keys}
    engine, *_ = initialize(model=model, config=config)
    return engine


def batch(seed):
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))


def weights(engine):
    return torch.cat([values_of(u.weights).clone() for u in engine.trained])


def test_they_are_bf16_and_the_step_is_that_of_fp32_to_the_bit():
    """The same micro-batch twice and halved is the sum of fp32 gradients that the first alone is in bf16."""
    one, fp32 = engine_of(), engine_of()
    for step in range(4):
        for engine in (one, fp32):
            engine.backward(engine(batch(step)).square().mean())
        assert all(u.grad.dtype == torch.bfloat16 for u in one.trained)
        fp32.optimizer.widen_grads()
        assert all(u.grad.dtype == torch.float32 for u in fp32.trained)
        for engine in (one, fp32):
            engine.step()
        assert torch.equal(one.grad_norm, fp32.grad_norm) and torch.equal(weights(one), weights(fp32))
    one.close()
    fp32.close()


def gradients(engine):
    with zplan.summon(engine.module, grads=True) as whole:
        return {name: g.clone() for name, g in whole.grads.items()}


def test_another_backward_adds_in_fp32():
    found = []
    for seeds in ((1,), (2,), (1, 2)):
        engine = engine_of()
        losses = [engine(batch(s)).square().mean() for s in seeds]
        for loss in losses:
            engine.backward(loss)
        found.append(gradients(engine))
        engine.step()
        assert weights(engine).isfinite().all()
        engine.close()
    first, second, both = found
    rounded = 0
    for name, g in both.items():
        total = first[name] + second[name]
        assert torch.equal(g, total)
        rounded += int((total.bfloat16().float() != total).sum())
    assert rounded, "bf16 would not have held the sums"


def test_what_is_written_through_summon_and_a_penalty_keep_their_bits():
    engine = engine_of()
    engine.backward(engine(batch(1)).square().mean())
    before = gradients(engine)
    with zplan.summon(engine.module, grads=True, write=True) as whole:
        for g in whole.grads.values():
            g.mul_(1.001)
    after = gradients(engine)
    assert all(torch.equal(after[n], before[n] * 1.001) for n in before)
    engine.penalty(l2=1e-3)
    engine.step()
    assert float(engine.grad_norm) > float(torch.cat([g.flatten() for g in after.values()]).norm())
    engine.close()


def test_a_step_after_a_backward_that_broke_off_is_refused():
    engine = engine_of()
    loss = engine(batch(1)).square().mean()

    def fail(_grad):
        raise ValueError("seven")

    engine.module[1][0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="seven"):
        engine.backward(loss)
    with pytest.raises(ZplanError, match="`step` after a backward that broke off") as caught:
        engine.step()
    assert "`engine.reset_step()`" in caught.value.hint
    engine.reset_step()
    engine.close()


def test_where_gradients_are_single():
    assert single_gradients(Choice(3, 1)) and runtime_rate(Choice(3, 1)).formula() == "14P"
    for other in ({"accumulation": 2}, {"precision": "fp16"}, {"precision": "fp32"}, {"optimizer": "lion"}):
        assert not single_gradients(Choice(3, 1, **other)), other
    assert not single_gradients(Choice(0, 2))
