"""Models whose control flow is not a straight line, and losses that users build themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import any_model as m
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from zplan.planner.errors import ZplanError
from zplan.runtime.calls import Schedule
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.initialize import initialize
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.streams import Streams
from zplan.runtime.unit import FlatUnit

WIDTH, LAYERS, HERE = 24, 5, "test_models_flow"


@dataclass
class Out:
    loss: Tensor
    extra: dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gate


class Net(nn.Module):
    """`flow` names the way its forward goes; `how` is the checkpointing of its layers."""

    def __init__(self, flow: str, how: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flow, self.how = flow, how
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.embed = nn.Embedding(m.VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, m.VOCAB, bias=False)
        if flow == "tied":
            self.head.weight = self.embed.weight

    def run(self, i: int, x: Tensor) -> Tensor:
        if self.how == "none":
            return self.layers[i](x)
        return checkpoint(self.layers[i], x, use_reentrant=self.how == "reentrant")

    def forward(self, input_ids: Tensor, labels: Tensor, route: list[int] | None = None) -> Any:
        x = self.embed(input_ids) + self.shift
        for i in route or range(LAYERS):
            x = self.run(i, x)
        if self.flow == "outside":
            logits = F.linear(x, self.embed.weight) + x @ self.head.weight.t()
        else:
            logits = self.head(x)
        if self.flow == "borrowed":
            logits = logits + self.layers[1].up.weight.sum()
        if self.flow == "logits":
            return {"logits": logits, "last": [x]}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Out(loss, {"logits": logits}) if self.flow == "dataclass" else loss


def check(run_ranks: Any, cases: dict[str, tuple[Any, ...]], *, world_size: int = 2, accumulation: int = 1) -> Any:
    """`key -> (flow, how, stage, recipe)`: all in one start, each equal to its reference."""
    calls = {}
    for key, (flow, how, stage, recipe) in cases.items():
        calls[key] = (f"{HERE}:Net", (flow, how), m.config(stage, accumulation), 3, recipe)
    results = run_ranks(world_size, m.train_each, calls, limit=200)
    done: dict[Any, Any] = {}
    for key, (flow, how, _, recipe) in cases.items():
        if (flow, how, recipe) not in done:
            done[flow, how, recipe] = m.reference(
                f"{HERE}:Net", (flow, how), steps=3, world_size=world_size, accumulation=accumulation, recipe=recipe
            )
        m.equal([r[key] for r in results], done[flow, how, recipe])
    return results


STAGES = (0, 1, 2, 3)


@pytest.mark.gloo
@pytest.mark.parametrize("flow", ["tied", "outside", "dataclass"])
def test_tied_weights_and_uses_outside_a_modules_forward(run_ranks, flow):
    """The parent uses the embedding's weight itself, has a parameter of its own, and leaves a child unused."""
    check(
        run_ranks,
        {f"{how} {s}": (flow, how, s, "any_model:plain") for s in STAGES for how in ("none", "plain")[s < 3 :]},
    )


# --- routes --------------------------------------------------------------------------------------------------------


def routed(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int, routes: list[list[int]]) -> Tensor:
    loss = model(**m.tokens(step, rank, k), route=routes[(step + rank) % len(routes)])
    backward(loss)
    return loss


def twice(*args: Any) -> Tensor:
    """Layers called twice, and not in the order of their list; the same way in every step."""
    return routed(*args, [[0, 2, 1, 2, 4, 3, 0]])


def dropped(*args: Any) -> Tensor:
    """Every rank and step skips other layers, from the first step on."""
    return routed(*args, [[0, 2, 4], [1, 2, 3, 4], [0, 1, 2, 3], [4]])


def half_used(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """On one rank the last layers do not reach the loss; on the other the first ones get no gradient."""
    core = getattr(model, "module", model)
    batch = m.tokens(step, rank, k)
    out = model(**batch)
    loss = (
        out["last"][0].square().mean()
        if rank
        else F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten())
    )
    assert core.unused.weight.requires_grad
    backward(loss)
    return loss


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["none", "plain", "reentrant"])
@pytest.mark.parametrize("recipe", ["twice", "dropped"])
def test_layers_called_twice_out_of_order_or_skipped(run_ranks, recipe, how):
    check(run_ranks, {str(s): ("", how, s, f"{HERE}:{recipe}") for s in ((1, 3) if how == "none" else (3,))})


def train_with_events(rank: int, world_size: int, cases: dict[str, tuple[Any, ...]]) -> list[int]:
    """Train as on a device, where a gather leaves an event; how many gathers were open as their units were updated."""
    left = []
    update, let_read = ShardedOptimizer.update, Gatherer.let_read

    def reading(self: Gatherer, units: Sequence[FlatUnit]) -> None:
        left.append(sum(u.gathered is not None for u in units))
        let_read(self, units)

    def updating(self: ShardedOptimizer, units: Sequence[FlatUnit]) -> None:
        assert all(u.gathered is None for u in units)
        update(self, units)

    with pytest.MonkeyPatch.context() as p:
        p.setattr(Streams, "mark", lambda self: object())
        p.setattr(Streams, "wait", lambda self, event: None)
        p.setattr(Gatherer, "let_read", reading)
        p.setattr(ShardedOptimizer, "update", updating)
        m.train_each(rank, world_size, cases)
    return left


