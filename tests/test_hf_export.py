"""Model folders: transformers loads them and computes what the decoder computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload as w

from zplan.cli import main
from zplan.planner.errors import ZplanError
from zplan.planner.hfconfig import read_architecture
from zplan.runtime.checkpoint_folder import commit, prepare
from zplan.runtime.checkpoint_format import Manifest, Parameter, Range
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.checkpoint_write import write_rank
from zplan.runtime.decoder import Decoder
from zplan.runtime.hf_export import export_checkpoint
from zplan.runtime.hf_names import hf_config
from zplan.runtime.initialize import initialize

LLAMA3 = replace(
    w.LLAMA,
    rope_theta=500000.0,
    rope_scaling=(
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 16.0),
        ("rope_type", "llama3"),
    ),
)
ARCHS = {
    "llama": w.LLAMA,
    "llama-tied": w.LLAMA_TIED,
    "gpt2": w.GPT2,
    "gpt2-untied": replace(w.GPT2, tied=False),
    "mistral": replace(w.LLAMA, window=64),
    "llama3": LLAMA3,
}


def save_and_export(rank: int, world_size: int, arch: Any, precision: str, folder: str) -> dict[str, Any]:
    """Whole fp32 master weights after two steps, their checkpoint, and a live export."""
    engine, *_ = initialize(model=w.build(arch), config=w.config(3, precision=precision, piece=16384), init=w.fill)
    for step in range(2):
        engine.backward(engine(*w.batch(arch.vocab, step, rank, 0)))
        engine.step()
    engine.save_checkpoint(Path(folder, "saved"))
    engine.save_16bit_model(Path(folder, "live"))
    with engine.summon():
        found = {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}
    engine.close()
    return found


def logits_of(arch: Any, values: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    model = Decoder(arch)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in values.items()}, strict=False)
    with torch.no_grad():
        return model.head(model.features(ids))


def pretrained(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **more)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ARCHS)
def test_transformers_computes_the_same(run_ranks, tmp_path, name):
    arch = ARCHS[name]
    values = run_ranks(2, save_and_export, arch, "fp32", str(tmp_path))[0]
    with Checkpoint(tmp_path / "saved" / "global_step2") as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "fp32", dtype="fp32", shard_bytes=60_000)
        export_checkpoint(checkpoint, tmp_path / "bf16", dtype="bf16")
    model = pretrained(tmp_path / "fp32", attn_implementation="sdpa")
    assert model.dtype == torch.float32 and len(list((tmp_path / "fp32").glob("model-*-of-*.safetensors"))) > 1
    ids = torch.randint(0, arch.vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits_of(arch, values, ids), rtol=1e-5, atol=1e-5)
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == arch.tied
    # The live export is the rounded masters, tensor by tensor.
    live, rounded = (pretrained(tmp_path / f).state_dict() for f in ("live", "bf16"))
    assert live.keys() == rounded.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(live[key], rounded[key]) and torch.equal(rounded[key], value.bfloat16()), key


@pytest.mark.gloo
def test_a_live_export_from_bf16_is_what_trains(run_ranks, tmp_path):
    values = run_ranks(2, save_and_export, w.LLAMA, "bf16", str(tmp_path))[0]
    model = pretrained(tmp_path / "live")
    assert model.dtype == torch.bfloat16
    got = model.state_dict()["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(got.float(), torch.from_numpy(values["blocks.1.k.weight"]))


@pytest.mark.parametrize("name", ARCHS)
def test_a_config_reads_back_as_the_same_shape(name):
    assert read_architecture(hf_config(ARCHS[name]), "config.json") == (ARCHS[name], ())


def test_a_transformers_model_keeps_its_own_names(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **shape))
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    engine, *_ = initialize(model=model, config=w.config(0))
    engine.save_checkpoint(tmp_path)
    engine.close()
    with Checkpoint(tmp_path / "global_step0") as checkpoint:
        assert checkpoint.manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        export_checkpoint(checkpoint, tmp_path / "out", dtype="fp32")
    loaded = pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[n], v) for n, v in before.items())


SHARD_BYTES = 96 * 2**20


def export_in_little_memory(rank: int, world_size: int, folder: str) -> int:
    """Bytes by which the process grew at most, over an export of 24 tensors of 8 MiB in bf16."""
    import resource

    numel, values = 4 * 2**20, torch.rand(4 * 2**20)
    names = [f"layers.{i}.weight" for i in range(24)]
    ranges = [Range("weight", n, 0, numel) for n in names]
    model = {"kind": "transformers", "config": {"model_type": "x"}, "class": "X"}
    parameters = tuple(Parameter(n, (2048, 2048)) for n in names)
    root = Path(folder)
    partial = prepare(root, "a", overwrite=False)
    record, _ = write_rank(partial, 0, [(r, values) for r in ranges], None, {})
    facts: dict[str, Any] = {"tag": "a", "global_step": 1, "global_samples": 1, "applied_steps": 1, "world_size": 1}
    facts |= {"lr": 0.1, "loss_scale": None, "training": {}, "client_state": {}, "zplan_version": "", "aliases": {}}
    facts |= {"torch_version": "", "written_at": "", "files": (record,), "model": model, "parameters": parameters}
    commit(root, partial, Manifest(**facts))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Checkpoint(root / "a") as checkpoint:
        export_checkpoint(checkpoint, root / "out", dtype="bf16", shard_bytes=SHARD_BYTES)
    assert len(list((root / "out").glob("model-*.safetensors"))) == 2
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.gloo
def test_an_export_takes_less_memory_than_a_shard(run_ranks, tmp_path):
    """One shard is 96 MiB and the whole 192 in bf16; a tensor is read (16), joined (16) and rounded (8)."""
    (grown,) = run_ranks(1, export_in_little_memory, str(tmp_path))
    assert grown < SHARD_BYTES, f"grew by {grown:,} bytes"


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def test_a_model_without_a_known_config_is_refused(tmp_path):
    engine, *_ = initialize(model=Plain(), config=w.config(0))
    with pytest.raises(ZplanError, match="a `Plain` has no `config.json` that zplan knows"):
        engine.save_16bit_model(tmp_path / "out")
    engine.close()


class Wrapped(torch.nn.Module):
    """Passes its model's config on, and has other names for its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config


