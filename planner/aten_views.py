"""Ops of torch that give a tensor another shape: views, and the copies that come of them.

The foot of `planner/aten.py`, which says what a rule is.
"""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.aten_devices import DeviceTable
from zplan.planner.graph import Storage, Value
from zplan.planner.strides import dense_like, row_major, view_strides
from zplan.planner.tape import Tape


class Views:
    """Views and copies over one tape."""

    def __init__(self, tape: Tape, table: DeviceTable) -> None:
        self.tape, self.table = tape, table
        self.adapters: dict[Storage, tuple[Value, Value]] = {}
        """Low-rank factors (rank, in) and (out, rank) beside a frozen weight."""
        self.quantized: set[Storage] = set()
        """Weights of 4 bits, which every product makes whole first."""
        self.masked = False
        """Whether fused attention takes a mask: of a padded batch."""
        self.fused = False
        """Whether the built-in decoder runs our own kernels: `planner/fused.py`."""

    def named(self, label: str, x: Value) -> Value:
        """Give a value's storage a name for people."""
        x.storage.label = label
        return x

    def view(self, x: Value, shape: Sequence[int]) -> Value:
        strides = view_strides(x.shape, x.strides, shape)
        assert strides is not None, f"view of {x.shape} with strides {x.strides} as {shape}"
        return self._view(x, shape, strides)

    def _view(self, x: Value, shape: Sequence[int], strides: tuple[int, ...]) -> Value:
        old = x.shape
        node = self.tape.node([x], lambda g, s: [self.reshape(g[0], old)])
        out = x.view(shape, strides)
        self.tape.finish(node, out)
        return out

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """A view where strides allow, else a row-major copy."""
        strides = view_strides(x.shape, x.strides, shape)
        if strides is None:
            return self._view(self.clone(x), shape, row_major(shape))
        return self._view(x, shape, strides)

    def clone(self, x: Value) -> Value:
        """Row-major copy; its gradient passes through."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        out = self.tape.new(x.shape, x.itemsize, "clone")
        self.tape.finish(node, out)
        return out

    def transpose(self, x: Value, a: int, b: int) -> Value:
        node = self.tape.node([x], lambda g, s: [self.transpose(g[0], a, b)])
        shape, strides = list(x.shape), list(x.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        out = x.view(shape, tuple(strides))
        out.turned = True
        self.tape.finish(node, out)
        return out

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast without bytes; its gradient is summed."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        strides = tuple(0 if n != m else s for n, m, s in zip(shape, x.shape, x.strides, strict=True))
        out = x.view(shape, strides)
        self.tape.finish(node, out)
        return out

    def split(self, x: Value, parts: int) -> list[Value]:
        """Equal parts of the last dim; their gradients are concatenated."""
        node = self.tape.node([x], lambda g, s: [self.cat(g)])
        shape = (*x.shape[:-1], x.shape[-1] // parts)
        out = [x.view(shape, x.strides) for _ in range(parts)]
        self.tape.finish(node, *out)
        return out

    def split_rows(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Parts of the first dim; their gradients are concatenated."""
        shape, itemsize = x.shape, x.itemsize
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "cat")])
        out = [x.view((n, *shape[1:]), x.strides) for n in sizes]
        self.tape.finish(node, *out)
        return out

    def stack(self, xs: Sequence[Value]) -> Value:
        """Scalars to one vector; the gradients are its elements."""
        count = len(xs)
        node = self.tape.node(xs, lambda g, s: [g[0].view((), ()) for _ in range(count)])
        out = self.tape.new((count,), xs[0].itemsize, "stack")
        self.tape.finish(node, out)
        return out

    def narrow(self, x: Value, start: int, length: int) -> Value:
        """`x[..., start:start + length]`; its gradient is written into zeros."""
        shape, itemsize = x.shape, x.itemsize
        if length == shape[-1]:
            return self.view(x, shape)
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "slice.grad")])
        out = x.view((*shape[:-1], length), x.strides)
        self.tape.finish(node, out)
        return out

    def contiguous(self, x: Value) -> Value:
        """Itself where it is row-major, else a copy."""
        same = all(n == 1 or a == b for n, a, b in zip(x.shape, x.strides, row_major(x.shape), strict=True))
        return x if same else self.clone(x)

    def cat(self, xs: Sequence[Value]) -> Value:
        """Concatenation along the last dim; the gradients are slices."""
        shapes = [x.shape for x in xs]
        node = self.tape.node(xs, lambda g, s: [g[0].view(n, g[0].strides) for n in shapes])
        out = self.tape.new((*xs[0].shape[:-1], sum(n[-1] for n in shapes)), xs[0].itemsize, "cat")
        self.tape.finish(node, out)
        return out

    def cat_tokens(self, xs: Sequence[Value]) -> Value:
        """Concatenation of (B, T, C) along T; the gradients are slices."""
        shapes = [x.shape for x in xs]
        node = self.tape.node(xs, lambda g, s: [g[0].view(n, g[0].strides) for n in shapes])
        b, _, c = shapes[0]
        out = self.tape.new((b, sum(n[1] for n in shapes), c), xs[0].itemsize, "cat")
        self.tape.finish(node, out)
        return out

    def select_token(self, x: Value) -> Value:
        """The first of (B, T, C), a view (B, C); its gradient is written into zeros."""
        shape, itemsize = x.shape, x.itemsize
        node = self.tape.node([x], lambda g, s: [self.tape.new(shape, itemsize, "select.grad")])
        out = x.view((shape[0], shape[2]), (x.strides[0], x.strides[2]))
        self.tape.finish(node, out)
        return out

    def to(self, x: Value, itemsize: int) -> Value:
        if x.itemsize == itemsize:
            return x
        old = x.itemsize
        node = self.tape.node([x], lambda g, s: [self.to(g[0], old)])
        label = x.storage.label.removesuffix(" cast") + " cast"
        out = self.like(x, label, itemsize)
        self.tape.finish(node, out)
        return out

    def like(self, x: Value, label: str, itemsize: int | None = None) -> Value:
        """A new value in the shape and memory order of `x`, without a node."""
        return self.tape.new(x.shape, itemsize or x.itemsize, label, strides=dense_like(x.shape, x.strides))

    def unsqueeze_last(self, x: Value) -> Value:
        """(N,) to (N, 1)."""
        return self.view(x, (*x.shape, 1))

    def unsqueeze(self, x: Value, dim: int) -> Value:
        """A dim of 1 before `dim`."""
        old = x.shape
        node = self.tape.node([x], lambda g, s: [g[0].view(old, g[0].strides[:dim] + g[0].strides[dim + 1 :])])
        stride = x.strides[dim] * old[dim]
        out = x.view((*old[:dim], 1, *old[dim:]), (*x.strides[:dim], stride, *x.strides[dim:]))
        self.tape.finish(node, out)
        return out

    def repeat_interleave(self, x: Value, times: int) -> Value:
        """Each head `times` over: (B, G, T, D) to (B, G * times, T, D)."""
        b, g, t, d = x.shape
        wide = self.expand(self.unsqueeze(x, 2), (b, g, times, t, d))
        return self.view(self.clone(wide), (b, g * times, t, d))
