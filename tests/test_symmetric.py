"""Ring and slot in memory that all ranks read: on CPU ranks, where gloo's collectives stand for the copies."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import test_engine
import torch
import torch.distributed as dist
import workload as w

from zplan.cuda_ops.grads import GradPlaces
from zplan.planner import placement
from zplan.planner.buffers import PAGE, SIGNAL_PAD, page_lines, shared_sizes
from zplan.planner.config import Choice
from zplan.planner.placement import SHARED, place
from zplan.planner.predict import predict
from zplan.planner.timeline import timeline
from zplan.runtime import arena, choices, symmetric

SPEC = w.spec(w.LLAMA4)


class OverGloo:
    """What `symmetric.Shared` promises, by collectives."""

    gathered: ClassVar[Counter[int]] = Counter()
    """Gathers of each buffer, by its address."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, group: Any, timeout_s: float) -> None:
        self.buffer = torch.empty(numel, dtype=dtype, device=device)
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        dist.barrier(group)

    def gather(self, pieces: list[torch.Tensor]) -> None:
        OverGloo.gathered[self.buffer.data_ptr()] += 1
        for full in pieces:
            assert full.untyped_storage()._cdata == self.buffer.untyped_storage()._cdata
            parts = [x.view(torch.uint8) for x in full.chunk(self.world_size)]
            dist.all_gather(parts, parts[self.rank].clone(), group=self.group)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        assert sent.untyped_storage()._cdata == self.buffer.untyped_storage()._cdata
        came, sent = received.view(torch.uint8), sent.view(torch.uint8)
        splits = [0 if r == self.rank else len(sent) // (self.world_size - 1) for r in range(self.world_size)]
        dist.all_to_all_single(came, sent, splits, splits, group=self.group)


class Side:
    """What torch's symmetric memory is to one rank, of threads."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._barrier.wait(timeout_ms / 1000)


def exchanged(world_size: int, numel: int) -> list[torch.Tensor]:
    """Every rank's sum of its slice over `symmetric.Shared` itself, on threads that read each other's buffers."""
    barrier, share = threading.Barrier(world_size), numel // world_size
    grads = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world_size)]
    buffers = [torch.full((numel + 64,), torch.nan).bfloat16() for _ in grads]
    out = [torch.full((share,), torch.nan) for _ in grads]

    def run(rank: int) -> None:
        shared = object.__new__(symmetric.Shared)
        shared.buffer, shared._memory, shared._peers = buffers[rank], Side(barrier), buffers
        shared.rank, shared.world_size, shared._timeout_ms = rank, world_size, 10_000
        sent, came, start = buffers[rank][64 : 64 + numel - share], torch.empty(numel - share).bfloat16(), rank * share
        mine = GradPlaces([(0, numel)]).of([grads[rank]])
        mine.copy(sent[:start], 0, add=False)
        mine.copy(sent[start:], start + share, add=False)
        shared.exchange(came, sent)
        mine.sum(came.view(-1, share), rank, out[rank], start, add=False)

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(run, range(world_size)))
    assert torch.equal(torch.cat(out), sum_in_order(grads))
    return out


def sum_in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].float()
    for x in values[1:]:
        total += x
    return total


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_exchange_by_copies_sums_every_slice_in_rank_order(world_size):
    assert len(exchanged(world_size, 24)) == world_size


def train_with_copies(rank: int, world_size: int, arch: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(arena, "Shared", OverGloo)
        m.setattr(choices, "_transport", lambda *_: "copies")
        m.setattr(placement, "SHARED_FROM", 1)
        m.setattr(Choice, "copies", property(lambda c: c.transport == "copies" and c.world_size > 1))
        OverGloo.gathered.clear()
        found = test_engine.train(rank, world_size, arch, config, steps, False)
    # After each step at least, but for the last: the ring's slots, and flat buffers of all other units.
    choice = Choice(config["zero_optimization"]["stage"], world_size)
    placed = place(w.spec(w.ARCHS[arch]), choice)
    flats = sum(not p.ringed for p in placed)
    assert len(OverGloo.gathered) == flats + (choice.ring_slots if flats < len(placed) else 0)
    assert min(OverGloo.gathered.values()) >= steps - 1
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 2), (3, 1), (3, 3)])
def test_copies_change_no_bit(run_ranks, stage, accumulation):
    config = w.config(stage, accumulation, precision="bf16", checkpointing="full", piece=16384)
    runs = {
        "collectives": run_ranks(2, test_engine.train, "llama4", config, 4, False),
        "copies": run_ranks(2, train_with_copies, "llama4", config, 4),
    }
    test_engine.same_bits([dict(zip(runs, found, strict=True)) for found in zip(*runs.values(), strict=True)])


def test_lines_of_symmetric_memory():
    """The slot that others read is always there; each buffer brings two tables of addresses and ends with its page."""
    plain, copies = (Choice(3, 8, transport=t) for t in ("collectives", "copies"))
    a, b = predict(SPEC, plain), predict(SPEC, copies)
    assert a.line("grads.slot").nbytes == b.line("grads.slot").nbytes
    assert len(a.line("grads.slot").spans) == 1 and a.line("grads.slot").spans != b.line("grads.slot").spans
    sizes = shared_sizes(place(SPEC, copies), copies)
    assert sorted(sizes) == sorted(
        [b.line("params.ring.block").nbytes] * copies.ring_slots + [b.line("grads.slot").nbytes]
    )
    assert b.line("grads.received").nbytes == a.line("grads.received").nbytes == a.line("grads.slot").nbytes
    scattered = predict(SPEC, replace(plain, reduce="scatter")).line("grads.slot")
    assert scattered.nbytes * 7 // 8 == a.line("grads.slot").nbytes * plain.reduce_itemsize // plain.itemsize
    assert (b.line("shared.tables").nbytes, b.line("shared.tables").instances) == (8 * 8, 2 * len(sizes))
    (pages,) = page_lines(place(SPEC, copies), copies, timeline(SPEC.units))
    assert (pages.nbytes + sum(sizes)) % PAGE == 0
    assert SIGNAL_PAD * len(sizes) <= pages.nbytes < (PAGE + SIGNAL_PAD) * len(sizes)


def test_the_signal_pad_is_torchs():
    from torch._C._distributed_c10d import _SymmetricMemory

    assert _SymmetricMemory.signal_pad_size == SIGNAL_PAD


def test_large_flat_buffers_are_shared_where_they_are_gathered():
    """Stages 1 to 3 with a tied table of 64 MiB; blocks are too small."""
    spec = w.spec(replace(w.LLAMA4, vocab=2**20 // w.LLAMA4.hidden * 32, tied=True))
    for stage in (0, 1, 2, 3):
        choice = Choice(stage, 4, transport="copies")
        ledger, sizes = predict(spec, choice), shared_sizes(place(spec, choice), choice)
        table = ledger.line("params.flat.embed")
        assert table.nbytes >= placement.SHARED_FROM
        assert (table.note == SHARED) == (table.nbytes in sizes) == (stage > 0)
        assert [x.id for x in ledger.lines if x.id.startswith("params.flat") and x.note] == ["params.flat.embed"] * (
            stage > 0
        )
        fewer = replace(choice, transport="collectives")
        assert sum(x.total_bytes for x in predict(spec, fewer).lines if x.id.startswith("params")) == sum(
            x.total_bytes for x in ledger.lines if x.id.startswith("params")
        )


@pytest.mark.parametrize("change", [{"world_size": 1}, {"device": "cpu"}, {"stage": 0}])
def test_where_nobody_reads_nothing_is_shared(change):
    choice = Choice(**{"stage": 3, "world_size": 4, "transport": "copies", **change})
    assert shared_sizes(place(SPEC, choice), choice) == []
    assert all(not x.id.startswith("shared") for x in predict(SPEC, choice).lines)
