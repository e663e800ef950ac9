"""The cases of `gpu_classes.py`: configs of transformers' classes and how each is trained, wide for a GPU or small."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import test_hfblocks
import test_hfgemma3
import test_hfremote
import test_hft5
import test_hfvit
from phases import choose

from zplan.planner.config import Choice
from zplan.planner.hardware import Hardware
from zplan.planner.hfshapes import SHAPES
from zplan.planner.presets import read_preset

Config = dict[str, Any]

PRESETS = [
    *(("vit-base", 64, 197), ("vit-large", 3, 197), ("t5-base", 8, 512), ("t5-base", 3, 1040)),
    *(("gemma-3-4b", 2, 1008), ("bert-base", 8, 512), ("qwen3-0.6b", 2, 2048), ("pythia-160m", 2, 2048)),
    *(("opt-1.3b", 2, 2048), ("falcon-40b", 1, 1024)),
]
PRESET_LAYERS = 4
WIDTHS = {"hidden_size": 1024, "n_embd": 1024, "word_embed_proj_dim": 1024, "d_model": 1024}
LENGTHS = {"max_position_embeddings": 8192, "n_positions": 8192, "seq_length": 8192}
LARGE = {
    **(WIDTHS | LENGTHS),
    **{"intermediate_size": 2816, "ffn_dim": 2816, "ffn_hidden_size": 2816, "d_ff": 2816, "rotary_dim": 32},
    **{"num_attention_heads": 16, "n_head": 16, "num_heads": 16, "kv_channels": 64},
    **{"vocab_size": 8192, "padded_vocab_size": 8192},
    **{"moe_intermediate_size": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "n_routed_experts": 16, "image_size": 224},
}
"""What a GPU's kernels are made for, for the keys that a case has."""
BY_VALUE = {
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_heads", "n_head"),
        {1: 1, 2: 4, 4: 16, 6: 6},
    ),
    "head_dim": {16: 64, 24: 128},
    "d_kv": {16: 64, 24: 96},
    "q_lora_rank": {None: None, 20: 384},
    "image_size": {48: 224, 35: 227},
    # Fused attention is refused from a window on; 16 is a class that has none.
    "sliding_window": {16: 128, 32: 512, 64: 4096},
}
"""The same where cases differ."""
SIX_HEADS = {"hidden_size": 384, "n_embd": 384}
FP32 = ("qwen2, tied", "opt", "gptj", "deepseek_v3", "gpt_neox")
PADDED = ("qwen2", "qwen3", "opt", "phi", "olmo2", "deepseek_v3", "deepseek_v2")
TOKENS = {"cuda": (2, 1024), "cpu": (2, 33)}
HOWS = [(c, a, "bf16") for c in ("none", "full") for a in ("sdpa", "eager")]


@dataclass(frozen=True)
class Case:
    """One model and one way to train it. `apart` are the units whose phases are not compared."""

    name: str
    config: Config
    choice: Choice
    apart: tuple[str, ...] = ()

    def __str__(self) -> str:
        c = self.choice
        return f"{self.name} {c.micro_batch}x{c.seq} {c.precision} {c.checkpointing} {c.attention}"


def cases(device: str, capability: str = "9.0") -> Iterator[Case]:
    """All cases, on a GPU of a compute capability; on a CPU with the tests' own small widths and few tokens."""
    cudnn_width = Hardware(1, 1, 0, compute_capability=capability).cudnn_width if device == "cuda" else 0
    for case in (
        *_presets(device),
        *_decoders(device),
        *_t5(device),
        *_vit(device),
        *_gemma3(device),
        *_remote(device),
    ):
        yield replace(case, choice=replace(case.choice, device=device, cudnn_width=cudnn_width))


def _presets(device: str) -> Iterator[Case]:
    for name, batch, seq in PRESETS:
        # One of Falcon 40B's layers has 0.7 billion parameters.
        layers = PRESET_LAYERS if device == "cuda" else 1 if name == "falcon-40b" else 2
        config = shortened(name, layers, small=device != "cuda")
        kind = config["model_type"]
        b, t = (batch, seq) if device == "cuda" else (min(batch, 2), 197 if kind == "vit" else 24 + seq % 16)
        apart = test_hfgemma3.TOWER if kind == "gemma3" else ()
        for checkpointing, attention, precision in (*HOWS[:3], ("none", "eager", "fp32")):
            if kind == "bert" and attention == "sdpa" and device != "cuda":
                continue  # It has dropout, which fused attention on a CPU takes none of.
            yield Case(name, config, choose(b, t, precision, checkpointing, attention), apart)


