"""The op lists of Hugging Face decoders (transformers 5.24): their Python, line by line, over values without numbers.

See [Note: lifetimes] in `planner/tape.py`: a module's call keeps its inputs, and a model's forward its locals, until it
returns. One row of `STYLES` a model_type. The loss is taken as `loss = model(input_ids, labels=labels).loss`, so the
logits in compute dtype die before backward. Dropout is off, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from zplan.planner.aten import FP32, INT64, Aten
from zplan.planner.config import Attention, Checkpointing
from zplan.planner.families import Params, StepTape
from zplan.planner.models import Architecture, Unit
from zplan.planner.tape import Value

Norm = Literal["rms", "gemma"]


@dataclass(frozen=True)
class Style:
    """What a model_type does differently.

    Attributes
    ----------
    norm
        `rms`: normed in fp32, cast, then times the weight. `gemma`: times (1 + weight) in fp32, then cast.
    act
        Activation of the feed-forward part.
    head_norms
        Queries and keys are normed head by head before they are rotated.
    fused
        One projection for queries, keys and values, and one for gate and up.
    scaled
        Embeddings are multiplied by a number.
    partial
        Rotation may be of a part of each head only.
    """

    norm: Norm = "rms"
    act: str = "silu"
    head_norms: bool = False
    fused: bool = False
    scaled: bool = False
    partial: bool = False


STYLES: dict[str, Style] = {
    "qwen2": Style(),
    "qwen3": Style(head_norms=True),
    "gemma": Style(norm="gemma", act="gelu", scaled=True),
    "phi3": Style(fused=True, partial=True),
}


def norm(op: Aten, x: Value, weight: Value, kind: Norm) -> Value:
    return gemma_norm(op, x, weight) if kind == "gemma" else rms_norm(op, x, weight)


def rms_norm(op: Aten, x: Value, weight: Value) -> Value:
    up = op.to(x, FP32)
    variance = op.mean(op.square(up))
    up = op.mul(up, op.rsqrt(op.add_number(variance)))
    return op.named("normed", op.mul(op.to(up, x.itemsize), weight))


def gemma_norm(op: Aten, x: Value, weight: Value) -> Value:
    normed = _gemma_normed(op, op.to(x, FP32))
    return op.named("normed", op.to(op.mul(normed, op.add_number(op.to(weight, FP32))), x.itemsize))


def _gemma_normed(op: Aten, x: Value) -> Value:
    return op.mul(x, op.rsqrt(op.add_number(op.mean(op.square(x)))))


def rotary_tables(op: Aten, head_dim: int, seq: int, itemsize: int) -> tuple[Value, Value]:
    """cos and sin (1, T, D) from the frequencies, which are a buffer."""
    freqs = _freqs(op, op.tape.new((1, seq, 1), FP32, "rotary"), head_dim)
    both = op.tape.new((1, seq, head_dim), FP32, "rotary")
    cos = op.like(op.like(both, "rotary"), "rotary")
    sin = op.like(op.like(both, "rotary"), "rotary")
    del freqs
    return op.to(cos, itemsize), op.to(sin, itemsize)


def _freqs(op: Aten, positions: Value, head_dim: int) -> Value:
    return op.tape.new((1, positions.shape[1], head_dim // 2), FP32, "rotary")


def rotate_half(op: Aten, x: Value) -> Value:
    half = x.shape[-1] // 2
    first, second = op.narrow(x, 0, half), op.narrow(x, half, half)
    return op.cat((op.neg(second), first))


def rotate_part(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Rotates the front of each head, which may be all of it, and always copies the rest behind it."""
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    wide, all_of = cos.shape[-1], q.shape[-1]
    q_front, q_rest = op.narrow(q, 0, wide), op.narrow(q, wide, all_of - wide)
    k_front, k_rest = op.narrow(k, 0, wide), op.narrow(k, wide, all_of - wide)
    q_rotated = op.cat((op.add(op.mul(q_front, cos), op.mul(rotate_half(op, q_front), sin)), q_rest))
    k_rotated = op.cat((op.add(op.mul(k_front, cos), op.mul(rotate_half(op, k_front), sin)), k_rest))
    return op.named("q, rotated", q_rotated), op.named("k, rotated", k_rotated)


