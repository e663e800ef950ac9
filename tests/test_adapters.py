"""Frozen bases with low-rank adapters: bytes against modules that follow peft, and against peft itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from phases import DTYPES, choose, observe, unit_modules
from test_hfblocks import CASES, SMALL, class_config, modules_of
from torch import Tensor, nn

import zplan
from zplan.planner.activations import activation_lines, profile
from zplan.planner.adapters import TABLES, adapt, find_targets, linear_modules, nf4_bytes
from zplan.planner.comm import traffic
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import merge
from zplan.planner.models import Adapters, Architecture, ModelSpec, decoder_units
from zplan.planner.plan_reading import parse_plan
from zplan.planner.predict import predict
from zplan.planner.report import report
from zplan.planner.timeline import timeline
from zplan.runtime.decoder import Decoder
from zplan.runtime.detect import find_units
from zplan.runtime.start import look

LLAMA = Architecture("llama", 4, 64, 4, 2, 16, 176, 100, 64, tied=False)
GPT2 = Architecture("gpt2", 4, 64, 4, 4, 16, 256, 100, 64, tied=True)
RANK = 6


class Adapted(nn.Module):
    """A frozen linear map with an adapter beside it, written as peft's Linear without dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result = nn.functional.linear(x, self.weight, self.bias)
        return result + self.lora_B(self.lora_A(x)) * 2.0


def adapted(arch: Architecture, targets: str, *, embeddings: bool = False, quantized: bool = False) -> ModelSpec:
    spec = ModelSpec("m", decoder_units(arch), arch)
    return adapt(spec, Adapters(RANK, find_targets(spec, targets), embeddings, quantized))


def build(spec: ModelSpec, choice: Choice) -> Decoder:
    assert spec.arch is not None and spec.adapters is not None
    model = Decoder(spec.arch, checkpointing=choice.checkpointing, attention=choice.attention)
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in spec.adapters.targets:
            setattr(block, name, Adapted(block.get_submodule(name), RANK))
    if spec.adapters.embeddings:
        for module in (model.embed, model.head, *([model.positions] if spec.arch.family == "gpt2" else [])):
            module.requires_grad_(requires_grad=True)
    return model.to(DTYPES[choice.precision])


def wrong_phases(spec: ModelSpec, choice: Choice, seen: dict[str, int]) -> dict[str, tuple[int, int]]:
    phases = timeline(spec.units).phases
    per_phase = merge(phases, activation_lines(spec, choice, phases)).per_phase()
    expected = dict(zip(phases, per_phase, strict=True))
    return {p: (expected[p], n) for p, n in seen.items() if expected[p] != n}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("arch", "targets", "embeddings", "attention", "precision"),
    [
        (LLAMA, "q,v", False, "sdpa", "bf16"),
        (LLAMA, "all-linear", False, "eager", "fp32"),
        (LLAMA, "up", False, "sdpa", "bf16"),
        (LLAMA, "attention", True, "sdpa", "fp32"),
        (GPT2, "q,v", False, "eager", "bf16"),
        (GPT2, "all-linear", True, "sdpa", "bf16"),
        (replace(GPT2, tied=False), "down", False, "sdpa", "fp32"),
    ],
)
def test_every_phase_equals_what_an_observer_sees(arch, targets, embeddings, attention, precision, checkpointing):
    spec, choice = (
        adapted(arch, targets, embeddings=embeddings),
        choose(3, 10, precision, checkpointing, attention),
    )
    model = build(spec, choice)
    seen = observe(model, unit_modules(model), choice, model, (3, 100))
    assert not (wrong := wrong_phases(spec, choice, seen)), wrong


def test_units_are_those_the_runtime_finds():
    """Names, frozen or not, and counts, unit by unit."""
    spec = adapted(LLAMA, "q,v")
    found = [u for f in find_units(build(spec, choose(1, 8))) for u, _ in f.segments()]
    mine = {(u.name, u.frozen, u.numel, len(u.params)) for u in spec.units if u.params}
    assert {(u.name, u.frozen, u.numel, len(u.params)) for u in found} == mine


HF = ["qwen2", "qwen3", "gemma", "phi3", "olmo2", "gpt_neox", "opt", "mixtral"]


