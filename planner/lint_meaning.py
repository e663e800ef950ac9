"""Rules about what a config means: batches, precision, optimizer, schedule, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zplan.planner.batch import KEYS, nearest_batches, solve_batch
from zplan.planner.dsschema import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS, ZERO
from zplan.planner.errors import ZplanError
from zplan.planner.lint import Finding, View, nearest, whole

CLIP_ON_SINCE = "mid-2026"
INERT_VARIABLES = {
    "NCCL_ASYNC_ERROR_HANDLING": "it is TORCH_NCCL_ASYNC_ERROR_HANDLING now",
    "NCCL_TIMEOUT": "no program reads it; the process group's own timeout counts",
    "NCCL_BLOCKING_WAIT": "it is TORCH_NCCL_BLOCKING_WAIT now",
}
"""Variables that people set and nothing reads."""


def batch(view: View) -> Iterator[Finding]:
    """train = micro x accumulation x ranks, by DeepSpeed's rules."""
    given = {name: view.config.get(name) for name in (KEYS.train, KEYS.micro, KEYS.accumulation)}
    if given[KEYS.train] is None and given[KEYS.micro] is None:
        alone = view.subject.consumer == "deepspeed"
        message = "no batch size: DeepSpeed refuses the file as it stands"
        fix = f"add `{KEYS.micro}`, unless this is a fragment or a trainer adds it"
        yield view.find("no-batch-size", "error" if alone else "warning", (), message, fix, refused=True)
        return
    sizes = {name: whole(value) for name, value in given.items()}
    if any(value is not None and sizes[name] in (None, 0) for name, value in given.items()):
        return  # "auto", or told by the rules about types
    train, micro, accumulation = (sizes[n] for n in (KEYS.train, KEYS.micro, KEYS.accumulation))
    if view.subject.gpus is None:
        step = (micro or 1) * (accumulation or 1)
        if train is not None and train % step:
            names = " x ".join(str(n) for n in (micro, accumulation) if n is not None)
            message = f"`{KEYS.train}` {train} is no multiple of {names}, so it splits over no number of GPUs"
            fix = f"use {' or '.join(map(str, nearest_batches(train, step)))}"
            yield view.find("batch-triple", "error", (KEYS.train,), message, fix)
        return
    gpus = view.subject.gpus
    try:
        solve_batch(train=train, micro=micro, accumulation=accumulation, world_size=gpus, names=KEYS)
    except ZplanError as e:
        assert train is not None
        fix = e.hint or ""
        other = _gpus_for(train, micro, accumulation, gpus)
        if other:
            fix += f", or {other} GPU{'s' * (other > 1)}"
        if gpus == 1 and other:
            fix += "; DeepSpeed saw 1 rank: start it with its launcher, before the config is read"
        yield view.find("batch-triple", "error", (KEYS.train,), e.message, fix, refused=True)


def _gpus_for(train: int, micro: int | None, accumulation: int | None, gpus: int) -> int | None:
    """The nearest number of GPUs over which the batch would split, within a factor of 8."""
    step = (micro or 1) * (accumulation or 1)
    if micro is not None and accumulation is not None:
        return train // step if train % step == 0 and train // step else None
    fits = [n for n in range(1, gpus * 8 + 1) if train % (step * n) == 0]
    return min(fits, key=lambda n: (abs(n - gpus), -n), default=None)


def launcher(view: View) -> Iterator[Finding]:
    """Sizes that a launcher owns or passes too."""
    s = view.subject
    micro = view.config.get(KEYS.micro)
    if s.micro_batch is not None and whole(micro) is not None and micro != s.micro_batch:
        message = f"`{KEYS.micro}` is {micro}, but the launcher passes {s.micro_batch}"
        yield view.find("launcher-mismatch", "error", (KEYS.micro,), message, 'write "auto", or make both equal')
    if s.consumer == "lightning" and KEYS.accumulation in view.config:
        message = f"Lightning raises when `{KEYS.accumulation}` is in the file: its Trainer owns it"
        yield view.find("owned-by-launcher", "error", (KEYS.accumulation,), message, "delete it here, pass it there")