def rotate(op: Aten, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    q_rotated = op.add(op.mul(q, cos), op.mul(rotate_half(op, q), sin))
    k_rotated = op.add(op.mul(k, cos), op.mul(rotate_half(op, k), sin))
    return op.named("q, rotated", q_rotated), op.named("k, rotated", k_rotated)


class Block:
    """One decoder layer over parameters by short name."""

    def __init__(self, op: Aten, p: Params, arch: Architecture, style: Style) -> None:
        self.op, self.p, self.arch, self.style = op, p, arch, style

    def linear(self, x: Value, name: str) -> Value:
        return self.op.linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias"))

    def norm(self, x: Value, name: str) -> Value:
        return norm(self.op, x, self.p[f"{name}.weight"], self.style.norm)

    def heads(self, x: Value, count: int) -> Value:
        return self.op.view(x, (*x.shape[:2], count, self.arch.head_dim))

    def queries_keys_values(self, x: Value) -> tuple[Value, Value, Value]:
        op, a = self.op, self.arch
        if self.style.fused:
            qkv = op.named("q, k, v", self.linear(x, "self_attn.qkv_proj"))
            wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
            fused_q, fused_k = op.narrow(qkv, 0, wide), op.narrow(qkv, wide, narrow)
            fused_v = op.narrow(qkv, wide + narrow, narrow)
            return self._turned(fused_q, a.heads), self._turned(fused_k, a.kv_heads), self._turned(fused_v, a.kv_heads)
        if self.style.head_norms:
            q = op.transpose(self._normed_heads(x, "q", a.heads), 1, 2)
            k = op.transpose(self._normed_heads(x, "k", a.kv_heads), 1, 2)
        else:
            q = self._turned(self.linear(x, "self_attn.q_proj"), a.heads)
            k = self._turned(self.linear(x, "self_attn.k_proj"), a.kv_heads)
        return q, k, self._turned(op.named("v", self.linear(x, "self_attn.v_proj")), a.kv_heads)

    def _turned(self, x: Value, count: int) -> Value:
        return self.op.transpose(self.heads(x, count), 1, 2)

    def _normed_heads(self, x: Value, which: str, count: int) -> Value:
        projected = self.heads(self.linear(x, f"self_attn.{which}_proj"), count)
        return self.norm(projected, f"self_attn.{which}_norm")

    def attention(self, x: Value, cos: Value, sin: Value) -> Value:
        op = self.op
        b, t, _ = x.shape
        q, k, v = self.queries_keys_values(x)
        q, k = (rotate_part if self.style.partial else rotate)(op, q, k, cos, sin)
        out = op.contiguous(op.transpose(op.sdpa(q, k, v), 1, 2))
        out = op.reshape(out, (b, t, self.arch.heads * self.arch.head_dim))
        return self.linear(out, "self_attn.o_proj")

    def feed(self, x: Value) -> Value:
        op = self.op
        if self.style.fused:
            up = self.linear(x, "mlp.gate_up_proj")
            gate, up = op.split(op.named("gate, up", up), 2)
            up = op.mul(up, op.named("act(gate)", op.unary(gate, self.style.act)))
            return self.linear(op.named("act(gate) * up", up), "mlp.down_proj")
        gated = op.mul(
            op.named("act(gate)", op.unary(op.named("gate", self.linear(x, "mlp.gate_proj")), self.style.act)),
            op.named("up", self.linear(x, "mlp.up_proj")),
        )
        return self.linear(op.named("act(gate) * up", gated), "mlp.down_proj")

    def run(self, x: Value, cos: Value, sin: Value, positions: Value) -> Value:
        """`positions` is not read, but a checkpointed layer keeps all that it was called with."""
        op = self.op
        residual = x
        hidden = self.norm(x, "input_layernorm")
        hidden = self.attention(hidden, cos, sin)
        hidden = op.named("after attention", op.add(residual, hidden))
        residual = hidden
        hidden = self.norm(hidden, "post_attention_layernorm")
        hidden = self.feed(hidden)
        return op.named("output", op.add(residual, hidden))


class ClassTape(StepTape):
    """One training step of a Hugging Face decoder on a tape."""

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int) -> None:
        super().__init__(op, arch, units, itemsize)
        self.style = STYLES[arch.family]
        self.by_unit: dict[str, Params] = {
            u.name: {_short(u, p.name): self.params[p.name] for p in u.params} for u in units
        }

    def block(self, i: int) -> Callable[..., Value]:
        return Block(self.op, self.by_unit[f"blocks.{i}"], self.arch, self.style).run

    def embed(self, ids: Value) -> Value:
        weight = self.by_unit["embed"]["weight"]
        out = self.op.embedding(weight, ids)
        # The factor is a buffer of the model.
        return self.op.scale(out) if self.style.scaled else out

    def features(self, ids: Value, checkpointing: Checkpointing) -> Value:
        embedded = self.embed(ids)
        assert embedded.node is not None
        embedded.node.on_gradient = "backward.embed"
        positions = self._positions(ids.shape[1])
        hidden = embedded
        cos, sin = rotary_tables(self.op, self.arch.head_dim, ids.shape[1], self.itemsize)
        for i in range(self.arch.layers):
            block = self.block(i)
            if checkpointing == "full":
                block = partial(self.tape.checkpoint, block)
            hidden = self.unit(f"blocks.{i}", block, hidden, cos, sin, positions)
        return self.unit("norm", self._norm, hidden)

    def _positions(self, seq: int) -> Value:
        """`arange(T) + 0`."""
        counted = self.tape.new((seq,), INT64, "positions.ids")
        return self.op.like(counted, "positions.ids")

    def _norm(self, x: Value) -> Value:
        return norm(self.op, x, self.by_unit["norm"]["weight"], self.style.norm)

    def _head(self, x: Value) -> Value:
        own = self.by_unit["head"].get("weight")
        return self.op.linear(x, self.by_unit["embed"]["weight"] if own is None else own)

    def forward(self, ids: Value, labels: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        assert attention == "sdpa", "eager attention of these classes has no op list"
        hidden = self.features(ids, checkpointing)
        logits = self.op.named("logits", self.unit("head", self._head, hidden))
        self.tape.enter("loss")
        return self._loss(logits, labels)

    def _loss(self, logits: Value, labels: Value) -> Value:
        op, tape = self.op, self.tape
        up = op.to(logits, FP32)
        b, t = labels.shape
        # Labels are padded by one and cut by one: (B, T + 1), which is two terms, then (B, T).
        padded = [tape.new((b, t), INT64, "labels.padded"), tape.new((b,), INT64, "labels.padded")]
        shifted = tape.new((b, t), INT64, "labels.shifted")
        up = op.view(up, (b * t, self.arch.vocab))
        loss = op.nll_loss(op.softmax(up, "log_softmax"), shifted.view((b * t,), (1,)))
        del padded
        return loss


def _short(unit: Unit, name: str) -> str:
    """A parameter's name within its block; in other units, its last part."""
    if unit.kind == "block":
        return name.split(f".{unit.name.rpartition('.')[2]}.", 1)[1]
    return name.rpartition(".")[2]