@pytest.mark.gloo
def test_an_update_waits_for_gathers_of_layers_that_did_not_run(run_ranks):
    """Other ranks may still read what it overwrites."""
    cases = {}
    for stage, on in ((1, False), (3, False), (2, True)):
        how = {**m.config(stage, optimizer_in_backward=on), "gradient_clipping": 0.0}
        cases[f"{stage}, {on}"] = (f"{HERE}:Net", ("loss", "none"), how, 3, f"{HERE}:dropped")
    for left in run_ranks(2, train_with_events, cases):
        assert sum(left) > 0


@pytest.mark.parametrize(
    ("seen", "order"),
    [
        (["ace", "abe"], "abcde"),  # each skips some: the module order
        (["abe", "adbe"], "adbec"),  # not in module order, and one skips
        (["ae", "adbe", "adbe"], "adbec"),
        (["abab", "aba"], "ababcde"),
    ],
)
def test_one_order_for_ranks_that_skip_different_modules(seen, order):
    for rank, ran in enumerate(seen):
        schedule = Schedule("abcde", frozenset(), "a")
        schedule.ran = list(ran)
        schedule.settle(seen, rank)
        assert "".join(schedule.order) == order
    with pytest.raises(ZplanError, match="ranks ran units in different orders"):
        Schedule("abcde", frozenset(), "a").settle(["adb", "abd"], 0)


@pytest.mark.gloo
def test_parameters_that_some_ranks_do_not_use(run_ranks):
    check(run_ranks, {str(s): ("logits", "none", s, f"{HERE}:half_used") for s in STAGES}, accumulation=2)


class Experts(nn.Module):
    """A block whose router sends each token to one of its experts; most see none on some rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            at = chosen == i
            out[at] = self.experts[i](x[at]) * weight[at].unsqueeze(-1)
        return x + out


def build_experts() -> nn.Module:
    model = Net("")
    torch.manual_seed(3)
    model.layers = nn.ModuleList(Experts() for _ in range(LAYERS))
    return model


@pytest.mark.gloo
def test_experts_with_routing_of_their_own_on_every_rank(run_ranks):
    path = f"{HERE}:build_experts"
    expected = m.reference(path, (), steps=3, world_size=3)
    results = run_ranks(3, m.train_each, {str(s): (path, (), m.config(s), 3) for s in (2, 3)})
    for stage in "23":
        m.equal([r[stage] for r in results], expected)
    assert results[0]["3"]["ringed"] == [f"layers.{i}" for i in range(LAYERS)]


# --- losses of the user's own --------------------------------------------------------------------------------------


def own_loss(out: Any, batch: m.Batch) -> Tensor:
    return F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten())


def two_backwards(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """Two losses of one forward, one after the other."""
    batch = m.tokens(step, rank, k)
    out = model(**batch)
    first, second = own_loss(out, batch), out["last"][0].square().mean()
    backward(first, retain_graph=True)
    backward(second)
    return first + second


def two_forwards(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """One loss over two forwards, as contrastive losses have."""
    a, b = m.tokens(step, rank, k), m.tokens(step, rank, k + 50)
    one, two = model(**a), model(**b)
    loss = own_loss(one, a) + (one["last"][0] - two["last"][0]).square().mean()
    backward(loss)
    return loss


def held(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """Two forwards, then two backwards in one micro-step, the first of them under `no_sync`."""
    a, b = m.tokens(step, rank, k), m.tokens(step, rank, k + 50)
    one, two = own_loss(model(**a), a), own_loss(model(**b), b)
    if hasattr(model, "no_sync"):
        with model.no_sync():
            backward(one)
    else:
        backward(one)
    backward(two)
    return one + two


def ragged(model: nn.Module, backward: m.Backward, step: int, rank: int, k: int) -> Tensor:
    """Sequences of another length on every rank and micro-step."""
    batch = m.tokens(step, rank, k, seq=3 + 4 * rank + step + k)
    loss = own_loss(model(**batch), batch)
    backward(loss)
    return loss


@pytest.mark.gloo
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("recipe", ["two_backwards", "two_forwards", "held", "ragged"])
def test_losses_of_the_users_own(run_ranks, recipe, accumulation):
    cases = {str(s): ("logits", "none", s, f"{HERE}:{recipe}") for s in STAGES}
    check(run_ranks, cases, accumulation=accumulation)


# --- what is refused, and the way out ------------------------------------------------------------------------------


def borrows(rank: int, world_size: int) -> tuple[str, str]:
    engine, *_ = initialize(model=Net("borrowed"), config=m.config(3))
    try:
        engine.backward(engine(**m.tokens(0, rank, 0)))
        said, hint = "", ""
    except ZplanError as error:
        said, hint = error.message, error.hint or ""
    engine.close()
    return said, hint


@pytest.mark.gloo
def test_a_ringed_parameter_used_elsewhere_names_the_way_out(run_ranks):
    for said, hint in run_ranks(2, borrows):
        assert "`layers.1.up.weight` is used outside the forward of its unit `layers.1`" in said
        assert 'resident=["layers.1"]' in hint
    path, options = f"{HERE}:Net", {"resident": ["layers.1"]}
    results = run_ranks(2, m.train, path, ("borrowed",), m.config(3), 3, "any_model:plain", options)
    m.equal(results, m.reference(path, ("borrowed",), steps=3, world_size=2))
    assert "layers.1" not in results[0]["ringed"] and len(results[0]["ringed"]) == LAYERS - 1
