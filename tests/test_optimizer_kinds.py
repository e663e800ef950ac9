"""The optimizer table: its bytes against torch's own optimizers, and what zplan's runtime can't step with is said."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zplan
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.models import Architecture, ModelSpec, Param, Unit, decoder_units
from zplan.planner.optimizers import KINDS, find_kind, workspace_bytes
from zplan.planner.plan_reading import parse_plan
from zplan.planner.predict import predict
from zplan.planner.report import report
from zplan.planner.runnable import limits
from zplan.planner.textbook import runtime_rate
from zplan.runtime.choices import choice_of
from zplan.runtime.meter import StorageRegistry
from zplan.runtime.start import look

SHAPES = {"wide.weight": (24, 40), "tall.weight": (50, 10), "experts": (3, 8, 6), "norm.weight": (24,)}
UNIT = Unit("blocks.0", "block", tuple(Param(name, shape) for name, shape in SHAPES.items()))
SPEC = "smollm2-135m"
ASKED = {"gpus": 2, "mem": 24, "seq": 128}

TORCH = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, foreach=False),
}


def params() -> list[nn.Parameter]:
    out = [nn.Parameter(torch.randn(shape)) for shape in SHAPES.values()]
    for p in out:
        p.grad = torch.randn_like(p)
    return out


@pytest.mark.parametrize("name", TORCH)
def test_states_are_those_of_torch(name):
    optimizer = TORCH[name](params())
    optimizer.step()
    kept: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, t in state.items():
            if key != "step" and t is not None:
                kept[key] = kept.get(key, 0) + t.untyped_storage().nbytes()
    numel = sum(math.prod(s) for s in SHAPES.values())
    assert {s.name: s.nbytes(UNIT, numel, 1) for s in KINDS[name].states} == kept


@pytest.mark.parametrize(("name", "shape"), [("muon", (24, 40)), ("muon", (50, 10)), ("adafactor", (24, 40))])
def test_workspaces_hold_what_torchs_step_takes(name, shape):
    """Torch's own step, small vectors and scalars aside, which are less than a row and a column in fp32."""
    p = nn.Parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    make = {"muon": torch.optim.Muon, "adafactor": TORCH["adafactor"]}[name]
    optimizer = make([p])
    optimizer.step()
    registry = StorageRegistry()
    with registry:
        registry.adopt(p, p.grad, *(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)))
        before = registry.live_bytes
        optimizer.step()
    expected = workspace_bytes(name, (Unit("b", "block", (Param("w", shape),)),))
    assert expected <= registry.peaks["idle"] - before <= expected + 2 * 4 * sum(shape) + 64


def test_eight_bit_states_have_one_constant_a_block():
    first, _ = KINDS["adamw8bit"].states
    assert first.nbytes(UNIT, 1000, 1) == 1000 + 4 * 4
    assert [first.nbytes(UNIT, n, 1) for n in (256, 257)] == [260, 265]


def states(name: str, **changes) -> dict[str, int]:
    """Bytes of each family of state lines of a small model on one rank."""
    arch = Architecture("llama", 3, 64, 4, 4, 16, 128, 100, 64, tied=False)
    spec = ModelSpec("m", decoder_units(arch), arch)
    ledger = predict(spec, Choice(**{"stage": 0, "world_size": 1, "seq": 16, "optimizer": name, **changes}))
    out: dict[str, int] = {}
    for x in ledger.lines:
        family = ".".join(x.id.split(".")[:2])
        out[family] = out.get(family, 0) + x.total_bytes
    return {**out, "P": sum(u.numel for u in spec.units)}


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("adamw", {"optim.master_low": 2, "optim.exp_avg": 4, "optim.exp_avg_sq": 4}),
        ("adam", {"optim.master": 4, "optim.exp_avg": 4, "optim.exp_avg_sq": 4}),
        ("lion", {"optim.master": 4, "optim.exp_avg": 4}),
        ("lamb", {"optim.master": 4, "optim.exp_avg": 4, "optim.exp_avg_sq": 4}),
        ("adagrad", {"optim.master": 4, "optim.sum": 4}),
        ("sgd", {"optim.master": 4}),
        ("sgd-momentum", {"optim.master": 4, "optim.momentum_buffer": 4}),
        ("adamw-bf16", {"optim.exp_avg": 2, "optim.exp_avg_sq": 2}),
    ],
)
def test_bytes_a_parameter(name, rates):
    found = states(name)
    small = ("optim.scalars", "optim.norms", "optim.table", "optim.workspace", "optim.scratch")
    kept = {k: v for k, v in found.items() if k.startswith("optim.") and k not in small}
    assert kept == {k: v * found["P"] for k, v in rates.items()}
    master = 2 if name == "adamw" else 4  # its other half is the bf16 weight
    nominal = KINDS[name].nominal + (master if KINDS[name].master else 0)
    assert sum(rates.values()) == nominal
    assert runtime_rate(Choice(0, 2, optimizer=name)).whole == 2 + nominal + 4


