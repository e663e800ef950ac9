"""Small modules that take the steps of InternLM2, Baichuan2-7B and ChatGLM3, whose code comes with their weights.

They are ours, written from what the published code computes and in which dtypes. A layer is called with what the
original is called with, since a checkpointed one keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zplan.planner.models import Architecture


def turn(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def tables(seq: int, wide: int, like: Tensor) -> tuple[Tensor, Tensor]:
    freqs = torch.arange(seq, device=like.device)[None, :, None].float() * torch.rand(wide // 2, device=like.device)
    both = torch.cat((freqs, freqs), dim=-1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


class Norm(nn.Module):
    """In fp32 from the start, or of the input as it is; times the weight in the input's dtype, or in fp32."""

    def __init__(self, hidden: int, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(hidden)), kind

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.kind == "rms":
            x = x.float()
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + 1e-6)
            return self.weight * x.to(dtype)
        variance = x.float().pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.kind == "mixed":
            x = x.to(dtype)
            return self.weight * x
        return (self.weight * x).to(dtype)


class Layer(nn.Module):
    """Norm, attention, norm, gate: what the three have in common."""

    norm = "rms"

    def __init__(self, a: Architecture, attention: str) -> None:
        super().__init__()
        self.a, self.kind, wide, narrow = a, attention, a.heads * a.head_dim, a.kv_heads * a.head_dim
        bias = bool(a.trait("qkv_bias"))
        self.norm1, self.norm2 = Norm(a.hidden, self.norm), Norm(a.hidden, self.norm)
        self.qkv, self.o = nn.Linear(a.hidden, wide + 2 * narrow, bias), nn.Linear(wide, a.hidden, False)
        self.up, self.down = nn.Linear(a.hidden, 2 * a.ffn, False), nn.Linear(a.ffn, a.hidden, False)

    def forward(self, x: Tensor, positions: Tensor, *given: Tensor) -> Tensor:
        hidden = self.norm1(x)
        hidden = self.attend(hidden, *given)
        hidden = x + hidden
        residual = hidden
        hidden = self.norm2(hidden)
        hidden = self.feed(hidden)
        return residual + hidden

    def attend(self, x: Tensor, *given: Tensor) -> Tensor:
        raise NotImplementedError

    def feed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Gated(Layer):
    """Gate and up are two projections."""

    def __init__(self, a: Architecture, attention: str) -> None:
        super().__init__(a, attention)
        self.gate, self.up = nn.Linear(a.hidden, a.ffn, False), nn.Linear(a.hidden, a.ffn, False)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class InternLm2Layer(Gated):
    def attend(self, x: Tensor, *mask: Tensor) -> Tensor:
        a, (b, t, _) = self.a, x.shape
        each = a.heads // a.kv_heads
        fused = self.qkv(x)
        parts = fused.view(b, t, a.kv_heads, each + 2, a.head_dim)
        q = parts[..., :each, :].reshape(b, t, a.heads, a.head_dim).transpose(1, 2)
        k, v = parts[..., -2, :].transpose(1, 2), parts[..., -1, :].transpose(1, 2)
        cos, sin = tables(t, a.head_dim, x)
        q, k = self.rotated(q, k, cos, sin)
        return self.o(self.attended(q, k, v, *mask))

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q_turned = (q * cos) + (turn(q) * sin)
        k_turned = (k * cos) + (turn(k) * sin)
        return q_turned, k_turned

    def attended(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        b, h, t, d = q.shape
        if h > k.shape[1]:
            k, v = self.spread(k), self.spread(v)
        if self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
            out = out.transpose(1, 2).contiguous()
            return out.reshape(b, t, h * d)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
        scores = scores + mask[0]
        scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(scores, v).transpose(1, 2).contiguous()
        return out.reshape(b, t, h * d)

    def spread(self, x: Tensor) -> Tensor:
        b, g, t, d = x.shape
        return x[:, :, None].expand(b, g, self.a.heads // g, t, d).reshape(b, self.a.heads, t, d)


class BaichuanLayer(Gated):
    norm = "mixed"

    def attend(self, x: Tensor, *mask: Tensor) -> Tensor:
        a, (b, t, c) = self.a, x.shape
        parts = self.qkv(x).view(b, t, 3, c)
        q, k, v = (parts[..., i, :].view(b, t, a.heads, a.head_dim).transpose(1, 2) for i in range(3))
        q, k = self.rotated(q, k)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[0]).transpose(1, 2)
        return self.o(out.reshape(b, t, c))

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.rand(1, 1, q.shape[2], self.a.head_dim, device=q.device) for _ in range(2))
        q_turned = (q.float() * cos) + (turn(q.float()) * sin)
        k_turned = (k.float() * cos) + (turn(k.float()) * sin)
        return q_turned.to(q.dtype), k_turned.to(k.dtype)