def was_batch(view: View) -> Iterator[Finding]:
    """Another global batch than that of the run that the learning rate is from."""
    s = view.subject
    sizes = {n: whole(view.config.get(n)) for n in (KEYS.train, KEYS.micro, KEYS.accumulation)}
    train = sizes[KEYS.train]
    if train is None and sizes[KEYS.micro] is not None and s.gpus:
        train = (sizes[KEYS.micro] or 1) * (sizes[KEYS.accumulation] or 1) * s.gpus
    if s.was_batch is not None and train and train != s.was_batch:
        ratio = train / s.was_batch
        message = f"the batch is {train}, {ratio:g} times the former {s.was_batch}"
        fix = f"learning rate x {ratio**0.5:.3g} (square root) or x {ratio:.3g} (linear) keeps the step comparable"
        yield view.find("batch-changed", "warning", (KEYS.train,), message, fix)
    if s.was_gpus is not None and s.gpus is not None and s.gpus != s.was_gpus:
        message = f"a checkpoint of {s.was_gpus} ranks does not load on {s.gpus}: DeepSpeed's shards are per rank"
        if not view.block("checkpoint").get("load_universal"):
            fix = "convert it with ds_to_universal.py and set `checkpoint.load_universal`"
            yield view.find("resume-world-size", "error", (), message, fix)


def environment(view: View) -> Iterator[Finding]:
    """Variables that are set and that nothing reads."""
    for name, why in INERT_VARIABLES.items():
        if name in view.subject.environment:
            yield view.find(
                "inert-variable", "warning", (), f"${name} is set but has no effect: {why}", f"unset {name}"
            )


def precision(view: View) -> Iterator[Finding]:
    """Which precision is on, and its loss scale."""
    fp16, bf16 = view.enabled("fp16"), view.enabled("bf16")
    if fp16 and bf16:
        message = "both `fp16` and `bf16` are on"
        yield view.find("both-precisions", "error", ("fp16",), message, "turn one off", refused=True)
    quoted = view.block("fp16").get("enabled")
    if isinstance(quoted, str) and quoted.lower() == "false" and bf16:
        message = 'older DeepSpeed takes "false" for true, so both precisions are on and it refuses the file'
        yield view.find("both-precisions", "warning", ("fp16", "enabled"), message, "write false without quotes")
    if fp16 is False and bf16 is False and not view.fragment:
        yield view.find("fp32", "note", (), "no 16-bit precision is on: training is in fp32, 16 bytes a parameter too")
    accumulate = view.block("data_types").get("grad_accum_dtype")
    if bf16 and view.stage == 0 and accumulate == "fp32":
        message = "bf16 with fp32 accumulation at stage 0: DeepSpeed refuses to start"
        path = ("data_types", "grad_accum_dtype")
        yield view.find("fp32-accumulation-at-stage-0", "error", path, message, "use stage 1, or leave it out")
    if fp16 is not False:
        yield from _loss_scale(view)


def _loss_scale(view: View) -> Iterator[Finding]:
    block = view.block("fp16")
    scale = block.get("loss_scale", 0)
    if isinstance(scale, (int, float)) and scale > 0:
        message = f"`loss_scale` {scale:g} is static: gradients that are too small for it vanish without a word"
        yield view.find("static-loss-scale", "warning", ("fp16", "loss_scale"), message, "write 0 for a dynamic scale")
    power = whole(block.get("initial_scale_power", 16))
    if power is not None and power > 20:
        hysteresis = whole(block.get("hysteresis", 2)) or 1
        skipped = power - 16 + max(hysteresis - 1, 0)
        message = (
            f"`initial_scale_power` {power} starts at 2^{power}: about {skipped} steps are skipped on the way to 2^16"
        )
        yield view.find("initial-scale-power", "warning", ("fp16", "initial_scale_power"), message, "write 16")


