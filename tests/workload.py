"""A tiny decoder, deterministic data and the single-process reference that every stage is held to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zplan.planner.config import Checkpointing
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.runtime.decoder import Decoder, init_parameter

LLAMA = Architecture("llama", 3, 64, 4, 2, 16, 96, 101, 32, tied=False)
LLAMA_TIED = Architecture("llama", 3, 64, 4, 4, 16, 96, 101, 32, tied=True)
GPT2 = Architecture("gpt2", 3, 64, 4, 4, 16, 128, 101, 32, tied=True)
LLAMA4 = replace(LLAMA, layers=4)
ARCHS = {"llama": LLAMA, "llama4": LLAMA4, "llama-tied": LLAMA_TIED, "gpt2": GPT2}

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
MICRO_BATCH, SEQ = 2, 16


def spec(arch: Architecture) -> ModelSpec:
    return ModelSpec("tiny", decoder_units(arch), arch)


def config(
    stage: int,
    accumulation: int = 1,
    *,
    precision: str = "fp32",
    checkpointing: Checkpointing = "none",
    clip: float = CLIP,
    piece: int = 65536,
    **zplan: Any,
) -> dict[str, Any]:
    """A config in DeepSpeed's schema for the tiny workload; `piece` is the cap of one reduce, in elements."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": piece},
        "zplan": {"checkpointing": checkpointing, "seq": SEQ, **zplan},
    }


def batch(vocab: int, step: int, rank: int, micro_step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels (MICRO_BATCH, SEQ), each with a storage of its own."""
    g = torch.Generator().manual_seed(step * 10_000 + rank * 100 + micro_step)
    inputs = torch.randint(0, vocab, (MICRO_BATCH, SEQ), generator=g)
    return inputs, torch.randint(0, vocab, (MICRO_BATCH, SEQ), generator=g)


def build(arch: Architecture, checkpointing: Checkpointing = "none", device: str = "meta", **parts: Any) -> Decoder:
    with torch.device(device):
        return Decoder(arch, checkpointing=checkpointing, **parts)


def fill(name: str, tensor: Tensor) -> None:
    init_parameter(name, tensor, 0)


def reference(
    arch: Architecture,
    *,
    steps: int,
    world_size: int,
    accumulation: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[tuple[float, float]]:
    """(mean loss, gradient norm before clipping) of each step: the same micro-batches in one process, plain torch.

    In bf16 the model computes in bf16 from fp32 master weights, and gradients are added up in fp32.
    """
    model = build(arch, device="cpu").to(device)
    for name, p in model.named_parameters():
        values = torch.empty(p.shape, device=device)
        init_parameter(name, values, 0)
        p.data.copy_(values)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, **ADAMW, fused=True)
    count = world_size * accumulation
    out = []
    for step in range(steps):
        total = 0.0
        sums = [torch.zeros_like(m) for m in masters]
        for rank in range(world_size):
            for k in range(accumulation):
                loss = model(*(x.to(device) for x in batch(arch.vocab, step, rank, k)))
                loss.backward()
                total += loss.item() / count
                for s, p in zip(sums, model.parameters(), strict=True):
                    s.add_(p.grad)
                    p.grad = None
        for m, s in zip(masters, sums, strict=True):
            m.grad = s / count
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters, strict=True):
                p.copy_(m)
        out.append((total, norm.item()))
    return out
