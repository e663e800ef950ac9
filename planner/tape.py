"""Autograd's memory behaviour in integers: values that have sizes but no numbers.

A `Tape` runs a model's op list once, forward and backward, and keeps every level of live bytes that a phase saw.
Tensors are `Value`s over `Storage`s; nodes save values, gradients flow through input buffers and add up as torch's
engine does it. What each op allocates and saves is in `planner/aten.py`; which ops a model runs, in
`planner/families.py`.

[Note: lifetimes] A storage is freed when the last Python reference to it goes, exactly as in torch, where a tensor's
lifetime is that of its handles. So an op list that mirrors the model's Python line by line, with the same locals and
the same nesting of calls, frees at the same moments. Nothing here may keep a value in a reference cycle.

[Note: symbols] Sizes are exact for *every* batch and sequence at once. The tape runs with two huge primes as B and T.
No other extent of a model is a multiple of them, so the exponents of B and T in a size can be read off by division:
every storage is `c * B**i * T**j` bytes, and a level is one coefficient for each monomial of `BASIS`. A batch or
sequence of 1 changes which reshapes copy, so 1 is run as 1, not as a prime.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from zplan.planner.layout import ceil_to
from zplan.planner.strides import dense_like, is_dense, row_major

PRIME_B, PRIME_T = 2**31 - 1, 2**61 - 1
BASIS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
"""Exponents of (B, T) of every size that occurs."""
TILE_32, TILE_128, SORT, SORT_POSITIONS, SORT_TYPES, CHUNK = range(len(BASIS), len(BASIS) + 6)
"""Indices of more monomials: B times T rounded up to 32 or to 128, the tiles of attention kernels; bytes that the
backward of an embedding of tokens takes to sort their ids, of one of positions, and of one of types; tokens
whose logits exist at once."""
WIDTH = len(BASIS) + 6

PARAMETER_GRADIENT = "parameter gradient"

Retention = Literal["next", "unit", "none"]
"""How long a runtime holds a unit's whole gradients: zplan until the next unit's have landed; until the unit's backward
is over; not at all, since each is taken as it comes."""

OF_PRODUCTS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "grouped_mm",
        "mm.input",
        "mm.weight",
        "attention output",
        "logsumexp",
        "q.grad",
        "k.grad",
        "v.grad",
    )
)
"""Labels of what matrix products and attention kernels write."""

Level = tuple[int, ...]
"""Coefficients of live bytes: `WIDTH` for what tensors hold, as many for what kernels hold for themselves, and one for
each shape of rows that a kernel sums.
"""


class RowSum(NamedTuple):
    """A sum of rows to one row: extents as exponents of B and T with a coefficient, and bytes of an element."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    itemsize: int

    def at(self, b: int, t: int) -> tuple[int, int, int]:
        """Rows, columns and itemsize at batch `b` and sequence `t`."""
        rows, columns = (n * b**i * t**j for i, j, n in (self.rows, self.columns))
        return rows, columns, self.itemsize


def monomials(b: int, t: int, sort_bytes: tuple[int, int, int], chunk: int) -> tuple[int, ...]:
    """Values of all monomials, those of the kernels' half included, at batch `b` and sequence `t`."""
    values = (*(b**i * t**j for i, j in BASIS), b * ceil_to(t, 32), b * ceil_to(t, 128), *sort_bytes, chunk)
    return values + values


def _factor(size: int) -> tuple[int, int, int]:
    """Exponents of B and T in a size, and what is left."""
    i = j = 0
    while size and size % PRIME_B == 0:
        size, i = size // PRIME_B, i + 1
    while size and size % PRIME_T == 0:
        size, j = size // PRIME_T, j + 1
    return i, j, size


def _split(nbytes: int) -> tuple[int, int]:
    """`(monomial index, coefficient)` of a size in bytes."""
    i, j, coefficient = _factor(nbytes)
    return BASIS.index((i, j)), coefficient


