"""A small reference decoder in Llama and GPT-2 shapes, for demo, verify and benchmarks.

Plain modules and torch's own ops, so that any runtime can train it. Parameter names are those of
`planner.models.decoder_units`; the op sequence is the one that `planner/activations.py` describes, so a change here
is a change there.

Shapes: B sequences, T tokens, C hidden, H heads, G kv heads, D head dim, F ffn width, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from zplan.cuda_ops.linear_cross_entropy import linear_cross_entropy
from zplan.cuda_ops.rms_norm import rms_norm
from zplan.cuda_ops.rotary import rotary
from zplan.cuda_ops.swiglu import swiglu
from zplan.planner.config import Attention, Checkpointing, CrossEntropy, Kernels
from zplan.planner.errors import ZplanError
from zplan.planner.fused import chunk_tokens
from zplan.planner.models import Architecture

FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Flash in 16 bits, memory-efficient in fp32 on CUDA; on a CPU, torch's own flash kernel for both."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float, kernels: Kernels = "torch") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.fused = eps, kernels == "fused"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(arch: Architecture, seq: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape (T, D/2), rotating halves (Su et al. 2021, RoFormer), with the config's rope scaling."""
    d = arch.head_dim
    inv = arch.rope_theta ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
    scaling = dict(arch.rope_scaling)
    if scaling:
        factor = float(scaling["factor"])
        if scaling["rope_type"] == "linear":
            inv = inv / factor
        else:  # llama3: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            original = float(scaling["original_max_position_embeddings"])
            turns = original * inv / (2 * math.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            inv = inv * (smooth + (1 - smooth) / factor)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), inv)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, H, D).

    Before heads and tokens change places: attention's output has the memory order of its queries, and in this order the
    output projection needs no copy of it.
    """
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, kind: Attention) -> Tensor:
    """Causal attention. q (B, H, T, D); k, v (B, G, T, D); returns (B, T, H*D)."""
    b, h, t, d = q.shape
    fused = kind == "sdpa"
    # Not every torch has an fp32 kernel on CUDA that shares keys among heads.
    if h != k.shape[1] and not (fused and (q.dtype != torch.float32 or not q.is_cuda)):
        k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    if fused:
        # Which kernel runs decides what is saved, so it is pinned; without one of these torch would fall back to
        # writing all T * T scores.
        with sdpa_kernel(FUSED_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != k.shape[1])
    else:
        scores = (q @ k.transpose(-2, -1)) * d**-0.5
        future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out.transpose(1, 2).reshape(b, t, h * d)


class LlamaBlock(nn.Module):
    def __init__(self, arch: Architecture, attention: Attention, kernels: Kernels) -> None:
        super().__init__()
        self.arch, self.attention, self.fused = arch, attention, kernels == "fused"
        c, q, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.norm1 = RMSNorm(c, arch.norm_eps, kernels)
        self.q = nn.Linear(c, q, bias=False)
        self.k = nn.Linear(c, kv, bias=False)
        self.v = nn.Linear(c, kv, bias=False)
        self.o = nn.Linear(q, c, bias=False)
        self.norm2 = RMSNorm(c, arch.norm_eps, kernels)
        self.gate = nn.Linear(c, arch.ffn, bias=False)
        self.up = nn.Linear(c, arch.ffn, bias=False)
        self.down = nn.Linear(arch.ffn, c, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        turn = rotary if self.fused else rotate
        q = turn(self.q(x).view(b, t, self.arch.heads, -1), cos, sin)
        k = turn(self.k(x).view(b, t, self.arch.kv_heads, -1), cos, sin)
        v = self.v(x).view(b, t, self.arch.kv_heads, -1)
        return self.o(attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.attention))

    def feed(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.down(swiglu(self.gate(x), self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class GPT2Block(nn.Module):
    """Dropout is left out: memory and speed of training without it, and bitwise repeatable."""

    def __init__(self, arch: Architecture, attention: Attention, kernels: Kernels) -> None:
        super().__init__()
        assert kernels == "torch", "there are no kernels for GPT-2 blocks"
        self.arch, self.attention = arch, attention
        c = arch.hidden
        self.norm1 = nn.LayerNorm(c, arch.norm_eps)
        self.qkv = nn.Linear(c, 3 * c)
        self.o = nn.Linear(c, c)
        self.norm2 = nn.LayerNorm(c, arch.norm_eps)
        self.up = nn.Linear(c, arch.ffn)
        self.down = nn.Linear(arch.ffn, c)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.arch.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=-1))
        return self.o(attend(q, k, v, self.attention))

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Head(nn.Linear):
    """The last linear layer; with labels, the mean cross-entropy of its logits, which then never exist whole."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(x)
        chunk = chunk_tokens(labels.numel(), self.out_features, self.weight.element_size())
        return linear_cross_entropy(x.flatten(0, 1), self.weight, labels.view(-1), chunk=chunk)


