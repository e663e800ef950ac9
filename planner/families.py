"""The op lists of the decoder families: `runtime/decoder.py`, line by line, over values without numbers.

See [Note: lifetimes] in `planner/tape.py`: locals and nesting are those of the decoder on purpose. A new family is a
block function, and a row in `BLOCKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zplan.planner import fused
from zplan.planner.aten import Aten
from zplan.planner.aten_devices import BOOL, FP32, INT64
from zplan.planner.config import Attention, Checkpointing, CrossEntropy, Kernels
from zplan.planner.graph import UnitGradients, Value
from zplan.planner.losses import chunked_cross_entropy, cross_entropy
from zplan.planner.models import LORA_A, LORA_B, Architecture, Unit

Params = dict[str, Value]
Block = Callable[..., Value]
Call = tuple[str, Block, tuple[Value, ...]]
"""A block's name, what runs it, and what it is called with beside the hidden states."""


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


class Recipe(NamedTuple):
    """How a step runs its model, as far as activations can tell. Fields are those of `Choice`."""

    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 1
    checkpoint_offload: bool = False
    attention: Attention = "sdpa"
    cross_entropy: CrossEntropy = "plain"
    kernels: Kernels = "torch"
    padded: bool = False
    cudnn_width: int = 0
    flash: bool = True


class StepTape(ABC):
    """One training step of a model on a tape. Phases are the ledger's."""

    direct = False
    """Whether a fused loss hands the head's gradient to its reduce in fp32, past autograd."""

    def __init__(self, op: Aten, arch: Architecture, units: Sequence[Unit], itemsize: int, recipe: Recipe) -> None:
        self.op, self.tape, self.arch, self.itemsize, self.recipe = op, op.tape, arch, itemsize, recipe
        op.fused, op.masked = recipe.kernels == "fused", recipe.padded
        self.params: dict[str, Value] = {}
        for u in units:
            gradients = UnitGradients(u.name)
            for p in u.params:
                if u.frozen:
                    self.params[p.name] = self.tape.buffer(p.shape, itemsize)
                else:
                    self.params[p.name] = self.tape.parameter(p.shape, itemsize, gradients)
            op.quantized.update(self.params[p.name].storage for p in u.params if u.quantized)
        for name, first in self.params.items():
            if name.endswith(LORA_A):
                base = name.removesuffix(LORA_A)
                op.adapters[self.params[f"{base}.weight"].storage] = (first, self.params[base + LORA_B])

    def unit(self, name: str, run: Block, *inputs: Value) -> Value:
        """Call a unit between its phases; one that runs again is in a phase of backward already."""
        if self.tape.recomputing:
            return run(*inputs)
        self.tape.enter(f"forward.{name}")
        return self.starts(run(*inputs), f"backward.{name}")

    def starts(self, out: Value, phase: str) -> Value:
        """Let the arrival of a value's gradient begin a phase, unless everything up to it is frozen."""
        if out.node is not None:
            out.node.on_gradient = phase
        return out

    def blocks(self, start: list[Value], calls: Sequence[Call]) -> Value:
        """Call all blocks in order, checkpointed as the recipe says: each alone, or so many in one segment.

        `start` holds the first hidden states and is emptied: their name is what the blocks' outputs take over.
        """
        x = start.pop()
        recipe, every = self.recipe, self.recipe.checkpoint_every
        if recipe.checkpointing == "none" or not self.tape.gradients:
            for name, run, further in calls:
                x = self.unit(name, run, x, *further)
            return x
        keep = partial(
            self.tape.checkpoint, selective=recipe.checkpointing == "selective", offload=recipe.checkpoint_offload
        )
        if every == 1:
            for name, run, further in calls:
                x = self.unit(name, partial(keep, run), x, *further)
            return x
        for i in range(0, len(calls), every):
            x = keep(partial(self._segment, calls[i : i + every]), x)
        return x

    def _segment(self, calls: Sequence[Call], x: Value) -> Value:
        for name, run, further in calls:
            x = self.unit(name, run, x, *further)
        return x

    def padding_mask(self, batch: int, seq: int) -> Value | None:
        """Which tokens each token of a padded batch may see, (B, 1, T, T); the model's forward keeps it."""
        return self.tape.new((batch, 1, seq, seq), BOOL, "padding mask") if self.recipe.padded else None

    def evaluate(self, batch: int, seq: int) -> None:
        """A batch and its forward, on a tape without gradients."""
        self.tape.enter("forward.embed")
        inputs, labels = self.batch(batch, seq)
        _loss = self.forward(inputs, labels)
        self.tape.close()

    def batch(self, batch: int, seq: int) -> tuple[Value, Value]:
        """What a model is called with: ids and labels, (B, T) each."""
        return self.tape.new((batch, seq), INT64, "inputs"), self.tape.new((batch, seq), INT64, "labels")

    @property
    def loss_itemsize(self) -> int:
        """Of the logits that the loss is taken of: fp32, or as they come from the head."""
        return self.itemsize if self.recipe.cross_entropy == "bf16" else FP32

    def loss_in_head(self, x: Value, labels: Value) -> Value:
        """Head and loss as one unit, without whole logits."""
        loss = self.unit("head", self._head_and_loss, x, labels)
        # The features are an argument of the head until its hooks have run.
        self.tape.enter("loss")
        return loss

    def _head_and_loss(self, x: Value, labels: Value) -> Value:
        rows, target = self.op.view(x, (labels.numel, x.shape[-1])), labels.view((labels.numel,), (1,))
        weight = self.head_weight()
        if self.recipe.cross_entropy == "chunked":
            return self.op.named("loss", chunked_cross_entropy(self.op, rows, weight, target))
        direct = self.direct and not self.arch.tied and weight.node is not None
        return self.op.named("loss", fused.linear_cross_entropy(self.op, rows, weight, target, direct=direct))

    @abstractmethod
    def head_weight(self) -> Value:
        """The matrix (V, C) of the head."""

    @abstractmethod
    def forward(self, inputs: Value, labels: Value) -> Value:
        """The loss of a `batch`."""

    def step(self, batch: int, seq: int) -> None:
        """Forward, backward and the optimizer's phase."""
        self.tape.enter("forward.embed")
        inputs, labels = self.batch(batch, seq)
        _which = self.tape.new((batch, seq), INT64, "mask of tokens") if self.recipe.padded else None
        loss = self.forward(inputs, labels)
        self.tape.enter("backward.loss")
        self.tape.backward(loss)
        self.tape.enter("step")
        self.tape.close()