def _decoders(device: str) -> Iterator[Case]:
    tokens = TOKENS[device]
    for name, keys in test_hfblocks.CASES.items():
        config = of_width(test_hfblocks.SMALL | keys, device)
        fused = not name.startswith(test_hfblocks.EAGER_ONLY) and tokens[1] <= (config.get("sliding_window") or 10**9)
        for how in (*HOWS, *((("none", "sdpa", "fp32"),) if name in FP32 else ())):
            if how[1] == "eager" or fused:
                yield _case(name, config, tokens, how)
        for how in HOWS[:2]:
            # On a CPU fused attention takes no dropout.
            if name in test_hfblocks.DROPPED and (how[1] == "eager" or (fused and device == "cuda")):
                yield _case(f"{name}, dropout", config | test_hfblocks.DROPPED[name], tokens, how)
        if name in PADDED:
            case = _case(f"{name}, padded", config, tokens, HOWS[0])
            # There each class makes its mask in its own way.
            yield replace(case, choice=replace(case.choice, padded=True), apart=("embed",))


def _t5(device: str) -> Iterator[Case]:
    for name, keys in (test_hft5.CASES | {"t5, dropout": {"dropout_rate": 0.1}}).items():
        for how in HOWS:
            if how[1] == "eager" or device == "cuda" or "dropout" not in name:
                yield _case(name, of_width(test_hft5.SMALL | keys, device), TOKENS[device], how)


def _vit(device: str) -> Iterator[Case]:
    for name, keys in (test_hfvit.CASES | {"vit, dropout": test_hfvit.DROPPED}).items():
        config = of_width(test_hfvit.SMALL | keys, device)
        for how in HOWS:
            if how[1] == "eager" or device == "cuda" or "dropout" not in name:
                yield _case(name, config, (8 if device == "cuda" else 2, test_hfvit.tokens(config)), how)


def _gemma3(device: str) -> Iterator[Case]:
    for name, keys in test_hfgemma3.CASES.items():
        text = of_width(keys["text_config"], device)
        short = (4, text["sliding_window"] - 1)
        for how in HOWS:
            case = _case(
                name,
                test_hfgemma3.SMALL | keys | {"text_config": text},
                short if how[1] == "sdpa" else TOKENS[device],
                how,
            )
            yield replace(case, apart=test_hfgemma3.TOWER)


def _remote(device: str) -> Iterator[Case]:
    """Modules of ours; the embedding's phase, where masks are made, is apart."""
    for name, keys in test_hfremote.CASES.items():
        for how in HOWS:
            if how[1] == "sdpa" or name not in test_hfremote.ONLY_FUSED:
                yield replace(_case(name, of_width(keys, device), TOKENS[device], how), apart=("embed",))


def _case(name: str, config: Config, tokens: tuple[int, int], how: tuple[str, str, str]) -> Case:
    return Case(name, config, choose(*tokens, how[2], how[0], how[1]))


def of_width(config: Config, device: str) -> Config:
    """A test's config with the widths of a GPU, or as it is."""
    if device != "cuda":
        return config
    wide = {k: LARGE[k] for k in config if k in LARGE} | {k: m[config[k]] for k, m in BY_VALUE.items() if k in config}
    return config | wide | (SIX_HEADS if 6 in (config.get("n_head"), config.get("num_attention_heads")) else {})


def shortened(name: str, layers: int, *, small: bool) -> Config:
    """A preset's config with few layers; a small one has few words too."""
    config = dict(read_preset(name) or {})
    kind = config["model_type"]
    few = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if small else {}
    if kind == "gemma3":
        kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        text = config["text_config"] | {"num_hidden_layers": layers, "layer_types": kinds, "use_cache": False} | few
        if small:
            config |= {"image_token_id": 999, "image_token_index": 999, "boi_token_index": 998, "eoi_token_index": 997}
        return config | {"text_config": text, "vision_config": config["vision_config"] | {"num_hidden_layers": 1}}
    more = {"num_decoder_layers": layers, "decoder_start_token_id": 0} if kind == "t5" else {}
    return (
        config
        | (few if "vocab_size" in config else {})
        | more
        | {SHAPES[kind].names.get("layers", "num_hidden_layers"): layers}
    )
