"""What each op of torch allocates, saves for backward and allocates in backward.

One method per op that a decoder uses, named as in torch. Each rule was read off torch's dispatch stream; what differs
between devices is in `DeviceTable` and nowhere else.

Values have an itemsize instead of a dtype: 2 bf16, 4 fp32, 8 int64, 1 bool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zplan.planner.layout import ceil_to
from zplan.planner.strides import dense_like, row_major, view_strides
from zplan.planner.tape import TILE_32, TILE_128, Storage, Tape, Value

INT64, FP32, BF16, BOOL = 8, 4, 2, 1
AttentionKernel = Literal["cpu", "flash", "cudnn", "efficient"]


class DeviceTable(NamedTuple):
    """The ways in which devices differ.

    Attributes
    ----------
    in_place_accumulation
        Whether a second gradient is added into the first one's buffer. Not under the dispatch mode that measures on a
        CPU: see [Note: observer effect] in `runtime/meter.py`.
    fused_rms_norm
        One kernel that saves its input and an fp32 reciprocal root per row; else a chain of elementwise ops in fp32.
    layer_norm_stats
        Itemsize of LayerNorm's mean and reciprocal deviation; None: that of the input.
    attention
        Kernel of fused attention by itemsize. `cpu`, `flash`, `cudnn`: the output in the memory order of the queries, a
        log-sum-exp per head and token. `efficient`: the output and the gradients row-major as (B, T, H, D), the
        log-sum-exp padded to 32 tokens.
    kernels
        Whether what kernels allocate for themselves is seen: by CUDA's allocator yes, by a dispatch mode no.
    """

    in_place_accumulation: bool
    fused_rms_norm: bool
    layer_norm_stats: int | None
    attention: Mapping[int, AttentionKernel]
    kernels: bool
    cudnn_width: int = 0
    """Of `Choice`: widest heads that go to cuDNN's kernel rather than to flash attention."""


DEVICES = {
    "cpu": DeviceTable(
        in_place_accumulation=False,
        fused_rms_norm=False,
        layer_norm_stats=None,
        attention={BF16: "cpu", FP32: "cpu"},
        kernels=False,
    ),
    "cuda": DeviceTable(
        in_place_accumulation=True,
        fused_rms_norm=True,
        layer_norm_stats=FP32,
        attention={BF16: "flash", FP32: "efficient"},
        kernels=True,
    ),
}

Grads = list[Value]
Outs = list["Value | None"]


def _factors(a: Value, b: Value) -> list[Value]:
    """What a product saves: each factor, where the other one needs a gradient."""
    return [x for x, other in ((a, b), (b, a)) if other.node is not None]


NF4_BLOCK = 64
"""Elements of a 4-bit weight that share one constant."""

SORT_ABOVE = 3072
"""Tokens up to which the backward of an embedding needs no sorting on CUDA."""
ROWS_PER_SEGMENT = 10


def embedding_sort_bytes(tokens: int, rows: int, width: int) -> int:
    """What `embedding_dense_backward` holds on CUDA beside its result (torch 2.11, EmbeddingBackwardKernel.cu).

    Gradients of one row of the table lie together once the ids are sorted. They are summed in stretches of at most ten,
    each of which has an fp32 row of partial sums, whatever the compute dtype. The temporary of the sort itself is gone
    by then, and smaller for any table of some width.

    Parameters
    ----------
    tokens
        Ids looked up.
    rows, width
        Extents of the table. At most `rows` of the ids differ.
    """
    if tokens <= SORT_ABOVE:
        return 0
    segments = min(tokens, rows)
    stretches = tokens // ROWS_PER_SEGMENT + segments
    lists = 3 * tokens + 2 * segments + stretches + 2
    return INT64 * lists + FP32 * width * stretches


CUDNN_REST = 256
"""Bytes of cuDNN's workspace in attention's backward beside its sums (measured: torch 2.11 with cuDNN of CUDA 13)."""