class Decoder(nn.Module):
    """Token ids and labels, both (B, T) int64, to the mean cross-entropy over all labels.

    Parameters
    ----------
    cross_entropy
        `fused`: head and loss in one op, chunk by chunk of tokens; `plain`: whole logits, in fp32.
    kernels
        `fused`: RMSNorm, SwiGLU and rotary embedding by kernels of zplan's own, on CUDA; Llama shapes only.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        checkpointing: Checkpointing = "none",
        attention: Attention = "sdpa",
        cross_entropy: CrossEntropy = "plain",
        kernels: Kernels = "torch",
    ) -> None:
        super().__init__()
        check_loss_and_kernels(arch, cross_entropy, kernels)
        self.arch, self.checkpointing, self.cross_entropy = arch, checkpointing, cross_entropy
        block = LlamaBlock if arch.family == "llama" else GPT2Block
        self.embed = nn.Embedding(arch.vocab, arch.hidden)
        if arch.family == "gpt2":
            self.positions = nn.Embedding(arch.max_seq, arch.hidden)
        self.blocks = nn.ModuleList(block(arch, attention, kernels) for _ in range(arch.layers))
        norm = partial(RMSNorm, kernels=kernels) if arch.family == "llama" else nn.LayerNorm
        self.norm = norm(arch.hidden, arch.norm_eps)
        self.head = Head(arch.hidden, arch.vocab, bias=False)
        if arch.tied:
            self.head.weight = self.embed.weight

    def features(self, ids: Tensor) -> Tensor:
        """Final normed hidden states, (B, T, C)."""
        t = ids.shape[1]
        x = self.embed(ids)
        if self.arch.family == "llama":
            tables = rotary_tables(self.arch, t, device=x.device, dtype=x.dtype)
        else:
            tables = ()
            x = x + self.positions(torch.arange(t, device=ids.device))
        for block in self.blocks:
            if self.checkpointing == "full" and torch.is_grad_enabled():
                # Nothing here draws random numbers, so there is no generator state to stash.
                x = checkpoint(block, x, *tables, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, *tables)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.cross_entropy == "fused":
            loss: Tensor = self.head(self.features(ids), labels)
            return loss
        # No name for the logits: those in 16 bits go as soon as they are cast.
        return F.cross_entropy(self.head(self.features(ids)).flatten(0, 1).float(), labels.view(-1))


def check_loss_and_kernels(arch: Architecture, cross_entropy: CrossEntropy, kernels: Kernels) -> None:
    """Refuse what the decoder does not have."""
    if cross_entropy not in ("plain", "fused"):
        raise ZplanError(
            f"the built-in decoder has no cross-entropy `{cross_entropy}`", 'use "cross_entropy": "plain" or "fused"'
        )
    if kernels == "fused" and arch.family != "llama":
        raise ZplanError(f"there are no fused kernels for blocks of the {arch.family} family", 'use "kernels": "torch"')


@torch.no_grad()
def init_parameter(name: str, tensor: Tensor, seed: int) -> None:
    """Fill one full fp32 parameter: norms with ones, biases with zeros, the rest normal with deviation 0.02.

    Every parameter has a generator of its own, seeded by its name, so each rank can make any unit by itself and all
    world sizes and stages start from the same model.
    """
    import zlib

    if tensor.dim() == 1:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator(device=tensor.device).manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
    tensor.normal_(0.0, 0.02, generator=generator)
