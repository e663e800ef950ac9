"""The peers, set up as their own documentation recommends, on the decoder that zplan trains."""

from __future__ import annotations

import torch
from shapes import SHAPES, Case
from torch import nn
from training import ADAMW, CLIP, Made

from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.mesh import Mesh


def build(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device(device):
        model = Decoder(SHAPES[case.model], checkpointing=case.checkpointing)
    for pname, p in model.named_parameters():
        init_parameter(pname, p.data, 0)
    return model.to(dtype)


def fsdp2_step(case: Case, mesh: Mesh, *, keep: bool = False) -> Made:
    """FSDP2, one unit a block; gradients are reduced in the last micro-step.

    `keep`: parameters stay gathered from forward to backward (`reshard_after_forward=False`), as at ZeRO stage 2.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": init_device_mesh("cuda", (mesh.world_size,)), "mp_policy": policy}
    if keep:
        options["reshard_after_forward"] = False
    model = build(case, mesh.device)
    if case.compiled:
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for i, (x, y) in enumerate(zip(ids.unbind(), labels.unbind(), strict=True)):
            model.set_requires_gradient_sync(i == case.accumulation - 1)
            loss = model(x, y)
            (loss / case.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: None


def deepspeed_step(case: Case, mesh: Mesh) -> Made:
    """DeepSpeed with its defaults, bf16, overlap on; stage 3 parameters are born under `zero.Init`."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage, "overlap_comm": True, "contiguous_gradients": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed()
    if case.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = Decoder(SHAPES[case.model], checkpointing=case.checkpointing)
    else:
        model = build(case, mesh.device, torch.bfloat16)
    if case.compiled:
        for block in model.blocks:
            block.compile()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for x, y in zip(ids.unbind(), labels.unbind(), strict=True):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step, engine.destroy
