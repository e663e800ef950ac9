"""What each op of torch allocates, saves for backward and allocates in backward.

One method per op that a decoder uses, named as in torch. Each rule was read off torch's dispatch stream; what differs
between devices is in `planner/aten_devices.py` and nowhere else. Views and copies are in `planner/aten_views.py`, what
works element by element in `planner/aten_pointwise.py`.

Values have an itemsize instead of a dtype: 2 bf16, 4 fp32, 8 int64, 1 bool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from zplan.planner.aten_devices import (
    BF16,
    CUDNN_REST,
    FP32,
    INT64,
    NF4_BLOCK,
    AttentionKernel,
    Grads,
    Outs,
    takes_cudnn,
    tile_of,
)
from zplan.planner.aten_pointwise import Pointwise, factors
from zplan.planner.graph import Value
from zplan.planner.monomials import TILE_32, TILE_128
from zplan.planner.strides import dense_like, row_major


class Aten(Pointwise):
    """Ops over one tape: products, routing, attention and both ends of a model, and what they stand on."""

    # Matrix products

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """(..., in) times a parameter (out, in), and perhaps a bias (out,); beside it its adapter, where it has one."""
        if weight.storage in self.adapters:
            return self._adapted(x, weight, bias)
        return self._base(x, weight, bias)

    def _adapted(self, x: Value, weight: Value, bias: Value | None) -> Value:
        """`result + B(A(x)) * scale`, as peft's Linear without dropout writes it."""
        first, second = self.adapters[weight.storage]
        result = self._base(x, weight, bias)
        return self.add(result, self.scale(self._base(self._base(x, first), second)))

    def _base(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        if weight.storage in self.quantized:
            return self._quantized(x, weight, bias)
        rows, wide = x.numel // x.shape[-1], weight.shape[0]
        if bias is None:
            w = self.transpose(weight, 0, 1)
            flat = self.reshape(x, (rows, x.shape[-1]))
            out = self.mm(flat, w)
        else:
            flat = self.reshape(x, (rows, x.shape[-1]))
            out = self.addmm(bias, flat, self.transpose(weight, 0, 1))
        del flat
        return self.view(out, (*x.shape[:-1], wide))

    def _quantized(self, x: Value, weight: Value, bias: Value | None) -> Value:
        """A product with a weight of 4 bits (bitsandbytes 0.50, `MatMul4Bit`): forward and backward make it whole in
        the compute dtype, and keep neither that nor the input.
        """
        shape, old = weight.shape, x.shape

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(math.prod(old[:-1]), *shape)
            whole = self._dequantized(shape, g[0].itemsize)
            out = self.tape.new(old, g[0].itemsize, "mm.input")
            del whole
            return [out]

        node = self.tape.node([x], backward)
        self.tape.multiply(x.numel // old[-1], *shape)
        whole = self._dequantized(shape, x.itemsize)
        out = self.tape.new((*old[:-1], shape[0]), x.itemsize, "mm")
        del whole
        self.tape.finish(node, out)
        return out

    def _dequantized(self, shape: tuple[int, ...], itemsize: int) -> tuple[Value, Value]:
        """The whole weight, and the fp32 constants of its blocks, which are 8 bits themselves."""
        blocks = self.tape.new((-(-math.prod(shape) // NF4_BLOCK),), FP32, "nf4.constants")
        blocks = self.like(blocks, "nf4.constants")
        return blocks, self.tape.new(shape, itemsize, "nf4.whole")

    def mm(self, a: Value, b: Value) -> Value:
        a_shape, b_shape = a.shape, b.shape
        left, right = a.node is not None, b.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(*a_shape, b_shape[1], times=left + right)
            second = self.tape.new(b_shape, g[0].itemsize, "mm.weight", strides=(1, b_shape[0])) if right else None
            return [self.tape.new(a_shape, g[0].itemsize, "mm.input") if left else None, second]

        node = self.tape.node([a, b], backward, *factors(a, b))
        out = self._made(a, b, "mm")
        self.tape.finish(node, out)
        return out

    def _made(self, a: Value, b: Value, label: str) -> Value:
        """The product of two matrices, unless selective checkpointing kept it."""
        m, k, n, itemsize = *a.shape, b.shape[1], a.itemsize

        def make() -> list[Value]:
            self.tape.multiply(m, k, n)
            return [self.tape.new((m, n), itemsize, label)]

        return self.tape.product(make)[0]

    def addmm(self, bias: Value, a: Value, b: Value) -> Value:
        a_shape, b_shape = a.shape, b.shape
        left, right = a.node is not None, b.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(*a_shape, b_shape[1], times=left + right)
            first = self.tape.new(a_shape, g[0].itemsize, "mm.input") if left else None
            second = self.tape.new(b_shape, g[0].itemsize, "mm.weight", strides=(1, b_shape[0])) if right else None
            return [g[0].alias(), first, second]

        node = self.tape.node([bias, a, b], backward, *factors(a, b))
        out = self._made(a, b, "addmm")
        self.tape.finish(node, out)
        return out

    def matmul(self, a: Value, b: Value) -> Value:
        """Batched over the two leading dims, which are equal."""
        batch, m, n = a.shape[0] * a.shape[1], a.shape[2], b.shape[3]
        left = self.reshape(self.expand(a, a.shape), (batch, *a.shape[2:]))
        right = self.reshape(self.expand(b, b.shape), (batch, *b.shape[2:]))
        return self.view(self.bmm(left, right), (*a.shape[:2], m, n))

    def bmm(self, a: Value, b: Value) -> Value:
        a_shape, b_shape = a.shape, b.shape
        left, right = a.node is not None, b.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(*a_shape, b_shape[2], times=left + right)
            second = self.tape.new(b_shape, g[0].itemsize, "bmm") if right else None
            return [self.tape.new(a_shape, g[0].itemsize, "bmm") if left else None, second]

        node = self.tape.node([a, b], backward, *factors(a, b))
        self.tape.multiply(*a_shape, b_shape[2])
        out = self.tape.new((*a.shape[:2], b.shape[2]), a.itemsize, "bmm")
        self.tape.finish(node, out)
        return out

    def grouped_mm(self, x: Value, weight: Value, offsets: Value) -> Value:
        """Rows (S, in), sorted by expert, times their expert's matrix of (E, in, out)."""
        x_shape, w_shape, w_strides = x.shape, weight.shape, weight.strides
        left, right = x.node is not None, weight.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(*x_shape, w_shape[2], times=left + right)
            second = self.tape.new(w_shape, g[0].itemsize, "mm.weight", strides=w_strides) if right else None
            return [self.tape.new(x_shape, g[0].itemsize, "mm.input") if left else None, second]

        node = self.tape.node([x, weight], backward, *factors(x, weight), offsets)
        self.tape.multiply(*x_shape, w_shape[2])
        out = self.tape.new((x_shape[0], w_shape[2]), x.itemsize, "grouped_mm")
        self.tape.finish(node, out)
        return out

    # Routing

    def topk(self, x: Value, k: int) -> tuple[Value, Value]:
        """Values and int64 indices of the largest `k` of the last dim; the gradient is scattered into zeros.

        In place, but not under the dispatch mode that measures on a CPU: see [Note: observer effect] in
        `runtime/meter.py`.
        """
        shape, itemsize = x.shape, x.itemsize

        def backward(g: Grads, s: Grads) -> Outs:
            zeros = self.tape.new(shape, itemsize, "topk.grad")
            if not self.table.in_place_accumulation:
                zeros = self.tape.new(shape, itemsize, "topk.grad")
            return [zeros]

        node = self.tape.node([x], backward)
        values = self.tape.new((*shape[:-1], k), itemsize, "topk")
        indices = self.tape.new((*shape[:-1], k), INT64, "topk.indices")
        self.tape.finish(node, values, saved=[indices])
        return values, indices

    def sum(self, x: Value, dim: int, *, keep: bool = False) -> Value:
        """Over one dim, which stays as 1 or goes; its gradient is expanded, which takes no bytes."""
        shape, dim = x.shape, dim % len(x.shape)
        kept = (*shape[:dim], 1, *shape[dim + 1 :])

        def backward(g: Grads, s: Grads) -> Outs:
            grad = g[0].view(kept, row_major(kept)) if g[0].shape != kept else g[0]
            strides = tuple(0 if n != m else t for n, m, t in zip(shape, kept, grad.strides, strict=True))
            return [grad.view(shape, strides)]

        node = self.tape.node([x], backward)
        out = self.tape.new(kept if keep else (*shape[:dim], *shape[dim + 1 :]), x.itemsize, "sum")
        self.tape.finish(node, out)
        return out

    def divide_(self, x: Value, by: Value) -> Value:
        """In place by something smaller; keeps a copy of what was there."""

        def backward(g: Grads, s: Grads) -> Outs:
            first = self.like(g[0], "div")
            negative = self.like(g[0], "neg")
            quotient = self.like(self.like(g[0], "div"), "div")
            second = self.like(g[0], "mul")
            del negative, quotient
            return [first, second]

        node = self.tape.node([x, by], backward, self.like(x, "original"), by)
        out = x.alias()
        self.tape.finish(node, out)
        return out

    def index(self, x: Value, rows: Value) -> Value:
        """`x[rows]` along the first dim; the gradient is added into zeros.

        In place, but not under the dispatch mode that measures on a CPU: see [Note: observer effect] in
        `runtime/meter.py`. A GPU sorts the indices first: three int64 lists.
        """
        shape, itemsize, count = x.shape, x.itemsize, rows.numel

        def backward(g: Grads, s: Grads) -> Outs:
            zeros = self.tape.new(shape, itemsize, "index.grad")
            if self.table.kernels:
                work = self.tape.workspace(3 * INT64 * count, "index.sort")
                del work
            if not self.table.in_place_accumulation:
                zeros = self.tape.new(shape, itemsize, "index.grad")
            return [zeros]

        node = self.tape.node([x], backward, rows)
        out = self.tape.new((*rows.shape, *shape[1:]), itemsize, "index")
        self.tape.finish(node, out)
        return out

    # Attention

    def shares_heads(self, q: Value) -> bool:
        """Whether fused attention takes fewer key than query heads as they are."""
        return self.table.attention[q.itemsize] != "efficient" and not self.masked

    def sdpa(self, q: Value, k: Value, v: Value, *, causal: bool = True, added: Value | None = None) -> Value:
        """Fused attention of (B, H, T, D) over (B, G, T, D). Causal kernels save half of the products, and no bytes.

        `added` to the scores is kept; where it is trained, its gradient is (B, H, T, T) first.
        """
        itemsize, (b, h, t, d), groups, width = q.itemsize, q.shape, k.shape[1], v.shape[3]
        trained = added is not None and added.node is not None
        kernel = self._attention_kernel(itemsize, d, width, added)
        if added is not None:
            added = self.expand(added, (b, h, t, t))

        def backward(g: Grads, s: Grads) -> Outs:
            # Scores again, and gradients of scores, queries, keys and values.
            self.tape.attend(b, h, t, t, d, times=3, causal=causal)
            self.tape.attend(b, h, t, t, width, times=2, causal=causal)
            pairs = list(zip(s, "qkv", strict=False))
            if kernel == "efficient":
                from zplan.planner.efficient_attention import gradient_sums, row_products

                grads: Outs = [self._row_major_heads(x.shape, x.itemsize, f"{n}.grad") for x, n in pairs]
                if trained:
                    grads.append(self.tape.new((b, h, t, t), itemsize, "attention bias.grad"))
                delta = row_products(self.tape, (b, h, t, d), width, itemsize)
                sums = gradient_sums(self.tape, (b, h, t, d), width, itemsize)
                del delta, sums
                return grads
            grads = [self.like(x, f"{n}.grad") for x, n in pairs]
            work = self._attention_work(kernel, (b, h, t, d), groups)
            work.clear()
            return grads

        def make() -> list[Value]:
            self.tape.attend(b, h, t, t, d, times=1, causal=causal)
            self.tape.attend(b, h, t, t, width, times=1, causal=causal)
            if kernel == "efficient":
                out = self._row_major_heads((b, h, t, width), q.itemsize, "attention output")
                lse = self.tape.padded(h * FP32, TILE_32, "logsumexp")
            else:
                shape = (b, h, t, width)
                out = self.tape.new(shape, itemsize, "attention output", strides=dense_like(shape, q.strides))
                lse = self.tape.new(q.shape[:3], FP32, "logsumexp")
            # A generator's seed and offset, unused without dropout but there; for fp32 they are numbers on the host.
            seeds = {"cpu": (), "flash": (2, 1), "cudnn": (1, 1), "efficient": ()}[kernel]
            return [out, lse, *(self.tape.new((n,), INT64, "philox") for n in seeds)]

        # A mask of bytes is turned into one that is added, anew for each layer, which keeps it.
        bias = [self.tape.new((b, 1, t, t), q.itemsize, "attention bias")] if self.masked else []
        bias += [added] if added is not None else []
        node = self.tape.node([q, k, v, *([added] if added is not None and trained else [])], backward, q, k, v, *bias)
        made = self.tape.product(make)
        self.tape.finish(node, made[0], saved=made)
        return made[0]

    def _attention_kernel(self, itemsize: int, width: int, value_width: int, added: Value | None) -> AttentionKernel:
        """Of heads of these widths: flash attention knows the causal mask alone, and heads of one width."""
        kernel = self.table.attention[itemsize]
        if kernel != "flash":
            return kernel
        trained = added is not None and added.node is not None
        if not trained and takes_cudnn(self.table.cudnn_width, width, value_width):
            return "cudnn"
        return "efficient" if self.masked or width != value_width or added is not None else "flash"

    def _attention_work(self, kernel: AttentionKernel, shape: tuple[int, ...], groups: int) -> list[Value]:
        """What backward holds for itself, for queries (B, H, T, D) and so many heads of keys."""
        (b, h, t, d), tape = shape, self.tape
        if kernel == "cudnn":
            sums = tape.workspace(b * h * t * FP32 * (d + 1), "attention.dq_accum")
            return [sums, tape.workspace(CUDNN_REST, "attention.rest")]
        if kernel != "flash":
            return []
        work = [
            tape.padded(h * FP32, TILE_128, "attention.softmax_d", kernel=True),
            tape.padded(h * FP32 * tile_of(d), TILE_128, "attention.dq_accum", kernel=True),
        ]
        if groups != h:
            work += [tape.workspace(b * h * t * d * BF16, f"attention.{n}_expanded") for n in ("dk", "dv")]
        return work

    def _row_major_heads(self, shape: Sequence[int], itemsize: int, label: str) -> Value:
        """A new (B, H, T, D) that lies in memory as (B, T, H, D)."""
        b, h, t, d = shape
        return self.tape.new(shape, itemsize, label, strides=(h * t * d, d, h * d, 1))

    # Ends of the model

    def embedding(self, weight: Value, ids: Value, table: Literal["tokens", "positions", "types"] = "tokens") -> Value:
        shape, itemsize = weight.shape, weight.itemsize

        def backward(g: Grads, s: Grads) -> Outs:
            if not self.table.kernels:
                return [self.tape.new(shape, itemsize, "embedding.weight")]
            work = self.tape.sort_workspace(table, "embedding.sort")
            out = self.tape.new(shape, itemsize, "embedding.weight")
            del work
            return [out]

        node = self.tape.node([weight], backward, ids)
        out = self.tape.new((*ids.shape, shape[1]), itemsize, "embedding")
        self.tape.finish(node, out)
        return out

    def nll_loss(self, x: Value, target: Value) -> Value:
        shape, itemsize = x.shape, x.itemsize
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "nll.grad")], x, target)
        out = self.tape.new((), itemsize, "loss")
        weight = self.tape.new((), itemsize, "loss.total_weight")
        self.tape.finish(node, out, saved=[weight])
        return out
