"""Autograd's memory behaviour in integers: values that have sizes but no numbers.

A `Tape` runs a model's op list once, forward and backward, and keeps every level of live bytes that a phase saw.
Tensors are `Value`s over `Storage`s; nodes save values (`planner/graph.py`), gradients flow through input buffers and
add up as torch's engine does it; sizes are monomials (`planner/monomials.py`). What each op allocates and saves is in
`planner/aten.py`; which ops a model runs, in `planner/families.py`.

[Note: lifetimes] A storage is freed when the last Python reference to it goes, exactly as in torch, where a tensor's
lifetime is that of its handles. So an op list that mirrors the model's Python line by line, with the same locals and
the same nesting of calls, frees at the same moments. Nothing here may keep a value in a reference cycle.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from zplan.planner.graph import (
    Accumulate,
    Away,
    Backward,
    Edge,
    Frame,
    Gradients,
    InputLeaf,
    Node,
    Packed,
    Saved,
    Storage,
    UnitGradients,
    Value,
)
from zplan.planner.levels import Levels
from zplan.planner.monomials import split
from zplan.planner.strides import dense_like, is_dense, row_major

Retention = Literal["next", "unit", "none"]
"""How long a runtime holds a unit's whole gradients: zplan until the next unit's have landed; until the unit's backward
is over; not at all, since each is taken as it comes."""


class StopRecompute(Exception):
    """Raised when a recomputed block has saved as much as its first run did."""


class Tape(Levels):
    """Records what a forward and its backward hold.

    Attributes
    ----------
    kernels
        Whether what kernels take for themselves where autograd sums a gradient counts, as CUDA's allocator sees it.
    retention, held
        How long whole gradients are held, and units whose gradients are held to the end of backward.
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
        super().__init__()
        self.gradients, self.retention, self.held = gradients, retention, held
        self.kernels = kernels
        self.in_place_accumulation = in_place_accumulation
        self._seq = 0
        self._retained: list[Value] = []
        self._held: list[Value] = []

    # The graph

    def enter(self, phase: str) -> None:
        """Start a phase."""
        if self.retention == "unit" and phase.startswith("backward."):
            self._retained.clear()
        self.start(phase)

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
        return split(value.numel * value.itemsize) == (value.storage.at, value.storage.coefficient)


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
