"""Rules about sizes in elements that mean gigabytes, or that wreck bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from zplan.planner.costs import costs, reduce_numel, size_of
from zplan.planner.lint import Finding, View, whole
from zplan.planner.relaxed import Path
from zplan.planner.units import format_si

SMALL_BYTES = 4 * 2**20
"""Below it a collective is bound by latency: 8 GPUs reach a few percent of their bandwidth."""
LARGE_SHARE = 10
"""A bucket of more than a tenth of the card is worth a warning."""
LARGE_BYTES = 4 * 10**9
"""The same where the card is not known."""
LARGE_PREFETCH = 200_000_000
"""Elements; four times the default."""


def small_buckets(view: View) -> Iterator[Finding]:
    """Buckets so small that they save nothing and cost bandwidth."""
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        numel = whole(view.zero.get(key))
        if not numel or view.stage == 0 or (key.startswith("all") and view.stage == 3):
            continue
        nbytes = numel * view.itemsize
        if nbytes < SMALL_BYTES:
            message = (
                f"`{key}` {numel:,} elements are {format_si(nbytes)}: latency, not bandwidth, decides each message"
            )
            if key == "reduce_bucket_size":
                message += "; below the largest gradient it saves nothing"
                if view.zero.get("contiguous_gradients") is False:
                    message += ", and without contiguous_gradients there is no bucket to save"
            path = ("zero_optimization", key)
            yield view.find("bucket-too-small", "warning", path, message, "use 1e7 to 2e8", nbytes=nbytes)


def large_buckets(view: View) -> Iterator[Finding]:
    """Buckets that take much of a card."""
    mem = view.subject.mem_bytes
    limit = mem // LARGE_SHARE if mem is not None else LARGE_BYTES
    for cost in costs(view):
        if cost.name.startswith("reduce bucket") and cost.nbytes > limit:
            of = f", more than a tenth of {format_si(mem)}" if mem is not None else ""
            numel = reduce_numel(view)
            message = f"`reduce_bucket_size` {numel:,} elements take {format_si(cost.nbytes)}{of}"
            path: Path = ("zero_optimization", "reduce_bucket_size")
            yield view.find("bucket-too-large", "warning", path, message, "use 5e7", nbytes=cost.nbytes)
    prefetch = size_of(view, "stage3_prefetch_bucket_size") if view.stage == 3 else None
    if prefetch is not None and prefetch >= LARGE_PREFETCH:
        nbytes = prefetch * view.itemsize
        message = f"`stage3_prefetch_bucket_size` {prefetch:,} elements gather {format_si(nbytes)} ahead of use"
        path = view.zero_path("stage3_prefetch_bucket_size")
        yield view.find("bucket-too-large", "warning", path, message, "use 5e7", nbytes=nbytes)


def stage3_extremes(view: View) -> Iterator[Finding]:
    """Zeros that turn a mechanism off, and tiles of the whole model."""
    if view.stage != 3:
        return
    for key, meaning in (
        ("stage3_max_live_parameters", "every parameter is gathered again for each use: least memory, most traffic"),
        ("stage3_max_reuse_distance", "nothing gathered is kept for its next use: least memory, most traffic"),
    ):
        if whole(view.zero.get(key)) == 0:
            yield view.find("no-reuse", "warning", view.zero_path(key), f"`{key}` 0: {meaning}", "leave it out")
    tile = whole(view.zero.get("sub_group_size"))
    path: Path = ("zero_optimization", "sub_group_size")
    if tile == 0:
        message = "`sub_group_size` 0 makes one group of each tensor: a slow optimizer step"
        yield view.find("sub-group-size", "warning", path, message, "use 1e9")
    elif tile is not None and tile >= 100_000_000_000:
        message = f"`sub_group_size` {tile:.0e} steps the whole shard at once, with an fp32 gradient of all of it"
        yield view.find("sub-group-size", "warning", path, message, "use 1e9")
    persist = whole(view.zero.get("stage3_param_persistence_threshold"))
    if persist is not None and persist >= 10_000_000:
        message = (
            f"`stage3_param_persistence_threshold` {persist:,} elements keeps nearly every tensor whole on each GPU"
        )
        path = view.zero_path("stage3_param_persistence_threshold")
        yield view.find("persistence-threshold", "warning", path, message, "use 1e5 to 1e6")


def host_buffers(view: View) -> Iterator[Finding]:
    """Pinned NVMe buffers by size, and against the largest tensor."""
    for cost in costs(view):
        if cost.name.startswith("NVMe"):
            path = ("zero_optimization", "offload_param", "buffer_size")
            large = cost.nbytes >= 8 * 10**9
            message = f"NVMe buffers pin {format_si(cost.nbytes)} of host memory ({cost.formula})"
            fix = "a `buffer_size` just above the largest tensor, and a smaller `buffer_count`" if large else ""
            yield view.find("pinned-buffers", "warning" if large else "note", path, message, fix, nbytes=cost.nbytes)
            yield from _against_tensor(view, path)


def _against_tensor(view: View, path: tuple[str, ...]) -> Iterator[Finding]:
    size = whole(view.block(*path[:-1]).get("buffer_size", 100_000_000)) or 0
    largest = view.subject.largest_tensor
    if largest is None:
        message = f"`buffer_size` {size:,} must be at least the largest tensor; name --model to check it"
        yield view.find("buffer-smaller-than-tensor", "note", path, message)
    elif size < largest:
        message = f"`buffer_size` {size:,} elements is below the largest tensor, {largest:,}: DeepSpeed stops"
        yield view.find("buffer-smaller-than-tensor", "error", path, message, f"use {largest:,} or more")


RULES = (small_buckets, large_buckets, stage3_extremes, host_buffers)
