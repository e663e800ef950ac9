"""The ways in which devices differ in what torch's ops allocate, and sizes that their kernels round to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from zplan.planner.config import Device
from zplan.planner.graph import Value
from zplan.planner.layout import ceil_to

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


def table_of(device: Device, cudnn_width: int, *, flash: bool) -> DeviceTable:
    """A device's table for a choice's `cudnn_width` and `flash`."""
    table = DEVICES[device]._replace(cudnn_width=cudnn_width)
    return table if flash or device == "cpu" else table._replace(attention=dict.fromkeys(table.attention, "efficient"))


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
