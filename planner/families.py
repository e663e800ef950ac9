"""The op lists of the decoder families: `runtime/decoder.py`, line by line, over values without numbers.

See [Note: lifetimes] in `planner/tape.py`: locals and nesting are those of the decoder on purpose. A new family is a
block function, and a row in `BLOCKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from zplan.planner import fused
from zplan.planner.aten import BOOL, FP32, INT64, Aten
from zplan.planner.config import Attention, Checkpointing
from zplan.planner.models import Architecture, Unit
from zplan.planner.tape import UnitGradients, Value

Params = dict[str, Value]
Block = Callable[..., Value]


def rotary_tables(op: Aten, arch: Architecture, seq: int, itemsize: int) -> tuple[Value, Value]:
    """Tables of cos and sin (T, D/2), with the small fp32 vectors on the way to them."""
    half = -(-arch.head_dim // 2)

    def vector(*operands: Value) -> Value:
        return op.tape.new((half,), FP32, "rotary")

    inv = vector(vector(vector(vector())))
    scaling = dict(arch.rope_scaling)
    if scaling and scaling["rope_type"] == "linear":
        inv = vector(inv)
    elif scaling:
        turns = vector(vector(inv))
        smooth = vector(vector(vector(turns)))
        inv = vector(inv, vector(smooth, vector(vector(smooth))))
    angles = _outer(op, op.tape.new((seq,), FP32, "rotary"), inv)
    return op.to(op.like(angles, "rotary"), itemsize), op.to(op.like(angles, "rotary"), itemsize)


def _outer(op: Aten, a: Value, b: Value) -> Value:
    return op.tape.new((*a.shape, *b.shape), FP32, "rotary")


def rotate(op: Aten, x: Value, cos: Value, sin: Value) -> Value:
    if op.fused:
        return fused.rotary(op, x, cos, sin)
    cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    a, b = op.split(x, 2)
    return op.cat((op.sub(op.mul(a, cos), op.mul(b, sin)), op.add(op.mul(b, cos), op.mul(a, sin))))


def attend(op: Aten, q: Value, k: Value, v: Value, kind: Attention) -> Value:
    b, h, t, d = q.shape
    fused = kind == "sdpa"
    if h != k.shape[1] and not (fused and op.shares_heads(q)):
        k, v = (op.repeat_interleave(x, h // x.shape[1]) for x in (k, v))
    if fused:
        out = op.sdpa(q, k, v)
    else:
        scores = op.scale(op.matmul(q, op.transpose(k, 2, 3)))
        future = _triu(op, op.tape.new((t, t), BOOL, "mask"))
        scores = op.masked_fill(scores, future)
        out = op.matmul(op.to(op.softmax(op.to(scores, FP32), "softmax"), q.itemsize), v)
        op.named("attention output", out)
    return op.reshape(op.transpose(out, 1, 2), (b, t, h * d))


def _triu(op: Aten, ones: Value) -> Value:
    return op.like(ones, "mask")


def llama_block(op: Aten, p: Params, arch: Architecture, attention: Attention) -> Block:
    """Block over parameters by short name: `run(x, cos, sin)`."""

    def heads(x: Value, weight: Value, count: int) -> Value:
        return op.view(op.linear(x, weight), (*x.shape[:2], count, arch.head_dim))

    def attention_part(x: Value, cos: Value, sin: Value) -> Value:
        q = op.named("q, rotated", rotate(op, heads(x, p["q.weight"], arch.heads), cos, sin))
        k = op.named("k, rotated", rotate(op, heads(x, p["k.weight"], arch.kv_heads), cos, sin))
        v = op.named("v", heads(x, p["v.weight"], arch.kv_heads))
        return op.linear(
            attend(op, op.transpose(q, 1, 2), op.transpose(k, 1, 2), op.transpose(v, 1, 2), attention), p["o.weight"]
        )

    def norm(x: Value, weight: Value) -> Value:
        return fused.rms_norm(op, x, weight) if op.fused else op.rms_norm(x, weight)

    def feed(x: Value) -> Value:
        if op.fused:
            gate, up = p["gate.weight"], p["up.weight"]
            return op.linear(
                op.named(
                    "silu(gate) * up",
                    fused.swiglu(op, op.named("gate", op.linear(x, gate)), op.named("up", op.linear(x, up))),
                ),
                p["down.weight"],
            )
        return op.linear(
            op.named(
                "silu(gate) * up",
                op.mul(
                    op.named("silu(gate)", op.unary(op.named("gate", op.linear(x, p["gate.weight"])), "silu")),
                    op.named("up", op.linear(x, p["up.weight"])),
                ),
            ),
            p["down.weight"],
        )

    def run(x: Value, cos: Value, sin: Value) -> Value:
        x = op.add(x, attention_part(norm(x, p["norm1.weight"]), cos, sin))
        op.named("after attention", x)
        return op.named("output", op.add(x, feed(norm(x, p["norm2.weight"]))))

    return run


def gpt2_block(op: Aten, p: Params, arch: Architecture, attention: Attention) -> Block:
    """Block over parameters by short name: `run(x)`."""

    def attention_part(x: Value) -> Value:
        b, t, _ = x.shape
        q, k, v = (
            op.transpose(op.view(y, (b, t, arch.heads, arch.head_dim)), 1, 2)
            for y in op.split(op.named("q, k, v", op.linear(x, p["qkv.weight"], p["qkv.bias"])), 3)
        )
        return op.linear(attend(op, q, k, v, attention), p["o.weight"], p["o.bias"])

    def feed(x: Value) -> Value:
        return op.linear(
            op.named("gelu(up)", op.unary(op.named("up", op.linear(x, p["up.weight"], p["up.bias"])), "gelu")),
            p["down.weight"],
            p["down.bias"],
        )

    def run(x: Value) -> Value:
        x = op.add(x, attention_part(op.layer_norm(x, p["norm1.weight"], p["norm1.bias"])))
        op.named("after attention", x)
        return op.named("output", op.add(x, feed(op.layer_norm(x, p["norm2.weight"], p["norm2.bias"]))))

    return run


BLOCKS = {"llama": llama_block, "gpt2": gpt2_block}


class StepTape(ABC):
    """One training step of a model on a tape. Phases are the ledger's."""

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int) -> None:
        self.op, self.tape, self.arch, self.itemsize = op, op.tape, arch, itemsize
        self.params: dict[str, Value] = {}
        for u in units:
            gradients = UnitGradients(u.name)
            for p in u.params:
                self.params[p.name] = self.tape.parameter(p.shape, itemsize, gradients)

    def unit(self, name: str, run: Block, *inputs: Value) -> Value:
        """Call a unit between its phases."""
        self.tape.enter(f"forward.{name}")
        out = run(*inputs)
        self.starts(out, f"backward.{name}")
        return out

    def starts(self, out: Value, phase: str) -> None:
        """The arrival of a value's gradient begins a phase."""
        if self.tape.gradients:
            assert out.node is not None
            out.node.on_gradient = phase

    def evaluate(self, batch: int, seq: int, attention: Attention) -> None:
        """A batch and its forward, on a tape without gradients."""
        self.tape.enter("forward.embed")
        ids = self.tape.new((batch, seq), INT64, "inputs")
        labels = self.tape.new((batch, seq), INT64, "labels")
        _loss = self.forward(ids, labels, "none", attention)
        self.tape.close()

    @abstractmethod
    def forward(self, ids: Value, labels: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        """The loss of a batch (B, T) of ids and labels."""

    def step(self, batch: int, seq: int, checkpointing: Checkpointing, attention: Attention) -> None:
        """Forward, backward and the optimizer's phase."""
        self.tape.enter("forward.embed")
        ids = self.tape.new((batch, seq), INT64, "inputs")
        labels = self.tape.new((batch, seq), INT64, "labels")
        loss = self.forward(ids, labels, checkpointing, attention)
        self.tape.enter("backward.loss")
        self.tape.backward(loss)
        self.tape.enter("step")
        self.tape.close()


class DecoderTape(StepTape):
    """`runtime/decoder.py`."""

    blocks: Mapping[str, Callable[[Aten, Params, Architecture, Attention], Block]] = BLOCKS

    def features(self, ids: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        op, arch, p = self.op, self.arch, self.params
        t = ids.shape[1]
        x = op.embedding(p["embed.weight"], ids)
        self.starts(x, "backward.embed")
        tables: tuple[Value, ...] = ()
        if arch.family == "llama":
            tables = rotary_tables(op, arch, t, self.itemsize)
        else:
            x = op.add(x, self._positions(self.tape.new((t,), INT64, "positions.ids")))
        for i in range(arch.layers):
            prefix = f"blocks.{i}."
            params = {k.removeprefix(prefix): v for k, v in p.items() if k.startswith(prefix)}
            block = self.blocks[arch.family](op, params, arch, attention)
            if checkpointing == "full":
                x = self.unit(prefix[:-1], partial(self.tape.checkpoint, block), x, *tables)
            else:
                x = self.unit(prefix[:-1], block, x, *tables)
        return self.unit("norm", self._norm, x)

    def _positions(self, ids: Value) -> Value:
        return self.unit(
            "positions", partial(self.op.embedding, self.params["positions.weight"], table="positions"), ids
        )

    def _norm(self, x: Value) -> Value:
        if self.arch.family == "llama" and self.op.fused:
            return fused.rms_norm(self.op, x, self.params["norm.weight"])
        if self.arch.family == "llama":
            return self.op.rms_norm(x, self.params["norm.weight"])
        return self.op.layer_norm(x, self.params["norm.weight"], self.params["norm.bias"])

    def _head(self, x: Value) -> Value:
        return self.op.linear(x, self.params["embed.weight" if self.arch.tied else "head.weight"])

    def forward(self, ids: Value, labels: Value, checkpointing: Checkpointing, attention: Attention) -> Value:
        if self.op.fused_loss:
            return self._fused_loss(self.features(ids, checkpointing, attention), labels)
        return self._cross_entropy(
            self.op.to(self._logits(self.features(ids, checkpointing, attention)), FP32),
            labels.view((labels.numel,), (1,)),
        )

    def _fused_loss(self, x: Value, labels: Value) -> Value:
        loss = self.unit("head", self._head_and_loss, x, labels)
        # The features are an argument of the head until its hooks have run.
        self.tape.enter("loss")
        return loss

    def _head_and_loss(self, x: Value, labels: Value) -> Value:
        weight = self.params["embed.weight" if self.arch.tied else "head.weight"]
        rows = self.op.view(x, (labels.numel, x.shape[-1]))
        target = labels.view((labels.numel,), (1,))
        return self.op.named(
            "loss", fused.linear_cross_entropy(self.op, rows, weight, target, direct=not self.arch.tied)
        )

    def _logits(self, x: Value) -> Value:
        logits = self.op.named("logits", self.unit("head", self._head, x))
        self.tape.enter("loss")
        return self.op.view(logits, (logits.numel // self.arch.vocab, self.arch.vocab))

    def _cross_entropy(self, x: Value, target: Value) -> Value:
        return self.op.nll_loss(self.op.softmax(x, "log_softmax"), target)
