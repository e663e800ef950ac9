"""What our own kernels allocate, save and allocate in backward: `zplan.cuda_ops`, as `aten.py` for torch's.

On a GPU an op allocates its results and little else. On a CPU its plain-torch path has temporaries, which are counted
as they are: locals and nesting are those of `cuda_ops/reference.py` on purpose ([Note: lifetimes] in `tape.py`).
"""

from __future__ import annotations

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64, Grads, Outs
from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.graph import Value
from zplan.planner.layout import ceil_to
from zplan.planner.monomials import CHUNK

CHUNK_TOKENS = 2048
"""Tokens of one chunk of logits, where `CHUNK_BYTES` does not say less. With much fewer, reading and writing the
weight's fp32 gradient for each chunk would take longer than its product."""
CHUNK_BYTES = 2**29
CHUNK_MULTIPLE = 128
"""Tokens; matrix products work in tiles."""

NORM_PARTS = 256
"""fp32 rows in which the backward of RMSNorm adds up the weight's gradient, on any GPU."""


def chunk_tokens(tokens: int, vocab: int, itemsize: int) -> int:
    """Tokens whose logits exist at once: the chunk's buffer has at most 512 MiB, unless 128 rows are more.

    Examples
    --------
    >>> [chunk_tokens(8192, vocab, 2) for vocab in (32000, 128256, 256000)], chunk_tokens(9, 50, 2)
    ([2048, 2048, 1024], 9)
    """
    fitting = CHUNK_BYTES // (padded_vocab(vocab, itemsize) * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
    return min(tokens, CHUNK_TOKENS, max(CHUNK_MULTIPLE, fitting))


def check_compiled(choice: Choice) -> None:
    """Refuse our kernels in blocks that `torch.compile` compiles."""
    if choice.compile and choice.kernels == "fused":
        raise ZplanError(
            '`compile` and "kernels": "fused" exclude each other: torch.compile can\'t see into kernels of our own, '
            "and makes fused ones itself",
            'drop one of the two; "cross_entropy": "fused" goes with both',
        )


