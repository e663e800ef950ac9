"""Scripts written from a plan: a training script on FSDP2, and a Slurm job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zplan.planner.models import Architecture
from zplan.planner.writing import render

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan


def model_config(a: Architecture) -> dict[str, Any]:
    """Keys of a transformers config of this shape."""
    if a.family == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": a.layers,
            "n_embd": a.hidden,
            "n_head": a.heads,
            "n_inner": a.ffn,
            "vocab_size": a.vocab,
            "n_positions": a.max_seq,
            "tie_word_embeddings": a.tied,
            "layer_norm_epsilon": a.norm_eps,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta, **dict(a.rope_scaling)}
    return {
        "model_type": "llama",
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.max_seq,
        "tie_word_embeddings": a.tied,
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": rope,
    }


def _constants(plan: Plan) -> str:
    c, t = plan.choice, plan.training
    rows = {
        "WORLD_SIZE": c.world_size,
        "MICRO_BATCH": c.micro_batch,
        "ACCUMULATION": c.accumulation,
        "SEQ": c.seq,
        "LR": t.lr,
        "BETAS": t.betas,
        "EPS": t.eps,
        "WEIGHT_DECAY": t.weight_decay,
        "CLIP": t.clip,
    }
    return "\n".join(f"{name} = {value!r}" for name, value in rows.items())


_FSDP2_HEAD = '''"""Training on PyTorch FSDP2, written by zplan {version} from a plan for {model}.

Start it with: torchrun --nproc-per-node {ranks} train_fsdp2.py --steps 100
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
{imports}from transformers import AutoConfig, AutoModelForCausalLM

{constants}
MODEL = json.loads("""{config}""")
'''

_FSDP2_BODY = '''

def build():
    """The model in fp32 on this rank, then cut up. Use from_pretrained instead to start from published weights."""
    config = AutoConfig.for_model(**MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="{attention}", dtype=torch.float32)
    model.config.use_cache = False
{checkpointing}    return model


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def batches(vocab, device, rank):
    """Random tokens: put your own loader here. Each item is one micro-batch of this rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(vocab, (MICRO_BATCH, SEQ), generator=generator).to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    cuda = torch.cuda.is_available() and {on_cuda}
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != WORLD_SIZE:
        raise SystemExit(f"the plan is for {{WORLD_SIZE}} ranks, this job has {{world}}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = build()
{shard}    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    data = batches(MODEL["vocab_size"], device, rank)
    for step in range(steps):
        total = 0.0
        for micro_step in range(ACCUMULATION):
            last = micro_step == ACCUMULATION - 1
            tokens = next(data)
{micro_step}            total += loss.item() / ACCUMULATION
        if CLIP > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {{step + 1}}: loss {{total:.4f}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_SHARD = """    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
"""
_SHARD_STEP = """            # Gradients are reduced in each micro-step into the shard, as at ZeRO stages 2 and 3.
            model.set_is_last_backward(last)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / ACCUMULATION).backward()
"""
_REPLICATE = """    model = DistributedDataParallel(model.to(device))
"""
_REPLICATE_STEP = """            model.require_backward_grad_sync = last
            with torch.autocast(device.type, torch.bfloat16, enabled={bf16}):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / ACCUMULATION).backward()
"""


def fsdp2_script(plan: Plan) -> str:
    """A training script for torchrun: FSDP2 at stages 1 to 3, DDP at stage 0."""
    c = plan.choice
    assert plan.spec.arch is not None
    if c.stage:
        imports = (
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
        )
        dtype = "bfloat16" if c.precision == "bf16" else "float32"
        shard, micro_step = _SHARD.format(dtype=dtype, reshard=c.stage == 3), _SHARD_STEP
    else:
        imports = "from torch.nn.parallel import DistributedDataParallel\n"
        shard, micro_step = _REPLICATE, _REPLICATE_STEP.format(bf16=c.precision == "bf16")
    head = _FSDP2_HEAD.format(
        version=plan.zplan_version,
        model=plan.spec.name.replace("\\", "/").replace('"', "'"),
        ranks=c.world_size,
        imports=imports,
        constants=_constants(plan),
        config=render(model_config(plan.spec.arch)),
    )
    checkpointing = "    model.gradient_checkpointing_enable()\n" if c.checkpointing == "full" else ""
    return head + _FSDP2_BODY.format(
        attention=c.attention,
        checkpointing=checkpointing,
        on_cuda=c.device == "cuda",
        shard=shard,
        micro_step=micro_step,
    )


_SLURM = """#!/bin/bash
# Written by zplan {version}: {model}, stage {stage}, {world} ranks, {peak} a GPU.
#SBATCH --job-name=zplan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --output=%x-%j.out
set -euo pipefail

export ZPLAN_PLAN="${{ZPLAN_PLAN:-plan.json}}"
{device}first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One torchrun a node; it starts one rank for each GPU.
srun --kill-on-bad-exit=1 torchrun \\
    --nnodes={nodes} --nproc-per-node={per_node} \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID" \\
    train.py "$@"
"""


def slurm_script(plan: Plan, per_node: int) -> str:
    """A job script: one torchrun per node, with the variables that zplan's own launcher sets."""
    from zplan.planner.units import format_small

    cuda = plan.choice.device == "cuda"
    device = "export ZPLAN_DEVICE=cpu\n"
    if cuda:
        device = (
            "# The plan counts on it: without it the allocator reserves more than it uses.\n"
            "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
        )
    resources = f"#SBATCH --gpus-per-node={per_node}\n" if cuda else f"#SBATCH --cpus-per-task={per_node}\n"
    if plan.hardware.host_mem_bytes is not None:
        resources += f"#SBATCH --mem={plan.hardware.host_mem_bytes // 2**20}M\n"
    return _SLURM.format(
        version=plan.zplan_version,
        model=plan.spec.name.replace("\n", " "),
        stage=plan.choice.stage,
        world=plan.choice.world_size,
        peak=format_small(plan.peak_bytes),
        nodes=plan.hardware.nodes,
        per_node=per_node,
        resources=resources,
        device=device,
    )
