"""transformers models of 1B to 2B as they are, in checked mode: predicted against measured bytes, by phase.

torchrun --standalone --nproc-per-node N tests/bench/gpu_real.py [MODEL ...] [stageS] [worldN] [full | none]

By default every model of `MODELS` at stage 3, without checkpointing and with it. `world8` is rank 0 of 8 in one
process, whose collectives move nothing: its bytes are true and its losses are not, so those are not looked at.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("ZPLAN_CHECK", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from hf_ledger import batches, engine_losses, ledger_of, spec_of, start_clean, tell
from hf_models import switch_on

from zplan.runtime.initialize import initialize
from zplan.runtime.mesh import own_device
from zplan.runtime.verify import Meter

QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    **{"max_position_embeddings": 40960, "tie_word_embeddings": True},
}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": True},
}
TINY = {
    **{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500},
    **{"max_position_embeddings": 64, "tie_word_embeddings": True},
}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3-1.7b": (QWEN3, 2, 2048),
    "llama-3.2-1b": (LLAMA, 2, 2048),
}
"""Keys of the config, micro-batch, sequence."""
CHECKS = {"tiny": (TINY, 2, 33), "tiny-llama": ({**TINY, "model_type": "llama"}, 2, 33)}
"""For a dry run of this script on a CPU."""
STEPS = 4


def run(name: str, stage: int, checkpointing: str, world: int | None) -> int:
    """One model; how many of its rows are off, with one more for losses that do not fall."""
    keys, micro_batch, seq = {**MODELS, **CHECKS}[name]
    device, spec = own_device(), spec_of(keys)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "zplan": {"seq": seq, "checkpointing": checkpointing},
    }
    hf = transformers.AutoConfig.for_model(**keys, use_cache=False, attn_implementation="sdpa")
    start_clean()
    with Meter(device) as meter:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf).train()
        if checkpointing == "full":
            switch_on(model, use_reentrant=False, preserve_rng_state=False)
        engine, *_ = initialize(model=model, config=config, world=world)
        meter.attach(engine)
        losses = engine_losses(engine, batches(keys["vocab_size"], (micro_batch, seq), STEPS, device))
        comparison = meter.compare(ledger_of(engine, spec))
    bad = 0
    if engine.rank == 0:
        where = f"world {engine.world_size}" + (" (one of it)" if world else "")
        title = f"{name} ({spec.num_params:,}) stage {stage} mb {micro_batch} seq {seq} {checkpointing} {where}"
        bad = tell(title, comparison)
        if world is None:
            falls = losses[-1] < losses[0]
            bad += not falls
            sys.stdout.write(f"  losses {', '.join(f'{x:.4f}' for x in losses)}{'' if falls else ': DO NOT FALL'}\n")
        if device.type == "cuda":
            stats = torch.cuda.memory_stats()
            sys.stdout.write(
                f"  allocated peak {stats['allocated_bytes.all.peak']:,}, "
                f"reserved {stats['reserved_bytes.all.peak']:,}\n"
            )
        sys.stdout.flush()
    engine.close()
    return bad


def main() -> None:
    words = sys.argv[1:]
    names = [w for w in words if w in MODELS or w in CHECKS] or list(MODELS)
    stage = next((int(w[5:]) for w in words if w.startswith("stage")), 3)
    world = next((int(w[5:]) for w in words if w.startswith("world")), None)
    kinds = [w for w in words if w in ("full", "none")] or ["none", "full"]
    bad = sum(run(name, stage, kind, world) for name in names for kind in kinds)
    sys.exit(f"{bad} rows are off" if bad else 0)


if __name__ == "__main__":
    main()