class DecoderTape(StepTape):
    """`runtime/decoder.py`."""

    direct = True

    kinds: Mapping[str, Callable[[Aten, Params, Architecture, Attention], Block]] = BLOCKS
    """Families and the functions that make their blocks."""

    def features(self, ids: Value) -> Value:
        t = ids.shape[1]
        mask = self.padding_mask(*ids.shape)
        start = [self.starts(self.op.embedding(self.params["embed.weight"], ids), "backward.embed")]
        tables: tuple[Value, ...] = ()
        if self.arch.family == "llama":
            tables = rotary_tables(self.op, self.arch, t, self.itemsize)
        else:
            start[0] = self.op.add(start[0], self._positions(self.tape.new((t,), INT64, "positions.ids")))
        out = self.unit("norm", self._norm, self.blocks(start, self._calls(tables)))
        del mask
        return out

    def _calls(self, tables: tuple[Value, ...]) -> list[Call]:
        out = []
        for i in range(self.arch.layers):
            prefix = f"blocks.{i}."
            params = {k.removeprefix(prefix): v for k, v in self.params.items() if k.startswith(prefix)}
            run = self.kinds[self.arch.family](self.op, params, self.arch, self.recipe.attention)
            out.append((prefix[:-1], run, tables))
        return out

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
        return self.op.linear(x, self.head_weight())

    def forward(self, ids: Value, labels: Value) -> Value:
        if self.recipe.cross_entropy in ("fused", "chunked"):
            return self.loss_in_head(self.features(ids), labels)
        return cross_entropy(
            self.op,
            self.op.to(self._logits(self.features(ids)), self.loss_itemsize),
            labels.view((labels.numel,), (1,)),
        )

    def head_weight(self) -> Value:
        return self.params["embed.weight" if self.arch.tied else "head.weight"]

    def _logits(self, x: Value) -> Value:
        logits = self.op.named("logits", self.unit("head", self._head, x))
        self.tape.enter("loss")
        return self.op.view(logits, (logits.numel // self.arch.vocab, self.arch.vocab))