def takes_cudnn(widest: int, width: int, value_width: int) -> bool:
    """Whether cuDNN's fused attention takes heads of these widths (torch 2.11, `sdp_utils.cpp`).

    Examples
    --------
    Only the heads of DeepSeek V3 may be wider than a card's limit.

    >>> takes_cudnn(128, 192, 128), takes_cudnn(128, 192, 192), takes_cudnn(0, 192, 128)
    (True, False, False)
    """
    fits = max(width, value_width) <= widest or (width, value_width) == (192, 128)
    return widest > 0 and fits and width % 8 == value_width % 8 == 0


def tile_of(head_dim: int) -> int:
    """Head width that flash attention's backward accumulates in."""
    return ceil_to(head_dim, 32 if head_dim <= 128 else 64)


class Aten:
    """Ops over one tape."""

    def __init__(self, tape: Tape, table: DeviceTable) -> None:
        self.tape, self.table = tape, table
        self.adapters: dict[Storage, tuple[Value, Value]] = {}
        """Low-rank factors (rank, in) and (out, rank) beside a frozen weight."""
        self.quantized: set[Storage] = set()
        """Weights of 4 bits, which every product makes whole first."""
        self.masked = False
        """Whether fused attention takes a mask: of a padded batch."""
        self.fused = False
        """Whether the built-in decoder runs our own kernels: `planner/fused.py`."""

    def named(self, label: str, x: Value) -> Value:
        """Give a value's storage a name for people."""
        x.storage.label = label
        return x

    # Views and copies

    def view(self, x: Value, shape: Sequence[int]) -> Value:
        strides = view_strides(x.shape, x.strides, shape)
        assert strides is not None, f"view of {x.shape} with strides {x.strides} as {shape}"
        return self._view(x, shape, strides)

    def _view(self, x: Value, shape: Sequence[int], strides: tuple[int, ...]) -> Value:
        old = x.shape
        node = self.tape.node([x], lambda g, s: [self.reshape(g[0], old)])
        out = x.view(shape, strides)
        self.tape.finish(node, out)
        return out

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """A view where strides allow, else a row-major copy."""
        strides = view_strides(x.shape, x.strides, shape)
        if strides is None:
            return self._view(self.clone(x), shape, row_major(shape))
        return self._view(x, shape, strides)

    def clone(self, x: Value) -> Value:
        """Row-major copy; its gradient passes through."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        out = self.tape.new(x.shape, x.itemsize, "clone")
        self.tape.finish(node, out)
        return out

    def transpose(self, x: Value, a: int, b: int) -> Value:
        node = self.tape.node([x], lambda g, s: [self.transpose(g[0], a, b)])
        shape, strides = list(x.shape), list(x.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        out = x.view(shape, tuple(strides))
        out.turned = True
        self.tape.finish(node, out)
        return out

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast without bytes; its gradient is summed."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        strides = tuple(0 if n != m else s for n, m, s in zip(shape, x.shape, x.strides, strict=True))
        out = x.view(shape, strides)
        self.tape.finish(node, out)
        return out

    def split(self, x: Value, parts: int) -> list[Value]:
        """Equal parts of the last dim; their gradients are concatenated."""
        node = self.tape.node([x], lambda g, s: [self.cat(g)])
        shape = (*x.shape[:-1], x.shape[-1] // parts)
        out = [x.view(shape, x.strides) for _ in range(parts)]
        self.tape.finish(node, *out)
        return out

    def split_rows(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Parts of the first dim; their gradients are concatenated."""
        shape, itemsize = x.shape, x.itemsize
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "cat")])
        out = [x.view((n, *shape[1:]), x.strides) for n in sizes]
        self.tape.finish(node, *out)
        return out

    def stack(self, xs: Sequence[Value]) -> Value:
        """Scalars to one vector; the gradients are its elements."""
        count = len(xs)
        node = self.tape.node(xs, lambda g, s: [g[0].view((), ()) for _ in range(count)])
        out = self.tape.new((count,), xs[0].itemsize, "stack")
        self.tape.finish(node, out)
        return out

    def narrow(self, x: Value, start: int, length: int) -> Value:
        """`x[..., start:start + length]`; its gradient is written into zeros."""
        shape, itemsize = x.shape, x.itemsize
        if length == shape[-1]:
            return self.view(x, shape)
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "slice.grad")])
        out = x.view((*shape[:-1], length), x.strides)
        self.tape.finish(node, out)
        return out

    def contiguous(self, x: Value) -> Value:
        """Itself where it is row-major, else a copy."""
        same = all(n == 1 or a == b for n, a, b in zip(x.shape, x.strides, row_major(x.shape), strict=True))
        return x if same else self.clone(x)

    def cat(self, xs: Sequence[Value]) -> Value:
        """Concatenation along the last dim; the gradients are slices."""
        shapes = [x.shape for x in xs]
        node = self.tape.node(xs, lambda g, s: [g[0].view(n, g[0].strides) for n in shapes])
        out = self.tape.new((*xs[0].shape[:-1], sum(n[-1] for n in shapes)), xs[0].itemsize, "cat")
        self.tape.finish(node, out)
        return out

    def cat_tokens(self, xs: Sequence[Value]) -> Value:
        """Concatenation of (B, T, C) along T; the gradients are slices."""
        shapes = [x.shape for x in xs]
        node = self.tape.node(xs, lambda g, s: [g[0].view(n, g[0].strides) for n in shapes])
        b, _, c = shapes[0]
        out = self.tape.new((b, sum(n[1] for n in shapes), c), xs[0].itemsize, "cat")
        self.tape.finish(node, out)
        return out

    def select_token(self, x: Value) -> Value:
        """The first of (B, T, C), a view (B, C); its gradient is written into zeros."""
        shape, itemsize = x.shape, x.itemsize
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "select.grad")])
        out = x.view((shape[0], shape[2]), (x.strides[0], x.strides[2]))
        self.tape.finish(node, out)
        return out

    def to(self, x: Value, itemsize: int) -> Value:
        if x.itemsize == itemsize:
            return x
        old = x.itemsize
        node = self.tape.node([x], lambda g, s: [self.to(g[0], old)])
        label = x.storage.label.removesuffix(" cast") + " cast"
        out = self.like(x, label, itemsize)
        self.tape.finish(node, out)
        return out

    def like(self, x: Value, label: str, itemsize: int | None = None) -> Value:
        """A new value in the shape and memory order of `x`, without a node."""
        return self.tape.new(x.shape, itemsize or x.itemsize, label, strides=dense_like(x.shape, x.strides))

    # Elementwise

    def add(self, a: Value, b: Value) -> Value:
        node = self.tape.node([a, b], lambda g, s: [g[0].alias(), g[0].alias()])
        out = self.like(a, "add")
        self.tape.finish(node, out)
        return out

    def sub(self, a: Value, b: Value) -> Value:
        second = b.node is not None
        node = self.tape.node([a, b], lambda g, s: [g[0].alias(), self.like(g[0], "neg") if second else None])
        out = self.like(a, "sub")
        self.tape.finish(node, out)
        return out

    def mul(self, a: Value, b: Value) -> Value:
        """`b` may be smaller and broadcast, and of another itemsize; the wider one wins."""
        wide = max(a.itemsize, b.itemsize)
        first, second = a.node is not None, b.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            other = self.like(g[0], "mul") if second else None
            return [self.like(g[0], "mul") if first else None, other]

        node = self.tape.node([a, b], backward, *_factors(a, b))
        out = self.like(a, "mul", wide)
        self.tape.finish(node, out)
        return out

    def scale(self, x: Value) -> Value:
        """Times a Python number."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "mul")])
        out = self.like(x, "mul")
        self.tape.finish(node, out)
        return out

    def add_number(self, x: Value) -> Value:
        """Plus a Python number."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        out = self.like(x, "add")
        self.tape.finish(node, out)
        return out

    def add_(self, x: Value, y: Value) -> Value:
        """In place."""
        node = self.tape.node([x, y], lambda g, s: [g[0].alias(), g[0].alias()])
        out = x.alias()
        self.tape.finish(node, out)
        return out

    def scale_(self, x: Value) -> Value:
        """In place times a Python number."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "div")])
        out = x.alias()
        self.tape.finish(node, out)
        return out

    def neg(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "neg")])
        out = self.like(x, "neg")
        self.tape.finish(node, out)
        return out

    def square(self, x: Value) -> Value:
        def backward(g: Grads, s: Grads) -> Outs:
            power = self.like(g[0], "pow")
            scaled = self.like(g[0], "mul")
            out = self.like(g[0], "mul")
            del power, scaled
            return [out]

        node = self.tape.node([x], backward, x)
        out = self.like(x, "pow")
        self.tape.finish(node, out)
        return out

    def mean(self, x: Value) -> Value:
        """Over the last dim, which stays as 1; in fp32."""
        sizes = x.shape
        node = self.tape.node([x], lambda g, s: [self.tape.new(sizes, FP32, "div")])
        out = self.tape.new((*sizes[:-1], 1), FP32, "mean")
        self.tape.finish(node, out)
        return out

    def rsqrt(self, x: Value) -> Value:
        def backward(g: Grads, s: Grads) -> Outs:
            cube = self.like(g[0], "pow")
            half = self.like(g[0], "mul")
            out = self.like(g[0], "mul")
            del cube, half
            return [out]

        node = self.tape.node([x], backward)
        out = self.like(x, "rstd")
        self.tape.finish(node, out, saved=[out])
        return out

    def unary(self, x: Value, label: str) -> Value:
        """`silu`, `gelu`: saves its input, backward in one kernel."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], f"{label}.grad")], x)
        out = self.like(x, label)
        self.tape.finish(node, out)
        return out

    def relu(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "relu.grad")])
        out = self.like(x, "relu")
        self.tape.finish(node, out, saved=[out])
        return out

    def tanh(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "tanh.grad")])
        out = self.like(x, "tanh")
        self.tape.finish(node, out, saved=[out])
        return out

    def dropout(self, x: Value) -> Value:
        """Training's, of any probability but 0. A GPU keeps a mask of bytes, a CPU the factors in the input's dtype."""
        if not self.table.kernels:
            return self.mul(x, self.like(x, "dropout.mask"))
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "dropout.grad")])
        out = self.like(x, "dropout")
        mask = self.like(x, "dropout.mask", BOOL)
        self.tape.finish(node, out, saved=[mask])
        return out

    def masked_fill(self, x: Value, mask: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "masked_fill")], mask)
        out = self.like(x, "masked_fill")
        self.tape.finish(node, out)
        return out

    def softmax(self, x: Value, label: str) -> Value:
        """`_softmax` and `_log_softmax`: save their output."""

        def backward(g: Grads, s: Grads) -> Outs:
            # On CUDA the softmax's backward multiplies gradient and output into a buffer first; log-softmax does not.
            product = (
                self.tape.workspace(g[0].numel * g[0].itemsize, "softmax.product") if self._multiplies(label) else None
            )
            out = self.like(g[0], f"{label}.grad")
            del product
            return [out]

        node = self.tape.node([x], backward)
        out = self.like(x, label)
        self.tape.finish(node, out, saved=[out])
        return out

    def _multiplies(self, label: str) -> bool:
        return self.table.kernels and label == "softmax"

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

        node = self.tape.node([a, b], backward, *_factors(a, b))
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

        node = self.tape.node([bias, a, b], backward, *_factors(a, b))
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

        node = self.tape.node([a, b], backward, *_factors(a, b))
        self.tape.multiply(*a_shape, b_shape[2])
        out = self.tape.new((*a.shape[:2], b.shape[2]), a.itemsize, "bmm")
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

    def unsqueeze_last(self, x: Value) -> Value:
        """(N,) to (N, 1)."""
        return self.view(x, (*x.shape, 1))

    def grouped_mm(self, x: Value, weight: Value, offsets: Value) -> Value:
        """Rows (S, in), sorted by expert, times their expert's matrix of (E, in, out)."""
        x_shape, w_shape, w_strides = x.shape, weight.shape, weight.strides
        left, right = x.node is not None, weight.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            self.tape.multiply(*x_shape, w_shape[2], times=left + right)
            second = self.tape.new(w_shape, g[0].itemsize, "mm.weight", strides=w_strides) if right else None
            return [self.tape.new(x_shape, g[0].itemsize, "mm.input") if left else None, second]

        node = self.tape.node([x, weight], backward, *_factors(x, weight), offsets)
        self.tape.multiply(*x_shape, w_shape[2])
        out = self.tape.new((x_shape[0], w_shape[2]), x.itemsize, "grouped_mm")
        self.tape.finish(node, out)
        return out

    # Norms

    def rms_norm(self, x: Value, weight: Value) -> Value:
        if self.table.fused_rms_norm:
            return self._fused_rms_norm(x, weight)
        up = self.to(x, FP32)
        square = self.square(up)
        mean = self.mean(square)
        # `add_(eps)`: in place, a node of its own.
        node = self.tape.node([mean], lambda g, s: [g[0].alias()])
        self.tape.finish(node, mean)
        root = self.rsqrt(mean)
        # One expression in C++: its temporaries live to its end.
        del square, mean
        normed = self.named("normed, before weight", self.mul(up, root))
        normed = self.named("normed", self.mul(normed, weight))
        return self.to(normed, x.itemsize)

    def _fused_rms_norm(self, x: Value, weight: Value) -> Value:
        wanted = [v.node is not None for v in (x, weight)]

        def backward(g: Grads, s: Grads) -> Outs:
            labels = ("rms_norm.grad", "rms_norm.weight")
            return [self.like(v, label) if w else None for v, label, w in zip(s, labels, wanted, strict=False)]

        node = self.tape.node([x, weight], backward, x, weight)
        out = self.tape.new(x.shape, x.itemsize, "rms_norm")
        root = self.tape.new((*x.shape[:-1], 1), FP32, "rstd")
        self.tape.finish(node, out, saved=[root])
        return out

    def layer_norm(self, x: Value, weight: Value, bias: Value) -> Value:
        wanted = [v.node is not None for v in (x, weight, bias)]

        def backward(g: Grads, s: Grads) -> Outs:
            labels = ("norm.grad", "norm.weight", "norm.bias")
            return [self.like(v, label) if w else None for v, label, w in zip(s, labels, wanted, strict=False)]

        node = self.tape.node([x, weight, bias], backward, x, weight, bias)
        out = self.tape.new(x.shape, x.itemsize, "layer_norm")
        stats = self.table.layer_norm_stats or x.itemsize
        mean = self.tape.new((*x.shape[:-1], 1), stats, "mean")
        rstd = self.tape.new((*x.shape[:-1], 1), stats, "rstd")
        self.tape.finish(node, out, saved=[mean, rstd])
        return out

    # Attention

    def repeat_interleave(self, x: Value, times: int) -> Value:
        """Each head `times` over: (B, G, T, D) to (B, G * times, T, D)."""
        b, g, t, d = x.shape
        wide = self.expand(self.unsqueeze(x, 2), (b, g, times, t, d))
        return self.view(self.clone(wide), (b, g * times, t, d))

    def unsqueeze(self, x: Value, dim: int) -> Value:
        """A dim of 1 before `dim`."""
        old = x.shape
        node = self.tape.node([x], lambda g, s: [g[0].view(old, g[0].strides[:dim] + g[0].strides[dim + 1 :])])
        stride = x.strides[dim] * old[dim]
        out = x.view((*old[:dim], 1, *old[dim:]), (*x.strides[:dim], stride, *x.strides[dim:]))
        self.tape.finish(node, out)
        return out

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

        def backward(g: Grads, s: Grads) -> Outs:
            # Scores again, and gradients of scores, queries, keys and values.
            self.tape.attend(b, h, t, t, d, times=3, causal=causal)
            self.tape.attend(b, h, t, t, width, times=2, causal=causal)
            pairs = list(zip(s, "qkv", strict=False))
            if kernel == "efficient":
                from zplan.planner.efficient_attention import gradient_sums

                grads: Outs = [self._row_major_heads(x.shape, x.itemsize, f"{n}.grad") for x, n in pairs]
                delta = self.tape.workspace(b * h * t * FP32, "attention.delta")
                sums = gradient_sums(self.tape, (b, h, t, d), width, itemsize)
                if trained:
                    grads.append(self.tape.new((b, h, t, t), itemsize, "attention bias.grad"))
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
                out = self.tape.new(
                    (b, h, t, width),
                    itemsize,
                    "attention output",
                    strides=dense_like((b, h, t, width), q.strides),
                )
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