def optimizer(view: View) -> Iterator[Finding]:
    """Names that mean something else, and parameters that do nothing."""
    block = view.block("optimizer")
    kind, params = block.get("type"), view.block("optimizer", "params")
    if isinstance(kind, str):
        yield from _optimizer_type(view, kind, params)
    if "max_grad_norm" in params:
        message = "`max_grad_norm` of the optimizer clips nothing: DeepSpeed raises"
        path = ("optimizer", "params", "max_grad_norm")
        yield view.find("max-grad-norm", "error", path, message, "write `gradient_clipping` at the top level")
    if params.get("torch_adam") is True and view.offload("optimizer") != "none":
        message = (
            "`torch_adam` with offloaded states: torch's Adam on the CPU is several times slower, if it is taken at all"
        )
        path = ("optimizer", "params", "torch_adam")
        yield view.find("torch-adam-offload", "warning", path, message, "delete it: DeepSpeed's own CPU Adam is used")
    if "gradient_clipping" not in view.config and not view.fragment:
        message = f"no `gradient_clipping`: 1.0 since {CLIP_ON_SINCE}, off before"
        yield view.find("clipping-default", "note", (), message, "write it")


def _optimizer_type(view: View, kind: str, params: dict[str, Any]) -> Iterator[Finding]:
    path = ("optimizer", "type")
    if kind.lower() in ("adam", "muadam") and params.get("adam_w_mode", True) is not False:
        yield view.find("adam-means-adamw", "note", path, f'"{kind}" means AdamW here: the decay is decoupled')
    if kind.lower() in OPTIMIZERS or kind in TORCH_OPTIMIZERS:
        return
    if any(name.startswith(("pipe", "model")) and name.endswith("size") for name in view.config):
        yield view.find(
            "optimizer-type", "note", path, f'"{kind}" is GPT-NeoX\'s name; DeepSpeed alone does not know it'
        )
        return
    fix = nearest(kind, (*TORCH_OPTIMIZERS, "Lamb", "Lion", "Muon")) or 'use "AdamW"'
    yield view.find("optimizer-type", "error", path, f'DeepSpeed and torch have no optimizer "{kind}"', fix)


def scheduler(view: View) -> Iterator[Finding]:
    """The schedule's type and parameters."""
    block = view.block("scheduler")
    kind, params = block.get("type"), view.block("scheduler", "params")
    if not isinstance(kind, str):
        return
    if kind not in SCHEDULERS:
        message = f'DeepSpeed has no schedule "{kind}"'
        fix = nearest(kind, SCHEDULERS) or f"use one of {', '.join(SCHEDULERS)}"
        yield view.find("scheduler-type", "error", ("scheduler", "type"), message, fix)
        return
    known, needed = SCHEDULERS[kind]
    for key in params:
        if key not in (*known, "last_batch_iteration"):
            message = f"`{key}` is no parameter of {kind}: DeepSpeed raises"
            fix = nearest(key, known) or "delete it"
            yield view.find("scheduler-params", "error", ("scheduler", "params", key), message, fix)
    for key in needed:
        if key not in params:
            message = f"{kind} needs `{key}`"
            yield view.find("scheduler-params", "error", ("scheduler", "params"), message, f"add `{key}`")
    if kind.startswith("Warmup") and params.get("warmup_type", "log") == "log":
        low = params.get("warmup_min_lr", params.get("warmup_min_ratio", 0))
        first = " and the first two steps run at a learning rate of 0" if low in (0, 0.0, "auto") else ""
        message = f"{kind} warms up logarithmically by default{first}"
        yield view.find(
            "log-warmup", "note", ("scheduler", "type"), message, 'write "warmup_type": "linear" for a line'
        )


