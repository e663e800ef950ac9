"""Shapes and exact counts: our table, config.json files, and a count alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.activations import counted
from zplan.planner.api import estimate, plan
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import RUNNABLE_TYPES, read_architecture
from zplan.planner.hfshapes import ARCHITECTURES, SHAPES
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.presets import preset_names, read_index, read_preset
from zplan.planner.runnable import limits
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


def count_of(config):
    return ModelSpec("m", decoder_units(read_architecture(config, "m")[0])).num_params


def refusal(config):
    with pytest.raises(ZplanError) as caught:
        read_architecture(config, "config.json")
    return caught.value


def test_every_file_has_a_row_and_every_row_a_file():
    assert preset_names() == sorted(ROWS) and len(ROWS) == 94


@pytest.mark.parametrize("name", ROWS)
def test_counts_of_the_table_are_exact(name):
    spec, row = model_from(name, None).spec, ROWS[name]
    assert (spec.num_params, spec.num_active) == (row.num_params, row.num_active)
    assert (spec.arch.layers, spec.arch.hidden) == (row.layers, row.hidden)
    assert spec.arch.runnable == (read_preset(name)["model_type"] in RUNNABLE_TYPES)
    assert counted(spec), "no op list for its activations"


def test_every_type_of_the_table_is_known():
    kinds = {read_preset(name)["model_type"] for name in ROWS}
    assert kinds == {*RUNNABLE_TYPES, *ARCHITECTURES}


OF_KIND = {read_preset(name)["model_type"]: read_preset(name) for name in sorted(ROWS, reverse=True)}
NO_CLASS = ("baichuan", "chatglm", "internlm2")
"""Their classes are not part of transformers, so only their counts are known."""
VARIANTS = [
    *(({"model_type": kind}, "published") for kind in ARCHITECTURES if kind not in NO_CLASS),
    ({"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2}, "tied"),
    ({"model_type": "qwen3", "attention_bias": True, "head_dim": 32}, "biases"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [0]}, "some layers dense"),
    ({"model_type": "gemma2", "attention_bias": True, "tie_word_embeddings": False}, "biases, own head"),
    ({"model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": True}, "parallel"),
    ({"model_type": "falcon", "new_decoder_architecture": False, "multi_query": True, "bias": True}, "one group"),
    ({"model_type": "falcon", "new_decoder_architecture": False, "multi_query": False}, "own keys"),
    ({"model_type": "falcon", "new_decoder_architecture": False, "parallel_attn": False}, "serial"),
    ({"model_type": "falcon", "num_ln_in_parallel_attn": 1}, "one norm"),
    ({"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True}, "no biases"),
    ({"model_type": "opt", "enable_bias": False, "tie_word_embeddings": False}, "no biases"),
    ({"model_type": "deepseek_v2", "q_lora_rank": 96, "first_k_dense_replace": 2}, "low-rank queries"),
    ({"model_type": "deepseek_v3", "q_lora_rank": None, "n_shared_experts": 3}, "whole queries"),
    ({"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}, "gated"),
    ({"model_type": "vit", "qkv_bias": False, "num_labels": 7, "image_size": 48, "patch_size": 8}, "small images"),
]


def tree_of(config):
    """Parameters of the transformers class, by name, on the meta device."""
    torch = pytest.importorskip("torch")
    auto = pytest.importorskip("transformers").models.auto.modeling_auto
    classes = {
        "bert": auto.AutoModelForMaskedLM,
        "t5": auto.AutoModelForSeq2SeqLM,
        "vit": auto.AutoModelForImageClassification,
        "gemma3": auto.AutoModelForImageTextToText,
    }
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = classes.get(config["model_type"], auto.AutoModelForCausalLM).from_config(hf)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("changes", "what"), VARIANTS, ids=[f"{c['model_type']}-{w}" for c, w in VARIANTS])
def test_names_and_shapes_are_those_of_transformers(changes, what):
    kind = changes["model_type"]
    config = {k: v for k, v in OF_KIND[kind].items() if k != "layer_types"} | changes
    if kind == "gemma3":
        config["text_config"] = config["text_config"] | {"num_hidden_layers": 2}
        config["vision_config"] = config["vision_config"] | {"num_hidden_layers": 2}
    else:
        config[SHAPES[kind].names.get("layers", "num_hidden_layers")] = 3
    spec = ModelSpec("m", decoder_units(read_architecture(config, "m")[0]))
    assert {p.name: p.shape for p in spec.params()} == tree_of(config)


@pytest.mark.parametrize("kind", [k for k in ARCHITECTURES if k not in (*NO_CLASS, "gemma3", "bloom", "deepseek_v2")])
def test_defaults_are_those_of_transformers(kind):
    # Left out: a vision config without its own keys, and defaults that their class itself refuses.
    layers = {SHAPES[kind].names.get("layers", "num_hidden_layers"): 1}
    labels = {"id2label": {i: str(i) for i in range(2)}} if kind == "vit" else {}
    config = {"model_type": kind, **layers, **labels}
    spec = ModelSpec("m", decoder_units(read_architecture(config, "m")[0]))
    assert {p.name: p.shape for p in spec.params()} == tree_of(config)


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


BEYOND = [
    ({**LLAMA, "attention_bias": True}, "`attention_bias` of `m`"),
    ({**LLAMA, "mlp_bias": True, "attention_dropout": 0.1}, "`mlp_bias` of `m`"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling `dynamic` of `m`"),
    (
        {"model_type": "mistral", "num_hidden_layers": 2, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rotary scaling `yarn` of `m`",
    ),
]


@pytest.mark.parametrize(("config", "what"), BEYOND, ids=[w.split(" of")[0] for _, w in BEYOND])
def test_what_zplans_llama_can_not_do_is_estimate_only_as_the_class_does_it(tmp_path, config, what):
    arch, (note,) = read_architecture(config, "m")
    spec = ModelSpec("m", decoder_units(arch), arch)
    kind = config["model_type"]
    assert note == f"{what} makes model_type `{kind}` estimate only: zplan's decoder has none of it"
    assert counted(spec) and not arch.runnable and arch.window == (4096 if kind == "mistral" else None)
    (limit,) = limits(Choice(0, 1), spec)
    assert (limit.key, limit.value) == ("model_type", "llama") and "neither biases nor rotary" in limit.why
    assert {p.name: p.shape for p in spec.params()} == tree_of(config)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    assert estimate(str(file), gpus=2, mem=80, seq=32).estimate_only
    with pytest.raises(ZplanError, match="is estimate only: zplan's own decoder has neither biases nor rotary"):
        plan(str(file), gpus=2, mem=80, seq=32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "hidden_act": "gelu"}, '`hidden_act` of `config.json` is the string "gelu"'),
        ({**LLAMA, "pretraining_tp": 2}, "`pretraining_tp`"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "spiral", "factor": 2}},
            '`rope_type` of `rope_scaling` of `config.json` is the string "spiral"',
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2}}, "has no `high_freq_factor`"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 heads and 3 key-value heads"),
        ({**LLAMA, "num_attention_heads": 5}, "5 heads, which do not divide its width 64"),
        ({**LLAMA, "head_dim": 15}, "odd head width"),
        ({**LLAMA, "hidden_size": "64"}, 'is the string "64"'),
        ({**LLAMA, "hidden_size": -64}, "is the number -64"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "`activation_function`"),
        ({"model_type": "gpt2", "n_head": 5}, "5 heads"),
        ({"model_type": "mamba"}, "model_type `mamba` of `config.json` is not built yet"),
        ({"model_type": "qwen2", "num_attention_heads": 33}, "33 heads, which do not divide its width 4096"),
        ({"model_type": "qwen2", "num_key_value_heads": 5}, "32 heads and 5 key-value heads"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"]}, "Qwen2ForTokenClassification"),
        ({"model_type": "qwen2", "hidden_act": "relu"}, '`hidden_act` of `config.json` is the string "relu"'),
        ({"model_type": "phi", "qk_layernorm": True}, "`qk_layernorm`"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "`word_embed_proj_dim`"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "1 experts of which a token takes 2"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "`num_experts`"),
        ({"hidden_size": 64}, "has no `model_type`"),
        ({**LLAMA, "hidden_size": None}, "`hidden_size` of `config.json` is null"),
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
@settings(max_examples=300)
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


@pytest.mark.parametrize("kind", [*RUNNABLE_TYPES, *ARCHITECTURES])
def test_every_type_is_estimated_and_only_runnable_ones_are_planned(kind):
    name = next(n for n in ROWS if read_preset(n)["model_type"] == kind)
    found = estimate(name, gpus=64, mem="200GiB")
    assert found.peak_bytes > 16 * found.model.num_params // 64
    assert found.counted or (found.verdict.code in ("open", "no-fit") and not found.fits)
    if kind not in RUNNABLE_TYPES:
        with pytest.raises(ZplanError, match="`model_type` of .* is estimate only"):
            plan(name, gpus=64, mem="200GiB")
        assert any("estimate only" in x for x in found.notes)


def test_classes_with_windows_are_estimated_with_eager_attention_unless_asked():
    found = estimate("gemma-3-1b", gpus=1, mem=80)
    assert found.row.choice.attention == "eager" and found.row.choice.seq == 2048
    asked = estimate("gemma-3-1b", gpus=1, mem=80, attention="sdpa", seq=256)
    assert asked.longest_seq == 511
    with pytest.raises(ZplanError, match="windows of 512 tokens"):
        estimate("gemma-3-1b", gpus=1, mem=80, attention="sdpa", seq=512)
    with pytest.raises(ZplanError, match="`gemma2` refuses fused attention"):
        estimate("gemma-2-2b", gpus=1, mem=80, attention="sdpa")


def test_dropout_of_a_class_is_a_trait():
    assert model_from("opt-1.3b", None).arch.trait("dropout")
    assert any("dropout" in x for x in model_from("gpt2", None).notes), "zplan's own decoder has none"


@pytest.mark.parametrize("kind", [k for k in OF_KIND if k not in NO_CLASS])
def test_what_transformers_writes_back_reads_the_same(kind):
    hf = pytest.importorskip("transformers").AutoConfig.for_model(**OF_KIND[kind])
    back = json.loads(hf.to_json_string(use_diff=False)) | {"architectures": None}
    first, second = (read_architecture(config, "m")[0] for config in (OF_KIND[kind], back))
    assert decoder_units(first) == decoder_units(second) and first.traits == second.traits
