"""Frozen parameters: sharded at stage 3, replicated below, never trained, and there while backward reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import any_model as m
import pytest
import torch
import workload as w
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zplan.planner.buffers import buffer_lines
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.ledger import Ledger, merge
from zplan.planner.models import Param, Unit
from zplan.planner.placement import place_units
from zplan.planner.states import state_lines
from zplan.planner.timeline import timeline
from zplan.runtime.detect import find_units
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Comparison, Meter

WIDTH = 24


class LoRA(nn.Module):
    """A frozen linear map and a trained one of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Layer(nn.Module):
    """The adapter sits behind frozen weights, so backward needs those after the last trained gradient has landed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.adapter = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), LoRA(WIDTH)
        for part in (self.norm, self.up):
            part.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.adapter(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Frozen embedding and layers with adapters, the first of them frozen whole; trained head."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(m.VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.head = nn.Linear(WIDTH, m.VOCAB)
        self.embed.requires_grad_(requires_grad=False)
        self.layers[0].requires_grad_(requires_grad=False)
        self.checkpointing = checkpointing

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.checkpointing == "reentrant":
            x.requires_grad_()
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@lru_cache
def reference(checkpointing: str) -> dict[str, Any]:
    return m.reference("test_models_frozen:Net", (checkpointing,), steps=3, world_size=2)


@pytest.mark.gloo
@pytest.mark.parametrize("checkpointing", ["none", "plain", "reentrant"])
def test_adapters_train_like_one_process(run_ranks, checkpointing):
    cases = {str(s): ("test_models_frozen:Net", (checkpointing,), m.config(s), 3) for s in range(4)}
    results = run_ranks(2, m.train_each, cases)
    for stage in range(4):
        m.equal([r[str(stage)] for r in results], reference(checkpointing))
    # The first layer is of another size, with nothing to train: it alone, and the embedding, stay whole.
    ringed = [f"layers.{i}{part}" for i in range(1, 5) for part in ("", ":frozen")]
    assert results[0]["3"]["ringed"] == ringed


# --- memory ----------------------------------------------------------------------------------------------------------


def ledger(engine: Engine, model: nn.Module) -> Ledger:
    """States and buffers of this model; its activations are nobody's here."""
    time = timeline([f.unit for f in find_units(model)])
    placements = [u.placement for u in engine.units]
    return merge(
        time.phases, state_lines(placements, engine.choice, time), buffer_lines(placements, engine.choice, time)
    )


def metered(rank: int, world_size: int, precision: str) -> dict[int, tuple[Ledger, Comparison]]:
    out = {}
    for stage in range(4):
        with Meter(torch.device("cpu")) as meter:
            engine, *_ = initialize(model=Net("none"), config=m.config(stage, precision=precision))
            meter.attach(engine)
            predicted = ledger(engine, engine.module)
            for step in range(2):
                batch = m.tokens(step, rank, 0)
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
            out[stage] = predicted, meter.compare(predicted)
            engine.close()
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_lines_are_exact(run_ranks, precision):
    """No master, no moments, no gradient; at stage 3 each rank keeps its part of the ringed ones."""
    frozen_layer = sum(p.numel() for p in Layer().parameters() if not p.requires_grad)
    for results in run_ranks(2, metered, precision):
        for stage, (predicted, comparison) in results.items():
            owned = [r for r in comparison.lines if not r.name.startswith(("act", "born", "grads.embed"))]
            assert len(owned) >= 12
            assert not [r for r in owned if r.difference], stage
            ids = {line.id: line for line in predicted.lines}
            itemsize = 4 if precision == "fp32" else 2
            if stage == 3:
                shard = ids["params.frozen.shard.frozen2"]
                assert (
                    shard.instances == 4
                    and frozen_layer * itemsize / 2 <= shard.nbytes < frozen_layer * itemsize / 2 + 2048
                )
            else:
                assert f"replicated on 2 ranks: stage {stage}" in ids["params.frozen.whole.frozen2"].note
            assert not any(i.startswith(("optim", "grads")) and "frozen" in i for i in ids)
            assert not any(i.startswith(("optim", "grads")) and "embed" in i for i in ids)


def test_frozen_weights_cost_two_bytes_in_shards():
    """Rank 0 of 4 at stage 3 in bf16: 2P/N for a frozen layer, and 12P/N for a trained one of the same size."""
    rows = [Param("w", (1024, 64))]
    units = [Unit(f"b{i}", "block", tuple(rows), frozen=i < 4) for i in range(8)]
    choice = Choice(stage=3, world_size=4)
    placed = place_units(units, choice, tied=frozenset())
    lines = state_lines(placed, choice, timeline([u for u in units if not u.frozen]))
    total = {True: 0, False: 0}
    for line in lines:
        total["frozen" in line.id] += line.total_bytes if line.id.endswith(("frozen", "block")) else 0
    numel = 4 * 1024 * 64
    assert total == {True: 2 * numel // 4, False: 12 * numel // 4}
    assert not any(line.note for line in lines)


# --- what is frozen stays what it was --------------------------------------------------------------------------------


class Quantized(nn.Module):
    """An int8 table beside a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(QuantizedLayer() for _ in range(3))
        self.embed, self.head = nn.Embedding(m.VOCAB, WIDTH), nn.Linear(WIDTH, m.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class QuantizedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.02))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.table.float()) * self.scale


@pytest.mark.gloo
def test_integer_parameters_keep_their_dtype(run_ranks):
    path = "test_models_frozen:Quantized"
    results = run_ranks(2, m.train_each, {str(s): (path, (), m.config(s), 3) for s in (2, 3)})
    expected = m.reference(path, (), steps=3, world_size=2)
    for stage in "23":
        m.equal([r[stage] for r in results], expected)
        assert "layers.0:int8" in results[0][stage]["units"] and "layers.0:int8" not in results[0][stage]["ringed"]


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ZplanError, match="no parameters to train"):
        initialize(model=nn.Linear(3, 3).requires_grad_(requires_grad=False), config=w.config(0))


def test_a_parameter_unfrozen_later_is_refused():
    """It has no states, and its gradient would go nowhere."""
    engine, *_ = initialize(model=Net("none"), config=m.config(0))
    engine.module.layers[0].requires_grad_()
    with pytest.raises(ZplanError, match=r"`layers.0.norm.weight` was frozen when the engine was made") as refused:
        engine.backward(engine(**m.tokens(0, 0, 0)))
    assert "a group of its own" in (refused.value.hint or "")
    engine.close()


def test_two_parameters_in_one_storage_are_refused():
    model = Net("none")
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(ZplanError, match=r"`head.weight` and `embed.weight` are two parameters in one storage"):
        initialize(model=model, config=m.config(0))


def test_a_parameter_that_comes_later_is_refused():
    """As `resize_token_embeddings` makes one."""
    engine, *_ = initialize(model=Net("none"), config=m.config(0))
    engine.module.embed = nn.Embedding(m.VOCAB + 3, WIDTH)
    with pytest.raises(ZplanError, match=r"`embed.weight` came into the model after `zplan.initialize`"):
        engine.backward(engine(**m.tokens(0, 0, 0)))
    with pytest.raises(ZplanError, match=r"`embed.weight` came into the model after"):
        engine.summon()
    engine.close()
