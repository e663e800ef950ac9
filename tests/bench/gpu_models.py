"""Do transformers' own modules train alike at every stage on GPUs, with checked mode on at stage 3?

torchrun --standalone --nproc-per-node N tests/bench/gpu_models.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import transformers
from job import join_job

from zplan.runtime.initialize import initialize

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_cache": False,
}
GPT2 = {"vocab_size": 512, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256, "use_cache": False}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "llama": ("LlamaConfig", SMALL),
    "llama-tied": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**GPT2, **NO_DROPOUT}),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 64}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
STEPS = 5


def losses(name: str, stage: int, *, checkpointing: bool, checked: bool) -> list[float]:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize(model=model, config=config, checked=checked)
    out = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(100 * step + engine.rank)
        ids = torch.randint(0, 512, (4, 128), generator=g).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        if engine.world_size > 1:
            dist.all_reduce(mean)
        out.append(mean.item() / engine.world_size)
    engine.close()
    return out


def main() -> None:
    mesh = join_job()
    bad = 0
    for name in MODELS:
        expected = losses(name, 0, checkpointing=False, checked=False)
        for stage, checkpointing in ((1, False), (2, True), (3, False), (3, True)):
            got = losses(name, stage, checkpointing=checkpointing, checked=stage == 3)
            off = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
            bad += not off < 2e-3
            if mesh.rank == 0:
                word = "ok " if off < 2e-3 else "BAD"
                sys.stdout.write(f"{word} {name} stage {stage} checkpointing {checkpointing}: loss off {off:.1e}\n")
    if mesh.rank == 0:
        sys.stdout.write(f"{bad} bad\n")
    dist.barrier()
    mesh.close()


main()
