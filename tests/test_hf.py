"""transformers models, unmodified: every stage trains like one plain process."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import any_model as m
import pytest
import torch
from torch import nn

from zplan.planner.errors import ZplanError
from zplan.runtime.initialize import initialize, meta_init, summon

pytest.importorskip("transformers")

from hf_models import CAUSAL, OTHERS, build

RECIPE = "hf_models:recipe"


@lru_cache
def reference(name: str, world_size: int = 2, recipe: str = "any_model:plain") -> dict[str, Any]:
    """Without checkpointing, which changes nothing."""
    return m.reference("hf_models:build", (name,), steps=3, world_size=world_size, recipe=recipe)


def check(run_ranks: Any, cases: dict[str, tuple[str, str, int]]) -> None:
    """`name -> (model, checkpointing, stage)` on two ranks, all in one start."""
    calls = {key: ("hf_models:build", (name, how), m.config(stage), 3) for key, (name, how, stage) in cases.items()}
    results = run_ranks(2, m.train_each, calls, limit=200)
    for key, (name, _how, stage) in cases.items():
        m.equal([r[key] for r in results], reference(name))
        blocks = [unit for unit in results[0][key]["ringed"] if unit[-1].isdigit()]
        assert len(blocks) == (4 if stage == 3 else 0), key


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_causal_models_below_stage_3(run_ranks, stage):
    check(run_ranks, {name: (name, "none", stage) for name in CAUSAL})


@pytest.mark.gloo
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "plain"])
def test_causal_models_at_stage_3(run_ranks, checkpointing):
    check(run_ranks, {name: (name, checkpointing, 3) for name in CAUSAL})


# --- other families --------------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "checkpointing"), [(1, "none"), pytest.param(3, "none", marks=pytest.mark.slow), (3, "plain")]
)
def test_other_families_on_three_ranks(run_ranks, stage, checkpointing):
    """Three on purpose: nothing divides evenly. Encoders, an encoder with a decoder, and images among them."""
    cases = {name: ("hf_models:build", (name, checkpointing), m.config(stage), 3, RECIPE) for name in OTHERS}
    results = run_ranks(3, m.train_each, cases, limit=200)
    for name in OTHERS:
        m.equal([r[name] for r in results], reference(name, 3, RECIPE))
        assert bool(results[0][name]["ringed"]) == (stage == 3), name


def test_floating_inputs_are_cast_to_the_compute_dtype():
    engine, *_ = initialize(model=build("vit"), config=m.config(0, precision="bf16"))
    images = torch.randn(m.MICRO_BATCH, 3, 16, 16)
    out = engine(pixel_values=images, labels=torch.tensor([0, 1]))
    engine.backward(out.loss)
    engine.step()
    assert out.logits.dtype == torch.bfloat16 and images.dtype == torch.float32 and engine.grad_norm.isfinite()
    engine.close()


# --- built on the meta device
# ------------------------------------------------------------------------------------------


def from_meta(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Losses at stages 0 and 3 from the same seed, and what the model was given as initial values."""
    out: dict[str, Any] = {}
    for name in names:
        for stage in (0, 3):
            with meta_init():
                model = build(name)
            assert all(p.is_meta for p in model.parameters())
            engine, *_ = initialize(model=model, config=m.config(stage), checked=True, seed=5)
            first = m.whole(engine)
            buffers = {n: b.clone().numpy() for n, b in engine.module.named_buffers()}
            losses = []
            for step in range(2):
                loss = engine(**m.tokens(step, rank, 0)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            out[f"{name} {stage}"] = (losses, first, buffers)
            engine.close()
    return out


@pytest.mark.gloo
def test_models_built_on_meta_get_their_own_initial_values(run_ranks):
    """transformers' own rules fill weights and rotary tables; every layer draws its own."""
    names = ["llama-tied", "gpt2", "mixtral"]
    for result in run_ranks(2, from_meta, names, limit=200):
        for name in names:
            losses, first, buffers = result[f"{name} 0"]
            assert result[f"{name} 3"][0] == pytest.approx(losses, rel=1e-6)
            on_cpu = build(name)
            for key, value in on_cpu.named_buffers():
                assert (buffers[key] == value.numpy()).all(), key
            for key, value in on_cpu.named_parameters():
                assert (first[key] == result[f"{name} 3"][1][key]).all()
                assert float(first[key].std()) == pytest.approx(value.std().item(), rel=0.35, abs=1e-6), key
            weights = [v for k, v in first.items() if k.endswith(("o_proj.weight", "attn.c_proj.weight"))]
            assert len(weights) == 4 and (weights[0] != weights[1]).any()


# --- evaluation and generation between steps --------------------------------------------------------------------------


def generates(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """Greedy tokens before and after a step; ranks ask for different lengths where the model is whole."""
    engine, *_ = initialize(model=build("llama"), config=m.config(stage), checked=True)
    prompt = m.tokens(9, 0, 0)["input_ids"]
    ask = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    out: dict[str, Any] = {}
    for step in range(2):
        loss = engine(**m.tokens(step, rank, 0)).loss
        engine.eval()
        with torch.no_grad():
            out[f"eval {step}"] = engine(**m.tokens(8, 0, 0)).loss.item()
            out[f"same {step}"] = engine.module.generate(prompt, max_new_tokens=3, **ask).tolist()
            with summon(engine.module):
                out[f"each {step}"] = engine.module.generate(prompt, max_new_tokens=2 + 2 * rank, **ask).tolist()
        engine.train()
        engine.backward(loss)
        engine.step()
        out[f"loss {step}"] = loss.item()
    engine.close()
    return out


@pytest.mark.gloo
def test_generate_and_evaluate_between_steps(run_ranks):
    expected = run_ranks(1, generates, 0)[0]
    for stage in (1, 3):
        results = run_ranks(2, generates, stage)
        for rank, r in enumerate(results):
            assert r["same 0"] == expected["same 0"] and r["eval 0"] == pytest.approx(expected["eval 0"], rel=1e-6)
            assert [row[: m.SEQ + 2] for row in r["each 0"]] == expected["each 0"]
            assert len(r["each 1"][0]) == m.SEQ + 2 + 2 * rank
        assert results[0]["same 1"] == results[1]["same 1"]


# --- PEFT
# --------------------------------------------------------------------------------------------------------------


def build_peft(name: str, checkpointing: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = build(name, checkpointing)
    if checkpointing == "reentrant":
        model.enable_input_require_grads()
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for names that are on their way out
        return peft.get_peft_model(model, config)


@pytest.mark.gloo
def test_peft_adapters(run_ranks):
    pytest.importorskip("peft")
    cases = {
        f"{how} {s}": ("test_hf:build_peft", ("llama", how), m.config(s), 3)
        for how in ("none", "reentrant")
        for s in (2, 3)
    }
    results = run_ranks(2, m.train_each, cases, limit=200)
    for how in ("none", "reentrant"):
        expected = m.reference("test_hf:build_peft", ("llama", how), steps=3, world_size=2)
        for stage in (2, 3):
            m.equal([r[f"{how} {stage}"] for r in results], expected)
        assert len(results[0][f"{how} 3"]["ringed"]) == 8


# --- before initialize, and instead of it
# ------------------------------------------------------------------------------------------


def build_resized() -> nn.Module:
    """Nine more tokens, of which the head knows too, before an engine sees the model."""
    model = build("llama-tied")
    torch.manual_seed(2)
    model.resize_token_embeddings(m.VOCAB + 9, mean_resizing=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@pytest.mark.gloo
def test_resized_embeddings(run_ranks):
    results = run_ranks(2, m.train_each, {str(s): ("test_hf:build_resized", (), m.config(s), 3) for s in (1, 3)})
    expected = m.reference("test_hf:build_resized", (), steps=3, world_size=2)
    assert expected["params"]["model.embed_tokens.weight"].shape[0] == m.VOCAB + 9
    for stage in "13":
        m.equal([r[stage] for r in results], expected)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {k: v[0] for k, v in m.tokens(i, 0, 0).items()}


@pytest.mark.parametrize(("own", "said"), [(True, "`optimizer.state_dict"), (False, "`backward` was called 2 times")])
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_is_told_the_way_and_never_trains_nothing(tmp_path, own, said):
    """With zplan's optimizer accelerate can't prepare it; with its own one its steps would find no gradients."""
    pytest.importorskip("accelerate", reason="needs the witness extra: accelerate")
    import transformers

    engine, optimizer, *_ = initialize(model=build("llama"), config=m.config(0))
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    given = {"optimizers": (optimizer, schedule)} if own else {}
    trainer = transformers.Trainer(model=engine.module, args=args, train_dataset=Rows(), **given)
    with pytest.raises(ZplanError, match=said) as refused:
        trainer.train()
    assert "zplan emit" in (refused.value.hint or "")
    engine.close()
