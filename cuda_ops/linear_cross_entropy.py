"""The last linear layer and its cross-entropy, chunk by chunk of tokens: logits never exist in full.

[Note: gradients in forward] A chunk's logits are overwritten by their own gradient, from which the chunk's part of both
gradients is made at once: that of the features, and, added up in fp32, that of the weight. Backward has nothing left to
do but to multiply by what only it knows (the gradient of the loss, with the loss scale in it, and one over the number
of tokens), on the device. So features and weight need not be kept, and the weight may be gone by then. What the logits'
gradient is before that factor, softmax minus target, does not underflow in fp16.

Shapes: N tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zplan.cuda_ops import compiler, reference
from zplan.cuda_ops.adamw import KINDS
from zplan.cuda_ops.autograd import refuse_second_derivative

CHUNK = 2048
"""Tokens of one chunk, unless the caller says otherwise."""

ROW_BYTES = 16
"""Rows of the chunk's buffer begin at multiples of it, whatever the vocabulary: whole vectors, and faster products."""

RESCALE_SHARE = 16384
"""Elements of a block of `rescale`."""


class _CrossEntropy(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "target", "loss")),
        *((name, ctypes.c_int64) for name in ("stride", "vocab", "ignore")),
        ("smoothing", ctypes.c_float),
        ("kind", ctypes.c_int),
        ("grads", ctypes.c_int),
    ]


class _Rescale(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "out", "first", "second")),
        ("numel", ctypes.c_int64),
        ("in_kind", ctypes.c_int),
        ("out_kind", ctypes.c_int),
    ]


_SINKS: MutableMapping[Tensor, Callable[[Tensor], object]] = WeakTensorKeyDictionary()


def give_gradient_to(weight: Tensor, sink: Callable[[Tensor], object] | None) -> None:
    """Have the gradient of a weight handed over as it was summed, in fp32, when backward makes it.

    Autograd then gets none for it, so it is neither rounded to the weight's dtype nor copied.

    Parameters
    ----------
    sink
        Takes the gradient, of the weight's shape, and may keep it; None: autograd gets it again.
    """
    if sink is None:
        _SINKS.pop(weight, None)
    else:
        _SINKS[weight] = sink


