"""Lays measured bytes beside predicted ones: by line, by birth and by phase.

[Note: what measured means] The measured side reads neither ledger nor arena. On the CPU a registry lists every live
storage; on CUDA the allocator's own counters are read. Names come from who holds a storage: the walk below goes through
units, optimizer and parameters and reads the size of what it finds. What nobody named there holds is an activation,
told apart by the phase in which it was born. Between two phases nothing is in flight, so there every line must be there
to the byte or not at all; inside a phase only the peak counts. Bytes that no line claims fail the check.

[Note: activations at boundaries] What forward saves is compared by birth from the turn of the step on, and what
backward hands on as one sum. Before the turn a unit's output may die anywhere in the next phase, so there only peaks
are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zplan.planner.activations import BOUND
from zplan.planner.ledger import Ledger, Line
from zplan.planner.overhead import CUBLAS, CUBLASLT
from zplan.runtime.engine import Engine
from zplan.runtime.meter import StorageRegistry
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.quantized import constant_storages
from zplan.runtime.sentinel import ReducedGradient
from zplan.runtime.symmetric import outside_bytes
from zplan.runtime.unit import FlatUnit

ACTIVATIONS = "act"
"""Name under which the walk puts what no owner holds."""

WORKSPACES = (CUBLAS, CUBLASLT, "shared.tables")
"""What torch takes from its allocator for itself: the only overheads in there, and tables of symmetric memory."""

BACKWARD = "backward"
"""Birth of everything that backward made."""

IN_FLIGHT = (".forward", ".backward", ".reduce")
"""Ends of the lines that live inside one phase only."""


@dataclass(frozen=True)
class Row:
    """One line, or several that are born together, where the difference was largest."""

    name: str
    where: str
    """Phase boundary (`a | b`) for lines, phase for peaks."""
    predicted: int
    measured: int
    bound: bool = False
    """`predicted` is an upper bound, as with compiled blocks."""

    @property
    def difference(self) -> int:
        return self.measured - self.predicted

    def outside(self, tolerance: float) -> bool:
        """Whether they differ by more than a fraction of the larger; under a bound, whether more was measured."""
        if self.bound and self.measured <= self.predicted:
            return False
        return abs(self.difference) > tolerance * max(self.predicted, self.measured)


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured for one rank, over the last whole step."""

    lines: tuple[Row, ...]
    peaks: tuple[Row, ...]
    unattributed: tuple[Row, ...]

    @property
    def peak(self) -> Row:
        return max(self.peaks, key=lambda r: r.measured)

    def off_by_more_than(self, tolerance: float) -> tuple[Row, ...]:
        """Rows outside `tolerance` (a fraction of the larger side); anything unattributed always is."""
        rows = (*self.lines, *self.peaks)
        return (*(r for r in rows if r.outside(tolerance)), *self.unattributed)


def owned_tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """(line id, tensor) of everything that the engine's objects hold right now."""
    seen_slots: set[int] = set()
    for buffer in engine.module.buffers():
        yield "model.buffers", buffer
    for u in engine.units:
        for tensor in constant_storages(u.params).values():
            yield "params.frozen.constants", tensor
        yield from _unit_tensors(u, sharded_grads=engine.world_size > 1 and engine.choice.stage > 1)
        if u.slot is not None and id(u.slot) not in seen_slots:
            seen_slots.add(id(u.slot))
            yield f"params.ring.{u.placement.ring}", u.slot.buffer
    for name, tensor in engine.reducer.retained:
        yield f"grads.{name}", tensor
    optional = {
        "save.snapshot": engine.checkpoints.snapshot,
        "comm.handshake": engine.collectives.handshake,
        "comm.terms": engine.collectives.terms,
        "comm.replicas": None if engine.replicas is None else engine.replicas.all,
    }
    yield from ((name, tensor) for name, tensor in optional.items() if tensor is not None)
    yield from _step_tensors(engine.optimizer)
    slot = engine.reducer.slot if engine.reducer.shared is None else engine.reducer.shared.buffer
    if slot is not None:
        yield "grads.slot", slot
    if engine.reducer.reduced_grads is not None:
        yield "grads.reduced", engine.reducer.reduced_grads
    if engine.reducer.received is not None:
        yield "grads.received", engine.reducer.received