class Storage:
    """Bytes that live from birth to death. `born` and `died` are phase indices."""

    __slots__ = ("again", "at", "beside", "born", "coefficient", "died", "label", "owner", "refs")

    def __init__(self, at: int, coefficient: int, label: str, born: int) -> None:
        self.at, self.coefficient, self.label, self.born = at, coefficient, label, born
        self.again = False
        """Born while a checkpointed call ran again."""
        self.owner: str | None = None
        """Unit of the parameter whose gradient it is."""
        self.died: int | None = None
        self.refs = 0
        self.beside: Value | None = None
        """The rest of a size that is no monomial, such as T (T + 1); it lives as long as this."""


class Value:
    """A view of a storage, with shape and strides in elements, and the node that made it."""

    __slots__ = ("itemsize", "node", "output_nr", "shape", "storage", "strides", "tape", "turned")

    def __init__(
        self, tape: Tape, storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.tape, self.storage, self.shape, self.strides, self.itemsize = tape, storage, shape, strides, itemsize
        self.node: Node | None = None
        self.output_nr = 0
        self.turned = False
        """Whether it is a transposed view."""
        storage.refs += 1

    def __del__(self) -> None:
        self.storage.refs -= 1
        if not self.storage.refs:
            self.tape._free(self.storage)

    def alias(self) -> Value:
        """The same bytes without the node: what autograd keeps, and what a gradient that is passed on is."""
        return Value(self.tape, self.storage, self.shape, self.strides, self.itemsize)

    def widened(self, itemsize: int) -> Value:
        """A parameter whose gradient may come in another itemsize than its own."""
        out = Value(self.tape, self.storage, self.shape, self.strides, itemsize)
        out.node, out.output_nr = self.node, self.output_nr
        return out

    def alias_with_node(self) -> Value:
        out = self.alias()
        out.node, out.output_nr = self.node, self.output_nr
        return out

    def view(self, shape: Sequence[int], strides: tuple[int, ...]) -> Value:
        return Value(self.tape, self.storage, tuple(shape), strides, self.itemsize)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Gradients = list["Value | None"]
Backward = Callable[[Any, list["Value"]], Gradients]
"""`(gradients of the outputs, saved values) -> gradients of the inputs`. Closures hold shapes only, never values."""


class Edge:
    """Where an input's gradient goes, and the shape and itemsize that it must arrive in."""

    __slots__ = ("itemsize", "node", "output_nr", "shape")

    def __init__(self, node: Node, output_nr: int, shape: tuple[int, ...], itemsize: int) -> None:
        self.node, self.output_nr, self.shape, self.itemsize = node, output_nr, shape, itemsize


class Node:
    """One entry of the graph. `seq` orders the backward: the engine runs the ready node with the highest."""

    __slots__ = ("backward", "edges", "num_outputs", "on_gradient", "saved", "seq")

    def __init__(self, seq: int, backward: Backward, edges: list[Edge | None], saved: list[Saved]) -> None:
        self.seq, self.backward, self.edges, self.saved = seq, backward, edges, saved
        self.num_outputs = 1
        self.on_gradient: str | None = None
        """Phase that starts when all of this node's output gradients have arrived."""


class Accumulate(Node):
    """The leaf of a parameter: takes its gradient over, and ends the unit's backward with the last one."""

    __slots__ = ("unit",)

    def __init__(self, unit: UnitGradients) -> None:
        super().__init__(2**62, lambda grads, saved: [], [], [])
        self.unit = unit

    def takes(self, gradient: Value) -> None:
        """Mark a storage as the parameter's gradient, or a part of it."""
        gradient.storage.label, gradient.storage.owner = PARAMETER_GRADIENT, self.unit.name


class InputLeaf(Node):
    """A value that is made to require a gradient without being a parameter. It and its gradient live with the graph."""

    __slots__ = ("kept",)

    def __init__(self, value: Value) -> None:
        super().__init__(2**62, lambda grads, saved: [], [], [])
        self.kept = [value.alias()]


class UnitGradients:
    """Gradients of one unit that wait for its last one."""

    __slots__ = ("arrived", "landed", "missing", "name")

    def __init__(self, name: str) -> None:
        self.name, self.missing, self.landed = name, 0, 0
        self.arrived: list[Value] = []


class StopRecompute(Exception):
    """Raised when a recomputed block has saved as much as its first run did."""


class Frame:
    """One checkpointed call: how to run it again, what it was called with, what came back of it."""

    __slots__ = ("away", "inputs", "kept", "packed", "recomputed", "run", "taken")

    def __init__(self, run: Callable[..., object], inputs: list[Value], *, selective: bool) -> None:
        self.run, self.inputs = run, inputs
        self.packed: list[weakref.ref[Packed]] = []
        """Places of what the call saved. Those of nodes that nothing leads to any more are dead by the time it runs
        again, and what belongs there is not kept."""
        self.recomputed: Gradients | None = None
        self.kept: list[list[Value]] | None = [] if selective else None
        """Selective: the results of products in order, which are not made again; None: everything is."""
        self.taken = 0
        """How many of `kept` a second run has used."""
        self.away: Away | None = None
        """What stands for the first input while it waits in host memory."""


class Away(NamedTuple):
    """A value that left the device: its shape and itemsize, and the node that it had."""

    shape: tuple[int, ...]
    itemsize: int
    node: Node | None


class Packed:
    """Place of a saved value in a checkpointed call."""

    __slots__ = ("__weakref__", "frame", "place")

    def __init__(self, frame: Frame, place: int) -> None:
        self.frame, self.place = frame, place


Saved = Value | Packed


class Tape:
    """Records what a forward and its backward hold.

    Attributes
    ----------
    kernels
        Whether what kernels take for themselves where autograd sums a gradient counts, as CUDA's allocator sees it.
    row_sums
        Shapes of those sums, in the order of their places in a level.
    retention, held
        How long whole gradients are held, and units whose gradients are held to the end of backward.
    phases
        Names in the order entered.
    levels
        For each phase the distinct levels at its moments, entry included. The last level before every free is
        enough: between two of them the level only grows.
    storages
        Every storage that ever was.
    gradients
        Off for a forward under `torch.no_grad`: no op has a node then, and nothing is saved.
    """

    def __init__(
        self,
        *,
        in_place_accumulation: bool,
        kernels: bool = False,
        gradients: bool = True,
        retention: Retention = "next",
        held: frozenset[str] = frozenset(),
    ) -> None:
        self.gradients, self.retention, self.held = gradients, retention, held
        self.kernels = kernels
        self.row_sums: dict[RowSum, int] = {}
        self.phases: list[str] = ["idle"]
        self.levels: list[set[Level]] = [{(0,) * (2 * WIDTH)}]
        self.storages: list[Storage] = []
        self.flops: list[list[int]] = [[0] * len(BASIS)]
        self.attention: list[list[int]] = [[0] * len(BASIS)]
        self.written: list[list[int]] = [[0] * len(BASIS)]
        self.in_place_accumulation = in_place_accumulation
        self._live = [0] * (2 * WIDTH)
        self._grew = False
        self._seq = 0
        self._frame: Frame | None = None
        self._retained: list[Value] = []
        self._held: list[Value] = []

    # Storages

    def new(self, shape: Sequence[int], itemsize: int, label: str, *, strides: tuple[int, ...] | None = None) -> Value:
        """A value with a fresh storage."""
        shape = tuple(shape)
        at, coefficient = _split(math.prod(shape) * itemsize)
        if label not in OF_PRODUCTS:
            self.written[-1][at] += coefficient
        return self._value(shape, itemsize, strides or row_major(shape), self._allocate(at, coefficient, label))

    def extend(self, value: Value, shape: Sequence[int]) -> None:
        """Let a value's storage be larger by so many elements: two monomials together."""
        value.storage.beside = self.new(shape, value.itemsize, value.storage.label)

    def multiply(self, *extents: int, times: int = 1) -> None:
        """Count matrix products of these extents, once their node is there: two operations for each combination."""
        at, count = _split(math.prod(extents))
        self.flops[-1][at] += 2 * times * count

    def attend(self, *extents: int, times: int, causal: bool) -> None:
        """Count products of fused attention, likewise; where it is causal, half of them are left out."""
        at, count = _split(math.prod(extents))
        self.attention[-1][at] += 2 * times * count // (1 + causal)

    def parameter(self, shape: Sequence[int], itemsize: int, unit: UnitGradients) -> Value:
        """A leaf whose bytes are not activations."""
        value = self._value(tuple(shape), itemsize, row_major(shape), Storage(0, 0, "parameter", 0))
        if self.gradients:
            value.node = Accumulate(unit)
            unit.missing += 1
        return value

    def require_gradient(self, value: Value) -> None:
        """Make a value that nothing trained leads to a leaf."""
        if self.gradients and value.node is None:
            value.node = InputLeaf(value)

    def buffer(self, shape: Sequence[int], itemsize: int) -> Value:
        """A buffer of the model, whose bytes are not activations."""
        return self._value(tuple(shape), itemsize, row_major(shape), Storage(0, 0, "buffer", 0))

    def padded(self, nbytes: int, tile: int, label: str, *, kernel: bool = False) -> Value:
        """`nbytes` per sequence and per token of a sequence rounded up to a tile; or (`CHUNK`) per token of a chunk."""
        at = tile + WIDTH * kernel
        return self._value((nbytes,), 1, (1,), self._allocate(at, nbytes, label))

    def workspace(self, nbytes: int, label: str) -> Value:
        """Bytes that a kernel holds for itself."""
        at, coefficient = _split(nbytes)
        return self._value((nbytes,), 1, (1,), self._allocate(WIDTH + at, coefficient, label))

    def sort_workspace(self, table: str, label: str) -> Value:
        """What sorting the ids of an embedding of tokens or positions takes: no monomial, so a term of its own."""
        at = {"tokens": SORT, "positions": SORT_POSITIONS, "types": SORT_TYPES}[table]
        return self._value((1,), 1, (1,), self._allocate(WIDTH + at, 1, label))

    def row_sum_workspace(self, value: Value, columns: int) -> Value:
        """What summing the rows of a value takes: no monomial, so a term of its own."""
        key = RowSum(_factor(value.numel // columns), _factor(columns), value.itemsize)
        if key not in self.row_sums:
            self.row_sums[key] = len(self._live)
            self._live.append(0)
        return self._value((1,), 1, (1,), self._allocate(self.row_sums[key], 1, "sum.staging"))

    def _value(self, shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...], storage: Storage) -> Value:
        return Value(self, storage, shape, strides, itemsize)

    def _allocate(self, at: int, coefficient: int, label: str) -> Storage:
        storage = Storage(at, coefficient, label, len(self.phases) - 1)
        storage.again = self.recomputing
        self.storages.append(storage)
        self._live[at] += coefficient
        self._grew = True
        return storage

    def _free(self, storage: Storage) -> None:
        if storage.coefficient:
            if self._grew:
                self._note()
            self._live[storage.at] -= storage.coefficient
        storage.died = len(self.phases) - 1
        storage.beside = None

    def _note(self) -> None:
        self.levels[-1].add(tuple(self._live))
        self._grew = False

    def enter(self, phase: str) -> None:
        """Start a phase; its first moment is the level it starts from."""
        if self.retention == "unit" and phase.startswith("backward."):
            self._retained.clear()
        self._note()
        self.phases.append(phase)
        self.levels.append(set())
        self.flops.append([0] * len(BASIS))
        self.attention.append([0] * len(BASIS))
        self.written.append([0] * len(BASIS))
        self._note()

    # The graph

    def node(self, inputs: Sequence[Value], backward: Backward, *saved: Value) -> Node | None:
        """Start an op whose gradients go to `inputs`, saving values before it runs. None when none needs a gradient."""
        edges = [Edge(v.node, v.output_nr, v.shape, v.itemsize) if v.node else None for v in inputs]
        if not any(edges):
            return None
        self._seq += 1
        return Node(self._seq, backward, edges, [self._pack(v) for v in saved])

    def finish(self, node: Node | None, *outputs: Value, saved: Sequence[Value] = ()) -> None:
        """Make values the outputs of an op, and save those of its results that its backward needs."""
        if node is None:
            return
        node.num_outputs = len(outputs)
        for i, value in enumerate(outputs):
            value.node, value.output_nr = node, i
        node.saved += [self._pack(v) for v in saved]

    def _pack(self, value: Value) -> Saved:
        frame = self._frame
        if frame is None:
            return value.alias()
        if frame.recomputed is None:
            place = Packed(frame, len(frame.packed))
            frame.packed.append(weakref.ref(place))
            return place
        wanted = frame.packed[len(frame.recomputed)]() is not None
        frame.recomputed.append(value.alias() if wanted else None)
        if len(frame.recomputed) == len(frame.packed):
            raise StopRecompute
        return value.alias()

    @property
    def recomputing(self) -> bool:
        """Whether a checkpointed call is run again."""
        return self._frame is not None and self._frame.recomputed is not None

    def checkpoint(
        self, run: Callable[..., Value], *inputs: Value, selective: bool = False, offload: bool = False
    ) -> Value:
        """Non-reentrant activation checkpointing with early stop: keep the inputs, run again at the first unpack.

        Parameters
        ----------
        run, inputs
            What is called, and with what.
        selective
            Keep the results of products (`product`) too, and do not make them again.
        offload
            Let the first input wait in host memory: it is on the device in forward, and from the second run on.
        """
        frame = Frame(run, [v.alias_with_node() for v in inputs], selective=selective)
        if offload:
            first = frame.inputs.pop(0)
            frame.away = Away(first.shape, first.itemsize, first.node)
            del first
        self._frame = frame
        out = run(*inputs)
        self._frame = None
        return out

    def product(self, make: Callable[[], list[Value]]) -> list[Value]:
        """Results of a matrix product or attention kernel; those that selective checkpointing kept are not made."""
        frame = self._frame
        if frame is None or frame.kept is None:
            return make()
        if frame.recomputed is None:
            made = make()
            frame.kept.append([v.alias() for v in made])
            return made
        kept, frame.kept[frame.taken] = frame.kept[frame.taken], []
        frame.taken += 1
        return kept

    def _recompute(self, frame: Frame) -> None:
        frame.recomputed = []
        self._frame = frame
        if frame.away is not None:
            back = self.new(frame.away.shape, frame.away.itemsize, "checkpoint")
            back.node = frame.away.node
            frame.inputs.insert(0, back)
            del back
        try:
            frame.run(*frame.inputs)
        except StopRecompute:
            pass
        self._frame = None

    def _unpack(self, saved: Saved) -> Value:
        if isinstance(saved, Value):
            return saved
        frame = saved.frame
        if frame.recomputed is None:
            self._recompute(frame)
        assert frame.recomputed is not None
        value = frame.recomputed[saved.place]
        frame.recomputed[saved.place] = None
        assert value is not None, "a recomputed value was taken twice"
        return value

    # The engine

    def backward(self, loss: Value) -> None:
        """Run the graph backwards, as torch's engine does for one root on one thread."""
        assert loss.node is not None
        seed = self.new(loss.shape, loss.itemsize, "loss.grad")
        waiting = _dependencies(loss.node)
        buffers: dict[Node, Gradients] = {loss.node: [seed]}
        ready = [(-loss.node.seq, 0, loss.node)]
        pushed = 0
        while ready:
            node = heapq.heappop(ready)[2]
            if node.on_gradient:
                self.enter(node.on_gradient)
            gradients = buffers.pop(node)
            outputs = self._run(node, gradients)
            # The engine drops the incoming gradients first, then what the node saved, and only then adds up.
            gradients.clear()
            node.saved = []
            for i, edge in enumerate(node.edges):
                if edge is None:
                    continue
                target = buffers.setdefault(edge.node, [None] * edge.node.num_outputs)
                leaf = isinstance(edge.node, Accumulate)
                value = target[edge.output_nr] = self._add(target, edge.output_nr, outputs, i, leaf=leaf)
                if value is not None and isinstance(edge.node, Accumulate):
                    edge.node.takes(value)
                del value
                waiting[edge.node] -= 1
                if not waiting[edge.node]:
                    pushed += 1
                    heapq.heappush(ready, (-edge.node.seq, pushed, edge.node))
        self._retained.clear()
        self._held.clear()

    def _run(self, node: Node, gradients: Gradients) -> Gradients:
        if isinstance(node, Accumulate):
            return self._accumulate(node, gradients)
        if isinstance(node, InputLeaf):
            node.kept += [g for g in gradients if g is not None]
            return []
        return self._call(node, gradients)

    def _call(self, node: Node, gradients: Gradients) -> Gradients:
        outputs = node.backward(gradients, [self._unpack(s) for s in node.saved])
        for i, edge in enumerate(node.edges):
            if edge is None:
                outputs[i] = None  # Nobody needs it, though a kernel made it with the others.
            elif outputs[i] is not None:
                self._fit(outputs, i, edge)
        return outputs

    def _fit(self, outputs: Gradients, i: int, edge: Edge) -> None:
        """Bring `outputs[i]` into its input's shape and dtype: summed over broadcast dims, then cast."""
        value = outputs[i]
        assert value is not None
        if value.shape != edge.shape:
            lead = len(value.shape) - len(edge.shape)
            rows, value = value, self.new((1,) * lead + edge.shape, value.itemsize, "sum")
            if self.kernels and rows.shape[lead:] == edge.shape:
                work = self.row_sum_workspace(rows, math.prod(edge.shape))
                del work
            del rows
            value = outputs[i] = Value(self, value.storage, edge.shape, row_major(edge.shape), value.itemsize)
        if value.itemsize != edge.itemsize:
            outputs[i] = self.new(edge.shape, edge.itemsize, "to", strides=dense_like(value.shape, value.strides))

    def _add(self, buffer: Gradients, at: int, outputs: Gradients, i: int, *, leaf: bool) -> Value | None:
        """Move `outputs[i]` into an input buffer, adding to what is there.

        A product's gradient of a parameter (`leaf`), a transposed view of what the product wrote, was seen to be added
        to out of place on CUDA too; gradients of embeddings and of our fused loss, and sums, in place.
        """
        new, outputs[i] = outputs[i], None
        old = buffer[at]
        if old is None or new is None:
            return old if new is None else new
        turned = leaf and old.turned
        if self.in_place_accumulation and not turned and old.storage.refs == 1 and is_dense(old.shape, old.strides):
            return old
        total = self.new(old.shape, old.itemsize, "grad.sum", strides=dense_like(old.shape, old.strides))
        if old.storage.beside is not None:
            self.extend(total, old.storage.beside.shape)
        return total

    def _accumulate(self, node: Accumulate, gradients: Gradients) -> Gradients:
        unit, gradient = node.unit, gradients[0]
        assert gradient is not None
        if gradient.storage.refs > 1 and self._is_whole(gradient):
            # Another node is to have it too, so it is copied. A part of a larger tensor is taken with all of that.
            gradient = gradients[0] = self.new(gradient.shape, gradient.itemsize, "clone")
        node.takes(gradient)
        unit.landed += 1
        if unit.name in self.held:
            self._held.append(gradient.alias())
        elif self.retention != "none":
            unit.arrived.append(gradient.alias())
        else:
            gradients.clear()
            del gradient
        if unit.landed == unit.missing:
            self._retained.clear()
            self.enter(f"reduce.{unit.name}")
            self._retained, unit.arrived = unit.arrived, []
        return []

    def _is_whole(self, value: Value) -> bool:
        """Whether a value is all of its storage."""
        return _split(value.numel * value.itemsize) == (value.storage.at, value.storage.coefficient)

    def close(self) -> None:
        """Note the last level, and give those before a row sum was met a place for it."""
        self._note()
        if self.row_sums:
            width = len(self._live)
            self.levels = [{(*v, *(0,) * (width - len(v))) for v in levels} for levels in self.levels]


def _dependencies(root: Node) -> dict[Node, int]:
    """How many gradients each node of the graph waits for."""
    count: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            if edge.node not in count:
                count[edge.node] = 0
                stack.append(edge.node)
            count[edge.node] += 1
    return count
