"""Token-weighted losses, clipping by call, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import any_model as m
import numpy as np
import pytest
import torch
from test_models_flow import LAYERS, Net
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from zplan.planner.errors import ZplanError
from zplan.runtime.initialize import initialize

ACCUMULATION, STEPS = 2, 3


def counted(step: int, rank: int, k: int) -> tuple[m.Batch, int]:
    """A batch in which only some labels count: none at all on one rank in one micro-step."""
    batch = m.tokens(step, rank, k)
    g = torch.Generator().manual_seed(step * 100 + rank * 10 + k)
    drop = torch.rand(batch["labels"].shape, generator=g) < 0.2 + 0.5 * rank
    if (step, rank, k) == (1, 1, 0):
        drop[:] = True
    batch["labels"] = batch["labels"].masked_fill(drop, -100)
    return batch, int((batch["labels"] != -100).sum())


def mean_loss(model: torch.nn.Module, batch: m.Batch) -> torch.Tensor:
    logits = model(**batch)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Grouped(Net):
    """Several layers in one reentrant checkpoint: what is gathered in backward follows from its recompute."""

    def run(self, i: int, x: torch.Tensor) -> torch.Tensor:
        ends = {0: 2, 2: LAYERS}
        return checkpoint(self.several, x, i, ends[i], use_reentrant=True) if i in ends else x

    def several(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        for layer in self.layers[start:end]:
            x = layer(x)
        return x


def weighted(rank: int, world_size: int) -> dict[int, Any]:
    out = {}
    for row, (stage, kind) in enumerate([*((stage, Net) for stage in range(4)), (3, Grouped)]):
        engine, *_ = initialize(model=kind("logits"), config=m.config(stage, ACCUMULATION), checked=True)
        norms = []
        for step in range(STEPS):
            for k in range(ACCUMULATION):
                batch, n = counted(step, rank, k)
                engine.backward(mean_loss(engine, batch), num_tokens=n)
                engine.step()
            norms.append(engine.grad_norm.item())
        out[row] = norms, m.whole(engine)
        engine.close()
    out[5] = held(rank)
    return out


def held(rank: int) -> tuple[list[float], dict[str, Any]]:
    """The same batches as two forwards and then two backward calls of one micro-step."""
    engine, *_ = initialize(model=Net("logits"), config=m.config(3), checked=True)
    norms = []
    for step in range(STEPS):
        (one, n), (two, k) = (counted(step, rank, i) for i in range(ACCUMULATION))
        losses = mean_loss(engine, one), mean_loss(engine, two)
        with engine.no_sync():
            engine.backward(losses[0], num_tokens=n)
        engine.backward(losses[1], num_tokens=k)
        engine.step()
        norms.append(engine.grad_norm.item())
    params = m.whole(engine)
    engine.close()
    return norms, params


def weighted_reference(world_size: int) -> tuple[list[float], dict[str, Any]]:
    """One process: the sum over all tokens of a step, divided by their number."""
    model = Net("logits")
    optimizer = torch.optim.AdamW(model.parameters(), **m.ADAMW)
    norms = []
    for step in range(STEPS):
        rows = [counted(step, rank, k) for rank in range(world_size) for k in range(ACCUMULATION)]
        total = sum(n for _, n in rows)
        for batch, n in rows:
            if n:
                (mean_loss(model, batch) * n / total).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), m.CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {n: p.detach().numpy() for n, p in model.named_parameters()}


@pytest.mark.gloo
def test_every_token_weighs_the_same(run_ranks):
    norms, params = weighted_reference(2)
    for result in run_ranks(2, weighted):
        for stage in range(6):
            np.testing.assert_allclose(result[stage][0], norms, rtol=5e-6)
            for name, value in params.items():
                np.testing.assert_allclose(result[stage][1][name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def from_the_first(rank: int, world_size: int) -> float:
    """Weights are used by hand, which the first backward looks for on every rank, tokens or none."""
    engine, *_ = initialize(model=Net("outside"), config=m.config(1), checked=True)
    engine.backward(engine(**m.tokens(0, 0, 0)), num_tokens=0 if rank else 16)
    engine.step()
    norm = engine.grad_norm.item()
    engine.close()
    return norm


@pytest.mark.gloo
def test_a_rank_without_tokens_from_the_first_step_on(run_ranks):
    alone = run_ranks(1, from_the_first)
    assert run_ranks(2, from_the_first) == pytest.approx(alone * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("part", "said"),
    [("vector", "a tensor of shape (2, 8)"), ("constant", "one that no parameter leads to"), ("none", "a NoneType")],
)
def test_a_loss_without_backward_is_refused_with_the_way_out(part, said):
    engine, *_ = initialize(model=Net("logits"), config=m.config(0))
    scores = engine(**m.tokens(0, 0, 0))["logits"].sum(-1)
    loss = {"vector": scores, "constant": scores.sum().detach(), "none": None}[part]
    with pytest.raises(ZplanError, match=re.escape(f"needs one loss with a graph and got {said}")) as refused:
        engine.backward(loss)
    assert "num_tokens=0" in (refused.value.hint or "")
    engine.backward(scores.mean())
    engine.step()
    engine.close()


def test_tokens_for_some_micro_steps_only_are_refused():
    engine, *_ = initialize(model=Net(""), config=m.config(0, 2))
    engine.backward(engine(**m.tokens(0, 0, 0)), num_tokens=3)
    engine.step()
    loss = engine(**m.tokens(0, 0, 1))
    with pytest.raises(ZplanError, match="`num_tokens` was given to some backward calls"):
        engine.backward(loss)
    engine.close()


# --- clipping by call ------------------------------------------------------------------------------------------------


def clips(rank: int, world_size: int, by_call: bool) -> list[tuple[float, float]]:
    """(norm, a weight after the step): the config's clip of 0.05, or the same by a call with a config of 1.0."""
    out = []
    for stage in (0, 2, 3):
        config = m.config(stage)
        config["gradient_clipping"] = 1.0 if by_call else 0.05
        engine, *_ = initialize(model=Net(""), config=config, checked=True)
        for step in range(2):
            engine.backward(engine(**m.tokens(step, rank, 0)))
            norm = engine.clip_grad_norm_(0.05) if by_call else engine.grad_norm
            engine.step()
        out.append((norm.item(), float(m.whole(engine)["layers.2.up.weight"].sum())))
        engine.close()
    return out


@pytest.mark.gloo
def test_clip_grad_norm_does_what_the_config_does(run_ranks):
    assert run_ranks(2, clips, True) == run_ranks(2, clips, False)


def test_clip_grad_norm_refuses_what_it_does_not_do():
    engine, *_ = initialize(model=Net(""), config=m.config(0, 2))
    engine.backward(engine(**m.tokens(0, 0, 0)))
    with pytest.raises(ZplanError, match="after 1 of 2 micro-steps"):
        engine.clip_grad_norm_(1.0)
    with pytest.raises(ZplanError, match="norm_type inf"):
        engine.clip_grad_norm_(1.0, float("inf"))
    with pytest.raises(ZplanError, match="inside `no_sync`"), engine.no_sync():
        engine.step()
    engine.close()
