"""Models of the configs of `class_cases.py`, and a step of each that tells a meter its phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import test_hfblocks
import test_hfgemma3
import test_hft5
import test_hfvit
import torch
import transformers
from phases import DTYPES, Observer, mark_phases, switch_on
from remote_models import Remote
from torch import Tensor, nn

from zplan.planner.config import Choice
from zplan.planner.hfconfig import read_architecture
from zplan.planner.models import REMOTE

Built = tuple[nn.Module, dict[str, Any], Callable[[], dict[str, Tensor]]]
"""A model, its modules by unit, and what makes a batch."""

AUTO = {
    "vit": (transformers.AutoModelForImageClassification, test_hfvit.modules_of),
    "t5": (transformers.AutoModelForSeq2SeqLM, test_hft5.modules_of),
    "gemma3": (transformers.AutoModelForImageTextToText, test_hfgemma3.modules_of),
    "bert": (transformers.AutoModelForMaskedLM, test_hfblocks.modules_of),
}


def build(config: dict[str, Any], choice: Choice, meter: Observer) -> tuple[Callable[[], None], nn.Module]:
    """A step on a random batch that enters its phases, and its model in the choice's precision on its device."""
    kind = config["model_type"]
    with torch.device(choice.device):
        model, modules, batch = _remote(config, choice) if kind in REMOTE else _class(config, choice)
    model.to(DTYPES[choice.precision]).train()
    mark_phases(modules, meter)

    def step() -> None:
        meter.enter("forward.embed")
        inputs = batch()
        loss = model(*inputs.values()) if kind in REMOTE else model(**inputs).loss
        meter.enter("backward.loss")
        loss.backward()
        meter.enter("step")
        del inputs, loss
        meter.enter("idle")

    return step, model


def _remote(config: dict[str, Any], choice: Choice) -> Built:
    arch, _ = read_architecture(config, "m")
    model = Remote(arch, choice.attention, choice.checkpointing)
    blocks = {f"blocks.{i}": layer for i, layer in enumerate(model.layers)}
    modules = {"embed": model.embed, **blocks, "norm": model.norm, "head": model.head}
    return model, modules, lambda: _tokens(choice)


def _class(config: dict[str, Any], choice: Choice) -> Built:
    kind = config["model_type"]
    auto, modules_of = AUTO.get(kind, (transformers.AutoModelForCausalLM, test_hfblocks.modules_of))
    cache = {} if kind == "vit" else {"use_cache": False}
    hf = transformers.AutoConfig.for_model(
        **test_hfblocks.class_config(config), **cache, attn_implementation=choice.attention
    )
    model = auto.from_config(hf)
    if kind == "t5" and not config.get("tie_word_embeddings", True):
        # The class ties on, but checkpoints that say so have a head of their own.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if choice.checkpointing == "full":
        # Without the state of the random number generator, which is 5 KB on the host a layer.
        switch_on(model, use_reentrant=False, preserve_rng_state=False)
    if kind == "vit":
        pixels = (choice.micro_batch, hf.num_channels, hf.image_size, hf.image_size)
        return (
            model,
            modules_of(model),
            lambda: {
                "pixel_values": torch.rand(pixels, device=choice.device),
                "labels": torch.randint(hf.num_labels, pixels[:1], device=choice.device),
            },
        )
    return model, modules_of(model), lambda: _tokens(choice)


def _tokens(choice: Choice) -> dict[str, Tensor]:
    shape = (choice.micro_batch, choice.seq)
    # 3 and more: no padding; below 99: no image.
    found = {name: torch.randint(3, 99, shape, device=choice.device) for name in ("input_ids", "labels")}
    if choice.padded:
        found["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=choice.device)
        found["attention_mask"][0, -1] = 0
    return found
