"""Configs of other tools from a plan, with every value explicit, so that no release's default can move a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from zplan.planner.dsoptimizer import in_deepspeed
from zplan.planner.emit_scripts import fsdp2_script, slurm_script
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.runnable import limits
from zplan.planner.writing import render

if TYPE_CHECKING:
    from zplan.planner.plan_file import Plan

Format = Literal["zplan", "deepspeed", "accelerate", "hf", "fsdp2", "torchtitan", "slurm"]
FORMATS = get_args(Format)

SUGGESTED: dict[str, str] = {
    "zplan": "zplan_config.json",
    "deepspeed": "ds_config.json",
    "accelerate": "accelerate.yaml",
    "hf": "training_args.json",
    "fsdp2": "train_fsdp2.py",
    "torchtitan": "torchtitan_config.py",
    "slurm": "job.sbatch",
}
"""File names that the emitted files know each other by."""

DS_CONFIG = SUGGESTED["deepspeed"]


def emit(plan: Plan, form: str) -> tuple[str, tuple[str, ...]]:
    """A plan as another tool's file.

    Parameters
    ----------
    plan
        What to write.
    form
        One of `FORMATS`.

    Returns
    -------
    tuple
        The text, and notes: what that tool does otherwise than zplan.
    """
    other = plan.choice.optimizer
    if other != "adamw" and form in ("hf", "accelerate", "fsdp2"):
        raise ZplanError(
            f"`--format {form}` writes AdamW, and the plan is for {other}", "use --format zplan or deepspeed"
        )
    if form == "deepspeed" and not in_deepspeed(other):
        raise ZplanError(f"`--format deepspeed`: DeepSpeed and torch have no optimizer `{other}`", "use --format zplan")
    if form not in _WRITERS:
        near = did_you_mean(form, FORMATS) or f"use one of {', '.join(FORMATS)}"
        raise ZplanError(f"there is no format `{form}`", near)
    if plan.choice.runtime != "zplan":
        from zplan.planner.peer_plan import refuse_format

        refuse_format(plan.choice, form)
    for limit in limits(plan.choice, plan.spec) if plan.choice.runtime == "zplan" else ():
        if form != "zplan" and limit.key not in ("--optimizer", "--reduce-dtype"):
            raise ZplanError(f"`{limit.words}` has no words in the format `{form}`", limit.instead)
    return _WRITERS[form](plan)


def _zplan(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """What `zplan.initialize` reads: DeepSpeed's schema and the block of zplan's own keys."""
    from zplan.planner.dsblocks import EXTRAS

    own = {name: getattr(plan.choice, name) for name in EXTRAS}
    return render({**plan.ds_config(), "zplan": own}) + "\n", ()


def _deepspeed(plan: Plan) -> tuple[str, tuple[str, ...]]:
    notes = [_whose(plan, "DeepSpeed has reduce buckets and gathered copies of its own")]
    if plan.choice.stage in (1, 2):
        notes.append(
            "DeepSpeed all-reduces gradients at stages 1 and 2 by default: twice the bytes of a reduce-scatter"
        )
    if plan.choice.optimizer == "adamw-bf16":
        notes.append("both moments are fp32 there: `adamw-bf16` is an optimizer of zplan's own")
    if plan.choice.checkpointing == "full":
        notes.append("checkpointing is the model's own business there: model.gradient_checkpointing_enable()")
    return render(plan.ds_config()) + "\n", tuple(notes)


def _whose(plan: Plan, otherwise: str) -> str:
    """Which runtime's ledger a plan has."""
    if plan.choice.runtime == "zplan":
        return f"the ledger is zplan's: {otherwise}"
    from zplan.planner.peer_plan import told

    return told(plan.choice)


def _accelerate(plan: Plan) -> tuple[str, tuple[str, ...]]:
    c = plan.choice
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": DS_CONFIG,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": c.stage == 3,
        },
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": plan.hardware.nodes,
        "num_processes": c.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": c.device == "cpu",
    }
    # accelerate refuses `mixed_precision` and the sizes beside a DeepSpeed file, which says them all.
    notes = [f"it names `{DS_CONFIG}`: write that too, with --format deepspeed"]
    if plan.hardware.nodes > 1:
        notes.append("on each machine set machine_rank, and main_process_ip to the first one's address")
    return _yaml(config), tuple(notes)


