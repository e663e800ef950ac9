"""Predicted against measured activations of transformers' classes on one GPU, phase by phase; one line per case.

python tests/bench/gpu_classes.py [NAME ...]

What is off by no more than `CLASS_SPREAD` per cent of the largest phase is within what the ledger's lines say.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from phases import DTYPES, AllocatorMeter, choose, mark_phases
from test_hfblocks import CASES, EAGER_ONLY, SMALL, class_config, modules_of, predicted

from zplan.planner.activations import CLASS_SPREAD
from zplan.planner.config import Choice

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
LATENT = {
    **{"num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "moe_intermediate_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 4},
}
NAMES = ["deepseek_v3", "deepseek_v2", "deepseek_v2, groups", "gpt_oss", "mixtral", "qwen3_moe", "qwen3"]


def config_of(name: str) -> dict:
    """The test's case, in widths that a GPU's kernels are made for."""
    case = CASES[name]
    wide = LATENT if "kv_lora_rank" in case else {}
    low = {"q_lora_rank": 384} if case.get("q_lora_rank") else {}
    return SMALL | case | LARGE | wide | low


def measured(config: dict, choice: Choice) -> dict[str, int]:
    """What the second step holds beside the parameters and cuBLAS's workspaces, by phase."""
    keys = class_config(config)
    hf = transformers.AutoConfig.for_model(**keys, use_cache=False, attn_implementation=choice.attention)
    model = transformers.AutoModelForCausalLM.from_config(hf).to("cuda", DTYPES[choice.precision])
    model.train()
    if choice.checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    meter = AllocatorMeter()
    mark_phases(modules_of(model), meter)

    def step() -> None:
        meter.enter("forward.embed")
        ids, labels = (torch.randint(3, 100, (choice.micro_batch, choice.seq), device="cuda") for _ in range(2))
        loss = model(input_ids=ids, labels=labels).loss
        meter.enter("backward.loss")
        loss.backward()
        meter.enter("step")
        del ids, labels, loss
        meter.enter("idle")

    step()  # cuBLAS takes its workspaces for good
    states = torch.cuda.memory_stats()["requested_bytes.all.current"]
    meter.peaks.clear()
    step()
    return {phase: peak - states for phase, peak in meter.peaks.items() if phase != "idle"}


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")  # noqa: T201
    wrong = 0
    for name, attention, checkpointing in product(sys.argv[1:] or NAMES, ("sdpa", "eager"), ("none", "full")):
        if attention == "sdpa" and name.startswith(EAGER_ONLY):
            continue
        config, choice = config_of(name), choose(2, 1024, "bf16", checkpointing, attention)
        expected = predicted(config, replace(choice, device="cuda"))
        seen = measured(config, choice)
        gc.collect()
        torch.cuda.empty_cache()
        off = {p: seen.get(p, 0) - n for p, n in expected.items() if p != "idle"}
        worst = sorted(off, key=lambda p: -abs(off[p]))[:3]
        top, true = max(expected.values()), max(seen.values())
        wrong += 100 * abs(true - top) > CLASS_SPREAD * top
        shown = ", ".join(f"{p} {off[p]:+,}" for p in worst if off[p]) or "equal"
        print(  # noqa: T201
            f"{name:20} {attention:5} {checkpointing:4} predicted {top:>13,} measured {true:>13,} "
            f"({100 * (true - top) / top:+.2f} %); {shown}",
            flush=True,
        )
    sys.exit(f"{wrong} peaks are off by more than {CLASS_SPREAD} %" if wrong else 0)


if __name__ == "__main__":
    main()
