"""The peers, set up as their own documentation recommends, on the decoder that zplan trains.

Each maker returns `(step, close)`; `step(ids, labels)` is a whole optimizer step and returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shapes import SHAPES
from torch import nn

from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.mesh import Mesh

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Made = tuple[Step, Callable[[], None]]


def build(name: str, checkpointing: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device(device):
        model = Decoder(SHAPES[name], checkpointing=checkpointing)
    for pname, p in model.named_parameters():
        init_parameter(pname, p.data, 0)
    return model.to(dtype)


def fsdp2_step(name: str, checkpointing: str, mesh: Mesh, *, compiled: bool) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = init_device_mesh("cuda", (mesh.world_size,))
    model = build(name, checkpointing, mesh.device)
    if compiled:
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block, mesh=where, mp_policy=policy)
    fully_shard(model, mesh=where, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: None


def deepspeed_step(name: str, micro_batch: int, checkpointing: str, mesh: Mesh, stage: int, *, compiled: bool) -> Made:
    """DeepSpeed with its defaults, bf16, overlap on; stage 3 parameters are born under `zero.Init`."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed()
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = Decoder(SHAPES[name], checkpointing=checkpointing)
    else:
        model = build(name, checkpointing, mesh.device, torch.bfloat16)
    if compiled:
        for block in model.blocks:
            block.compile()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine.destroy