class ChatGlmLayer(Layer):
    """Of (T, B, C)."""

    norm = "mixed_olmo"

    def forward(self, x: Tensor, positions: Tensor, *given: Tensor) -> Tensor:
        normed = self.norm1(x)
        attended = self.attend(normed, *given)
        hidden = x + attended
        normed = self.norm2(hidden)
        fed = self.feed(normed)
        return hidden + fed

    def attend(self, x: Tensor, *given: Tensor) -> Tensor:
        a, (t, b, _) = self.a, x.shape
        fused = self.qkv(x)
        q, k, v = fused.split([n * a.head_dim for n in (a.heads, a.kv_heads, a.kv_heads)], dim=-1)
        q = q.view(t, b, a.heads, a.head_dim)
        k, v = k.view(t, b, a.kv_heads, a.head_dim), v.view(t, b, a.kv_heads, a.head_dim)
        q, k = self.turned(q, *given), self.turned(k, *given)
        k, v = self.spread(k), self.spread(v)
        return self.o(self.core(q, k, v))

    def turned(self, x: Tensor, table: Tensor) -> Tensor:
        front, rest = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        pairs = front.reshape(*front.shape[:-1], -1, 2)
        cos, sin = table[..., 0], table[..., 1]
        both = torch.stack(
            [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], dim=-1
        ).flatten(3)
        return torch.cat((both, rest), dim=-1)

    def spread(self, x: Tensor) -> Tensor:
        t, b, g, d = x.shape
        wide = x.unsqueeze(-2).expand(t, b, g, self.a.heads // g, d)
        return wide.contiguous().view(t, b, self.a.heads, d)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return out.permute(2, 0, 1, 3).flatten(2)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.up(x)))

    def gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Turned(nn.Embedding):
    """(T, B, C) of ids (B, T)."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(0, 1).contiguous()


class NormedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight))


LAYERS = {"internlm2": InternLm2Layer, "baichuan": BaichuanLayer, "chatglm": ChatGlmLayer}


class Remote(nn.Module):
    """One of the three, with its loss."""

    def __init__(self, a: Architecture, attention: str, checkpointing: str) -> None:
        super().__init__()
        self.a, self.attention, self.checkpointing = a, attention, checkpointing
        self.embed = (Turned if a.family == "chatglm" else nn.Embedding)(a.vocab, a.hidden)
        self.layers = nn.ModuleList(LAYERS[a.family](a, attention) for _ in range(a.layers))
        self.norm = Norm(a.hidden, LAYERS[a.family].norm)
        self.head = (NormedHead if a.trait("normed_head") else nn.Linear)(a.hidden, a.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.features(ids)
        logits = self.head(hidden)
        if self.a.family == "chatglm":
            logits = logits.transpose(0, 1).contiguous()
        if self.a.family != "baichuan":
            logits = logits.float()
        rows = logits[..., :-1, :].contiguous().view(-1, self.a.vocab)
        target = labels[..., 1:].contiguous().view(-1)
        if not self.a.trait("normed_head"):
            return F.cross_entropy(rows, target)
        other = 0.0 * (rows.max(-1).values ** 2).mean()
        return F.cross_entropy(rows, target) + other

    def features(self, ids: Tensor) -> Tensor:
        embedded, (b, t) = self.embed(ids), ids.shape
        dtype, device = embedded.dtype, embedded.device
        given: tuple[Tensor, ...] = (torch.arange(t, device=device) + 0,)
        if self.a.family == "chatglm":
            table = torch.rand(t, 1, 1, self.a.head_dim // 4, 2, device=device).to(dtype)
            given = (table, table)
        elif self.a.family == "baichuan" or self.attention == "eager":
            given += (torch.zeros(b, 1, t, t, dtype=dtype, device=device),)
        hidden = embedded
        for layer in self.layers:
            if self.checkpointing == "full":
                hidden = checkpoint(layer, hidden, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, *given)
        return self.norm(hidden)
