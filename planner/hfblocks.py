"""The layers of Hugging Face decoders (transformers 5.24): parts, and how they follow each other.

What each model_type does differently is a row of `planner/hfstyles.py`. See [Note: lifetimes] in `planner/tape.py`: a
module's call keeps its inputs until it returns. Dropout is on where the config asks for it: `planner/hfdropout.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32
from zplan.planner.config import Attention
from zplan.planner.families import Params
from zplan.planner.graph import Value
from zplan.planner.hfmoe import experts
from zplan.planner.hfops import (
    activate,
    norm,
)
from zplan.planner.hfstyles import Layout, Style
from zplan.planner.models import Architecture


class Block:
    """One decoder layer over parameters by short name."""

    def __init__(self, op: Aten, p: Params, arch: Architecture, style: Style, kind: Attention) -> None:
        self.op, self.p, self.arch, self.style, self.kind = op, p, arch, style, kind

    def run(self, x: Value, positions: Value, *given: Value) -> Value:
        """The layer, of rotary tables and a mask, where there are any.

        `positions` are not read, but a checkpointed layer keeps all that it was called with.
        """
        return self.op.named("output", _LAYOUTS[self.style.layout](self, x, *given))

    # Parts

    def linear(self, x: Value, name: str) -> Value:
        return self.op.linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias"))

    def drop(self, x: Value) -> Value:
        """Dropout of what a branch adds to the hidden states, where the config asks for it."""
        return self.op.dropout(x) if self.arch.trait("dropout") else x

    def norm(self, x: Value, which: int) -> Value:
        return norm(self.op, x, self.p, self.style.norms[which], self.style.norm)

    def heads(self, x: Value, count: int) -> Value:
        """(B, T, H * D) to (B, H, T, D)."""
        return self.op.transpose(self.op.view(x, (*x.shape[:2], count, self.arch.head_dim)), 1, 2)

    def queries_keys_values(self, x: Value) -> tuple[Value, Value, Value]:
        op, a, name = self.op, self.arch, self.style.attention[0]
        if self.style.qkv == "heads":
            fused = self.linear(x, f"{name}.query_key_value")
            fused = op.transpose(op.view(fused, (*x.shape[:2], a.heads, 3 * a.head_dim)), 1, 2)
            q, k, v = op.split(op.named("q, k, v", fused), 3)
            return q, k, v
        if self.style.qkv == "fused":
            fused = op.named("q, k, v", self.linear(x, f"{name}.qkv_proj"))
            wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
            q, k = op.narrow(fused, 0, wide), op.narrow(fused, wide, narrow)
            v = op.narrow(fused, wide + narrow, narrow)
            return self.heads(q, a.heads), self.heads(k, a.kv_heads), self.heads(v, a.kv_heads)
        if self.style.head_norms == "whole":
            q = norm(op, self.linear(x, f"{name}.q_proj"), self.p, f"{name}.q_norm", self.style.norm)
            k = norm(op, self.linear(x, f"{name}.k_proj"), self.p, f"{name}.k_norm", self.style.norm)
            v = op.named("v", self.linear(x, f"{name}.v_proj"))
            return self.heads(q, a.heads), self.heads(k, a.kv_heads), self.heads(v, a.kv_heads)
        if self.style.head_norms == "turned":
            q = self.heads(self.linear(x, f"{name}.q_proj"), a.heads)
            k = self.heads(self.linear(x, f"{name}.k_proj"), a.kv_heads)
            v = self.heads(op.named("v", self.linear(x, f"{name}.v_proj")), a.kv_heads)
            q = norm(op, q, self.p, f"{name}.q_norm", self.style.norm)
            return q, norm(op, k, self.p, f"{name}.k_norm", self.style.norm), v
        if self.style.head_norms == "head":
            q, k = self._normed_heads(x, "q", a.heads), self._normed_heads(x, "k", a.kv_heads)
        else:
            q = self.heads(self.linear(x, f"{name}.q_proj"), a.heads)
            k = self.heads(self.linear(x, f"{name}.k_proj"), a.kv_heads)
        return q, k, self.heads(op.named("v", self.linear(x, f"{name}.v_proj")), a.kv_heads)

    def _normed_heads(self, x: Value, which: str, count: int) -> Value:
        name, op = self.style.attention[0], self.op
        projected = op.view(self.linear(x, f"{name}.{which}_proj"), (*x.shape[:2], count, self.arch.head_dim))
        return op.transpose(norm(op, projected, self.p, f"{name}.{which}_norm", self.style.norm), 1, 2)

    def attention(self, x: Value, cos: Value, sin: Value, *mask: Value) -> tuple[Value, Value | None]:
        """The output, and the probabilities where they were written, which a layer keeps until it returns."""
        q, k, v = self.queries_keys_values(x)
        assert self.style.rotation is not None
        q, k, *_names = self.style.rotation(self.op, q, k, cos, sin)
        return self.attend(q, k, v, *mask)

    def attend(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        """From queries, keys and values (B, H, T, D) to what `attention` returns."""
        out, weights = self._eager(q, k, v, *mask) if self.kind == "eager" else self._fused(q, k, v, *mask)
        out = self.op.reshape(out, (*out.shape[:2], self.arch.heads * v.shape[-1]))
        return self.linear(out, ".".join(self.style.attention)), weights

    def _fused(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        times = self.arch.heads // self.arch.kv_heads
        if mask and times > 1:
            k, v = self._repeated(k, times), self._repeated(v, times)
        return self.op.contiguous(self.op.transpose(self.op.sdpa(q, k, v), 1, 2)), None

    def _eager(self, q: Value, k: Value, v: Value, mask: Value) -> tuple[Value, Value | None]:
        op, times = self.op, self.arch.heads // self.arch.kv_heads
        if times > 1:
            k, v = self._repeated(k, times), self._repeated(v, times)
        scores = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        if self.arch.trait("capped_scores"):
            scores = op.scale(scores)
            scores = op.tanh(scores)
            scores = op.scale(scores)
        scores = op.add(scores, mask)
        scores = op.to(op.softmax(op.to(scores, FP32), "softmax"), q.itemsize)
        if self.arch.trait("attention_dropout"):
            scores = op.dropout(scores)
        out = op.named("attention output", op.matmul(scores, v))
        return op.contiguous(op.transpose(out, 1, 2)), scores

    def _repeated(self, x: Value, times: int) -> Value:
        b, g, t, d = x.shape
        return self.op.reshape(self.op.expand(self.op.unsqueeze(x, 2), (b, g, times, t, d)), (b, g * times, t, d))

    def feed(self, x: Value) -> Value:
        op, act = self.op, self.style.act
        if "mlp.experts.down_proj" in self.p:
            return experts(op, self.p, self.arch, x)
        if not self.style.gated:
            up = op.named("up", self.linear(x, self.style.feed[0]))
            up = op.named(f"{act}(up)", activate(op, up, act))
            return self.linear(up, self.style.feed[1])
        if self.style.feed_fused:
            up = self.linear(x, "mlp.gate_up_proj")
            gate, up = op.split(op.named("gate, up", up), 2)
            up = op.mul(up, op.named("act(gate)", activate(op, gate, act)))
            return self.linear(op.named("act(gate) * up", up), "mlp.down_proj")
        return self.gated(x, "mlp")

    def gated(self, x: Value, name: str) -> Value:
        """A feed-forward part of three projections."""
        op = self.op
        gated = op.mul(
            op.named("act(gate)", activate(op, op.named("gate", self.linear(x, f"{name}.gate_proj")), self.style.act)),
            op.named("up", self.linear(x, f"{name}.up_proj")),
        )
        return self.linear(op.named("act(gate) * up", gated), f"{name}.down_proj")


def _serial(b: Block, x: Value, *tables: Value) -> Value:
    residual = x
    hidden = b.norm(x, 0)
    hidden, _weights = b.attention(hidden, *tables)
    hidden = b.op.named("after attention", b.op.add(residual, b.drop(hidden)))
    residual = hidden
    hidden = b.norm(hidden, 1)
    hidden = b.feed(hidden)
    return b.op.add(residual, b.drop(hidden))


def _post(b: Block, x: Value, *tables: Value) -> Value:
    """Norms behind attention and feed-forward part."""
    residual = x
    hidden, _weights = b.attention(x, *tables)
    hidden = b.norm(hidden, 0)
    hidden = b.op.named("after attention", b.op.add(residual, hidden))
    residual = hidden
    hidden = b.feed(hidden)
    hidden = b.norm(hidden, 1)
    return b.op.add(residual, hidden)


def _neox(b: Block, x: Value, *tables: Value) -> Value:
    attended, _weights = b.attention(b.norm(x, 0), *tables)
    attended = b.drop(attended)
    if not b.arch.trait("parallel"):
        attended = b.op.named("after attention", b.op.add(attended, x))
        fed = b.feed(b.norm(attended, 1))
        fed = b.drop(fed)
        return b.op.add(fed, attended)
    fed = b.feed(b.norm(x, 1))
    fed = b.drop(fed)
    return b.op.add(b.op.add(fed, attended), x)


def _stablelm(b: Block, x: Value, *tables: Value) -> Value:
    residual = x
    hidden = b.norm(x, 0)
    attended, _weights = b.attention(hidden, *tables)
    if not b.arch.trait("serial"):
        fed = b.feed(hidden)
        return b.op.add(b.op.add(residual, attended), fed)
    residual = b.op.named("after attention", b.op.add(residual, attended))
    fed = b.feed(b.norm(residual, 1))
    return b.op.add(residual, fed)


def _phi(b: Block, x: Value, *tables: Value) -> Value:
    residual = x
    hidden = b.norm(x, 0)
    attended, _weights = b.attention(hidden, *tables)
    attended = b.drop(attended)
    fed = b.drop(b.feed(hidden))
    return b.op.add(b.op.add(attended, fed), residual)


def _sandwich(b: Block, x: Value, *tables: Value) -> Value:
    """Norms before and behind."""
    residual = x
    hidden = b.norm(x, 0)
    hidden, _weights = b.attention(hidden, *tables)
    hidden = b.norm(hidden, 1)
    hidden = b.op.named("after attention", b.op.add(residual, hidden))
    residual = hidden
    hidden = b.norm(hidden, 2)
    hidden = b.feed(hidden)
    hidden = b.norm(hidden, 3)
    return b.op.add(residual, hidden)


def _opt(b: Block, x: Value, *mask: Value) -> Value:
    """Queries are scaled before attention, and the feed-forward part sees rows of tokens."""
    op = b.op
    residual = x
    hidden = b.norm(x, 0)
    hidden, _weights = _opt_attention(b, hidden, *mask)
    hidden = b.drop(hidden)
    hidden = op.named("after attention", op.add(residual, hidden))
    shape = hidden.shape
    hidden = op.reshape(hidden, (shape[0] * shape[1], shape[2]))
    residual = hidden
    hidden = b.norm(hidden, 1)
    hidden = op.named("up", b.linear(hidden, "fc1"))
    hidden = op.named("relu(up)", op.relu(hidden))
    hidden = b.linear(hidden, "fc2")
    hidden = b.drop(hidden)
    return op.view(op.add(residual, hidden), shape)


def _opt_attention(b: Block, x: Value, *mask: Value) -> tuple[Value, Value | None]:
    op, heads = b.op, b.arch.heads
    q = b.heads(op.named("q, scaled", op.scale(b.linear(x, "self_attn.q_proj"))), heads)
    k, v = b.linear(x, "self_attn.k_proj"), b.linear(x, "self_attn.v_proj")
    k, v = b.heads(op.named("k", k), heads), b.heads(op.named("v", v), heads)
    return b.attend(q, k, v, *mask)


_LAYOUTS: dict[Layout, Callable[..., Value]] = {
    "serial": _serial,
    "post": _post,
    "neox": _neox,
    "stablelm": _stablelm,
    "phi": _phi,
    "opt": _opt,
    "sandwich": _sandwich,
}
