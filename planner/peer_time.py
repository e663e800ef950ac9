"""Time of one optimizer step of FSDP2 and of DDP, from the bytes that they move and in the order they move them.

Compute is that of their own tape (`planner/peer_tape.py`), at the same speeds as zplan's. What they do beside it:

FSDP2 (`_fsdp_collectives.py`, `_fsdp_param_group.py`): a rank's fp32 shard is cast into the input of each gather, and
what was gathered is copied out of it, on the stream that computes. The next block's gather runs beside compute. A
block's gradients are copied into one fp32 buffer, and reduce-scattered beside the next backward. With accumulation only
the last micro-step reduces; the ones before add whole fp32 gradients up. The root's parameters are gathered first.

DDP (`reducer.cpp`): each gradient is scaled into its bucket; an all-reduce of a full bucket of 25 MiB runs beside
backward, in every micro-step. Autocast's casts are on the tape.

Both then read the gradients' norm, scale them and step with torch's fused AdamW on what the rank owns, as
`torch.nn.utils.clip_grad_norm_` and `torch.optim.AdamW(fused=True)` do it.

[Note: not DeepSpeed] No time is told for DeepSpeed. At stage 3 it fetches parameter by parameter, and at the others its
steps wait for the host, which follows from no byte: a count like this one is met within 3 % by a 7B model at stages 1
and 2, and missed by 12 to 16 % by a 1.3B model and by 44 to 105 % at stage 3.
"""

from __future__ import annotations

from dataclasses import replace

from zplan.planner.config import Choice
from zplan.planner.models import ModelSpec
from zplan.planner.peer_sizes import numel_of, trained
from zplan.planner.speeds import Speeds
from zplan.planner.step_time import Passes, Queue, StepTime, Wire, gathered_first, passes_of, reduced_after

FP32 = 4
BUCKET_BYTES = 25 * 2**20
"""DDP's `bucket_cap_mb`."""

STEP_BYTES = FP32 + 2 * FP32 + (FP32 + 2 * 3 * FP32)
"""Of an owned element in the step: read for the norm, scaled, and read by AdamW, which updates weight and moments."""

Parts = tuple[float, float, float]
"""Of what comes before the blocks, of one block, and of what comes after them."""


def peer_step_time(spec: ModelSpec, choice: Choice, link: Wire, at: Speeds, *, per_token: int) -> StepTime:
    """Predict one optimizer step of FSDP2 or DDP.

    Parameters
    ----------
    spec
        A model whose ops are counted.
    choice
        With `runtime` fsdp2 or ddp; its gradients are clipped.
    link
        Between the ranks of this choice.
    at
        Speeds of their machine.
    per_token
        Operations of `model_flops`.
    """
    assert spec.arch is not None, f"{spec.name} has no known shape"
    layers = spec.arch.layers
    passes, again = passes_of(spec, choice, at, layers)
    numel = _numel(spec, layers)
    whole = numel[0] + layers * numel[1] + numel[2]
    k, n = choice.accumulation, choice.world_size
    if choice.runtime == "ddp":
        gathers, reduces, carried = 0.0, *_ddp(passes, numel, layers, k, link)
        copied, owned = k * 2 * FP32 * whole, whole
    else:
        gathers, reduces, carried = _fsdp2(choice, passes, numel, layers, link)
        copied, owned = _fsdp2_copies(choice) * whole, whole / n
    compute = k * (passes.forward(layers) + passes.backward(layers) - again) + copied / at.hbm
    tokens = choice.micro_batch * k * choice.seq
    found = StepTime(
        compute=compute,
        recompute=k * again,
        gathers=gathers,
        reduces=reduces,
        optimizer=owned * STEP_BYTES / at.hbm,
        offload=0.0,
        hidden=max(0.0, carried - gathers - reduces),
        offload_bound="",
        tokens=tokens * n,
        mfu=0.0,
    )
    return replace(found, mfu=tokens * per_token / (at.peak_flops * found.total))


def _numel(spec: ModelSpec, layers: int) -> Parts:
    """Trained elements by part."""
    found = [0.0, 0.0, 0.0]
    at = 0
    for unit in trained(spec.units):
        if unit.kind == "block":
            at = 1
            found[1] += numel_of([unit]) / layers
        else:
            at = 2 if at else 0
            found[at] += numel_of([unit])
    return found[0], found[1], found[2]


def _gathers(choice: Choice) -> int:
    """Of every block in one micro-step: for forward, and for backward where it was given up in between."""
    return 2 if choice.stage == 3 else 1


def _fsdp2_copies(choice: Choice) -> float:
    """Bytes of a whole parameter's copies in one step."""
    c, n, k = choice.itemsize, choice.world_size, choice.accumulation
    in_and_out = (FP32 + c) / n + 2 * c
    summed = 0 if k == 1 else (c + FP32) + (k - 1) * (c + 2 * FP32)
    into_buffer = c + FP32 if k == 1 else 2 * FP32
    return k * _gathers(choice) * in_and_out + summed + into_buffer


def _fsdp2(choice: Choice, p: Passes, numel: Parts, layers: int, link: Wire) -> tuple[float, float, float]:
    """`(gathers, reduces, all transfers)` of a step in seconds, the first two as far as they are exposed."""
    if choice.world_size == 1:
        return 0.0, 0.0, 0.0
    k, c = choice.accumulation, choice.itemsize
    root, block = link.seconds(c * (numel[0] + numel[2])), link.seconds(c * numel[1])
    up = [Queue(1, p.front, root), Queue(layers, p.block, block), Queue(1, p.end, 0.0)]
    again = _gathers(choice) == 2
    down = [
        Queue(1, p.end_backward, root * again),
        Queue(layers, p.block_backward, block * again),
        Queue(1, p.front_backward, 0.0),
    ]
    forward, backward = gathered_first(up), gathered_first(down)
    gathers = k * (forward - p.forward(layers) + backward - p.backward(layers))
    # The last micro-step's reduces share the links with its gathers; the root's come when all is over.
    r = choice.reduce_itemsize
    last, each = link.seconds(r * (numel[0] + numel[2])), link.seconds(r * numel[1])
    queue = [Queue(1, p.end_backward, root * again), Queue(layers, p.block_backward, each + block * again)]
    ended = reduced_after([*queue, Queue(1, p.front_backward, last)])
    carried = k * _gathers(choice) * (root + layers * block) + last + layers * each
    return gathers, max(0.0, ended - backward), carried


def _ddp(p: Passes, numel: Parts, layers: int, k: int, link: Wire) -> tuple[float, float]:
    """`(reduces as far as exposed, all of them)` of a step in seconds."""

    def reduce(part: float) -> float:
        calls = max(1, round(FP32 * part / BUCKET_BYTES))
        return 2 * link.seconds(FP32 * part, calls=calls)  # An all-reduce is a reduce-scatter and a gather.

    front, block, end = map(reduce, numel)
    queue = [Queue(1, p.end_backward, end), Queue(layers, p.block_backward, block), Queue(1, p.front_backward, front)]
    exposed = reduced_after(queue) - p.backward(layers)
    return k * max(0.0, exposed), k * (front + layers * block + end)
