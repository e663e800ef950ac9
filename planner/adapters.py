"""Fine-tuning as a change of the model's units: a frozen base with low-rank adapters beside some of its linear maps.

[Note: adapters] What stays frozen becomes a unit `NAME:frozen` beside the adapters of the same module, exactly as the
runtime cuts up a module whose parameters do not require gradients, so states, buffers and phases need no rules of
their own. Adapters are in the compute dtype with fp32 master weights, as everything that zplan trains. The base keeps
its dtype, or, quantized, the linear maps of its blocks are 4-bit nf4 (bitsandbytes 0.50): two elements a byte, one
8-bit constant for 64 elements, one fp32 constant for 256 of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zplan.planner.aten_devices import NF4_BLOCK
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.models import LORA_A, LORA_B, Adapters, ModelSpec, Param, Unit

if TYPE_CHECKING:
    from zplan.planner.request import Tuning
    from zplan.planner.sources import Model

CONSTANT_BLOCK = 256
"""8-bit constants of a 4-bit weight that share one in fp32."""
TABLES = 16 * 4 + 256 * 4 + 4
"""Bytes beside each quantized tensor: the values of nf4, those of its 8-bit constants, and their mean."""

_FUSED = ("W_pack", "qkv", "qkv_proj", "query_key_value", "wqkv")
_QUERY = ("q", "q_proj", "query", *_FUSED, "q_b_proj")
_VALUE = ("v", "v_proj", "value", *_FUSED, "kv_b_proj")
"""Latent attention projects queries, and keys and values together, out of what its `a` projections compress."""
_ATTENTION = ("attn", "attention")
_RUNNABLE_ATTENTION = ("q", "k", "v", "o", "qkv")
_ROUTERS = ("mlp.gate", "mlp.router", "router")


def nf4_bytes(numel: int) -> int:
    """Bytes of a weight in 4 bits with its constants and tables.

    Examples
    --------
    >>> nf4_bytes(4096 * 4096) - TABLES, (4096 * 4096) // 2
    (8654848, 8388608)
    """
    constants = -(-numel // NF4_BLOCK)
    return -(-numel // 2) + constants + 4 * -(-constants // CONSTANT_BLOCK) + TABLES


def linear_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Names within a block of the linear maps that an adapter may stand beside, in order of first use."""
    found: dict[str, None] = {}
    for u in spec.units:
        if u.kind == "block":
            found.update((_module(u, p), None) for p in u.params if _is_linear(u, p) and "lora_" not in p.name)
    return tuple(found)


def _short(u: Unit, p: Param) -> str:
    return p.name.split(f".{u.base_name.rpartition('.')[2]}.", 1)[1]


def _module(u: Unit, p: Param) -> str:
    return _short(u, p).removesuffix(".weight")


def _is_linear(u: Unit, p: Param) -> bool:
    """A matrix that a linear map owns. Experts are one tensor of three dims, routers and tables are no targets."""
    name = _short(u, p)
    plain = len(p.shape) == 2 and name.endswith(".weight") and "relative_attention_bias" not in name
    return plain and name.removesuffix(".weight") not in _ROUTERS


def find_targets(spec: ModelSpec, words: str) -> tuple[str, ...]:
    """Modules that `words` mean in this model's blocks.

    Parameters
    ----------
    spec
        The model as it is.
    words
        `attention`, `all-linear`, or names with commas. `q` and `v` mean the projections of queries and values by
        whatever name the model gives them, fused ones included.
    """
    modules = linear_modules(spec)
    if words == "all-linear":
        return modules
    if words == "attention":
        return tuple(m for m in modules if m in _RUNNABLE_ATTENTION or any(word in m.lower() for word in _ATTENTION))
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    out: set[str] = set()
    for word in wanted:
        known = {"q": _QUERY, "v": _VALUE}.get(word, (word,))
        found = {m for m in modules if m.rpartition(".")[2] in known or m == word}
        if not found:
            names = tuple(dict.fromkeys(m.rpartition(".")[2] for m in modules))
            hint = did_you_mean(word, names) or f"its linear maps are {', '.join(names)}"
            raise ZplanError(f"`--lora-targets {words}`: no linear map of {spec.name} is called `{word}`", hint)
        out |= found
    if not out:
        raise ZplanError("`--lora-targets` is empty", "use q,v, attention, all-linear, or names with commas")
    return tuple(m for m in modules if m in out)


def adapt(spec: ModelSpec, adapters: Adapters) -> ModelSpec:
    """The same model with its base frozen and adapters in the blocks. See [Note: adapters]."""
    return replace(spec, units=tuple(_units(spec, adapters)), adapters=adapters)


def adapted_model(model: Model, tuning: Tuning) -> Model:
    """A model with the adapters that were asked for, and notes on what they leave out."""
    spec = model.spec
    targets = find_targets(spec, tuning.targets)
    adapters = Adapters(tuning.rank, targets, tuning.embeddings, tuning.quantized)
    notes = list(model.notes)
    if any(".experts." in p.name for p in spec.params()):
        notes.append("experts are one tensor for all: they stay frozen in their own dtype, without adapters")
    if tuning.embeddings:
        notes.append("peft's `modules_to_save` keeps the frozen original of embedding and head beside the trained one")
    return model._replace(spec=adapt(spec, adapters), base_params=spec.num_params, notes=tuple(notes))


def frozen_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Of the frozen base, whole, in a dtype of `itemsize` bytes where it is not quantized."""
    frozen = [u for u in spec.units if u.frozen]
    return sum(nf4_bytes(p.numel) if u.quantized else p.numel * itemsize for u in frozen for p in u.params)


def _units(spec: ModelSpec, adapters: Adapters) -> Iterator[Unit]:
    for u in spec.units:
        if u.kind != "block":
            yield from _around(u, adapters)
            continue
        pairs: list[Param] = []
        quantized: list[Param] = []
        rest: list[Param] = []
        for p in u.params:
            if _is_linear(u, p) and _module(u, p) in adapters.targets:
                base, (wide, narrow) = p.name.removesuffix(".weight"), p.shape
                pairs.append(Param(base + LORA_A, (adapters.rank, narrow)))
                pairs.append(Param(base + LORA_B, (wide, adapters.rank)))
            (quantized if adapters.quantized and _is_linear(u, p) else rest).append(p)
        yield Unit(u.name, u.kind, tuple(pairs))
        if rest:
            yield Unit(f"{u.name}:frozen", u.kind, tuple(rest), frozen=True)
        if quantized:
            yield Unit(f"{u.name}:nf4", u.kind, tuple(quantized), frozen=True, quantized=True)


def _around(u: Unit, adapters: Adapters) -> Iterator[Unit]:
    """Embedding, norms and head: frozen, or the tables trained in full."""
    if not u.params or (adapters.embeddings and u.kind in ("embed", "head")):
        yield u
    else:
        yield u._replace(name=f"{u.name}:frozen", frozen=True)
