"""Rules that need to know the model or the machine: fit, saving, mixture of experts, precision of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zplan.planner.costs import PER_RANK_ACTIVATIONS, Cost, costs, places, states_bytes
from zplan.planner.dsschema import LEAF_CLASSES_BUILT_IN
from zplan.planner.lint import Finding, View
from zplan.planner.textbook import TEXTBOOK, least_ranks
from zplan.planner.units import format_si

ROOMY_PERCENT = 60
"""States up to this share of a card usually leave enough for activations."""


def gather_on_save(view: View) -> Iterator[Finding]:
    """Stage 3 saves either a whole model, gathered, or one that must be put together."""
    key = "stage3_gather_16bit_weights_on_model_save"
    if view.stage != 3 or key not in view.zero:
        return
    path = view.zero_path(key)
    if view.zero[key] is False:
        message = f"`{path[-1]}` false: the saved model file is an empty shell until zero_to_fp32 is run"
        yield view.find("gather-off", "warning", path, message, "write true, or convert the checkpoint")
    elif view.zero[key] is True and view.subject.num_params is not None:
        nbytes = 2 * view.subject.num_params
        host, card = view.subject.host_mem_bytes, view.subject.mem_bytes
        over = host is not None and nbytes > host
        message = f"each save gathers the whole model, module by module, into rank 0's host memory: {format_si(nbytes)}"
        if host is not None and over:
            message += f", more than {format_si(host)}"
        elif card is not None and nbytes > card:
            message += f"; code that gathers it on a GPU of {format_si(card)} runs out of memory there"
        fix = "write false and convert the checkpoint afterwards" if over else ""
        yield view.find("gather-on-save", "warning" if over else "note", path, message, fix, nbytes=nbytes)


def fits(view: View) -> Iterator[Finding]:
    """Whether the model states alone fit, before any activation."""
    return states_fit(view, costs(view), _way_out(view))


def states_fit(view: View, found: Sequence[Cost], way_out: str) -> Iterator[Finding]:
    """The same for costs that are known already; `way_out` is what to do when a card is too small."""
    s = view.subject
    for cost in found:
        limit = {"GPU": s.mem_bytes, "host": s.host_mem_bytes}.get(cost.tier)
        if limit is None or cost.name not in ("model states", "offloaded states", "gathered model on each save"):
            continue
        if cost.nbytes > limit:
            where = "a GPU" if cost.tier == "GPU" else "a node"
            message = (
                f"{cost.name} of {format_si(cost.nbytes)} do not fit {where} of {format_si(limit)} ({cost.formula})"
            )
            path = ("zero_optimization",)
            fix = way_out if cost.tier == "GPU" else "more nodes or host memory, or less offload"
            yield view.find("states-do-not-fit", "error", path, message, fix, nbytes=cost.nbytes)
    yield from _fit_together(view, found)


def _fit_together(view: View, found: Sequence[Cost]) -> Iterator[Finding]:
    """States and reduce buckets, which lie side by side at the end of backward, where each alone would fit."""
    limit = view.subject.mem_bytes
    both = [c for c in found if c.tier == "GPU" and c.name in ("model states", "reduce bucket", "reduce buckets")]
    total = sum(c.nbytes for c in both)
    if limit is None or total <= limit or len(both) < 2 or any(c.nbytes > limit for c in both):
        return
    words = " and ".join(f"{c.name} of {format_si(c.nbytes)}" for c in both)
    message = f"{words} are {format_si(total)}, more than a GPU of {format_si(limit)}"
    path = ("zero_optimization", "reduce_bucket_size")
    fix = "a smaller `reduce_bucket_size`, a higher stage, more GPUs, or offload"
    yield view.find("states-do-not-fit", "error", path, message, fix, nbytes=total)


def _way_out(view: View) -> str:
    s = view.subject
    if s.num_params is None or s.mem_bytes is None or s.gpus is None:
        return "more GPUs, or offload"
    for stage in range(view.stage + 1, 4):
        nbytes = states_bytes(view, stage)["GPU"]
        if nbytes <= s.mem_bytes:
            return f"stage {stage} needs {format_si(nbytes)}"
    states, params = places(view, 3)
    if s.trainable is not None or (states, params) != ("GPU", "GPU"):
        left = [name for name, where in (("optimizer", states), ("parameters", params)) if where == "GPU"]
        return f"more GPUs, or offload of the {' and the '.join(left)}" if left else "more GPUs"
    return f"stage 3 needs at least {least_ranks(s.num_params, s.mem_bytes)} such GPUs, or offload"


def lower_stage(view: View) -> Iterator[Finding]:
    """Stage 3 gathers everything twice per micro-step; where a lower stage fits, it is faster."""
    s = view.subject
    if view.stage != 3 or s.num_params is None or s.gpus is None or s.mem_bytes is None:
        return
    if view.offload("param") != "none" or view.offload("optimizer") != "none":
        return
    trained = s.num_params if s.trainable is None else s.trainable
    for stage in (0, 1, 2):
        nbytes = 2 * (s.num_params - trained) + TEXTBOOK[stage].of(trained, s.gpus)
        if nbytes * 100 <= s.mem_bytes * ROOMY_PERCENT:
            message = f"stage {stage} takes {format_si(nbytes)} of {format_si(s.mem_bytes)} for states and gathers less"
            path = ("zero_optimization", "stage")
            yield view.find("stage-3-where-lower-fits", "warning", path, message, f"use stage {stage}")
            return


def loading(view: View) -> Iterator[Finding]:
    """Stage 3 splits a model as it is made under zero.Init; one that is made before is whole on every rank first."""
    s = view.subject
    if view.stage != 3 or s.num_params is None or s.gpus is None or s.gpus == 1:
        return
    each, ranks = view.itemsize * s.num_params, -(-s.gpus // s.nodes)
    host = 4 * ranks * s.num_params
    over = s.host_mem_bytes is not None and host > s.host_mem_bytes
    message = (
        f"a model that is loaded before DeepSpeed's config is known is whole on every rank: {format_si(each)} on each "
        f"GPU that it goes to, and in fp32 {format_si(host)} of a node's memory for {ranks} ranks"
    )
    if over and s.host_mem_bytes is not None:
        message += f", more than {format_si(s.host_mem_bytes)}"
    fix = "make TrainingArguments or HfDeepSpeedConfig before from_pretrained and keep it, or build under zero.Init"
    yield view.find(
        "no-zero-init", "warning" if over else "note", ("zero_optimization", "stage"), message, fix, nbytes=host
    )


def experts(view: View) -> Iterator[Finding]:
    """At stage 3 an expert that gets no tokens on one rank never asks for its gather, and the others wait."""
    s = view.subject
    if view.stage != 3 or not s.experts or view.zero.get("leaf_module"):
        return
    known = s.model_type in LEAF_CLASSES_BUILT_IN
    message = f"{s.experts} experts per block at stage 3: ranks whose tokens miss an expert wait for ever"
    fix = "call set_z3_leaf_modules, name the block in `leaf_module`, or in accelerate `deepspeed_moe_layer_cls_names`"
    if known:
        fix += "; releases since 0.18 know this model's block by themselves"
    yield view.find("moe-leaf-modules", "warning", ("zero_optimization",), message, fix)


def weights_dtype(view: View) -> Iterator[Finding]:
    """fp16 has a smaller range than the bf16 that a model was trained in."""
    if view.enabled("fp16") and view.subject.dtype in ("bfloat16", "bf16"):
        message = f"`{view.subject.model}` was trained in bf16; its activations can exceed fp16's range of 65,504"
        yield view.find("fp16-on-bf16-model", "warning", ("fp16", "enabled"), message, "use bf16 where the GPU has it")


def batch_norm(view: View) -> Iterator[Finding]:
    """Running statistics kept in 16 bits drift: an update of a hundredth of a value is often below its last bit."""
    half = [name for name in ("fp16", "bf16") if view.enabled(name)]
    if view.subject.batch_norm and half:
        digits = {"fp16": "3 digits", "bf16": "2 digits"}[half[0]]
        message = f"`{view.subject.model}` has BatchNorm layers: DeepSpeed casts their running statistics to {half[0]}"
        message += f", which has {digits}, so they drift"
        fix = "keep them in fp32 (model.apply on nn.BatchNorm*, .float()), or use GroupNorm or frozen statistics"
        yield view.find("batch-norm-in-half", "warning", (half[0], "enabled"), message, fix)


def activations(view: View) -> Iterator[Finding]:
    """What no number of GPUs splits: checkpointed inputs and logits of one rank's tokens."""
    s = view.subject
    nbytes = sum(c.nbytes for c in costs(view) if c.name in PER_RANK_ACTIVATIONS)
    if s.mem_bytes is not None and nbytes > s.mem_bytes:
        message = (
            f"block inputs and logits of {s.seq:,} tokens take {format_si(nbytes)}, "
            f"more than {format_si(s.mem_bytes)}, on any number of GPUs"
        )
        fix = "a smaller micro-batch, chunked or fused cross-entropy, offloaded checkpoints, or context parallelism"
        yield view.find("activations-do-not-fit", "warning", (), message, fix, nbytes=nbytes)


RULES = (gather_on_save, fits, lower_stage, loading, experts, weights_dtype, batch_norm, activations)
