"""QLoRA on one card: a Llama of 1B in bitsandbytes' nf4 under peft's adapters, beside a plain loop and its ledger.

torchrun --standalone --nproc-per-node 1 tests/bench/gpu_qlora.py [tiny]
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("ZPLAN_CHECK", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from gpu_real import CHECKS, MODELS
from hf_ledger import batches, engine_losses, ledger_of, plain_losses, spec_of, start_clean, tell
from hf_models import switch_on
from torch import nn

from zplan.planner.adapters import adapt, find_targets, frozen_bytes
from zplan.planner.ledger import Line
from zplan.planner.models import Adapters, ModelSpec
from zplan.planner.timeline import timeline
from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import own_device
from zplan.runtime.verify import Meter

try:
    import bitsandbytes as bnb
    import peft
except ImportError as missing:
    sys.exit(f"gpu_qlora needs {missing.name}: put it on PYTHONPATH (pip install --no-deps --target DIR bitsandbytes)")

RANK, STEPS, LR, CLIP = 16, 5, 2e-4, 1.0
CASES = (0, "none", None), (3, "none", None), (3, "full", None), (3, "none", 8)
"""Stage, checkpointing, and ranks where this is to be one of several: then its bytes are true, its losses are not."""
LOSS_TOLERANCE = 2e-3
"""Of bf16: the engine sums gradients in another order than torch's loop."""


def quantize(model: nn.Module) -> None:
    """Every linear map of the blocks in nf4 with double quantization, as `BitsAndBytesConfig` does on loading."""
    for block in model.model.layers:
        for name, linear in list(block.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            packed = bnb.nn.Linear4bit(
                *(linear.in_features, linear.out_features),
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                device="meta",
            )
            weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=packed)
            packed.weight = weight.to(linear.weight.device)
            parent, _, last = name.rpartition(".")
            setattr(block.get_submodule(parent), last, packed)
    model.is_loaded_in_4bit = True  # by this peft knows which of its layers to put around


def build(keys: dict[str, Any], checkpointing: str, targets: list[str]) -> nn.Module:
    """The model on the device, quantized, with adapters in bf16; the same values each time."""
    torch.manual_seed(0)
    hf = transformers.AutoConfig.for_model(**keys, use_cache=False, attn_implementation="sdpa")
    with own_device():
        model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16)
        quantize(model)
        lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, lora_dropout=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            peft.inject_adapter_in_model(lora, model)
    for name, p in model.named_parameters():
        if p.is_floating_point():
            p.data = p.data.to(torch.bfloat16)
        p.requires_grad_("lora_" in name)
    if checkpointing == "full":
        switch_on(model, use_reentrant=False, preserve_rng_state=False)
    return model.train()


def spec(keys: dict[str, Any]) -> ModelSpec:
    base = spec_of(keys)
    return adapt(base, Adapters(RANK, find_targets(base, "all-linear"), quantized=True))


def code_table(mine: ModelSpec, device: torch.device) -> list[Line]:
    """Of bitsandbytes itself, one a process: the 8-bit values of constants. On a card it is older than the meter."""
    span = timeline(mine.units).always
    return [Line("act.code_table", 4 * 256, (span,), "activations")] if device.type == "cpu" else []


def checksums(model: nn.Module) -> list[int]:
    packed = (p.data for p in model.parameters() if isinstance(p, bnb.nn.Params4bit))
    return [zlib.crc32(p.cpu().numpy().tobytes()) for p in packed]


def check_base(model: nn.Module, before: list[int], mine: ModelSpec, told: dict[str, int]) -> int:
    """The quantized weights are what they were, and as large as the planner says of `--qlora nf4`."""
    same = checksums(model) == before
    have, want = sum(n for line, n in told.items() if line.startswith("params.frozen")), frozen_bytes(mine, 2)
    near = abs(have - want) <= 1e-4 * want  # units are padded to 64 elements
    sys.stdout.write(
        f"  base {'unchanged' if same else 'CHANGED'}; `--qlora` says {want:,} bytes of it, measured {have:,}"
        f"{'' if near else ': OFF'}\n"
    )
    return (not same) + (not near)


def run(keys: dict[str, Any], size: tuple[int, int], case: tuple[int, str, int | None], expected: list[float]) -> int:
    stage, checkpointing, world = case
    mine, device = spec(keys), own_device()
    targets = list({t.rpartition(".")[2] for t in mine.adapters.targets})
    config = {
        "train_micro_batch_size_per_gpu": size[0],
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        "zplan": {"seq": size[1], "checkpointing": checkpointing},
    }
    start_clean()
    with Meter(device) as meter:
        model = build(keys, checkpointing, targets)
        before = checksums(model)
        engine, *_ = initialize(model=model, config=config, world=world)
        meter.attach(engine)
        losses = engine_losses(engine, batches(keys["vocab_size"], size, STEPS, device))
        comparison = meter.compare(ledger_of(engine, mine, *code_table(mine, device)))
        told = {name: n for (name, _), n in meter._snapshot().items()}
    where = "" if world is None else f" world {world} (one of it)"
    bad = tell(f"qlora {mine.name} stage {stage} mb {size[0]} seq {size[1]} {checkpointing}{where}", comparison)
    if world is None:
        bad += check_base(model, before, mine, told)
        off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        bad += not off < LOSS_TOLERANCE
        sys.stdout.write(f"  losses {', '.join(f'{x:.4f}' for x in losses)}: off {off:.1e} from a plain loop\n")
    sys.stdout.flush()
    engine.close()
    return bad


def main() -> None:
    keys, *size = CHECKS["tiny-llama"] if "tiny" in sys.argv else MODELS["llama-3.2-1b"]
    mine = spec(keys)
    targets = list({t.rpartition(".")[2] for t in mine.adapters.targets})
    plain = build(keys, "none", targets)
    expected = plain_losses(plain, batches(keys["vocab_size"], tuple(size), STEPS, own_device()), lr=LR, clip=CLIP)
    del plain
    sys.stdout.write(
        f"{mine.num_params:,} parameters, {mine.num_trained:,} trained; bitsandbytes {bnb.__version__}, peft "
        f"{peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}\n"
        f"plain loop: {', '.join(f'{x:.4f}' for x in expected)}\n"
    )
    bad = sum(run(keys, tuple(size), case, expected) for case in CASES)
    sys.exit(f"{bad} rows or checks are off" if bad else 0)


if __name__ == "__main__":
    main()