def _yaml(block: dict[str, Any], indent: str = "") -> str:
    """A mapping of plain values as YAML. Strings are quoted, since YAML 1.1 reads `no` as false."""
    lines = []
    for key, value in block.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {render(value)}\n")
    return "".join(lines)


def _hf(plan: Plan) -> tuple[str, tuple[str, ...]]:
    c, t = plan.choice, plan.training
    params = dict(t.schedule.params) if t.schedule is not None else {}
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": c.micro_batch,
        "gradient_accumulation_steps": c.accumulation,
        "learning_rate": t.lr if t.schedule is None else t.schedule.peak(t.lr),
        "adam_beta1": t.betas[0],
        "adam_beta2": t.betas[1],
        "adam_epsilon": t.eps,
        "weight_decay": t.weight_decay,
        "max_grad_norm": t.clip,
        "lr_scheduler_type": "constant",
        "warmup_steps": params.get("warmup_num_steps", 0),
        "bf16": c.precision == "bf16",
        "fp16": c.precision == "fp16",
        "gradient_checkpointing": c.checkpointing == "full",
        "optim": "adamw_torch_fused",
        "logging_steps": t.steps_per_print,
        "use_cpu": c.device == "cpu",
        "deepspeed": DS_CONFIG,
    }
    if "total_num_steps" in params:
        arguments["max_steps"] = params["total_num_steps"]
    notes = [f"it names `{DS_CONFIG}`: write that too, with --format deepspeed"]
    notes.append(f"sequences of {c.seq} tokens are the data collator's business")
    if t.schedule is not None:
        notes.append(f"the schedule is the `scheduler` of `{DS_CONFIG}`; lr_scheduler_type is not read then")
        if arguments["learning_rate"] != t.lr:
            notes.append(
                f"the Trainer wants the optimizer's lr equal: write {arguments['learning_rate']:g} for {t.lr:g}"
            )
    return render(arguments) + "\n", tuple(notes)


def _fsdp2(plan: Plan) -> tuple[str, tuple[str, ...]]:
    if plan.training.schedule is not None:
        raise ZplanError(
            f"the schedule {plan.training.schedule.type} is not built into the FSDP2 script yet",
            "plan without `scheduler`, and add one of torch's to the script",
        )
    if plan.choice.precision == "fp16":
        raise ZplanError("fp16 is not built into the FSDP2 script yet", "plan with --precision bf16")
    if plan.choice.stage == 0:
        notes = [_whose(plan, "DDP has gradients and reduce buckets of its own")]
        notes.append("stage 0 is DDP: whole fp32 parameters and gradients on every rank, bf16 by autocast alone")
        return fsdp2_script(plan), tuple(notes if plan.choice.precision == "bf16" else notes[:1])
    notes = [_whose(plan, "FSDP2 has gathered copies and a reduce input of its own")]
    if plan.choice.stage in (1, 2) and plan.choice.runtime == "zplan":
        notes.append("FSDP2 has no stage 1 or 2: blocks stay gathered between forward and backward instead")
    if plan.choice.precision == "bf16":
        notes.append("parameters are fp32 shards, gathered in bf16 and reduced in fp32, as in the plan")
    return fsdp2_script(plan), tuple(notes)


def _torchtitan(plan: Plan) -> tuple[str, tuple[str, ...]]:
    from zplan.planner.emit_torchtitan import torchtitan_module

    return torchtitan_module(plan)


def _slurm(plan: Plan) -> tuple[str, tuple[str, ...]]:
    per_node, rest = divmod(plan.choice.world_size, plan.hardware.nodes)
    if rest:
        raise ZplanError(
            f"{plan.choice.world_size} ranks do not split over {plan.hardware.nodes} nodes", "plan for equal nodes"
        )
    note = "it starts `train.py`, a script that calls zplan.initialize(model=...); add --partition and --time to taste"
    return slurm_script(plan, per_node), (note,)


_WRITERS: dict[str, Callable[[Plan], tuple[str, tuple[str, ...]]]] = {
    "zplan": _zplan,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "hf": _hf,
    "fsdp2": _fsdp2,
    "torchtitan": _torchtitan,
    "slurm": _slurm,
}
