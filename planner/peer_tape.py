"""What differs on the tape under another runtime: the model code people train with it, its precision, its gradients.

[Note: usual code] Nobody trains `runtime/decoder.py` with DeepSpeed. A Llama model in plain torch, and transformers'
class too, puts heads before tokens and rotates then, so attention's output has to be copied for the output projection;
and it cuts the last logit off by a slice, whose gradient is written into zeros. Llama shapes under another runtime are
counted so; all else is as in the decoder.

[Note: gradients] DeepSpeed from stage 1 on and DDP copy a parameter's gradient into a bucket as soon as it is there
(`stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads`, `stage3.py: __add_grad_to_ipg_bucket`,
`reducer.cpp: mark_variable_ready_dense`). FSDP2 holds a unit's gradients until the unit's backward is over, and those
of the root, where embedding, last norm and head are, until all is (`_fsdp_param_group.py: post_backward`). DeepSpeed at
stage 0 leaves them where they are; until its unit is done a gradient is counted here, then in a line of its own.
"""

from __future__ import annotations

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import FP32, INT64, DeviceTable
from zplan.planner.config import ITEMSIZE, Attention, Precision, Runtime
from zplan.planner.families import BLOCKS, Block, DecoderTape, Params, Recipe, StepTape, attend
from zplan.planner.graph import Value
from zplan.planner.losses import cross_entropy
from zplan.planner.models import Architecture, Unit
from zplan.planner.tape import Tape

ROOT_KINDS = ("embed", "norm", "head", "other")
"""Units that lie in FSDP2's root group, for only blocks are wrapped."""


def tape_for(runtime: Runtime, units: tuple[Unit, ...], table: DeviceTable) -> Tape:
    """A tape that holds gradients as a runtime does. See [Note: gradients]."""
    in_place, kernels = table.in_place_accumulation, table.kernels
    if runtime == "fsdp2":
        root = frozenset(u.name for u in units if u.kind in ROOT_KINDS)
        return Tape(in_place_accumulation=in_place, kernels=kernels, retention="unit", held=root)
    return Tape(in_place_accumulation=in_place, kernels=kernels, retention="none")


def steps_for(  # noqa: PLR0913  (what a step is made of)
    make: type[StepTape],
    tape: Tape,
    table: DeviceTable,
    runtime: Runtime,
    arch: Architecture,
    units: tuple[Unit, ...],
    precision: Precision,
    recipe: Recipe,
) -> StepTape:
    """The step of a model under a runtime: `make` unless that is zplan's decoder. DDP keeps fp32 and autocasts."""
    autocast = runtime == "ddp" and precision != "fp32"
    op = AutocastAten(tape, table, ITEMSIZE[precision]) if autocast else Aten(tape, table)
    cls = UsualTape if make is DecoderTape else make
    return cls(op, arch, units, FP32 if autocast else ITEMSIZE[precision], recipe)


def rotate_heads(op: Aten, x: Value, cos: Value, sin: Value) -> Value:
    """Rotary embedding of (B, H, T, D) by tables (T, D / 2)."""
    a, b = op.split(x, 2)
    return op.cat((op.sub(op.mul(a, cos), op.mul(b, sin)), op.add(op.mul(b, cos), op.mul(a, sin))))


def usual_llama_block(op: Aten, p: Params, arch: Architecture, attention: Attention) -> Block:
    """As `families.llama_block`, with heads before tokens when it rotates. See [Note: usual code]."""

    def heads(x: Value, weight: Value, count: int) -> Value:
        return op.transpose(op.view(op.linear(x, weight), (*x.shape[:2], count, arch.head_dim)), 1, 2)

    def run(x: Value, cos: Value, sin: Value) -> Value:
        h = op.rms_norm(x, p["norm1.weight"])
        q, k = heads(h, p["q.weight"], arch.heads), heads(h, p["k.weight"], arch.kv_heads)
        v = op.named("v", heads(h, p["v.weight"], arch.kv_heads))
        q, k = (
            op.named("q, rotated", rotate_heads(op, q, cos, sin)),
            op.named("k, rotated", rotate_heads(op, k, cos, sin)),
        )
        x = op.add(x, op.linear(attend(op, q, k, v, attention), p["o.weight"]))
        op.named("after attention", x)
        h = op.rms_norm(x, p["norm2.weight"])
        gate = op.named("silu(gate)", op.unary(op.named("gate", op.linear(h, p["gate.weight"])), "silu"))
        both = op.named("silu(gate) * up", op.mul(gate, op.named("up", op.linear(h, p["up.weight"]))))
        return op.named("output", op.add(x, op.linear(both, p["down.weight"])))

    return run


class UsualTape(DecoderTape):
    """A decoder in plain torch. See [Note: usual code]."""

    direct = False
    kinds = {**BLOCKS, "llama": usual_llama_block}

    def forward(self, ids: Value, labels: Value) -> Value:
        if self.recipe.cross_entropy in ("fused", "chunked"):
            return self.loss_in_head(self.features(ids), labels)
        logits = self.op.named("logits", self.unit("head", self._head, self.features(ids)))
        self.tape.enter("loss")
        loss = self._loss(logits)
        if isinstance(self.op, AutocastAten):
            self.op.leave()
        return loss

    def _loss(self, logits: Value) -> Value:
        """Of a (B, T, V) that the caller keeps. The one token less of T is left out of the sizes."""
        up = self.op.to(self._all_but_last(logits), self.loss_itemsize)
        return cross_entropy(self.op, up, self.tape.new((up.shape[0],), INT64, "labels.shifted"))

    def _all_but_last(self, logits: Value) -> Value:
        shape, itemsize = logits.shape, logits.itemsize
        node = self.tape.node([logits], lambda g, s: [self.tape.new(shape, itemsize, "slice.grad")])
        out = logits.alias()
        self.tape.finish(node, out)
        # Of one sequence the slice is contiguous.
        out = self.op.clone(out) if shape[0] > 1 else out
        return self.op.view(out, (shape[0] * shape[1], shape[2]))


class AutocastAten(Aten):
    """Ops under `torch.autocast`: products and fused attention in 16 bits, all else in what comes in.

    A weight is cast once: autocast's cache holds the copy to the end of the forward, and the product saves it for its
    backward (`ATen/autocast_mode.cpp: cached_cast`). An input is cast for each product.
    """

    def __init__(self, tape: Tape, table: DeviceTable, itemsize: int) -> None:
        super().__init__(tape, table)
        self.low = itemsize
        self.cache: dict[int, Value] | None = {}

    def leave(self) -> None:
        """The end of the context; a checkpointed block's recompute opens one of its own."""
        self.cache = None

    def _weight(self, weight: Value) -> Value:
        if self.cache is None:
            return self.to(weight, self.low)
        key = id(weight.storage)
        if key not in self.cache:
            self.cache[key] = self.to(weight, self.low)
        return self.cache[key]

    def _base(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        if weight.storage in self.quantized:
            return super()._base(self.to(x, self.low), weight, bias)
        return super()._base(self.to(x, self.low), self._weight(weight), None if bias is None else self._weight(bias))

    def matmul(self, a: Value, b: Value) -> Value:
        return super().matmul(self.to(a, self.low), self.to(b, self.low))

    def sdpa(self, q: Value, k: Value, v: Value, *, causal: bool = True, added: Value | None = None) -> Value:
        added = None if added is None else self.to(added, self.low)
        q, k, v = (self.to(x, self.low) for x in (q, k, v))
        return super().sdpa(q, k, v, causal=causal, added=added)

    def shares_heads(self, q: Value) -> bool:
        return self.table.attention[self.low] != "efficient"
