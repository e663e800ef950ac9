"""What a sharded model says of itself: shapes, names, identity, ties; and parameters that come in several dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import any_model as m
import pytest
import torch
from test_models_flow import WIDTH, Net
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.runtime.initialize import initialize, meta_init

HERE = "test_models_truth"


def facts(model: nn.Module) -> list[tuple[str, tuple[int, ...], int]]:
    return [(n, tuple(p.shape), p.numel()) for n, p in model.named_parameters()]


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Names that share a pointer, as libraries look for ties."""
    found: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(p.data_ptr(), set()).add(name)
    return {frozenset(names) for names in found.values() if len(names) > 1}


def _refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except ZplanError as error:
        return str(error)
    return ""


def looks(rank: int, world_size: int) -> list[dict[str, Any]]:
    """At each moment of two steps at every stage."""
    out = []
    for stage in range(4):
        model = Net("tied")
        plain, before = facts(model), list(model.parameters())
        engine, *_ = initialize(model=model, config=m.config(stage), checked=True)
        moments = []

        def look(when: str, moments: list[Any] = moments, model: nn.Module = model, before: list[Any] = before) -> None:
            same = [a is b for a, b in zip(before, model.parameters(), strict=True)]
            moments.append((when, facts(model), all(same), ties(model)))

        look("made")
        for step in range(2):
            loss = engine(**m.tokens(step, rank, 0))
            look("forward")
            engine.backward(loss)
            look("backward")
            engine.step()
            look("step")
        refused = [_refusal(part.state_dict) for part in (engine, model, model.layers[1])]
        values = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters(remove_duplicate=False)}
        refused += [_refusal(model.load_state_dict, values, assign=assign) for assign in (False, True)]
        with engine.summon(write=True):
            model.load_state_dict(values)
            refused.append(_refusal(initialize, model=model, config=m.config(stage)))
            engine.close()
        kept = all(bool((p == 0.25).all()) for p in before)
        moments.append(("closed inside summon", facts(model), kept, ties(model)))
        out.append({"plain": plain, "moments": moments, "refused": refused})
    return out


@pytest.mark.gloo
def test_a_sharded_model_tells_the_truth_at_every_moment(run_ranks):
    for result in run_ranks(2, looks):
        for stage, r in enumerate(result):
            assert len(r["moments"]) == 8
            for when, told, same, tied in r["moments"]:
                assert told == r["plain"] and same, (stage, when)
                assert tied == {frozenset({"embed.weight", "head.weight"})}, (stage, when)
            *reads, load, assign, again = r["refused"]
            assert all(("outside `zplan.summon`" in said) == (stage > 0) for said in reads)
            assert ("summon(model, write=True)" in load) == (stage > 0) and "assign=True" in assign
            assert "trained by another engine" in again


class Mixed(Net):
    """Norms in fp32, matrices in bf16, one layer in fp16; compute in fp32, where all of these are exact."""

    def __init__(self) -> None:
        super().__init__("plain")
        for name, p in self.named_parameters():
            if "norm" not in name:
                p.data = p.data.to(torch.float16 if name.startswith("layers.1.") else torch.bfloat16)


class InOneDtype(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.float()


@pytest.mark.gloo
def test_parameters_of_several_dtypes_train_like_one_process(run_ranks):
    calls = {str(s): (f"{HERE}:Mixed", (), m.config(s), 3) for s in range(4)}
    results = run_ranks(2, m.train_each, calls)
    expected = m.reference(f"{HERE}:InOneDtype", (), steps=3, world_size=2)
    for stage in range(4):
        m.equal([r[str(stage)] for r in results], expected)


class WithState(Net):
    """Buffers that forward changes and reads: running means, and a counter of integers."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.mean = nn.BatchNorm1d(24, affine=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def run(self, i: int, x: Tensor) -> Tensor:
        self.calls += 1
        return super().run(i, x) + self.mean(x.detach().transpose(1, 2)).transpose(1, 2) * 0.1


def counts(rank: int, world_size: int) -> tuple[int, torch.dtype, int, float]:
    engine, *_ = initialize(model=WithState(), config=m.config(3, precision="bf16"))
    for step in range(2):
        engine.backward(engine(**m.tokens(step, rank, 0)))
        engine.step()
    model = engine.module
    out = int(model.calls), model.mean.running_mean.dtype, int(model.mean.num_batches_tracked)
    moved = float(model.mean.running_mean.abs().sum())
    engine.close()
    return (*out, moved)


@pytest.mark.gloo
def test_buffers_keep_their_dtype_and_what_forward_does_to_them(run_ranks):
    for calls, dtype, batches, moved in run_ranks(2, counts):
        assert calls == 10 and batches == 10 and dtype == torch.float32 and moved > 0


def test_torchs_recurrent_and_attention_modules_on_meta():
    """They keep weak references to their weights, and call their rule `_reset_parameters`."""
    with meta_init():
        model = nn.ModuleList([nn.GRU(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0)])
    engine, *_ = initialize(model=model, config=m.config(0), seed=3)
    x = torch.randn(m.SEQ, 2, WIDTH)
    for _ in range(2):
        engine.backward(model[1](model[0](x)[0]).square().mean())
        engine.step()
    assert engine.grad_norm.isfinite() and all(p.std().item() > 0 for p in model.parameters() if p.dim() > 1)
    assert all(ref() is p for ref, p in zip(model[0]._flat_weight_refs, model[0].parameters(), strict=True))
    engine.close()
