"""Predicted against measured activations of transformers classes on one GPU, phase by phase; one line per case.

python tests/bench/gpu_presets.py [NAME ...]

Models of the table with few layers, called with a batch of their own; NAME limits them. `transformers` has to be there.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import test_hfblocks
import test_hfgemma3
import test_hft5
import test_hfvit
import transformers
from phases import DTYPES, AllocatorMeter, activation_ledger, mark_phases

from zplan.planner.config import Choice
from zplan.planner.hfconfig import read_architecture
from zplan.planner.hfshapes import SHAPES
from zplan.planner.presets import read_preset

LAYERS = 4
AUTO = {
    "vit": (transformers.AutoModelForImageClassification, test_hfvit.modules_of),
    "t5": (transformers.AutoModelForSeq2SeqLM, test_hft5.modules_of),
    "gemma3": (transformers.AutoModelForImageTextToText, test_hfgemma3.modules_of),
    "bert": (transformers.AutoModelForMaskedLM, test_hfblocks.modules_of),
}
CASES = [
    (name, batch, seq, *how)
    for name, batch, seq in (
        ("vit-base", 64, 197),
        ("vit-large", 3, 197),
        ("t5-base", 8, 512),
        ("t5-base", 3, 1040),
        ("gemma-3-4b", 2, 1008),
        ("bert-base", 8, 512),
        ("qwen3-0.6b", 2, 2048),
        ("pythia-160m", 2, 2048),
        ("opt-1.3b", 2, 2048),
        ("falcon-40b", 1, 1024),
    )
    for how in (
        ("none", "sdpa", "bf16"),
        ("full", "sdpa", "bf16"),
        ("none", "eager", "bf16"),
        ("none", "eager", "fp32"),
    )
]


def shortened(name: str) -> dict:
    """A preset's config with few layers."""
    config = dict(read_preset(name))
    kind = config["model_type"]
    if kind == "gemma3":
        return config | {"text_config": config["text_config"] | {"num_hidden_layers": LAYERS, "use_cache": False}}
    layers = {"num_decoder_layers": LAYERS, "decoder_start_token_id": 0} if kind == "t5" else {}
    return config | layers | {SHAPES[kind].names.get("layers", "num_hidden_layers"): LAYERS}


def measured(config: dict, choice: Choice) -> dict[str, int]:
    """What the second step holds beside parameters and cuBLAS's workspaces, by phase."""
    kind = config["model_type"]
    auto, modules_of = AUTO.get(kind, (transformers.AutoModelForCausalLM, test_hfblocks.modules_of))
    hf = transformers.AutoConfig.for_model(**config, use_cache=False, attn_implementation=choice.attention)
    with torch.device("cuda"):
        model = auto.from_config(hf).to(DTYPES[choice.precision]).train()
    if choice.checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    meter, shape = AllocatorMeter(), (choice.micro_batch, choice.seq)
    mark_phases(modules_of(model), meter)

    def step() -> None:
        meter.enter("forward.embed")
        if kind == "vit":
            pixels = (choice.micro_batch, hf.num_channels, hf.image_size, hf.image_size)
            batch = {"pixel_values": torch.rand(pixels, device="cuda"), "labels": _ids(hf.num_labels, shape[:1])}
        else:
            batch = {name: _ids(1000, shape) for name in ("input_ids", "labels")}
        loss = model(**batch).loss
        meter.enter("backward.loss")
        loss.backward()
        meter.enter("step")
        del batch, loss
        meter.enter("idle")

    step()
    states = torch.cuda.memory_stats()["requested_bytes.all.current"]
    meter.peaks.clear()
    step()
    return {phase: peak - states for phase, peak in meter.peaks.items() if phase != "idle"}


def _ids(below: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(3, below, shape, device="cuda")


def main() -> None:
    for name, batch, seq, checkpointing, attention, precision in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        config = shortened(name)
        choice = Choice(
            0, 1, batch, seq=seq, checkpointing=checkpointing, attention=attention, precision=precision, device="cuda"
        )
        ledger = activation_ledger(read_architecture(config, name)[0], choice)
        predicted = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
        seen = measured(config, choice)
        gc.collect()
        torch.cuda.empty_cache()
        off = {p: seen[p] - predicted[p] for p in seen}
        worst = sorted((p for p in off if off[p]), key=lambda p: -abs(off[p]))
        shown = ", ".join(f"{p} {off[p]:+,}" for p in worst[:4]) or "equal"
        most, least = max(predicted.values()), max(seen.values())
        print(  # noqa: T201
            f"{name:12} {batch} x {seq:5} {precision} {checkpointing:4} {attention:5} predicted {most:>15,} measured "
            f"{least:>15,} {100 * (most / least - 1):+.2f} % phases off: {len(worst)} of {len(off)}; {shown}",
            flush=True,
        )


main()
