"""What a tape is made of: values over storages, and the nodes of autograd's graph between them.

See [Note: lifetimes] in `planner/tape.py`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from zplan.planner.levels import Levels

PARAMETER_GRADIENT = "parameter gradient"


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
        self, tape: Levels, storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
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