def no_effect(view: View) -> Iterator[Finding]:
    """Keys that do nothing at this stage, or under a device of none."""
    stage = view.stage
    for key in view.block("zero_optimization"):
        row = ZERO.get(key) or ZERO.get(f"stage3_{key}")
        if row is None or stage in row.stages or key == "offload_optimizer":
            continue
        why = row.why or "nothing is sharded"
        message = f"`{key}` has no effect at stage {stage}: {why}"
        yield view.find("no-effect-at-stage", "warning", ("zero_optimization", key), message, "delete it")
    for what in ("param", "optimizer"):
        block = view.block("zero_optimization", f"offload_{what}")
        rest = [key for key in block if key != "device" and block[key] not in (None, False)]
        if rest and block.get("device", "none") in ("none", None):
            path = ("zero_optimization", f"offload_{what}", rest[0])
            yield view.find("no-effect", "warning", path, f"`{rest[0]}` has no effect: the device is none", "delete it")
    if view.config.get("aio") and "nvme" not in (view.offload("param"), view.offload("optimizer")):
        yield view.find(
            "no-effect", "warning", ("aio",), "`aio` has no effect: nothing is offloaded to NVMe", "delete it"
        )
    yield from _checkpointing_block(view)


def _checkpointing_block(view: View) -> Iterator[Finding]:
    """DeepSpeed's activation checkpointing acts on models that call it, and two of its keys need more than that."""
    block, path = view.block("activation_checkpointing"), ("activation_checkpointing",)
    if any(value not in (None, False, 0) for value in block.values()):
        message = "`activation_checkpointing` acts only on models that call DeepSpeed's own checkpoint function"
        fix = "for transformers models: model.gradient_checkpointing_enable()"
        yield view.find("activation-checkpointing-inert", "warning", path, message, fix)
    if block.get("partition_activations") is True:
        message = "`partition_activations` splits checkpoints over tensor-parallel ranks only: without them, nothing"
        here = (*path, "partition_activations")
        yield view.find("activation-checkpointing-inert", "note", here, message, "delete it")
    if block.get("contiguous_memory_optimization") is True and not block.get("number_checkpoints"):
        message = "`contiguous_memory_optimization` needs `number_checkpoints`, which is missing"
        here = (*path, "contiguous_memory_optimization")
        yield view.find("activation-checkpointing-inert", "note", here, message, "add the number of layers")


def offload(view: View) -> Iterator[Finding]:
    """Offload below the stage that has it, and NVMe without a folder."""
    stage = view.stage
    if view.offload("param") != "none" and stage < 3:
        message = f"`offload_param` is ignored at stage {stage}: every GPU keeps all parameters"
        path = ("zero_optimization", "offload_param")
        yield view.find("offload-param-below-stage-3", "warning", path, message, "use stage 3, or delete it")
    if view.offload("optimizer") != "none" and stage == 0:
        message = "`offload_optimizer` is ignored at stage 0"
        path = ("zero_optimization", "offload_optimizer")
        yield view.find("no-effect-at-stage", "warning", path, message, "use stage 1, 2 or 3")
    for what in ("param", "optimizer"):
        path = ("zero_optimization", f"offload_{what}")
        block = view.block(*path)
        ratio = block.get("ratio", 1.0)
        if what == "optimizer" and isinstance(ratio, (int, float)) and ratio < 1 and stage != 3:
            message = f"`ratio` {ratio:g} needs stage 3"
            yield view.find("offload-ratio", "error", (*path, "ratio"), message, "use stage 3, or 1.0", refused=True)
        if block.get("device") != "nvme":
            continue
        folder = block.get("nvme_path")
        if folder is None:
            message = f"`offload_{what}` goes to NVMe but has no `nvme_path`: DeepSpeed fails at the start"
            yield view.find("nvme-path", "warning", path, message, "add the folder of a local disk")
        elif isinstance(folder, str) and folder.startswith("/path/"):
            message = f"`nvme_path` is the placeholder {folder}"
            yield view.find("nvme-path", "warning", (*path, "nvme_path"), message, "write the folder of a local disk")


RULES = (batch, launcher, was_batch, environment, precision, optimizer, scheduler, no_effect, offload)