def tiny(**words: Any) -> Any:
    return {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, **words}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what is on its way out
@pytest.mark.parametrize("how", ["wrapped", "adapters", "adapters inside"])
def test_names_that_no_model_folder_has_are_refused(tmp_path, how):
    """`from_pretrained` would draw every weight that it does not find at random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**tiny(num_attention_heads=2)))
    if how == "wrapped":
        model, message = Wrapped(model), "a `Wrapped` has no `config.json` that zplan knows"
    else:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
        model = peft.get_peft_model(model, lora) if how == "adapters" else peft.inject_adapter_in_model(lora, model)
        message = "is of a model with adapters"
    engine, *_ = initialize(model=model, config=w.config(0))
    with pytest.raises(ZplanError, match=message):
        engine.save_16bit_model(tmp_path / "out")
    engine.close()


def test_a_model_with_buffers_is_refused_and_a_load_says_what_stays(tmp_path, capsys):
    """Checkpoints hold no buffers, and `from_pretrained` would begin running statistics anew."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    engine, *_ = initialize(model=ResNetForImageClassification(config), config=w.config(0))
    engine.save_checkpoint(tmp_path)
    message = r"`resnet\S+running_mean` is a buffer, one of \d+ that"
    with pytest.raises(ZplanError, match=message):
        engine.save_16bit_model(tmp_path / "out")
    with Checkpoint(tmp_path / "global_step0") as checkpoint, pytest.raises(ZplanError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out", dtype="fp32")
    engine.load_checkpoint(tmp_path)
    assert "running_mean` and all other buffers" in capsys.readouterr().err
    engine.close()


def test_a_model_of_another_task_is_loaded_by_its_own_class(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    engine, *_ = initialize(
        model=LlamaForSequenceClassification(LlamaConfig(**tiny(num_attention_heads=2))), config=w.config(0)
    )
    engine.save_checkpoint(tmp_path)
    engine.close()
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith("LlamaForSequenceClassification.from_pretrained(")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_a_folder_that_exists_is_refused(tmp_path):
    engine, *_ = initialize(model=w.build(w.LLAMA), config=w.config(0), init=w.fill)
    engine.save_16bit_model(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(ZplanError, match="out` exists"):
        engine.save_16bit_model(tmp_path / "out")
    assert config["model_type"] == "llama" and sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    engine.close()
