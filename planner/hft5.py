"""One training step of `T5ForConditionalGeneration` (transformers 5.24) on a tape, line by line.

See [Note: lifetimes] in `planner/tape.py`. Encoder and decoder see T tokens each; the decoder's are the labels, moved
by one. Positions are a bias on the scores, learned in the first layer of each stack and handed on to the others, which
all add to its gradient; cross attention takes zeros. The loss is taken of the logits in compute dtype.

[Note: biased attention] torch's fused attention takes the bias as a mask, (1, H, T, T) in the compute dtype, copied
anew in each layer. A GPU's memory-efficient kernel keeps the copy until backward, and writes the gradient of a mask
that is trained for every sequence, (B, H, T, T). A CPU has no kernel for such a mask, nor for dropout, and runs a chain
of products in fp32. Checkpointing makes the zeros of cross attention require a gradient too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64
from zplan.planner.config import Attention
from zplan.planner.families import Block as Run
from zplan.planner.families import Params, Recipe
from zplan.planner.graph import Value
from zplan.planner.hfmla import attend_plain
from zplan.planner.hfops import activate
from zplan.planner.hft5_bias import bias_of_distance, causal_mask, masked_bias
from zplan.planner.hftape import ClassTape
from zplan.planner.models import Architecture, Unit

ACTS = ("relu", "gelu_new", "silu", "gelu")
"""Of the feed-forward part: traits `act_NAME`."""


class Biases:
    """What the layers of a stack hand on: the bias of distances, and the zeros of cross attention."""

    def __init__(self) -> None:
        self.own: Value | None = None
        self.cross: Value | None = None


class T5Block:
    """One layer of the encoder, or with `decoder` of the decoder."""

    def __init__(  # noqa: PLR0913  (what a layer is made of)
        self, op: Aten, p: Params, arch: Architecture, kind: Attention, biases: Biases, *, decoder: bool, leaf: bool
    ) -> None:
        self.op, self.p, self.arch, self.kind, self.biases = op, p, arch, kind, biases
        self.decoder, self.leaf = decoder, leaf

    def run(self, names: Sequence[str], x: Value, *values: Value) -> Value:
        """The layer, called with the values of `names`: `mask` and bias (`own`) of its tokens, if there are any; those
        it sees, `encoded`, with their `cross_mask` and bias (`cross`).
        """
        given = dict(zip(names, values, strict=True))
        x, own, _weights = self._self_attention(x, given)
        cross = None
        if self.decoder:
            x, cross, _weights = self._cross_attention(x, given)
        x = self._feed(x)
        if not self.op.tape.recomputing:
            self.biases.own, self.biases.cross = own, cross
        return self.op.named("output", x)

    def _linear(self, x: Value, name: str) -> Value:
        return self.op.linear(x, self.p[f"{name}.weight"])

    def _drop(self, x: Value) -> Value:
        return self.op.dropout(x) if self.arch.trait("dropout") else x

    def _norm(self, x: Value, layer: int) -> Value:
        return t5_norm(self.op, x, self.p[f"layer.{layer}.layer_norm.weight"])

    def _self_attention(self, x: Value, given: dict[str, Value]) -> tuple[Value, Value, Value | None]:
        normed = self._norm(x, 0)
        name = "layer.0.SelfAttention"
        out, bias, weights = self._attention(normed, normed, name, given.get("own"), given.get("mask"))
        return self.op.named("after attention", self.op.add(x, self._drop(out))), bias, weights

    def _cross_attention(self, x: Value, given: dict[str, Value]) -> tuple[Value, Value, Value | None]:
        normed = self._norm(x, 1)
        name = "layer.1.EncDecAttention"
        out, bias, weights = self._attention(
            normed, given["encoded"], name, given.get("cross"), given.get("cross_mask")
        )
        return self.op.named("after attention", self.op.add(x, self._drop(out))), bias, weights

    def _heads(self, x: Value) -> Value:
        return self.op.transpose(self.op.view(x, (*x.shape[:2], self.arch.heads, self.arch.head_dim)), 1, 2)

    def _attention(
        self, x: Value, seen: Value, name: str, bias: Value | None, mask: Value | None
    ) -> tuple[Value, Value, Value | None]:
        """The output, the bias, and the probabilities where they were written."""
        op = self.op
        q = self._heads(self._linear(x, f"{name}.q"))
        k = self._heads(op.named("k", self._linear(seen, f"{name}.k")))
        v = self._heads(op.named("v", self._linear(seen, f"{name}.v")))
        if bias is None:
            bias = self._bias(name, x.shape[1])
        if self.kind == "eager":
            out, weights = self._eager(q, k, v, bias, mask)
        else:
            causal = self.decoder and name.endswith("SelfAttention")
            out, weights = self._fused(q, k, v, self._as_mask(bias, mask, causal=causal)), None
        out = op.reshape(out, (*x.shape[:2], self.arch.heads * self.arch.head_dim))
        return self._linear(out, f"{name}.o"), bias, weights

    def _bias(self, name: str, seq: int) -> Value:
        table = self.p.get(f"{name}.relative_attention_bias.weight")
        if table is not None:
            return bias_of_distance(self.op, table, seq, both_ways=not self.decoder)
        zeros = self.op.tape.new((1, self.arch.heads, seq, seq), self.itemsize, "position bias")
        if self.leaf:
            self.op.tape.require_gradient(zeros)
        return zeros

    @property
    def itemsize(self) -> int:
        return self.p["layer.0.layer_norm.weight"].itemsize

    def _fused(self, q: Value, k: Value, v: Value, mask: Value) -> Value:
        op, dropout = self.op, bool(self.arch.trait("attention_dropout"))
        if op.table.kernels or (mask.node is None and not dropout):
            out = op.sdpa(q, k, v, causal=False, added=mask)
        else:
            out = attend_plain(op, q, k, v, mask, dropout=dropout)
        return op.contiguous(op.transpose(out, 1, 2))

    def _as_mask(self, bias: Value, mask: Value | None, *, causal: bool) -> Value:
        """The bias in the order of its dims, without what a token may not see."""
        if mask is None and causal and bias.shape[-1] > 1:
            mask = causal_mask(self.op, bias.shape[-1])
        return self.op.contiguous(bias if mask is None else masked_bias(self.op, bias, mask))

    def _eager(self, q: Value, k: Value, v: Value, bias: Value, mask: Value | None) -> tuple[Value, Value]:
        op = self.op
        scores = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        scores = op.add(scores, bias)
        if mask is not None:
            scores = op.add(scores, mask)
        scores = op.softmax(scores, "softmax")
        if self.arch.trait("attention_dropout"):
            scores = op.dropout(scores)
        out = op.named("attention output", op.matmul(scores, v))
        return op.contiguous(op.transpose(out, 1, 2)), scores

    def _feed(self, x: Value) -> Value:
        fed = self._norm(x, 2 if self.decoder else 1)
        fed = self._products(fed, f"layer.{2 if self.decoder else 1}.DenseReluDense")
        return self.op.add(x, self._drop(fed))

    def _products(self, x: Value, name: str) -> Value:
        op = self.op
        act = next(a for a in ACTS if self.arch.trait(f"act_{a}"))
        if self.arch.trait("gated"):
            gate = op.named("act(gate)", activate(op, op.named("gate", self._linear(x, f"{name}.wi_0")), act))
            up = op.named("up", self._linear(x, f"{name}.wi_1"))
            x = op.named("act(gate) * up", op.mul(gate, up))
        else:
            x = op.named("up", self._linear(x, f"{name}.wi"))
            x = op.named(f"{act}(up)", activate(op, x, act))
        x = self._drop(x)
        return self._linear(x, f"{name}.wo")


def t5_norm(op: Aten, x: Value, weight: Value) -> Value:
    """Squares and root in fp32, the rest in the compute dtype."""
    variance = op.mean(op.square(op.to(x, FP32)))
    x = op.mul(x, op.rsqrt(op.add_number(variance)))
    x = op.to(x, weight.itemsize)
    return op.named("normed", op.mul(x, weight))


class T5Tape(ClassTape):
    """Both stacks and the head. What is padded is the encoder's; a decoder's labels are padded behind what counts."""

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int, recipe: Recipe) -> None:
        super().__init__(op, arch, units, itemsize, recipe)
        op.masked = False  # Each layer makes a mask of its own, of bias and padding.

    def stack(self, name: str, embedded: Value, encoded: Value | None = None) -> Value:
        """A stack, its norm and its dropout, of embeddings that its caller lets go of."""
        arch, decoder = self.arch, encoded is not None
        layers = arch.trait("decoder_layers") if decoder else arch.layers
        given: dict[str, Value | None] = {"encoded": encoded}
        if decoder and self.recipe.attention == "eager":
            given["mask"] = self._mask(*embedded.shape[:2])
        if self.recipe.padded:
            given["cross_mask" if decoder else "mask"] = self._padding(*embedded.shape[:2])
        biases, leaf = Biases(), self.recipe.checkpointing != "none"
        x = self._drop(embedded)
        for i in range(layers):
            there = {k: v for k, v in given.items() if v is not None}
            params = self.by_unit[f"{name}.{i}"]
            block = T5Block(self.op, params, arch, self.recipe.attention, biases, decoder=decoder, leaf=leaf)
            run = partial(block.run, tuple(there))
            x = self.unit(f"{name}.{i}", self._kept(run), x, *there.values())
            given["own"], given["cross"] = biases.own, biases.cross
            del there
        norm = "norm" if decoder else "encoder_norm"
        x = self.unit(norm, partial(self._t5_norm, norm), x)
        x = self._drop(x)
        # Layers that run again know this object; the class hands on what it holds by name.
        biases.own = biases.cross = None
        return x

    def _padding(self, batch: int, seq: int) -> Value:
        """Which tokens of the encoder may be seen, (B, 1, T, T); eager attention adds numbers."""
        _tokens = self.tape.new((batch, seq), BOOL, "mask of tokens, as bytes")
        allowed = self._allowed(batch, seq)
        if self.recipe.attention != "eager":
            return allowed
        _numbers = [self.tape.new((), self.itemsize, "mask") for _ in ("zero", "lowest")]
        return self.op.like(allowed, "mask", self.itemsize)

    def _allowed(self, batch: int, seq: int) -> Value:
        _indices = [self.tape.new((n,), INT64, "mask.indices") for n in (batch, 1, seq, seq)]
        _rows = self.tape.new((1, 1, seq, 1), BOOL, "padding mask")
        _columns = self.tape.new((batch, 1, 1, seq), BOOL, "padding mask")
        return self.tape.new((batch, 1, seq, seq), BOOL, "padding mask")

    def _kept(self, run: Run) -> Run:
        """A layer's call, checkpointed where the recipe says so."""
        if self.recipe.checkpointing == "none" or not self.tape.gradients:
            return run
        selective = self.recipe.checkpointing == "selective"
        return partial(self.tape.checkpoint, run, selective=selective, offload=self.recipe.checkpoint_offload)

    def _t5_norm(self, name: str, x: Value) -> Value:
        return t5_norm(self.op, x, self.by_unit[name]["weight"])

    def _drop(self, x: Value) -> Value:
        return self.op.dropout(x) if self.arch.trait("dropout") else x

    def _decoder_embed(self, ids: Value) -> Value:
        out = self.op.embedding(self.by_unit["embed"]["weight"], ids)
        if self.recipe.checkpointing != "none":
            self.tape.require_gradient(out)
        return out

    def _shifted_right(self, labels: Value) -> Value:
        shifted = self.op.like(labels, "labels.shifted")
        _copy = self.op.like(labels, "labels.shifted")
        return shifted

    def forward(self, ids: Value, labels: Value) -> Value:
        encoded = self.stack("encoder", self.embed(ids))
        shifted = self._shifted_right(labels)
        decoded = self.stack("decoder", self._decoder_embed(shifted), encoded)
        hidden = self.op.scale(decoded) if self.arch.tied else decoded
        if self.recipe.cross_entropy in ("fused", "chunked"):
            return self.loss_in_head(hidden, labels)
        logits = self.op.named("logits", self.unit("head", self._head, hidden))
        self.tape.enter("loss")
        flat = self.op.view(logits, (labels.numel, self.arch.vocab))
        return self.op.nll_loss(self.op.softmax(flat, "log_softmax"), labels.view((labels.numel,), (1,)))
