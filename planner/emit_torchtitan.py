"""A torchtitan config from a plan: a module with one function, in the form of torchtitan's own config registries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zplan.planner.errors import ZplanError

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan

RELEASE = "0.3"
FLAVOURS: dict[str, str] = {
    "llama-3.2-1b": "1B",
    "llama-3.2-3b": "3B",
    "llama-3.1-8b": "8B",
    "llama-3.1-70b": "70B",
    "llama-3.1-405b": "405B",
}
"""Models of our table that torchtitan has, and its names for them."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

_MODULE = '''"""Training with torchtitan {release}, written by zplan {version} from a plan for {model}.

{command}
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{imports}from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b


def zplan():
    """The plan: model, batch, precision, sharding, checkpointing, optimizer. Data and paths are torchtitan's."""
    config = llama3_8b()
    config.model_spec = model_registry("{flavour}")
{settings}    return config
'''


def torchtitan_module(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The module's text and notes.

    Raises
    ------
    ZplanError
        Where torchtitan has no such model, precision, schedule or kind of checkpointing.
    """
    c, t = plan.choice, plan.training
    if plan.spec.name not in FLAVOURS:
        raise ZplanError(
            f"torchtitan {RELEASE} has no flavour for `{plan.spec.name}`", f"it has {', '.join(FLAVOURS)}; else fsdp2"
        )
    if c.precision not in DTYPES:
        raise ZplanError(f"torchtitan {RELEASE} does not train in {c.precision}", "plan with --precision bf16")
    if t.schedule is not None:
        raise ZplanError(
            f"the schedule {t.schedule.type} is not built into torchtitan's yet",
            "plan without `scheduler`, and set config.lr_scheduler in the file",
        )
    if c.checkpointing not in ("none", "full"):
        raise ZplanError(f"torchtitan's own selective checkpointing is not `{c.checkpointing}`", "plan none or full")
    settings = "".join(f"    config.{name} = {value}\n" for name, value in _settings(plan).items())
    full = c.checkpointing == "full"
    text = _MODULE.format(
        release=RELEASE,
        version=plan.zplan_version,
        model=plan.spec.name,
        command=command(plan),
        imports="from torchtitan.distributed.activation_checkpoint import FullAC\n" if full else "",
        flavour=FLAVOURS[plan.spec.name],
        settings=settings,
    )
    return text, _notes(plan)


def command(plan: Plan) -> str:
    """How to start it, on one machine or on each."""
    nodes, per_node = plan.hardware.nodes, plan.choice.world_size // plan.hardware.nodes
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else "--standalone "
    return (
        f"torchrun {several}--nproc-per-node {per_node} -m torchtitan.train --module torchtitan_config --config zplan"
    )


def _settings(plan: Plan) -> dict[str, Any]:
    c, t = plan.choice, plan.training
    adamw = f"lr={t.lr!r}, betas={tuple(t.betas)!r}, eps={t.eps!r}, weight_decay={t.weight_decay!r}"
    return {
        "training.local_batch_size": c.micro_batch,
        "training.global_batch_size": c.global_batch,
        "training.seq_len": c.seq,
        "training.max_norm": t.clip if t.clip else 'float("inf")  # no clipping',
        "training.dtype": '"float32"',
        "training.mixed_precision_param": f'"{DTYPES[c.precision]}"',
        "training.mixed_precision_reduce": '"float32"',
        "parallelism.data_parallel_replicate_degree": c.world_size if c.stage == 0 else 1,
        "parallelism.data_parallel_shard_degree": 1 if c.stage == 0 else c.world_size,
        "parallelism.fsdp_reshard_after_forward": '"always"' if c.stage == 3 else '"never"',
        "activation_checkpoint": "FullAC.Config()" if c.checkpointing == "full" else None,
        "optimizer": f"default_adamw({adamw})",
        # No warm-up, and a decay to the full rate: constant.
        "lr_scheduler": "LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0)",
    }


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = ["the ledger is zplan's: torchtitan runs on FSDP2, with gathered copies and a reduce input of its own"]
    notes.append(f"put the file where torchrun is started: {command(plan)}")
    notes.append("data, tokenizer and checkpoint folders are those of torchtitan's llama3_8b; change them in the file")
    if plan.choice.stage in (1, 2):
        notes.append("FSDP2 has no stage 1 or 2: blocks stay gathered between forward and backward instead")
    if plan.choice.stage == 0:
        notes.append("stage 0 is torchtitan's replication (DDP): weights in fp32 under autocast")
    return tuple(notes)
