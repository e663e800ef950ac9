"""One training step of `ViTForImageClassification` (transformers 5.24) on a tape, line by line.

See [Note: lifetimes] in `planner/tape.py`. A sequence is an image: its patches and one token for the class, so T is the
model's and not a choice. Pixels come in fp32, as processors give them, and the loss is taken of the logits in compute
dtype, as that class does. What cuDNN's convolution takes for itself is not counted.
"""

from __future__ import annotations

from zplan.planner.aten_devices import FP32, INT64, Grads, Outs
from zplan.planner.graph import Value
from zplan.planner.hfblocks import Block
from zplan.planner.hftape import ClassTape


class VitBlock(Block):
    """One encoder layer: norms before attention and feed-forward part, no mask."""

    def run(self, x: Value, positions: Value | None = None, *given: Value) -> Value:
        op = self.op
        residual = x
        x = self.norm(x, 0)
        x, _weights = self.attention(x)
        x = self.drop(x)
        x = op.named("after attention", op.add(x, residual))
        residual = x
        x = self.norm(x, 1)
        x = self.feed(x)
        x = self.drop(x)
        return op.named("output", op.add(x, residual))

    def attention(self, x: Value, *given: Value) -> tuple[Value, Value | None]:
        return self.attend(*self.queries_keys_values(x))

    def _fused(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        return self.op.contiguous(self.op.transpose(self.op.sdpa(q, k, v, causal=False), 1, 2)), None

    def _eager(self, q: Value, k: Value, v: Value, *mask: Value) -> tuple[Value, Value | None]:
        op = self.op
        scores = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        scores = op.to(op.softmax(op.to(scores, FP32), "softmax"), q.itemsize)
        if self.arch.trait("attention_dropout"):
            scores = op.dropout(scores)
        out = op.named("attention output", op.matmul(scores, v))
        return op.contiguous(op.transpose(out, 1, 2)), scores


class VitTape(ClassTape):
    """Patches, encoder and classifier."""

    block = VitBlock

    def batch(self, batch: int, seq: int) -> tuple[Value, Value]:
        """Pixels (B, channels, image, image) in fp32, and a class each."""
        a = self.arch
        pixels = self.tape.new((batch, a.trait("channels"), a.trait("image"), a.trait("image")), FP32, "inputs")
        return pixels, self.tape.new((batch,), INT64, "labels")

    def _patches(self, pixels: Value) -> Value:
        """A convolution whose steps are as wide as its kernel: (B, C, side, side) as (B, side * side, C)."""
        op, tape, p = self.op, self.tape, self.by_unit["embed"]
        weight, bias = p["weight"], p["bias"]
        side = self.arch.trait("image") // self.arch.trait("patch")
        wide, extents, trained = weight.shape, (pixels.shape[0], side, side, *weight.shape), weight.node is not None
        shape, itemsize = (pixels.shape[0], wide[0], side, side), pixels.itemsize

        def backward(g: Grads, s: Grads) -> Outs:
            if trained:
                tape.multiply(*extents)
            # On a GPU the gradient, which lies patch by patch, is first copied to lie channel by channel.
            copy = tape.workspace(g[0].numel * itemsize, "convolution.grad") if op.table.kernels else None
            out = [
                None,
                tape.new(wide, itemsize, "convolution.weight"),
                tape.new(wide[:1], itemsize, "convolution.bias"),
            ]
            del copy
            return out

        node = tape.node([pixels, weight, bias], backward, pixels, weight)
        tape.multiply(*extents)
        out = tape.new(shape, itemsize, "convolution")
        tape.finish(node, out)
        return op.transpose(op.view(out, (*shape[:2], side * side)), 1, 2)

    def embed(self, ids: Value) -> Value:
        op, p = self.op, self.by_unit["embed"]
        x = self._patches(ids)
        first = op.expand(p["cls_token"], (x.shape[0], 1, x.shape[2]))
        x = op.cat_tokens((first, x))
        x = op.add(x, p["position_embeddings"])
        return self.starts(op.dropout(x) if self.arch.trait("dropout") else x, "backward.embed")

    def features(self, ids: Value) -> Value:
        pixels = self.op.to(ids, self.itemsize)
        # The model's forward keeps the embedded patches until it returns.
        embedded = self.embed(pixels)
        calls = [(f"blocks.{i}", self.make_block(i).run, ()) for i in range(self.arch.layers)]
        out = self.unit("norm", self._norm, self.blocks([embedded], calls))
        del pixels
        return out

    def forward(self, inputs: Value, labels: Value) -> Value:
        hidden = self.features(inputs)
        pooled = self.op.select_token(hidden)
        logits = self.op.named("logits", self.unit("head", self._head, pooled))
        self.tape.enter("loss")
        return self.op.nll_loss(self.op.softmax(logits, "log_softmax"), labels)
