"""Architectures as units with ordered parameters.

A model is an ordered list of *units*; a unit is what the runtime gathers, reduces and frees at once: the embedding, each
block, the final norm, the head. Families are small functions from an `Architecture` to units; presets are rows of data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "gpt2"]
UnitKind = Literal["embed", "block", "norm", "head", "other"]


@dataclass(frozen=True)
class Param:
    """One parameter: its name in the module tree and its true shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together. A tied parameter belongs to the first unit that uses it."""

    name: str
    kind: UnitKind
    params: tuple[Param, ...]
    frozen: bool = False
    """No gradient, no optimizer state. Frozen parameters of a module are a unit beside its trainable ones."""
    itemsize: int | None = None
    """Bytes of one element where they keep a dtype of their own (frozen integers); None for the compute dtype."""

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder. `head_dim` may differ from `hidden // heads`; `kv_heads < heads` is grouped-query attention."""

    family: Family
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


@dataclass(frozen=True)
class ModelSpec:
    """A model: a name, its shape where one is known, and its units in forward order."""

    name: str
    units: tuple[Unit, ...]
    arch: Architecture | None = None

    @property
    def num_params(self) -> int:
        """Unique parameters: a tied head is counted once."""
        return sum(u.numel for u in self.units)

    def params(self) -> Iterator[Param]:
        for u in self.units:
            yield from u.params


def decoder_units(a: Architecture) -> tuple[Unit, ...]:
    """Units of a decoder in forward order, with the parameter names of `runtime/decoder.py`."""
    return _llama_units(a) if a.family == "llama" else _gpt2_units(a)


def _block(i: int, *rows: tuple[str, tuple[int, ...]]) -> Unit:
    return Unit(f"blocks.{i}", "block", tuple(Param(f"blocks.{i}.{name}", shape) for name, shape in rows))


def _head(a: Architecture) -> Unit:
    """The head's own weight; none when it is tied to the embedding."""
    return Unit("head", "head", () if a.tied else (Param("head.weight", (a.vocab, a.hidden)),))


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
        Unit("embed", "embed", (Param("embed.weight", (a.vocab, a.hidden)),)),
        *blocks,
        Unit("norm", "norm", (Param("norm.weight", (a.hidden,)),)),
        _head(a),
    )


def _gpt2_units(a: Architecture) -> tuple[Unit, ...]:
    h = a.hidden
    blocks = (
        _block(
            i,
            ("norm1.weight", (h,)),
            ("norm1.bias", (h,)),
            ("qkv.weight", (3 * h, h)),
            ("qkv.bias", (3 * h,)),
            ("o.weight", (h, h)),
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
        Unit("embed", "embed", (Param("embed.weight", (a.vocab, h)),)),
        Unit("positions", "embed", (Param("positions.weight", (a.max_seq, h)),)),
        *blocks,
        Unit("norm", "norm", (Param("norm.weight", (h,)), Param("norm.bias", (h,)))),
        _head(a),
    )