def _step_tensors(optimizer: ShardedOptimizer) -> Iterator[tuple[str, Tensor]]:
    """What the step keeps beside the units' states."""
    yield "optim.scalars", optimizer.scalars.buffer
    yield "optim.norms", optimizer.partial
    if optimizer.scaler is not None:
        yield "optim.loss_scale", optimizer.scaler.buffer
    for name, tensor in (("table", optimizer.table), ("scratch", optimizer.scratch)):
        if tensor is not None:
            yield f"optim.{name}", tensor
    if optimizer.wanted.foreign is not None:
        yield from optimizer.wanted.foreign.tensors()


def _unit_tensors(u: FlatUnit, *, sharded_grads: bool) -> Iterator[tuple[str, Tensor]]:
    """(line id, tensor) of what one unit holds, its ring slot left out."""
    name = u.placement.size_class
    yield from _gradients(u, name, sharded=sharded_grads)
    if u.master is not None:
        yield f"{'optim.master' if u.placement.has_master else 'params.shard'}.{name}", u.master
    elif u.low is not None:
        yield f"optim.master_low.{name}", u.low
    for state, tensor in u.states.items():
        yield f"optim.{state}.{name}", tensor
    if u.flat is not None:
        yield f"params.{'frozen.whole' if u.placement.frozen else 'flat'}.{name}", u.flat
    if u.shard is not None:
        yield f"params.{'frozen.' if u.placement.frozen else ''}shard.{name}", u.shard
    for nan in u.placeholders:
        yield "params.placeholder", nan


def _gradients(u: FlatUnit, name: str, *, sharded: bool) -> Iterator[tuple[str, Tensor]]:
    for p in u.params:
        if p.grad is not None and not isinstance(p.grad, ReducedGradient):
            yield f"grads.{name}", p.grad
    for summed in u.summed_grads.values():
        yield f"grads.{name}", summed
    if u.grad is not None:
        full = u.grad.numel() == u.layout.padded_numel and not sharded
        yield f"grads.{'full' if full else 'shard'}.{name}", u.grad


class Meter:
    """Watches one engine's steps. Enter it before `initialize`, so that nothing escapes; then `attach` the engine.

    Examples
    --------
    >>> with Meter(device) as meter:                                  # doctest: +SKIP
    ...     engine, *_ = zplan.initialize(model=model, config=plan)
    ...     meter.attach(engine)
    ...     ...                                                       # two steps
    ...     comparison = meter.compare(ledger)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.registry = StorageRegistry() if device.type == "cpu" else None
        self.engine: Engine | None = None
        self.phase = "idle"
        self.peaks: dict[str, int] = {}
        self.boundaries: list[tuple[str, str, dict[tuple[str, str], int]]] = []
        self.data_names: frozenset[int] = frozenset()
        self.base = 0

    def __enter__(self) -> Meter:
        if self.registry is not None:
            self.registry.__enter__()
        else:
            self.base = _requested("current")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.registry is not None:
            self.registry.__exit__(kind, error, trace)
        if self.engine is not None:
            self.engine.on_phase = None

    def attach(self, engine: Engine) -> None:
        """Follow an engine's phases and learn its batches."""
        self.engine = engine
        if self.registry is not None:
            self.registry.peaks.clear()
            self.registry.enter("idle")
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
        engine.on_phase = self._enter
        engine.register_forward_pre_hook(self._note_data, with_kwargs=True)

    # --- watching --------------------------------------------------------------------------------------------------

    def _note_data(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self.data_names = frozenset(t.untyped_storage()._cdata for t in tensors)

    def _enter(self, phase: str) -> None:
        self._close_phase()
        if phase.startswith("forward.") and self.phase in ("idle",):
            self.peaks, self.boundaries = {"idle": self.peaks.get("idle", 0)}, []
        self.boundaries.append((self.phase, phase, self._snapshot()))
        self.phase = phase
        if self.registry is not None:
            self.registry.peaks.pop(phase, None)
            self.registry.enter(phase)
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _close_phase(self) -> None:
        measured = (
            self.registry.peaks.get(self.phase, 0) if self.registry is not None else _requested("peak") - self.base
        )
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), measured)

    def _snapshot(self) -> dict[tuple[str, str], int]:
        """Bytes by (line id, "") for what owners hold, and by (`act`, birth phase) for the rest."""
        assert self.engine is not None
        owners: dict[int, str] = {}
        out: Counter[tuple[str, str]] = Counter()
        for line, tensor in owned_tensors(self.engine):
            storage = tensor.untyped_storage()
            if storage._cdata not in owners:
                owners[storage._cdata] = line
                out[line, ""] += storage.nbytes()
        if self.registry is None:
            out[ACTIVATIONS, ""] = _requested("current") - self.base - sum(out.values())
            return dict(out)
        for record in self.registry.storages():
            storage = record.ref()
            if storage is None or storage._cdata in owners:
                continue
            pass_ = record.phase.partition(".")[0]
            birth = BACKWARD if pass_ in ("backward", "reduce") else record.phase
            out[ACTIVATIONS, "data" if storage._cdata in self.data_names else birth] += record.nbytes
        return dict(out)

    # --- comparing -------------------------------------------------------------------------------------------------

    def compare(self, ledger: Ledger) -> Comparison:
        """The last whole step against a ledger made for this very choice and device."""
        bound = any(x.note == BOUND for x in ledger.lines)
        lines: dict[str, Row] = {}
        stray: dict[str, Row] = {}
        index = {p: i for i, p in enumerate(ledger.phases)}
        turn = index["backward.loss"]
        for before, after, found in self.boundaries:
            at = index.get(before)
            if at is None or index.get(after) != at + 1:
                continue
            expected = _expected(ledger, at, turn, by_birth=self.registry is not None)
            for key in expected.keys() | found.keys():
                if key[0] == ACTIVATIONS and at < turn - 1:
                    continue
                name, want, have = _name(ledger, key, at, turn), expected.get(key, 0), found.get(key, 0)
                row = Row(name, f"{before} | {after}", want, have, bound and key[0] == ACTIVATIONS)
                table = lines if key in expected or name in lines else stray
                if name not in table or abs(row.difference) >= abs(table[name].difference):
                    table[name] = row
        pinned = ledger.per_phase("pinned") if self.registry is not None else (0,) * len(ledger.phases)
        peaks = tuple(
            Row("peak", phase, want + beside, self.peaks[phase], bound)
            for phase, want, beside in zip(ledger.phases, ledger.per_phase(), pinned, strict=True)
            if phase in self.peaks
        )
        return Comparison(tuple(lines.values()), peaks, tuple(r for r in stray.values() if r.measured))


