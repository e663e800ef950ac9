"""Architectures as units with ordered parameters.

A model is an ordered list of *units*; a unit is what the runtime gathers, reduces and frees at once: the embedding,
each block, the final norm, the head. Families are small functions from an `Architecture` to units; presets are rows
of data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

Family = Literal["llama", "gpt2"]
"""Decoders that `runtime/decoder.py` runs. Every other family is a Hugging Face class, by its model_type."""
RUNNABLE: tuple[Family, ...] = ("llama", "gpt2")
LLAMA_CLASS = "llama_class"
"""The family of what the classes of Llama and Mistral do and our decoder does not: biases, other rotary scalings."""
REMOTE = ("baichuan", "chatglm", "internlm2")
"""Families without a class in the transformers package: their code comes with their weights."""
UnitKind = Literal["embed", "block", "norm", "head", "other"]


class Param(NamedTuple):
    """One parameter: its name in the module tree and its true shape."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    """Index of the optimizer's parameter group."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Unit(NamedTuple):
    """Parameters that are gathered and reduced together. A tied parameter belongs to the first unit that uses it."""

    name: str
    kind: UnitKind
    params: tuple[Param, ...]
    frozen: bool = False
    """No gradient, no optimizer state. Frozen parameters of a module are a unit beside its trainable ones."""
    itemsize: int | None = None
    """Bytes of one element where they keep a dtype of their own (frozen integers); None for the compute dtype."""
    constant_bytes: int = 0
    """Of what a quantizer keeps beside its integers: scales and code tables."""
    quantized: bool = False
    """Frozen in 4 bits (`planner/adapters.py`); shapes stay those of the whole weights."""
    guest: bool = False
    """An embedding or a head whose weight is known to be read in its own module's forward alone, so that it may borrow
    a slot of the blocks' ring."""

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def base_name(self) -> str:
        """Of the module: frozen parameters of `blocks.0` are the unit `blocks.0:frozen`."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Architecture:
    """Shape of a model. `head_dim` may differ from `hidden // heads`; `kv_heads < heads` is grouped-query attention."""

    family: str
    """One of `RUNNABLE`, or a model_type of `planner/hfrows.py`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int
    tied: bool
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | str], ...] = ()
    """Items of the config's `rope_scaling`, sorted by key; empty for none."""
    window: int | None = None
    """Tokens of a sliding attention window. Sequences up to it see everything, so only longer ones would differ."""
    traits: tuple[tuple[str, int | bool], ...] = ()
    """What else shapes a family's parameters, by name: [Note: letters] in `planner/hfrows.py`. Empty if runnable."""
    dense_layers: tuple[int, ...] = ()
    """In a mixture of experts, the layers with an ordinary feed-forward part."""

    @property
    def runnable(self) -> bool:
        """Whether zplan has a decoder of this shape to train by itself."""
        return self.family in RUNNABLE

    @property
    def shares_keys(self) -> bool:
        """Whether fused attention is given fewer heads of keys than of queries. Remote code spreads them itself."""
        return self.kv_heads < self.heads and self.family not in REMOTE

    @property
    def value_dim(self) -> int:
        """Width of a head's values, which is that of its queries and keys but in latent attention."""
        return self.trait("values") // self.heads or self.head_dim

    def trait(self, name: str) -> int:
        """A trait's value, 0 where the family has none of that name."""
        return int(dict(self.traits).get(name, 0))


LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""What follows a module's name in the names of its adapter's two parameters."""


class Adapters(NamedTuple):
    """Low-rank adapters beside a frozen base (Hu et al. 2021, LoRA)."""

    rank: int
    targets: tuple[str, ...]
    """Modules within a block that have one, in order."""
    embeddings: bool = False
    """Embedding and head are trained in full beside them."""
    quantized: bool = False
    """The frozen linear maps of the blocks are 4 bits wide (Dettmers et al. 2023, QLoRA)."""


@dataclass(frozen=True)
class ModelSpec:
    """A model: a name, its shape where one is known, and its units in forward order."""

    name: str
    units: tuple[Unit, ...]
    arch: Architecture | None = None
    adapters: Adapters | None = None
    """What is trained instead of the model itself; its units say the same by their `frozen`."""

    @cached_property
    def num_params(self) -> int:
        """Unique parameters: a tied head is counted once."""
        return sum(u.numel for u in self.units)

    @property
    def num_held(self) -> int:
        """Elements as a module's parameters hold them: of 4 bits two in one byte."""
        return sum(-(-p.numel // 2) if u.quantized else p.numel for u in self.units for p in u.params)

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and optimizer states."""
        return sum(u.numel for u in self.units if not u.frozen)

    @property
    def num_active(self) -> int | None:
        """Parameters that one token passes, of a mixture of experts: of each layer's experts only the chosen ones."""
        experts = self.arch.trait("experts") if self.arch else 0
        if not self.arch or not experts:
            return None
        per_token = self.arch.trait("experts_per_token")
        return sum(p.numel // experts * per_token if ".experts." in p.name else p.numel for p in self.params())

    def params(self) -> Iterator[Param]:
        for u in self.units:
            yield from u.params


ESTIMATE_ONLY = ("traits", "dense_layers")
"""Fields that every runnable architecture has empty, so plans leave them out."""


def architecture_values(a: Architecture) -> dict[str, Any]:
    """An architecture as JSON values."""
    values = {**asdict(a), "rope_scaling": dict(a.rope_scaling), "traits": dict(a.traits)}
    return {k: v for k, v in values.items() if not a.runnable or k not in ESTIMATE_ONLY}


def adapter_values(a: Adapters | None) -> dict[str, Any] | None:
    """Adapters as JSON values; None where there are none."""
    return None if a is None else {**a._asdict(), "targets": list(a.targets)}


def decoder_units(a: Architecture) -> tuple[Unit, ...]:
    """Units in forward order, with the parameter names of `runtime/decoder.py`, or of the Hugging Face class."""
    if not a.runnable:
        from zplan.planner.hfunits import units_of

        return units_of(a)
    return _llama_units(a) if a.family == "llama" else _gpt2_units(a)


def _block(i: int, *rows: tuple[str, tuple[int, ...]]) -> Unit:
    return Unit(f"blocks.{i}", "block", tuple(Param(f"blocks.{i}.{name}", shape) for name, shape in rows))


def _head(a: Architecture) -> Unit:
    """The head's own weight; none when it is tied to the embedding."""
    return Unit("head", "head", () if a.tied else (Param("head.weight", (a.vocab, a.hidden)),), guest=not a.tied)


def _llama_units(a: Architecture) -> tuple[Unit, ...]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    blocks = (
        _block(
            i,
            ("norm1.weight", (a.hidden,)),
            ("q.weight", (q, a.hidden)),
            ("k.weight", (kv, a.hidden)),
            ("v.weight", (kv, a.hidden)),
            ("o.weight", (a.hidden, q)),
            ("norm2.weight", (a.hidden,)),
            ("gate.weight", (a.ffn, a.hidden)),
            ("up.weight", (a.ffn, a.hidden)),
            ("down.weight", (a.hidden, a.ffn)),
        )
        for i in range(a.layers)
    )
    return (
        Unit("embed", "embed", (Param("embed.weight", (a.vocab, a.hidden)),), guest=not a.tied),
        *blocks,
        Unit("norm", "norm", (Param("norm.weight", (a.hidden,)),)),
        _head(a),
    )


def _gpt2_units(a: Architecture) -> tuple[Unit, ...]:
    h, width = a.hidden, a.heads * a.head_dim  # A tensor rank has a part of the heads.
    blocks = (
        _block(
            i,
            ("norm1.weight", (h,)),
            ("norm1.bias", (h,)),
            ("qkv.weight", (3 * width, h)),
            ("qkv.bias", (3 * width,)),
            ("o.weight", (h, width)),
            ("o.bias", (h,)),
            ("norm2.weight", (h,)),
            ("norm2.bias", (h,)),
            ("up.weight", (a.ffn, h)),
            ("up.bias", (a.ffn,)),
            ("down.weight", (h, a.ffn)),
            ("down.bias", (h,)),
        )
        for i in range(a.layers)
    )
    return (
        Unit("embed", "embed", (Param("embed.weight", (a.vocab, h)),), guest=not a.tied),
        Unit("positions", "embed", (Param("positions.weight", (a.max_seq, h)),), guest=True),
        *blocks,
        Unit("norm", "norm", (Param("norm.weight", (h,)), Param("norm.bias", (h,)))),
        _head(a),
    )
