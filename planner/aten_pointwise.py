"""Ops of torch that keep a tensor's shape, or reduce a row to a number: elementwise ones, softmax, norms.

On top of `planner/aten_views.py`, and below the products of `planner/aten.py`, which says what a rule is.
"""

from __future__ import annotations

from zplan.planner.aten_devices import BOOL, FP32, Grads, Outs
from zplan.planner.aten_views import Views
from zplan.planner.graph import Value


def factors(a: Value, b: Value) -> list[Value]:
    """What a product saves: each factor, where the other one needs a gradient."""
    return [x for x, other in ((a, b), (b, a)) if other.node is not None]


class Pointwise(Views):
    """Elementwise ops and norms over one tape."""

    def add(self, a: Value, b: Value) -> Value:
        node = self.tape.node([a, b], lambda g, s: [g[0].alias(), g[0].alias()])
        out = self.like(a, "add")
        self.tape.finish(node, out)
        return out

    def sub(self, a: Value, b: Value) -> Value:
        second = b.node is not None
        node = self.tape.node([a, b], lambda g, s: [g[0].alias(), self.like(g[0], "neg") if second else None])
        out = self.like(a, "sub")
        self.tape.finish(node, out)
        return out

    def mul(self, a: Value, b: Value) -> Value:
        """`b` may be smaller and broadcast, and of another itemsize; the wider one wins."""
        wide = max(a.itemsize, b.itemsize)
        first, second = a.node is not None, b.node is not None

        def backward(g: Grads, s: Grads) -> Outs:
            other = self.like(g[0], "mul") if second else None
            return [self.like(g[0], "mul") if first else None, other]

        node = self.tape.node([a, b], backward, *factors(a, b))
        out = self.like(a, "mul", wide)
        self.tape.finish(node, out)
        return out

    def scale(self, x: Value) -> Value:
        """Times a Python number."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "mul")])
        out = self.like(x, "mul")
        self.tape.finish(node, out)
        return out

    def add_number(self, x: Value) -> Value:
        """Plus a Python number."""
        node = self.tape.node([x], lambda g, s: [g[0].alias()])
        out = self.like(x, "add")
        self.tape.finish(node, out)
        return out

    def add_(self, x: Value, y: Value) -> Value:
        """In place."""
        node = self.tape.node([x, y], lambda g, s: [g[0].alias(), g[0].alias()])
        out = x.alias()
        self.tape.finish(node, out)
        return out

    def scale_(self, x: Value) -> Value:
        """In place times a Python number."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "div")])
        out = x.alias()
        self.tape.finish(node, out)
        return out

    def neg(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "neg")])
        out = self.like(x, "neg")
        self.tape.finish(node, out)
        return out

    def square(self, x: Value) -> Value:
        def backward(g: Grads, s: Grads) -> Outs:
            power = self.like(g[0], "pow")
            scaled = self.like(g[0], "mul")
            out = self.like(g[0], "mul")
            del power, scaled
            return [out]

        node = self.tape.node([x], backward, x)
        out = self.like(x, "pow")
        self.tape.finish(node, out)
        return out

    def mean(self, x: Value) -> Value:
        """Over the last dim, which stays as 1; in fp32."""
        sizes = x.shape
        node = self.tape.node([x], lambda g, s: [self.tape.new(sizes, FP32, "div")])
        out = self.tape.new((*sizes[:-1], 1), FP32, "mean")
        self.tape.finish(node, out)
        return out

    def rsqrt(self, x: Value) -> Value:
        def backward(g: Grads, s: Grads) -> Outs:
            cube = self.like(g[0], "pow")
            half = self.like(g[0], "mul")
            out = self.like(g[0], "mul")
            del cube, half
            return [out]

        node = self.tape.node([x], backward)
        out = self.like(x, "rstd")
        self.tape.finish(node, out, saved=[out])
        return out

    def unary(self, x: Value, label: str) -> Value:
        """`silu`, `gelu`: saves its input, backward in one kernel."""
        node = self.tape.node([x], lambda g, s: [self.like(g[0], f"{label}.grad")], x)
        out = self.like(x, label)
        self.tape.finish(node, out)
        return out

    def relu(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "relu.grad")])
        out = self.like(x, "relu")
        self.tape.finish(node, out, saved=[out])
        return out

    def tanh(self, x: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "tanh.grad")])
        out = self.like(x, "tanh")
        self.tape.finish(node, out, saved=[out])
        return out

    def dropout(self, x: Value) -> Value:
        """Training's, of any probability but 0. A GPU keeps a mask of bytes, a CPU the factors in the input's dtype."""
        if not self.table.kernels:
            return self.mul(x, self.like(x, "dropout.mask"))
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "dropout.grad")])
        out = self.like(x, "dropout")
        mask = self.like(x, "dropout.mask", BOOL)
        self.tape.finish(node, out, saved=[mask])
        return out

    def masked_fill(self, x: Value, mask: Value) -> Value:
        node = self.tape.node([x], lambda g, s: [self.like(g[0], "masked_fill")], mask)
        out = self.like(x, "masked_fill")
        self.tape.finish(node, out)
        return out

    def softmax(self, x: Value, label: str) -> Value:
        """`_softmax` and `_log_softmax`: save their output."""

        def backward(g: Grads, s: Grads) -> Outs:
            # On CUDA the softmax's backward multiplies gradient and output into a buffer first; log-softmax does not.
            product = (
                self.tape.workspace(g[0].numel * g[0].itemsize, "softmax.product") if self._multiplies(label) else None
            )
            out = self.like(g[0], f"{label}.grad")
            del product
            return [out]

        node = self.tape.node([x], backward)
        out = self.like(x, label)
        self.tape.finish(node, out, saved=[out])
        return out

    def _multiplies(self, label: str) -> bool:
        return self.table.kernels and label == "softmax"

    def rms_norm(self, x: Value, weight: Value) -> Value:
        if self.table.fused_rms_norm:
            return self._fused_rms_norm(x, weight)
        up = self.to(x, FP32)
        square = self.square(up)
        mean = self.mean(square)
        # `add_(eps)`: in place, a node of its own.
        node = self.tape.node([mean], lambda g, s: [g[0].alias()])
        self.tape.finish(node, mean)
        root = self.rsqrt(mean)
        # One expression in C++: its temporaries live to its end.
        del square, mean
        normed = self.named("normed, before weight", self.mul(up, root))
        normed = self.named("normed", self.mul(normed, weight))
        return self.to(normed, x.itemsize)

    def _fused_rms_norm(self, x: Value, weight: Value) -> Value:
        wanted = [v.node is not None for v in (x, weight)]

        def backward(g: Grads, s: Grads) -> Outs:
            labels = ("rms_norm.grad", "rms_norm.weight")
            return [self.like(v, label) if w else None for v, label, w in zip(s, labels, wanted, strict=False)]

        node = self.tape.node([x, weight], backward, x, weight)
        out = self.tape.new(x.shape, x.itemsize, "rms_norm")
        root = self.tape.new((*x.shape[:-1], 1), FP32, "rstd")
        self.tape.finish(node, out, saved=[root])
        return out

    def layer_norm(self, x: Value, weight: Value, bias: Value) -> Value:
        wanted = [v.node is not None for v in (x, weight, bias)]

        def backward(g: Grads, s: Grads) -> Outs:
            labels = ("norm.grad", "norm.weight", "norm.bias")
            return [self.like(v, label) if w else None for v, label, w in zip(s, labels, wanted, strict=False)]

        node = self.tape.node([x, weight, bias], backward, x, weight, bias)
        out = self.tape.new(x.shape, x.itemsize, "layer_norm")
        stats = self.table.layer_norm_stats or x.itemsize
        mean = self.tape.new((*x.shape[:-1], 1), stats, "mean")
        rstd = self.tape.new((*x.shape[:-1], 1), stats, "rstd")
        self.tape.finish(node, out, saved=[mean, rstd])
        return out
