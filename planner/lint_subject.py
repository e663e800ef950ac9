"""What a config is for, from the options of `zplan check`: facts about a model need no family that zplan can plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zplan.planner.dsschema import CURRENT
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.lint import CONSUMERS, Subject
from zplan.planner.units import parse_bytes, parse_count


def make_subject(given: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Subject:
    """Parse the options.

    Parameters
    ----------
    given
        By name: consumer, deepspeed (a release), gpus, nodes, mem, gpu, host_mem, model, params, trainable,
        largest_tensor, micro_batch, seq, was_batch, was_gpus. None leaves one unsaid.
    environment
        Variables to look through; this process's own where left out.
    """
    given = {k: v for k, v in given.items() if v is not None}
    consumer = given.get("consumer", "any")
    if consumer not in CONSUMERS:
        near = did_you_mean(str(consumer), CONSUMERS)
        raise ZplanError(f"`--for {consumer}` is unknown", near or f"use one of {', '.join(CONSUMERS)}")
    for name in ("gpus", "nodes", "micro_batch", "seq", "was_batch", "was_gpus"):
        if name in given and given[name] < 1:
            option = "--" + name.replace("_", "-")
            raise ZplanError(f"`{option} {given[name]}` is below 1", f"give {option} 1 or more")
    facts = _model_facts(str(given["model"])) if "model" in given else {}
    if "params" in given:
        if facts:
            raise ZplanError("both --model and --params are given", "give one: --model llama-2-7b, or --params 7e9")
        facts["num_params"] = parse_count(given["params"], "--params")
    if "largest_tensor" in given:
        facts["largest_tensor"] = parse_count(given["largest_tensor"], "--largest-tensor")
    return Subject(
        consumer=consumer,
        gpus=given.get("gpus"),
        nodes=given.get("nodes", 1),
        mem_bytes=_memory(given),
        host_mem_bytes=parse_bytes(given["host_mem"], "--host-mem") if "host_mem" in given else None,
        trainable=parse_count(given["trainable"], "--trainable") if "trainable" in given else None,
        micro_batch=given.get("micro_batch"),
        seq=given.get("seq"),
        was_batch=given.get("was_batch"),
        was_gpus=given.get("was_gpus"),
        environment=os.environ if environment is None else environment,
        release=_release(str(given["deepspeed"])) if "deepspeed" in given else CURRENT,
        **facts,
    )


def _release(text: str) -> tuple[int, ...]:
    parts = text.removeprefix("v").split(".")
    if not all(p.isascii() and p.isdigit() and len(p) < 6 for p in parts):
        raise ZplanError(f"`--deepspeed {text}` is no release", "write it like 0.15.4")
    return tuple(int(p) for p in parts)


def _memory(given: Mapping[str, Any]) -> int | None:
    if "mem" in given:
        return parse_bytes(given["mem"], "--mem")
    if "gpu" in given:
        from zplan.planner.hardware import hardware_from

        return hardware_from(
            gpus=1, mem_bytes=None, gpu=given["gpu"], nodes=1, host_mem_bytes=None, device="cuda"
        ).mem_bytes
    return None


def _model_facts(name: str) -> dict[str, Any]:
    """Facts of a model of our table, also of families that can't be planned yet; of others what their config gives."""
    from zplan.planner.presets import preset_of_hub_id, read_index, read_preset

    preset = preset_of_hub_id(name) or name
    config = read_preset(preset)
    if config is not None:
        row = next(r for r in read_index() if r.name == preset.lower())
        return {**_config_facts(name, config), "num_params": row.num_params, "hidden": row.hidden}
    path = os.path.join(name, "config.json") if os.path.isdir(name) else name
    facts: dict[str, Any] = {}
    if os.path.isfile(path):
        from zplan.planner.reading import read_json

        facts = _config_facts(name, read_json(path))
        if facts["batch_norm"]:
            return facts  # Families with BatchNorm are none that zplan plans; the rules need no more than this.
    from zplan.planner.sources import model_from

    found = model_from(name, None)
    largest = max(p.numel for p in found.spec.params())
    arch = found.arch
    own = {"num_params": found.num_params, "hidden": arch.hidden, "largest_tensor": largest, "layers": arch.layers}
    return {**facts, "model": name, "vocab": arch.vocab, **own}


BATCH_NORM = frozenset(
    "align cvt efficientnet fastspeech2_conformer granite_speech groupvit hgnet_v2 lasr levit mobilenet_v1 "
    "mobilenet_v2 mobilevit mobilevitv2 parakeet patchtst regnet resnet rt_detr rt_detr_v2 seamless_m4t speecht5 "
    "superglue swiftformer textnet wav2vec2_conformer".split()
)
"""Model types of transformers that build BatchNorm layers by default, heads for one task apart."""


def _config_facts(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(inner, Mapping)
    experts = next((inner[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if inner.get(k)), 0)
    dtype = config.get("torch_dtype") or config.get("dtype") or ""
    kind = str(config.get("model_type", ""))
    facts = {"model": name, "model_type": kind, "experts": experts, "dtype": str(dtype)}
    facts["batch_norm"] = kind in BATCH_NORM
    vocab, hidden = inner.get("vocab_size"), inner.get("hidden_size")
    layers = next((inner[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if k in inner), None)
    facts["vocab"] = vocab if isinstance(vocab, int) else None
    facts["layers"] = layers if isinstance(layers, int) else None
    if isinstance(vocab, int) and isinstance(hidden, int):
        ffn = inner.get("intermediate_size")
        facts["largest_tensor"] = hidden * max(vocab, ffn if isinstance(ffn, int) else 0)
    return facts
