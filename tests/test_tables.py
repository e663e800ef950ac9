"""Embeddings and heads in pieces: the same outputs and training, pieces in a ring, the whole table by its old name."""

from __future__ import annotations

import json
from typing import Any

import any_model as m
import pytest
import torch
from test_models_units import run
from torch import Tensor, nn

from zplan.planner.buffers import buffer_lines
from zplan.planner.errors import ZplanError
from zplan.planner.ledger import merge
from zplan.planner.states import state_lines
from zplan.planner.timeline import timeline
from zplan.runtime.detect import find_units
from zplan.runtime.initialize import initialize
from zplan.runtime.tables import MIN_PIECES, PIECES, SplitTable, cap_tables
from zplan.runtime.unit_list import list_units
from zplan.runtime.verify import Meter

WIDTH, CAP, STEPS, HERE = 24, 400, 3, "test_tables"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(self.norm(x)))


class Net(nn.Module):
    """An embedding of 1,464 elements, whose width has even parts, and a head, whose 61 rows have none."""

    def __init__(self, kind: str = "trained") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(m.VOCAB, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, m.VOCAB)
        if kind == "frozen":
            self.embed.requires_grad_(requires_grad=False)
            self.head.requires_grad_(requires_grad=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def capped(kind: str = "trained") -> nn.Module:
    model = Net(kind)
    assert cap_tables(model, CAP) == ("embed", "head")
    return model


def test_pieces_give_the_same_and_have_the_old_names():
    plain, cut = Net(), capped()
    ids = m.tokens(0, 0, 0)
    assert torch.allclose(plain(**ids), cut(**ids), rtol=1e-6, atol=0)
    assert [tuple(p.weight.shape) for p in cut.embed.pieces] == [(61, 6)] * 4
    assert [p.weight.shape[0] for p in cut.head.pieces] == [16, 16, 16, 13]
    assert sum(p.numel() for p in cut.parameters()) == sum(p.numel() for p in plain.parameters())
    state = cut.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())
    again = capped()
    for p in again.parameters():
        p.data.zero_()
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), cut.parameters(), strict=True))


def tied() -> nn.Module:
    model = Net()
    model.head.weight = model.embed.weight
    return model


class Scaled(nn.Embedding):
    pass


def of_a_class_of_its_own() -> nn.Module:
    model = Net()
    model.embed = Scaled(m.VOCAB, WIDTH)
    return model


def with_max_norm() -> nn.Module:
    model = Net()
    model.embed.max_norm = 1.0
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (tied, r"`embed` \(1,464 elements\) is tied to `head.weight`"),
        (of_a_class_of_its_own, "is a `Scaled`"),
        (with_max_norm, "has `max_norm`"),
    ],
)
def test_what_can_not_be_cut_is_refused_before_anything_is(build, said):
    model = build()
    with pytest.raises(ZplanError, match=said):
        cap_tables(model, CAP)
    assert not any(isinstance(part, SplitTable) for part in model.modules())
    assert cap_tables(model, 2000) == ()
    with pytest.raises(ZplanError, match="a cap of 0 elements"):
        cap_tables(model, 0)


def test_linear_maps_of_blocks_are_not_cut():
    """They are gathered with their block, so pieces would save nothing."""
    model = Net()
    assert cap_tables(model, 100) == ("embed", "head")
    assert type(model.layers[0].line) is nn.Linear and len(model.embed.pieces) >= MIN_PIECES


def test_pieces_are_units_whatever_the_others_are():
    names = [f.unit.name for f in find_units(capped(), units=["layers"])]
    assert f"embed.{PIECES}.0" in names and f"head.{PIECES}.3" in names and "layers" in names