@pytest.mark.parametrize(
    ("name", "words", "kind"),
    [
        (n, "all-linear" if i % 2 else "q,v", (2, 9, "bf16", "full" if i % 3 else "none", "sdpa"))
        for i, n in enumerate(HF)
    ]
    + [
        ("deepseek_v2", "attention", (2, 9, "fp32", "none", "sdpa")),
        ("deepseek_v3", "attention", (2, 9, "bf16", "full", "eager")),
        ("gpt_oss", "all-linear", (2, 9, "bf16", "full", "eager")),
    ],
)
def test_every_phase_equals_what_peft_holds(name, words, kind):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config, choice = SMALL | CASES[name], choose(*kind)
    arch, _ = read_architecture(config, "m")
    spec = adapted(arch, words)
    assert spec.adapters is not None
    keys = class_config(config)
    hf = transformers.AutoConfig.for_model(**keys, use_cache=False, attn_implementation=choice.attention)
    model = transformers.AutoModelForCausalLM.from_config(hf).to(DTYPES[choice.precision])
    if choice.checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    targets = list({t.rpartition(".")[2] for t in spec.adapters.targets})
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=12, target_modules=targets), model)
    model.to(DTYPES[choice.precision]).train()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == spec.num_trained
    seen = observe(model, modules_of(model), choice, lambda i, t: model(input_ids=i, labels=t).loss, (3, 100))
    assert not (wrong := wrong_phases(spec, choice, seen)), wrong


