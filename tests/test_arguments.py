"""Arguments of an engine's calls that would train something else than asked."""

import pytest
import torch
from torch import nn

import zplan
from zplan.planner.errors import ZplanError

NAN = float("nan")


@pytest.fixture
def engine():
    config = {"train_batch_size": 2, "gradient_accumulation_steps": 2}
    engine, *_ = zplan.initialize(model=nn.Linear(3, 1), config=config)
    yield engine
    engine.close()


def backward(engine, **options):
    engine.backward(engine(torch.ones(2, 3)).mean(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: backward(e, num_tokens=-3), "`num_tokens` is -3"),
        (lambda e: e.clip_grad_norm_(-1.0), "`clip_grad_norm_` with a largest norm of -1.0"),
        (lambda e: e.clip_grad_norm_(None), "`clip_grad_norm_` with a largest norm of None"),
        (lambda e: e.clip_grad_norm_(NAN), "`clip_grad_norm_` with a largest norm of nan"),
        (lambda e: e.penalty(l1=NAN), "`penalty` with l1 nan and l2 0.0"),
        (lambda e: e.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "no states for what comes"),
    ],
    ids=["tokens", "negative", "none", "nan", "penalty", "group"],
)
def test_refused(engine, call, message):
    with pytest.raises(ZplanError, match=message):
        call(engine)


def test_the_outer_no_sync_goes_on_after_an_inner_one(engine):
    with engine.no_sync():
        with engine.no_sync():
            backward(engine)
        backward(engine)
        backward(engine)
    backward(engine)
    backward(engine)
    engine.step()
    assert engine.global_steps == 1
