"""How a reported case is put to zplan: the facts of a report as arguments of `zplan.estimate`, or as a config to check.

A case gives facts in the words of a report: cards, stage, batch, what was offloaded. Nothing here knows an answer.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import zplan
from zplan.planner.lint import Subject, check_document
from zplan.planner.presets import read_preset
from zplan.planner.relaxed import read_document
from zplan.planner.sources import model_from
from zplan.planner.textbook import runtime_rate
from zplan.planner.units import GIB, parse_count

CONFIGS = Path(__file__).parent / "golden" / "configs"
OFFLOAD = {
    "none": {},
    "optimizer": {"offload": "cpu"},
    "cpu": {"offload": "cpu", "offload_params": "cpu"},
    "both": {"offload": "cpu", "offload_params": "cpu"},
    "nvme": {"offload": "nvme"},
}
PASSED_ON = (
    *("gpus", "gpu", "nodes", "stage", "micro_batch", "accumulation", "precision", "optimizer", "reduce_dtype"),
    *("checkpointing", "attention", "runtime", "lora", "lora_targets", "lora_embeddings", "qlora", "config"),
)
"""Facts that are arguments of `zplan.estimate` by the same name."""
RENAMED = {"seq_len": "seq", "tensor_parallel": "tp", "loss": "cross_entropy"}
PURE_BF16 = {"optimizer": "adamw-bf16", "reduce_dtype": "bf16"}
BYTES_A_PARAM = {6: {"optimizer": "adamw8bit-bf16", "reduce_dtype": "bf16"}, 8: PURE_BF16, 12: {}, 16: {}, 18: {}}
"""What a report's "bytes a parameter" means: 12 are fp32 masters and moments, 18 all of mixed precision with fp32
gradients, 8 everything in bf16, 6 that with moments of 8 bits.
"""


@dataclass(frozen=True)
class Given:
    """The facts of one question."""

    model: str
    """A name of zplan's table, a count, or a Hugging Face config as JSON."""
    facts: dict
    folder: Path
    """Where configs that zplan is to read are written."""

    def get(self, name, default=None):
        return self.facts.get(name, default)

    def with_(self, **more):
        return Given(self.model, {**self.facts, **more}, self.folder)

    @property
    def ranks(self):
        return self.get("gpus", 1)

    @property
    def tokens(self):
        return self.get("tokens") or self.get("micro_batch", 1) * self.get("seq_len", 1)


def asked(given):
    """The arguments of `zplan.estimate`."""
    found = {name: given.get(name) for name in PASSED_ON if given.get(name) is not None}
    found |= {new: given.get(old) for old, new in RENAMED.items() if given.get(old) is not None}
    found |= OFFLOAD[given.get("offload", "none")]
    if isinstance(found.get("config"), str):
        found["config"] = str(CONFIGS / found["config"])
    if "gpu" not in found:
        # A card's label is its GiB; where a case names none, the size of the card moves no quantity but a verdict.
        found["mem"] = given.get("mem_gib") or given.get("mem_gb", 80)
    if given.get("host_ram_gb"):
        found["host_mem"] = f"{given.get('host_ram_gb')}GB"
    # Whoever reports a run has run it, however long its sequences were.
    return {**found, "gpus": given.ranks, "beyond_limit": True, **model(given)}


def model(given):
    """`model` or `params`; another vocabulary makes a config of its own."""
    if given.get("params"):
        return {"params": given.get("params")}
    if given.model[0].isdigit():
        return {"params": given.model}
    if given.model[0] != "{" and not given.get("vocab"):
        return {"model": given.model}
    config = json.loads(given.model) if given.model[0] == "{" else dict(read_preset(given.model))
    if given.get("vocab"):
        config["vocab_size"] = given.get("vocab")
    text = json.dumps(config)
    file = given.folder / f"{hash(text) & 0xFFFFFFFF:x}" / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return {"model": str(file)}


@lru_cache(maxsize=512)
def _estimate(text):
    return zplan.estimate(**json.loads(text))


def estimate(given, **more):
    """zplan's answer; the same question is asked once."""
    return _estimate(json.dumps({**asked(given), **more}, sort_keys=True))


def line_bytes(answer, *prefixes, tier="device"):
    """All instances of the lines whose id starts so."""
    return sum(x.total_bytes for x in answer.lines if x.id.startswith(prefixes) and x.tier == tier)


def num_params(given):
    found = model(given)
    return model_from(
        found.get("model"), parse_count(found["params"], "--params") if "params" in found else None
    ).num_params


def rate(given):
    """Bytes a parameter of zplan's answer, as its tables tell them."""
    return runtime_rate(estimate(given).row.choice)


ANY_SIZE = 10**6
"""GiB."""


def plain(given, **more):
    """The facts without what moves no model state, so that equal questions are asked once.

    `count` is the model's own number of parameters where another class stands in for its shape.
    """
    kept = ("gpus", "nodes", "stage", "params", "precision", "mem_gib")
    facts = {k: v for k, v in given.facts.items() if k in kept}
    if given.get("count") and not given.get("params"):
        facts["params"] = given.get("count")
    return Given(given.model, {**facts, "seq_len": 128, "checkpointing": "full", **more}, given.folder)


def deepspeed_config(given):
    """The config of a case, or the smallest one for its stage and precision."""
    config = given.get("config")
    if isinstance(config, str):
        return read_document((CONFIGS / config).read_text(encoding="utf-8"), config)
    if config is None:
        precision = given.get("precision", "bf16")
        enabled = {} if precision == "fp32" else {precision: {"enabled": True}}
        config = {"train_micro_batch_size_per_gpu": 1, **enabled, "zero_optimization": {"stage": given.get("stage", 0)}}
    return read_document(json.dumps(config), "ds.json")


def subject(given, **more):
    """What `zplan check` is told beside the config."""
    facts = {"gpus": given.ranks, "nodes": given.get("nodes", 1), "trainable": given.get("trainable"), **more}
    for name, key, unit in (("mem_bytes", "mem_gb", GIB), ("host_mem_bytes", "host_ram_gb", 10**9)):
        facts[name] = given.get(key) and given.get(key) * unit
    return Subject(consumer=given.get("for_", "any"), num_params=num_params(plain(given)), **facts)


def check(given, **more):
    return check_document(deepspeed_config(given), "ds.json", subject(given, **more))


def cost(given, name, **more):
    """An amount that `zplan check` tells of a config; 0 where it has none."""
    return sum(c.nbytes for c in check(given, **more).costs if c.name == name)


KNOWN_FACTS = {
    *PASSED_ON,
    *RENAMED,
    *("params", "count", "mem_gb", "mem_gib", "host_ram_gb", "tier", "load", "offload", "vocab", "tokens", "for_"),
    *("trainable", "bytes_per_param", "sharded", "quantization", "gradients", "master", "tried_gib", "flops"),
    *("data_parallel", "train_batch_size", "overlap_comm", "contiguous_gradients", "reduce_bucket_size"),
    *("buffer_count", "buffer_size", "ranks_per_node"),
    # Said for the reader: what they mean is in the quantity or the setup already.
    *("peft", "rank", "targets", "states", "embedding", "heads", "zero_init", "quant_storage"),
}
