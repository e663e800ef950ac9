"""Ways of backward into a unit other than through a tensor that its forward returns; each beside one plain process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import any_model as m
import pytest
import torch
from test_models_flow import LAYERS, WIDTH, Layer, Net
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from zplan.planner.errors import ZplanError
from zplan.runtime.initialize import initialize

HERE = "test_models_backward"


class InObject(Layer):
    def forward(self, x: Any) -> Any:
        return SimpleNamespace(hidden=super().forward(x.hidden))


class InArgument(Layer):
    def forward(self, x: Any) -> None:
        x["hidden"] = super().forward(x["hidden"])


class Token(nn.Module):
    """Returns a parameter of its own, as modules with learned queries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Ways(Net):
    def __init__(self, way: str) -> None:
        super().__init__("")
        self.way, self.inside = way, []
        kind = {"object": InObject, "argument": InArgument}.get(way)
        if kind is not None:
            self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        if way in ("token", "leaf"):
            self.token = Token()
        if way == "leaf":  # a prompt before a frozen embedding, with what PEFT does for checkpointing
            self.embed.requires_grad_(requires_grad=False)
            self.embed.register_forward_hook(lambda *args: args[-1].requires_grad_())
        if way == "lists":
            self.layers = nn.ModuleList([nn.ModuleList(self.layers[:2]), nn.ModuleList(self.layers[2:])])
        if way == "reads":
            for layer in self.layers:
                layer.register_forward_pre_hook(lambda part, args: (args[0] / part.up.weight.norm(),))
        if way == "inside":
            self.layers[1].up.register_forward_hook(lambda *args: self.inside.append(args[-1]))
        if way == "hand":
            self.table = nn.Embedding(2, WIDTH)

    def several(self, x: Tensor, start: int, end: int) -> Tensor:
        for layer in self.layers[start:end]:
            x = layer(x)
        return x * self.table.weight[0] if self.way == "hand" else x

    def chosen(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x

    def body(self, x: Tensor) -> Tensor:
        if self.way == "object":
            box = SimpleNamespace(hidden=x)
            for layer in self.layers:
                box = layer(box)
            return box.hidden
        if self.way == "argument":
            named = {"hidden": x}
            for layer in self.layers:
                layer(named)
            return named["hidden"]
        if self.way == "again":
            x = checkpoint(self.chosen, x, (0, 1, 0), use_reentrant=True)
            return checkpoint(self.chosen, x, (2, 3, 4, 2, 1), use_reentrant=True)
        if self.way in ("group", "hand"):
            x = checkpoint(self.several, x, 0, 2, use_reentrant=True)
            return checkpoint(self.several, x, 2, LAYERS, use_reentrant=True)
        if self.way == "lists":
            for layer in (layer for part in self.layers for layer in part):
                x = layer(x)
            return x
        token = self.token() if self.way in ("token", "leaf") else 1.0
        return self.several(x, 0, LAYERS) * token

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.way in ("grad", "double"):
            start = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.body(start).tanh().sum(), start, create_graph=self.way == "double")
            x = slope if self.way == "double" else x + 0.1 * slope.sign()
        self.inside.clear()
        logits = self.head(self.body(x + self.shift))
        if self.way == "inside":
            return self.inside.pop().square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


WAYS = {
    **{way: (3,) for way in ("object", "argument", "group", "lists", "reads")},
    **{way: (1, 3) for way in ("again", "token", "leaf", "hand", "grad")},
    "double": (0, 2),
}


@pytest.mark.gloo
def test_backward_finds_every_unit(run_ranks):
    """Outputs in objects and arguments; several layers in one reentrant checkpoint, some twice, one weight that is no
    module's; modules that return a parameter; lists of lists; weights read in a user's hook; gradients of inputs.
    """
    calls = {f"{way} {s}": (f"{HERE}:Ways", (way,), m.config(s), 2) for way, stages in WAYS.items() for s in stages}
    results = run_ranks(2, m.train_each, calls, limit=200)
    for way, stages in WAYS.items():
        expected = m.reference(f"{HERE}:Ways", (way,), steps=2, world_size=2)
        for stage in stages:
            m.equal([r[f"{way} {stage}"] for r in results], expected)
            assert len(results[0][f"{way} {stage}"]["ringed"]) == (LAYERS if stage == 3 else 0), way


def refused(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    said = {}
    for way in ("inside", "double"):
        engine, *_ = initialize(model=Ways(way), config=m.config(3))
        with pytest.raises(ZplanError) as error:
            engine.backward(engine(**m.tokens(0, rank, 0)))
        said[way] = error.value.message, error.value.hint or ""
        engine.close()
    return said


@pytest.mark.gloo
def test_what_backward_can_not_find_is_refused_with_the_way_out(run_ranks):
    said = run_ranks(2, refused)[0]
    message, hint = said["inside"]
    assert "got a gradient while its unit `layers.1` was not gathered" in message and '["layers.1"]' in hint
    message, hint = said["double"]
    assert "`create_graph=True` through `layers.4`" in message and 'resident=["layers.4"]' in hint
    path, options = f"{HERE}:Ways", {"resident": ["layers.*"]}
    calls = {way: (path, (way,), m.config(3), 2, "any_model:plain", options) for way in said}
    results = run_ranks(2, m.train_each, calls)
    for way in said:
        m.equal([r[way] for r in results], m.reference(path, (way,), steps=2, world_size=2))
