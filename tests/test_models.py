"""Shapes and exact counts: our table, config.json files, and a count alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import SUPPORTED, read_architecture
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.presets import preset_names, read_index, read_preset
from zplan.planner.shape import LARGEST, SMALLEST, solve_shape
from zplan.planner.sources import model_from

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
ROWS = {row.name: row for row in read_index()}
BUILT = [name for name in ROWS if read_preset(name)["model_type"] in SUPPORTED]


def count_of(config):
    return ModelSpec("m", decoder_units(read_architecture(config, "m")[0])).num_params


def refusal(config):
    with pytest.raises(ZplanError) as caught:
        read_architecture(config, "config.json")
    return caught.value


def test_every_file_has_a_row_and_every_row_a_file():
    assert preset_names() == sorted(ROWS) and len(ROWS) == 94
    assert len(BUILT) == 26


@pytest.mark.parametrize("name", BUILT)
def test_counts_of_the_table_are_exact(name):
    spec = model_from(name, None).spec
    assert spec.num_params == ROWS[name].num_params
    assert (spec.arch.layers, spec.arch.hidden) == (ROWS[name].layers, ROWS[name].hidden)


@pytest.mark.parametrize("name", sorted(set(ROWS) - set(BUILT)))
def test_other_families_are_refused_by_name(name):
    with pytest.raises(ZplanError) as caught:
        model_from(name, None)
    assert f"model_type `{read_preset(name)['model_type']}`" in caught.value.message
    assert "not built yet" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
        ("llama", {"head_dim": None}),
        ("mistral", {"num_key_value_heads": 2}),
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 100}),
        ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 4, "tie_word_embeddings": False}),
    ],
)
def test_counts_agree_with_transformers(kind, overrides):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    base = {"vocab_size": 256} if kind == "gpt2" else {**LLAMA, "num_hidden_layers": 2}
    config = {**base, **overrides, "model_type": kind}
    hf = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    expected = sum(p.numel() for p in model.parameters())
    assert count_of(config) == expected
    # What transformers writes back, in the newer style with every key there, says the same.
    assert count_of(json.loads(hf.to_json_string(use_diff=False)) | {"architectures": None}) == expected


def test_missing_keys_have_the_defaults_of_the_class():
    a, _ = read_architecture({"model_type": "llama"}, "m")
    assert (a.layers, a.hidden, a.heads, a.kv_heads, a.head_dim, a.ffn) == (32, 4096, 32, 32, 128, 11008)
    assert (a.vocab, a.max_seq, a.tied, a.norm_eps, a.rope_theta) == (32000, 2048, False, 1e-6, 10000.0)
    a, _ = read_architecture({"model_type": "mistral"}, "m")
    assert (a.kv_heads, a.ffn, a.max_seq, a.window) == (8, 14336, 131072, 4096)
    a, notes = read_architecture({"model_type": "gpt2"}, "m")
    assert (a.layers, a.hidden, a.ffn, a.vocab, a.max_seq, a.tied) == (12, 768, 3072, 50257, 1024, True)
    assert a.norm_eps == 1e-5 and "attn_pdrop" in notes[0]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 10000.0, {}),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, {}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, {}),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7, "factor": 4}},
            7.0,
            {"rope_type": "linear", "factor": 4.0},
        ),
    ],
)
def test_rotary_settings_old_and_new(keys, theta, scaling):
    a, _ = read_architecture({**LLAMA, **keys}, "m")
    assert a.rope_theta == theta and dict(a.rope_scaling) == scaling
    assert list(a.rope_scaling) == sorted(a.rope_scaling)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "attention_bias": True}, "`attention_bias` of `config.json` is true"),
        ({**LLAMA, "mlp_bias": True}, "`mlp_bias`"),
        ({**LLAMA, "hidden_act": "gelu"}, '`hidden_act` of `config.json` is the string "gelu"'),
        ({**LLAMA, "pretraining_tp": 2}, "`pretraining_tp`"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            '`rope_type` of `rope_scaling` of `config.json` is the string "yarn"',
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2}}, "has no `high_freq_factor`"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 heads and 3 key-value heads"),
        ({**LLAMA, "num_attention_heads": 5}, "5 heads, which do not divide its width 64"),
        ({**LLAMA, "head_dim": 15}, "odd head width"),
        ({**LLAMA, "hidden_size": "64"}, 'is the string "64"'),
        ({**LLAMA, "hidden_size": -64}, "is the number -64"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "`activation_function`"),
        ({"model_type": "gpt2", "n_head": 5}, "5 heads"),
        ({"model_type": "qwen3"}, "model_type `qwen3` of `config.json` is not built yet"),
        ({"hidden_size": 64}, "has no `model_type`"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, said):
    assert said in refusal(config).message


def test_a_name_is_found_in_any_case_and_misspelt_ones_are_guessed():
    assert model_from("Llama-2-7B", None).spec.name == "llama-2-7b"
    with pytest.raises(ZplanError) as caught:
        model_from("lama-2-7b", None)
    assert caught.value.hint == "did you mean `llama-2-7b`?"
    with pytest.raises(ZplanError) as caught:
        model_from("zzzzzz", None)
    assert "zplan models" in caught.value.hint


@pytest.mark.parametrize("name", ["../index", "../models/llama-2-7b", ""])
def test_a_name_cannot_leave_the_table(name):
    with pytest.raises(ZplanError):
        model_from(name, None)


def test_folders_and_files(tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ZplanError, match="has no config.json"):
        model_from(str(folder), None)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for name in (str(folder), str(folder / "config.json")):
        found = model_from(name, None)
        assert found.spec.name == "tiny" and found.spec.num_params == count_of(LLAMA)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden')
    with pytest.raises(ZplanError, match="cut short"):
        model_from(str(folder), None)
    with pytest.raises(ZplanError, match="does not exist"):
        model_from(str(tmp_path / "nothing" / "config.json"), None)
    # A folder with the name of a preset does not hide it, and the user is told.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    found = model_from("gpt2", None)
    assert found.source == "zplan's table" and "./gpt2" in found.notes[0]


def test_exactly_one_of_model_and_params():
    for args in ((None, None), ("gpt2", 7)):
        with pytest.raises(ZplanError, match="--params"):
            model_from(*args)


def own_count(a):
    """Llama count by hand, without building units."""
    tables = a.vocab * a.hidden * (1 if a.tied else 2)
    return tables + a.hidden + a.layers * (4 * a.hidden**2 + 3 * a.hidden * a.ffn + 2 * a.hidden)


@given(st.floats(0, 1).map(lambda x: int(SMALLEST * (LARGEST / SMALLEST) ** x)))
@settings(max_examples=300, deadline=None)
def test_any_count_gets_a_shape_within_one_per_cent(count):
    a = solve_shape(count)
    assert 0.99 * count <= own_count(a) <= count
    assert a.heads * a.head_dim == a.hidden and a.hidden % 128 == 0
    assert 1.9 < a.ffn / a.hidden < 3.8


def test_seven_billion_looks_like_the_seven_billion_of_the_field():
    found = model_from(None, 7 * 10**9)
    a = found.arch
    assert (a.layers, a.hidden, a.heads, a.vocab, a.tied) == (32, 4096, 32, 32000, False)
    assert found.spec.num_params == own_count(a)
    assert found.missing_params == 7 * 10**9 - own_count(a)
    assert found.num_params == 7 * 10**9


@pytest.mark.parametrize("count", [1, SMALLEST - 1, LARGEST + 1])
def test_counts_without_a_shape(count):
    with pytest.raises(ZplanError, match="no shape is assumed"):
        solve_shape(count)