def padded_vocab(vocab: int, itemsize: int) -> int:
    """Elements of one row of the chunk's buffer: rows begin at multiples of 16 bytes."""
    return ceil_to(vocab, 16 // itemsize)


# --- linear and cross-entropy -------------------------------------------------------------------------------------


def linear_cross_entropy(op: Aten, x: Value, weight: Value, labels: Value, *, direct: bool) -> Value:
    """The loss of (N, C) and (V, C). Both gradients are made here; see `cuda_ops/linear_cross_entropy.py`.

    `direct`: the weight's goes to its reduce in fp32, past autograd.
    """
    tape, (vocab, width), itemsize = op.tape, weight.shape, x.itemsize
    wanted = [v.node is not None for v in (x, weight)]
    on_gpu = op.table.kernels

    def backward(g: Grads, s: Grads) -> Outs:
        out: Outs = [_rescale(op, v, itemsize) for v in s[: wanted[0]]]
        if wanted[1]:
            out.append(_rescale(op, s[-2], FP32 if direct else itemsize))
        return out

    if direct:
        # The runtime takes the gradient as it was summed.
        weight = weight.widened(FP32)
    node = tape.node([v for v, w in zip((x, weight), wanted, strict=True) if w], backward)
    scale = _scale(op, labels)
    losses = tape.new(labels.shape, FP32, "losses")
    grads = [op.like(x, "head.grad")] if wanted[0] else []
    if wanted[1]:
        grads.append(tape.new((vocab, width), FP32, WEIGHT_SUM))
    buffer = tape.padded(padded_vocab(vocab, itemsize) * itemsize, CHUNK, "logits.chunk")
    if not on_gpu:
        _chunk_on_cpu(op, vocab, width, itemsize, grads=any(wanted), weight=wanted[1])
    del buffer
    summed = tape.new((), FP32, "loss.sum")
    out = tape.new((), FP32, "loss")
    del summed, losses
    tape.finish(node, out, saved=[*grads, scale])
    return out


WEIGHT_SUM = "weight gradient, summed"


def _rescale(op: Aten, grad: Value, itemsize: int) -> Value:
    """`rescale`: in place where the dtype is right."""
    if op.table.kernels:
        return grad.alias() if grad.itemsize == itemsize else op.like(grad, "mm.weight", itemsize)
    factor = op.tape.new((), FP32, "factor")
    if grad.itemsize == FP32:
        out = grad.alias() if itemsize == FP32 else op.like(grad, "mm.weight", itemsize)
    else:
        wide = op.like(grad, "wide", FP32)
        out = grad.alias()
        del wide
    del factor
    return out


def _scale(op: Aten, labels: Value) -> Value:
    """One over the number of labels that count."""
    counts = op.like(labels, "counts", BOOL)
    total = op.tape.new((), INT64, "counts")
    del counts
    out = op.tape.new((), FP32, "scale")
    del total
    return out


def _chunk_on_cpu(op: Aten, vocab: int, width: int, itemsize: int, *, grads: bool, weight: bool) -> None:
    """Temporaries of `reference.cross_entropy_`, then of the product of 16-bit factors in fp32."""

    def rows(nbytes: int) -> Value:
        return op.tape.padded(nbytes, CHUNK, "chunk")

    half = itemsize < FP32
    wide = rows(vocab * FP32) if half else None
    ignored, index, lse = rows(BOOL), rows(INT64), rows(FP32)
    infinite = rows(BOOL)
    del infinite
    chosen = rows(FP32)
    del chosen
    if grads:
        hit = op.tape.new((), FP32, "hit")
        del hit
    del wide, ignored, index, lse
    if weight and half:
        factors = rows(vocab * FP32), rows(width * FP32)
        del factors


# --- norms, gates, positions ----------------------------------------------------------------------------------------


def rms_norm(op: Aten, x: Value, weight: Value) -> Value:
    """`cuda_ops/rms_norm.py`: saves its input and one fp32 number a row."""
    on_gpu, shape, itemsize, width = op.table.kernels, x.shape, x.itemsize, x.shape[-1]

    def on_cpu(g: Grads) -> tuple[Value, Value]:
        normed = _product_of_wide(op, g[0])
        wide = op.like(g[0], "wide", FP32)
        summed = op.tape.new((width,), FP32, "rms_norm.weight")
        grad_weight = summed if itemsize == FP32 else op.tape.new((width,), itemsize, "rms_norm.weight")
        del summed
        mean = op.tape.new((*shape[:-1], 1), FP32, "mean")
        factor = None if itemsize == FP32 else op.tape.new((width,), FP32, "wide")
        other = op.like(g[0], "wide", FP32)
        del factor, wide
        grad_x = other if itemsize == FP32 else op.like(g[0], "rms_norm.grad")
        del other, normed, mean
        return grad_x, grad_weight

    def backward(g: Grads, s: Grads) -> Outs:
        if not on_gpu:
            return list(on_cpu([op.contiguous(g[0])]))
        grad = op.contiguous(g[0])
        out: Outs = [op.like(grad, "rms_norm.grad"), op.like(s[1], "rms_norm.weight")]
        parts = op.tape.workspace(NORM_PARTS * width * FP32, "rms_norm.parts")
        del parts, grad
        return out

    node = op.tape.node([x, weight], backward)
    if on_gpu:
        out = op.tape.new(shape, itemsize, "rms_norm")
        rstd = op.tape.new((*shape[:-1], 1), FP32, "rstd")
    else:
        wide = x if itemsize == FP32 else op.like(x, "wide", FP32)
        square = op.like(x, "square", FP32)
        rstd = op.tape.new((*shape[:-1], 1), FP32, "rstd")
        del square
        normed = op.like(x, "rms_norm", FP32)
        out = normed if itemsize == FP32 else op.like(x, "rms_norm")
        del wide, normed
    op.tape.finish(node, out, saved=[x, weight, rstd])
    return out


def _product_of_wide(op: Aten, x: Value) -> Value:
    """`wide(x) * something smaller`: the widened copy goes at once."""
    wide = x if x.itemsize == FP32 else op.like(x, "wide", FP32)
    out = op.like(x, "product", FP32)
    del wide
    return out


def swiglu(op: Aten, gate: Value, up: Value) -> Value:
    """`cuda_ops/swiglu.py`: saves gate and up, over which backward writes the gradients."""
    on_gpu, itemsize = op.table.kernels, gate.itemsize

    def backward(g: Grads, s: Grads) -> Outs:
        grad = op.contiguous(g[0])
        if not on_gpu:
            wide = None if itemsize == FP32 else op.like(grad, "wide", FP32)
            share, silu, rest = (op.like(grad, "wide", FP32) for _ in range(3))
            del wide, share, silu, rest
        return [s[0].alias(), s[1].alias()]

    node = op.tape.node([gate, up], backward)
    if on_gpu:
        out = op.like(gate, "swiglu")
    else:
        wide = gate if itemsize == FP32 else op.like(gate, "wide", FP32)
        share = op.like(gate, "swiglu", FP32)
        out = share if itemsize == FP32 else op.like(gate, "swiglu")
        del wide, share
    op.tape.finish(node, out, saved=[gate, up])
    return out


def rotary(op: Aten, x: Value, cos: Value, sin: Value) -> Value:
    """`cuda_ops/rotary.py`: saves its tables."""
    node = op.tape.node([x], lambda g, s: [_turn(op, op.contiguous(g[0]), s[0])])
    out = _turn(op, x, cos)
    op.tape.finish(node, out, saved=[cos, sin])
    return out


def _turn(op: Aten, x: Value, table: Value) -> Value:
    if op.table.kernels:
        return op.like(x, "rotary")
    half = (*x.shape[:-1], x.shape[-1] // 2)

    def product() -> Value:
        return op.tape.new(half, FP32, "rotary")

    def combined() -> Value:
        a, b = product(), product()
        out = product()
        del a, b
        return out

    wide = x if x.itemsize == FP32 else op.like(x, "wide", FP32)
    cos = table if table.itemsize == FP32 else op.like(table, "wide", FP32)
    other = table if table.itemsize == FP32 else op.like(table, "wide", FP32)
    sin = op.like(table, "wide", FP32)
    del other
    first, second = combined(), combined()
    joined = op.like(x, "rotary", FP32)
    del first, second
    out = joined if x.itemsize == FP32 else op.like(x, "rotary")
    del wide, cos, sin, joined
    return out