def test_four_bits_against_bitsandbytes():
    """Weights, constants and tables of a quantized tensor, and the whole weight that backward makes of it."""
    bnb = pytest.importorskip("bitsandbytes")
    for shape in ((24, 40), (64, 64), (33, 100)):
        packed, state = bnb.functional.quantize_4bit(torch.randn(shape), compress_statistics=True, quant_type="nf4")
        kept = [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        assert sum(t.untyped_storage().nbytes() for t in kept) == nf4_bytes(shape[0] * shape[1])


def test_four_bits_a_weight():
    assert nf4_bytes(2**20) == 2**19 + 2**14 + 4 * 64 + TABLES
    whole, quantized = adapted(LLAMA, "all-linear"), adapted(LLAMA, "all-linear", quantized=True)
    assert whole.num_params == quantized.num_params and whole.num_trained == quantized.num_trained
    choice = Choice(3, 4, seq=16)
    lines = {x.id: x for x in predict(quantized, choice).lines}
    linear = [p.numel for u in decoder_units(LLAMA) for p in u.params if len(p.shape) == 2 and u.name == "blocks.1"]
    line = lines["params.frozen.whole.nf4"]
    assert (line.nbytes, line.instances, line.source) == (sum(map(nf4_bytes, linear)), LLAMA.layers, "derived")
    # A rank holds the quantized base whole, what is left of it in shards.
    assert "params.frozen.shard.frozen" in lines


def test_quantized_weights_are_made_whole_for_each_product():
    """The largest is there beside what a plain frozen one takes; nothing more is saved."""
    choice = replace(choose(2, 16), device="cuda")
    wide = replace(LLAMA, ffn=4096)
    whole, quantized = (profile(adapted(wide, "all-linear", quantized=q), choice)["block"] for q in (False, True))
    assert quantized.saved == whole.saved
    largest = wide.ffn * wide.hidden
    extra = 2 * largest + 2 * 4 * -(-largest // 64)
    assert 0 < quantized.backward - whole.backward <= extra


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_adapters_have_gradients_and_states(stage):
    spec, choice = adapted(LLAMA, "q,v"), Choice(stage, 4, seq=16)
    ledger = predict(spec, choice)
    trained = [u for u in spec.units if not u.frozen]
    assert {x.id for x in ledger.lines if x.id.startswith("optim.exp_avg.")} == {"optim.exp_avg.block"}
    assert sum(u.numel for u in trained) == spec.num_trained
    frozen = sum(x.total_bytes for x in ledger.lines if x.id.startswith("params.frozen."))
    base = 2 * (spec.num_params - spec.num_trained)
    assert base <= frozen < 1.05 * base if stage < 3 else frozen < base  # units are padded to 64 elements a rank
    full = ModelSpec("m", decoder_units(LLAMA), LLAMA)
    assert ledger.peak_bytes() < predict(full, choice).peak_bytes()
    sent, sent_full = traffic(spec, choice), traffic(full, choice)
    assert sent.reduce_bytes * 10 < sent_full.reduce_bytes


def test_targets_by_word():
    spec = ModelSpec("m", decoder_units(LLAMA), LLAMA)
    assert find_targets(spec, "q,v") == ("q", "v")
    assert find_targets(spec, "attention") == ("q", "k", "v", "o")
    assert find_targets(spec, "all-linear") == linear_modules(spec) == ("q", "k", "v", "o", "gate", "up", "down")
    arch, _ = read_architecture(SMALL | CASES["phi3"], "m")
    fused = ModelSpec("m", decoder_units(arch), arch)
    assert find_targets(fused, "q,v") == ("self_attn.qkv_proj",)
    moe, _ = read_architecture(SMALL | CASES["mixtral"], "m")
    assert not any("mlp" in t for t in find_targets(ModelSpec("m", decoder_units(moe), moe), "all-linear"))
    with pytest.raises(ZplanError, match="no linear map of m is called `qq`"):
        find_targets(spec, "q,qq")
    with pytest.raises(ZplanError, match="`--lora-targets` is empty"):
        find_targets(spec, ",")


@pytest.mark.parametrize("words", ["q,v", "all-linear"])
def test_more_rank_never_costs_less(words):
    spec = ModelSpec("m", decoder_units(LLAMA), LLAMA)
    choice = replace(choose(2, 16), device="cuda")
    peaks = [predict(adapt(spec, Adapters(r, find_targets(spec, words))), choice).peak_bytes() for r in (1, 8, 64)]
    assert peaks == sorted(peaks)


ASKED = {"gpus": 2, "mem": 8, "seq": 64, "lora": 8}


def test_a_plan_with_adapters_comes_back_and_is_for_scripts(tmp_path):
    plan = zplan.plan("smollm2-135m", **ASKED, lora_targets="attention", lora_embeddings=True)
    assert parse_plan(json.loads(plan.to_json()), "p") == plan
    assert plan.estimate_only[0].startswith("`--lora 8`: ")
    assert "--lora 8 --lora-targets attention --lora-embeddings" in plan.command()
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(ZplanError, match="`--lora 8` is estimate only"):
        look(tmp_path / "plan.json")
    assert look(tmp_path / "plan.json", script=True)[0] == plan
    packed = zplan.plan("smollm2-135m", **ASKED, qlora=True)
    (tmp_path / "packed.json").write_text(packed.to_json())
    with pytest.raises(ZplanError, match="`--qlora nf4` is estimate only"):
        look(tmp_path / "packed.json")
    assert look(tmp_path / "packed.json", script=True)[0] == packed


def test_a_module_holds_two_elements_of_four_bits_in_one():
    whole, packed = adapted(LLAMA, "all-linear"), adapted(LLAMA, "all-linear", quantized=True)
    linear = sum(p.numel for u in packed.units if u.quantized for p in u.params)
    assert linear and whole.num_held == whole.num_params == packed.num_params == packed.num_held + linear // 2


def test_the_answer_says_what_is_trained():
    found = zplan.estimate("smollm2-135m", **ASKED, qlora=True)
    text, document = report(found), json.loads(found.to_json())
    assert "trained: " in text and "base in 4 bits" in text and "`--qlora nf4`" in text
    assert document["model"]["trained_num_params"] == found.model.spec.num_trained
    assert document["model"]["adapters"]["targets"] == list(linear_modules(found.model.spec))
    assert document["model"]["num_params"] == 134515008
    assert zplan.estimate("smollm2-135m", gpus=2, mem=8, seq=64).peak_bytes > found.peak_bytes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"qlora": True}, "`--qlora` needs the rank"),
        ({"lora_targets": "q"}, "`--lora-targets` needs the rank"),
        ({"lora": 0}, "`--lora 0` is not a whole number"),
        ({"lora": 8, "lora_targets": "query"}, "is called `query`"),
    ],
)
def test_what_is_refused(asked, message):
    with pytest.raises(ZplanError, match=message):
        zplan.estimate("smollm2-135m", gpus=2, mem=8, **asked)


def test_a_count_alone_keeps_its_base_as_asked():
    found = zplan.estimate(params="7e9", gpus=1, mem=80, lora=16)
    assert found.model.num_params == 7 * 10**9 and found.model.missing_params == 9926144
    line = next(x for x in found.lines if x.id == "states.remainder")
    assert line.nbytes == 2 * 9926144