# --- training --------------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, kind: str, precision: str) -> dict[int, dict[str, Any]]:
    out = {}
    for stage in range(4):
        with Meter(torch.device("cpu")) as meter:
            engine, *_ = initialize(model=capped(kind), config=m.config(stage, precision=precision), checked=True)
            meter.attach(engine)
            losses, norms = [], []
            for step in range(STEPS):
                losses.append(m.plain(engine, engine.backward, step, rank, 0).item())
                engine.step()
                norms.append(engine.grad_norm.item())
            time, placed = timeline([f.unit for f in find_units(engine.module)]), [u.placement for u in engine.units]
            lines = [f(placed, engine.choice, time) for f in (state_lines, buffer_lines)]
            rows = [r for r in meter.compare(merge(time.phases, *lines)).lines if r.name.startswith(OWNED)]
        with engine.summon():
            params = {n: p.float().numpy().copy() for n, p in engine.module.state_dict().items()}
        told = {r.name: (r.nbytes, r.where) for r in list_units(on_meta(kind), world_size=world_size)}
        here = {p.unit.name: (p.buffer_bytes(engine.choice), "ring" if p.ringed else "resident") for p in placed}
        with pytest.raises(ZplanError, match="is a piece of a table"):
            engine.save_16bit_model("nowhere")
        out[stage] = {"losses": losses, "norms": norms, "params": params, "told": told, "here": here}
        out[stage] |= {"off": [r for r in rows if r.difference], "lines": len(rows), "held": held(engine)}
        engine.close()
    whole, *_ = initialize(model=Net(kind), config=m.config(3, precision=precision))
    out[3]["held whole"] = held(whole)
    whole.close()
    return out


OWNED = ("optim.", "params.", "grads.")


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return capped(kind)


def held(engine: Any) -> int:
    """Bytes in the compute dtype that this rank keeps of all units: ring slots, flat buffers, frozen shards."""
    slots = {id(u.slot): u.slot.buffer.nbytes for u in engine.units if u.slot is not None}
    rest = sum(
        t.nbytes for u in engine.units for t in (u.flat, u.shard if u.placement.frozen else None) if t is not None
    )
    return sum(slots.values()) + rest


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "precision"), [("trained", "fp32"), ("frozen", "fp32"), ("trained", "bf16")])
def test_training_equals_one_process_with_whole_tables(run_ranks, kind, precision):
    want = m.reference(f"{HERE}:Net", (kind,), steps=STEPS, world_size=2)
    results = run_ranks(2, train, kind, precision, limit=150)
    for stage in range(4):
        if precision == "fp32":
            m.equal([r[stage] for r in results], want)
        for r in results:
            assert r[stage]["lines"] > 8 and not r[stage]["off"], stage
    here, told = results[0][3]["here"], results[0][3]["told"]
    mark = ":frozen" if kind == "frozen" else ""
    even = [f"embed.{PIECES}.{i}{mark}" for i in range(4)] + [f"head.{PIECES}.{i}{mark}" for i in range(3)]
    assert all(here[name][1] == "ring" for name in even)
    # The odd piece is alone in its size class.
    assert here[f"head.{PIECES}.3{mark}"][1] == "resident"
    if precision == "bf16":
        assert told == here
    if kind == "trained":
        # Rings of pieces, and the odd one, in the place of both tables. Frozen ones need a shard of their own as well.
        assert results[0][3]["held"] < 0.85 * results[0][3]["held whole"]


def transformers_model(rank: int, world_size: int, folder: str) -> list[float]:
    """Losses of an untied Llama with tables in pieces; the folder that it saves is that of a whole one."""
    from hf_models import build

    model = build("llama")
    assert cap_tables(model, 500) == ("model.embed_tokens", "lm_head")
    engine, *_ = initialize(model=model, config=m.config(3), checked=True)
    losses = []
    for step in range(STEPS):
        losses.append(m.plain(engine, engine.backward, step, rank, 0).item())
        engine.step()
    assert sum(PIECES in u.name and u.placement.ringed for u in engine.units) == 7
    with engine.summon():
        if rank == 0:
            model.save_pretrained(folder)
    engine.close()
    return losses


@pytest.mark.gloo
def test_a_transformers_model_in_pieces_saves_whole_tables(run_ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    want = m.reference("hf_models:build", ("llama",), steps=STEPS, world_size=2)
    results = run_ranks(2, transformers_model, str(tmp_path))
    assert [sum(x) / 2 for x in zip(*results, strict=True)] == pytest.approx(want["losses"], rel=1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, p in loaded.named_parameters():
        assert p.detach().numpy() == pytest.approx(want["params"][name], rel=1e-5, abs=2e-6), name


def test_the_command_lists_pieces():
    code, out = run("--units", "--model", f"{HERE}:Net", "--gpus", "2", "--table-cap", "400", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and rows[f"embed.{PIECES}.1"]["numel"] == 61 * 6
    assert rows[f"embed.{PIECES}.1"]["where"] == "ring"
    _, out = run("--units", "--model", f"{HERE}:tied", "--table-cap", "400")
    assert "is tied to `head.weight`" in out
    code, out = run("--units", "--model", f"{HERE}:Net", "--gpus", "2", "--table-cap", "1e6")
    assert code == 0 and "no table has more than 1,000,000 elements" in out
