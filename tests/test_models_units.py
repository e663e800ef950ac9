"""Which units a module tree is cut into, how users name their own, and what `zplan trace --units` prints of them."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from test_models_frozen import Net as FrozenNet
from torch import nn

from zplan import cli_trace
from zplan.planner.errors import ZplanError
from zplan.runtime.detect import find_units
from zplan.runtime.unit_list import as_text, list_units, load_model


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))


class TwoStacks(nn.Module):
    """An encoder and a decoder, a shared embedding, a list too small to be blocks, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(3)), "norm": nn.LayerNorm(8)})
        self.decoder = nn.Sequential()
        self.decoder.blocks = nn.ModuleList(block(16) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def names(model: nn.Module, **options: object) -> list[str]:
    return [f.unit.name for f in find_units(model, **options)]


def test_every_list_of_blocks_is_found():
    found = {f.unit.name: f for f in find_units(TwoStacks())}
    assert list(found) == [
        *("root", "embed", "encoder.blocks.0", "encoder.blocks.1", "encoder.blocks.2", "encoder.norm"),
        *("decoder.blocks.0", "decoder.blocks.1", "decoder.blocks.2", "gates.0", "gates.1", "head"),
    ]
    assert found["head"].reads == ["embed"] and not found["head"].params
    assert found["encoder.blocks.0"].unit.kind == "block" and found["gates.0"].unit.kind != "block"


def test_a_lists_own_parameters_go_to_the_module_that_is_called():
    model = nn.Sequential(nn.Linear(2, 2))
    model.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
    found = {f.unit.name: f.module for f in find_units(model)}
    assert found["extra"] is model


def test_tables_of_transformers_models_that_are_read_by_hand_are_no_guests_of_the_ring():
    """As DETR's queries and DeBERTa's relative positions are."""
    model = nn.ModuleDict({name: nn.Embedding(64, 8) for name in ("embed_tokens", "wpe", "query_embed")})
    model["blocks"] = nn.ModuleList(block() for _ in range(3))
    assert not any(f.unit.guest for f in find_units(model))
    model.__class__ = type("Detr", (nn.ModuleDict,), {"__module__": "transformers.models.detr.modeling_detr"})
    guests = [f.unit.name for f in find_units(model) if f.unit.guest]
    assert guests == ["embed_tokens", "wpe"]


def test_units_by_pattern():
    found = names(TwoStacks(), units=["encoder.blocks.*", "decoder"])
    assert found.count("decoder") == 1 and "encoder.blocks.1" in found and "decoder.blocks.0" not in found
    # A star does not cross a dot, and what lies inside a match belongs to it.
    assert "encoder.blocks.0.0" not in names(TwoStacks(), units=["encoder.blocks.*", "encoder.blocks.*.*"])
    kinds = {f.unit.name: f.unit.kind for f in find_units(TwoStacks(), resident=["encoder.blocks.1"])}
    assert (kinds["encoder.blocks.0"], kinds["encoder.blocks.1"]) == ("block", "other")


@pytest.mark.parametrize("option", ["units", "resident"])
def test_a_pattern_that_names_nothing_is_refused(option):
    with pytest.raises(ZplanError, match="no module with parameters is called `encoder.block.1`") as refused:
        names(TwoStacks(), **{option: ["encoder.block.1"]})
    assert "did you mean `encoder.blocks.1`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Embedding(4, 4, sparse=True), "sparse gradients"),
        (nn.LazyLinear(4), "a class of their own"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex"),
    ],
    ids=["sparse", "lazy", "complex"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_can_not_be_cut_is_refused(module, said):
    with pytest.raises(ZplanError, match=said):
        find_units(nn.ModuleDict({"part": module}))


def test_the_list_of_units():
    rows = {r.name: r for r in list_units(FrozenNet("none"), world_size=2)}
    assert (rows["layers.1"].where, rows["layers.1:frozen"].frozen, rows["layers.0:frozen"].where) == (
        "ring",
        True,
        "resident",
    )
    assert rows["embed:frozen"].numel == 61 * 24 and rows["embed:frozen"].nbytes >= 2 * 61 * 24
    text = as_text(list_units(TwoStacks(), world_size=2), 2)
    assert "encoder.blocks.0 ... encoder.blocks.2" in text and "3 x ring" in text and "reads embed" in text


def run(*words: str) -> tuple[int, str]:
    from zplan.cli_trace import trace

    result = CliRunner().invoke(trace, list(words))
    return result.exit_code, result.output if result.exception is None else str(result.exception)


def test_the_command_prints_units_of_a_function_and_of_a_config(tmp_path):
    code, out = run("--units", "--model", "test_models_units:TwoStacks", "--gpus", "2", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == names(TwoStacks())
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(
        n_layer=3, n_embd=8, n_head=2, vocab_size=11, architectures=["GPT2LMHeadModel"]
    ).save_pretrained(tmp_path)
    code, out = run("--units", "--model", str(tmp_path))
    assert code == 0 and "transformer.h.0 ... transformer.h.2" in out and "reads transformer.wte" in out
    assert all(p.is_meta for p in load_model(str(tmp_path)).parameters())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nowhere:f"], "was not told what to print"),
        (["--units", "--model", "nowhere:f"], "`nowhere:f` can't be imported"),
        (["--units", "--model", "/nowhere"], "no `config.json` at `/nowhere`"),
        (["--units", "--model", "json:dumps_not"], "can't be imported"),
        (["--units", "--model", "builtins:dict"], "returned a dict"),
    ],
)
def test_what_the_command_refuses(words, said):
    _, out = run(*words)
    assert said in out


def test_a_type_that_transformers_does_not_know_is_no_traceback(tmp_path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "chatglm", "num_layers": 2}), encoding="utf-8")
    result = CliRunner().invoke(cli_trace.trace, ["--units", "--model", str(config)])
    assert isinstance(result.exception, ZplanError)
    assert f"transformers builds no model of `{config}`" in result.exception.message
    assert "`chatglm`" in result.exception.message and result.exception.hint == "give package.module:function"