def test_eight_bit_states_with_and_without_masters():
    """2 + 8 / 256 bytes of moments either way; without masters that is all there is beside weights and gradients."""
    with_masters, without = states("adamw8bit"), states("adamw8bit-bf16")
    moments = [with_masters[k] for k in ("optim.exp_avg", "optim.exp_avg_sq")]
    assert moments == [without[k] for k in ("optim.exp_avg", "optim.exp_avg_sq")]
    assert 2 * without["P"] < sum(moments) < 2.05 * without["P"]
    assert "optim.master" in with_masters and "optim.master" not in without


def test_pure_bf16_keeps_shards_where_there_is_a_ring():
    found = states("adamw-bf16", stage=3, world_size=4, ring_slots=2)
    assert found["params.shard"] and "optim.master" not in found
    assert "params.shard" not in states("adam", stage=3, world_size=4)
    split = states("adamw", stage=3, world_size=4, ring_slots=2)
    assert split["params.shard"] == found["params.shard"] and "optim.master" not in split


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_only_what_the_runtime_steps_with_is_exact(name, stage):
    kind = KINDS[name]
    arch = Architecture("llama", 3, 64, 4, 4, 16, 128, 100, 64, tied=False)
    spec = ModelSpec("m", decoder_units(arch), arch)
    choice = Choice(stage, 4, seq=16, optimizer=name)
    ids = {f"optim.{s.name}" for s in kind.states} | {"optim.workspace"}
    sources = {x.source for x in predict(spec, choice).lines if x.id.rpartition(".")[0] in ids or x.id in ids}
    assert sources <= {"allocated" if kind.runnable else "estimate"}
    assert [x.key for x in limits(choice)] == ([] if kind.runnable else ["--optimizer"])


def test_gradients_in_bf16_are_half():
    full, half = (states("adamw", world_size=2, **k) for k in ({}, {"reduce_dtype": "bf16"}))
    assert full["grads.full"] == 2 * half["grads.full"] >= 4 * full["P"]
    alone = states("adamw")
    assert alone["grads.full"] == 2 * alone["P"], "nothing is added to them"


def test_words():
    assert find_kind("Adam").name == "adam" and find_kind("adamw_8bit").name == "adamw8bit"
    with pytest.raises(ZplanError, match="`--optimizer lionn` is unknown") as caught:
        find_kind("lionn")
    assert caught.value.hint == "did you mean `lion`?"


@pytest.mark.parametrize(
    ("asked", "key"), [({"optimizer": "lamb"}, "--optimizer lamb"), ({"reduce_dtype": "bf16"}, "--reduce-dtype bf16")]
)
def test_what_cannot_run_is_marked_in_table_json_and_plan_and_refused(asked, key, tmp_path):
    found = zplan.estimate(SPEC, **ASKED, **asked)
    assert found.fits and found.estimate_only[0].startswith(f"`{key}`: ")
    assert f"Estimate only, zplan can't run it: `{key}`" in report(found)
    assert json.loads(found.to_json())["estimate_only"] == list(found.estimate_only)
    plan = zplan.plan(SPEC, **ASKED, **asked)
    document = json.loads(plan.to_json())
    assert document["estimate_only"] == list(found.estimate_only)
    assert parse_plan(document, "p") == plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(ZplanError, match=f"`{key}` is estimate only"):
        look(tmp_path / "plan.json")
    with pytest.raises(ZplanError, match=f"`{key}` is estimate only"):
        choice_of(plan.training, SimpleNamespace(world_size=2, device=torch.device("cpu")))
    document["estimate_only"] = []
    with pytest.raises(ZplanError, match="`estimate_only` of `p`"):
        parse_plan(document, "p")


def test_what_runs_is_not_marked():
    assert zplan.estimate(SPEC, **ASKED).estimate_only == ()


@pytest.mark.parametrize("name", KINDS)
def test_plans_of_all_kinds_come_back(name):
    plan = zplan.plan(SPEC, **ASKED, optimizer=name)
    assert plan.choice.optimizer == name
    assert parse_plan(json.loads(plan.to_json()), "p") == plan