def _expected(ledger: Ledger, at: int, turn: int, *, by_birth: bool) -> dict[tuple[str, str], int]:
    """What must be alive between phase `at` and the next, keyed as `Meter._snapshot` keys it."""
    out: Counter[tuple[str, str]] = Counter()
    for line in ledger.lines:
        # On the CPU host memory is where everything lies.
        if line.tier not in (("device", "pinned") if by_birth else ("device",)) or (
            line.kind == "overhead" and line.id not in WORKSPACES
        ):
            continue
        for span in line.spans:
            if _crosses(line, span, at, turn):
                out[_key(ledger, line, span[0], turn, by_birth=by_birth)] += line.nbytes
    return dict(out)


def _crosses(line: Line, span: tuple[int, int], at: int, turn: int) -> bool:
    """Whether an instance is alive at the end of phase `at`. What backward makes and hands on has its line from the
    next phase on.
    """
    first, last = span
    # Instances of another size have a line of their own, whose name goes on.
    if line.kind == "activations" and first > turn and not line.id.partition(".other")[0].endswith(IN_FLIGHT):
        return first <= at + 1 <= last
    return first <= at < last


def _key(ledger: Ledger, line: Line, first: int, turn: int, *, by_birth: bool) -> tuple[str, str]:
    if line.id in WORKSPACES:
        return ACTIVATIONS, ""
    if line.kind != "activations" or (line.id.startswith("grads.") and line.id != "grads.tied"):
        return line.id, ""
    if not by_birth:
        return ACTIVATIONS, ""
    if line.id.startswith("data."):
        return ACTIVATIONS, "data"
    return ACTIVATIONS, BACKWARD if first >= turn else ledger.phases[first]


def _name(ledger: Ledger, key: tuple[str, str], at: int, turn: int) -> str:
    """What a row is called: the line's id, or the ids of all activation lines that share a birth."""
    if key[0] != ACTIVATIONS:
        return key[0]
    if not key[1]:
        return "activations and workspaces"
    ids = dict.fromkeys(
        line.id
        for line in ledger.lines
        for span in line.spans
        if _crosses(line, span, at, turn)
        and line.kind == "activations"
        and key == _key(ledger, line, span[0], turn, by_birth=True)
    )
    shown = list(ids)[:3] + ([f"{len(ids) - 3} more"] if len(ids) > 3 else [])
    return " + ".join(shown) or f"born in {key[1]}"


def _requested(which: str) -> int:
    """Bytes that tensors asked the CUDA allocator for, before its rounding, and those of buffers outside it."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]) + outside_bytes()