@dataclass(frozen=True)
class Loss:
    """What kind of cross-entropy; names and meaning as in `torch.nn.functional.cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: Literal["mean", "sum"] = "mean"
    chunk: int = CHUNK


def padded_vocab(vocab: int, itemsize: int) -> int:
    """Elements of one row of the chunk's buffer."""
    multiple = max(1, ROW_BYTES // itemsize)
    return -(-vocab // multiple) * multiple


def linear_cross_entropy(  # noqa: PLR0913  those of `cross_entropy`, all of them named
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int = CHUNK,
) -> Tensor:
    """`cross_entropy(x @ weight.T + bias, target)` without the logits. See [Note: gradients in forward].

    Where gradients are wanted they are made here, so backward can run once, and not through itself.

    Parameters
    ----------
    x, weight, bias
        (N, C), (V, C), (V,), of one dtype: bf16, fp16 or fp32 (float64 too on a CPU).
    target
        (N,) int64, contiguous. On CUDA a label that is neither in the vocabulary nor `ignore_index` makes the loss NaN.
    chunk
        Tokens at once. Memory: `chunk` rows of V logits in the dtype of `x`; with gradients `x` once more, and the
        weight in fp32.

    Returns
    -------
    Tensor
        0-dim, fp32 (float64 for float64).
    """
    assert x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert target.shape == x.shape[:1] and target.dtype == torch.int64 and target.is_contiguous(), target.shape
    assert x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype), (x.dtype, weight.dtype)
    assert chunk > 0 and reduction in ("mean", "sum") and 0.0 <= label_smoothing <= 1.0, (chunk, reduction)
    kind = Loss(ignore_index, label_smoothing, reduction, chunk)
    grad = torch.is_grad_enabled()
    wanted = tuple(grad and t is not None and t.requires_grad for t in (x, weight, bias))
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, bias, target, kind, wanted)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        kind: Loss,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        ctx.dtype = x.dtype
        ctx.sink = _SINKS.get(weight)
        loss, ctx.scale, ctx.grads = _forward(x, weight, bias, target, kind, wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        if ctx.grads is None:
            raise RuntimeError(
                "backward through linear_cross_entropy a second time: its gradients were made in forward, once"
            )
        # The graph lives as long as the loss, so nothing may be left in it.
        (x, weight, bias), ctx.grads = ctx.grads, None
        scale, ctx.scale = ctx.scale, None
        x, bias = (rescale(g, grad, scale, ctx.dtype) for g in (x, bias))
        if weight is not None and ctx.sink is not None:
            weight = rescale(weight, grad, scale, weight.dtype)
            del scale
            ctx.sink(weight)
            return x, None, bias, None, None, None
        return x, rescale(weight, grad, scale, ctx.dtype), bias, None, None, None


Grads = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(frozen=True, eq=False)
class _Chunks:
    """What all chunks of one call share."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    kind: Loss
    losses: Tensor  # (N,)
    grads: Grads
    buffer: Tensor  # (chunk, V and some more), in the dtype of x

    def run(self, first: int) -> None:
        """Losses of the chunk that begins at a token, and its part of the gradients."""
        rows = slice(first, first + self.kind.chunk)
        x, (grad_x, grad_weight, grad_bias) = self.x[rows], self.grads
        logits = self.buffer[: len(x), : len(self.weight)]
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=logits)
        wanted = any(g is not None for g in self.grads)
        cross_entropy_(logits, self.target[rows], self.losses[rows], self.kind, grads=wanted)
        if grad_x is not None:
            torch.mm(logits, self.weight, out=grad_x[rows])
        if grad_weight is not None:
            _add_product(grad_weight, logits, x, start=first == 0)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=grad_bias.dtype)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, kind: Loss, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Grads]:
    """The loss, what gradients are to be multiplied by, and the gradients of x, weight and bias before that."""
    tokens, wide = len(x), torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = _scale(target, kind, wide)
    losses = x.new_empty(tokens, dtype=wide)
    # Zeros where no chunk would fill them.
    new = torch.empty_like if tokens else torch.zeros_like
    grads = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None,
        new(weight, dtype=wide, memory_format=torch.contiguous_format) if wanted[1] else None,
        torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None,
    )
    buffer = x.new_empty(min(kind.chunk, tokens), padded_vocab(len(weight), x.element_size()))
    if not buffer.is_cuda:
        # oneDNN's bf16 product reads the ends of rows too and multiplies them by zero: a NaN left there comes through.
        buffer[:, len(weight) :].zero_()
    chunks = _Chunks(x, weight, bias, target, kind, losses, grads, buffer)
    for first in range(0, tokens, kind.chunk):
        chunks.run(first)
    del chunks, buffer
    return losses.sum() * scale, scale, grads


def _scale(target: Tensor, kind: Loss, dtype: torch.dtype) -> Tensor:
    """One over the number of labels that count, or 1; 0-dim on the device."""
    if kind.reduction == "sum":
        return torch.ones((), dtype=dtype, device=target.device)
    return (target != kind.ignore_index).sum().to(dtype).reciprocal_()


def _add_product(total: Tensor, grad: Tensor, x: Tensor, *, start: bool) -> None:
    """`total (+)= grad.T @ x` in fp32, from 16-bit factors; overwrites where it starts."""
    if total.dtype == grad.dtype:
        torch.addmm(total, grad.t(), x, beta=0 if start else 1, out=total)
    elif total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, beta=0 if start else 1, out=total)
    else:
        torch.addmm(total, grad.t().to(total.dtype), x.to(total.dtype), beta=0 if start else 1, out=total)


def cross_entropy_(  # noqa: PLR0913
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    kind: Loss,
    *,
    grads: bool,
    defines: Mapping[str, int] | None = None,
) -> None:
    """Loss of each row of logits (n, V), and with `grads` its gradient in their place.

    Parameters
    ----------
    logits
        Rows begin at multiples of `ROW_BYTES`.
    losses
        (n,) fp32, overwritten; 0 where the label is the ignored one.
    defines
        Macros that differ from `compiler.TUNED`.
    """
    if not compiler.usable(logits.device):
        smoothing, ignored = kind.label_smoothing, kind.ignore_index
        reference.cross_entropy_(logits, target, losses, ignore_index=ignored, label_smoothing=smoothing, grads=grads)
        return
    assert logits.stride(1) == 1 and losses.dtype == torch.float32, (logits.stride(), losses.dtype)
    assert logits.data_ptr() % ROW_BYTES == 0 and logits.stride(0) * logits.element_size() % ROW_BYTES == 0
    if len(logits):
        params = _CrossEntropy(
            *(t.data_ptr() for t in (logits, target, losses)),
            *(logits.stride(0), logits.shape[1], kind.ignore_index),
            *(kind.label_smoothing, KINDS[logits.dtype], int(grads)),
        )
        function = compiler.kernel("cross_entropy", "cross_entropy", logits.get_device(), defines)
        function.launch(len(logits), {**compiler.TUNED["cross_entropy"], **(defines or {})}["BLOCK"], params)


def rescale(grad: Tensor | None, first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`grad * first * second` in `dtype`; in place where that is its own, and then not at all for a factor of 1.

    `grad` is not to be read afterwards.

    Parameters
    ----------
    grad
        Contiguous; None stays None.
    first, second
        0-dim fp32 on the device: read there.
    """
    if grad is None:
        return None
    if not compiler.usable(grad.device):
        return reference.rescale(grad, first, second, dtype)
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    assert grad.is_contiguous() and first.dtype == second.dtype == torch.float32, (grad.stride(), first.dtype)
    if grad.numel():
        pointers = (t.data_ptr() for t in (grad, out, first, second))
        params = _Rescale(*pointers, grad.numel(), KINDS[grad.dtype], KINDS[dtype])
        function = compiler.kernel("cross_entropy", "rescale", grad.get_device())
        function.launch(-(-grad.numel() // RESCALE_SHARE), compiler.TUNED["cross_entropy"]["BLOCK"], params)
    return out
