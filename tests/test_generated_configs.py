"""Generated configs of every shape: each is read and answered, or refused in one sentence; never a traceback."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zplan
from zplan.planner import dskeys
from zplan.planner.config_doc import treatments
from zplan.planner.dsconfig import from_mapping
from zplan.planner.dsschema import (
    BF16,
    FP16,
    LEAF_MODULE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    REMOVED,
    SCHEDULERS,
    TOP,
    UNPREFIXED,
    ZERO,
)
from zplan.planner.dswriting import to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.lint import CONSUMERS, Subject, check_document
from zplan.planner.lint_launch import DEEPSPEED, FSDP
from zplan.planner.lint_launch import TOP as ACCELERATE
from zplan.planner.lint_report import lint_json, lint_text
from zplan.planner.lint_script import check_script
from zplan.planner.relaxed import read_document
from zplan.planner.schedules import Schedule

SCALARS = [None, True, False, "auto", "true", "false", "5e8", "", 0, -1, 1, 2, 3, 4, 8, 16, 64, 1.5, 2e8, 1e30, -0.0]
SCALARS += ["cpu", "nvme", "none", "fp16", "bf16", "fp32", "/path/to/nvme", "AdamW", "Adam", "Lion", "linear", 10**400]
ODD = st.sampled_from([*SCALARS, {}, [], [1], [0.9, 0.95], {"enabled": True}, {"device": "cpu"}, {"stage": 3}])


def block(names, *, most=6, **inner):
    """Some keys with odd values, and some with blocks of their own."""
    names = [n for n in names if n not in inner]
    return st.fixed_dictionaries({}, optional=inner).flatmap(
        lambda found: st.dictionaries(st.sampled_from(names), ODD, max_size=most).map(lambda more: {**more, **found})
    )


def typed(kinds, params):
    """A `type` and `params`, as optimizers and schedules have them."""
    return st.fixed_dictionaries(
        {}, optional={"type": st.sampled_from([*kinds, "Warmup", None, 3]), "params": block(params) | ODD}
    )


RATES = sorted({name for known, _ in SCHEDULERS.values() for name in known})
OFFLOADS = {
    "offload_param": block(OFFLOAD_PARAM) | ODD,
    "offload_optimizer": block(OFFLOAD_OPTIMIZER) | ODD,
    "leaf_module": block(LEAF_MODULE) | ODD,
}
BLOCKS = {
    "zero_optimization": block([*ZERO, *UNPREFIXED, "stage3_param_persitence_threshold"], **OFFLOADS) | ODD,
    "fp16": block(FP16) | ODD,
    "bf16": block(BF16) | ODD,
    "optimizer": typed(["AdamW", "Adam", "Lion", "OneBitAdam", "SGD"], [*dskeys.OPTIMIZER_HONOURED, "adam_w_mode"])
    | ODD,
    "scheduler": typed(SCHEDULERS, RATES) | ODD,
    "data_types": block(["grad_accum_dtype", "param_dtype"]) | ODD,
    "activation_checkpointing": block(["partition_activations", "contiguous_memory_optimization", "profile"]) | ODD,
    "zplan": block(["ring_slots", "seq", "checkpointing", "attention", "saving", "ringslots"]) | ODD,
}
MORE_TOP = [*treatments()[()], *REMOVED, *dskeys.MEANT, "gradient_cliping", " train_batch_size"]
DS = block([*TOP, *MORE_TOP], **BLOCKS)
LAUNCHED = block(
    [*ACCELERATE, "num_process"], deepspeed_config=block(DEEPSPEED) | ODD, fsdp_config=block([*FSDP, "fsdp_x"]) | ODD
)
FLAG = st.booleans()
SIZES = st.sampled_from([1, 1000, 2e8, 500_000_000, 10**9])
SANE_SCHEDULES = st.sampled_from(
    [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_max_lr": "auto"}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}},
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 3}},
    ]
)
SANE_ZERO = {
    "stage": st.integers(0, 3),
    **{name: SIZES for name, row in ZERO.items() if row.numel and row.least is not None and row.least <= 1},
    **{name: FLAG for name in (*dskeys.ZERO_MAPPED, "overlap_comm")},
    "offload_optimizer": st.just({"device": "none", "pin_memory": True}),
}
SANE_FP16 = {
    "loss_scale": st.sampled_from([0, 128, 1024.0]),
    "initial_scale_power": st.integers(4, 32),
    "loss_scale_window": st.integers(1, 2000),
    "hysteresis": st.integers(1, 4),
    "consecutive_hysteresis": FLAG,
    "min_loss_scale": st.integers(1, 16),
}
SANE_OPTIMIZER = {
    "lr": st.floats(1e-6, 1),
    "betas": st.sampled_from([[0.9, 0.95], [0, 0.999], "auto"]),
    "eps": st.just(1e-8),
    "weight_decay": st.floats(0, 1),
    "torch_adam": FLAG,
}
SANE_TOP = {
    "train_micro_batch_size_per_gpu": st.integers(1, 8),
    "gradient_accumulation_steps": st.integers(1, 8),
    "gradient_clipping": st.sampled_from([0, 0.5, 1.0, "auto"]),
    "steps_per_print": st.integers(1, 2000),
    "wall_clock_breakdown": FLAG,
    "prescale_gradients": FLAG,
    "communication_data_type": st.just("fp32"),
    "zero_optimization": st.fixed_dictionaries({}, optional=SANE_ZERO),
    "optimizer": st.fixed_dictionaries(
        {"type": st.sampled_from(["Adam", "AdamW"]), "params": st.fixed_dictionaries({}, optional=SANE_OPTIMIZER)}
    ),
    "scheduler": SANE_SCHEDULES,
}


def sane(found):
    """At most one precision; a batch size."""
    config, precision, scale = found
    if precision == "fp16":
        config = {**config, "fp16": {"enabled": True, **scale}}
    elif precision:
        config = {**config, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    return {"train_micro_batch_size_per_gpu": 1, **config}


SANE = st.tuples(
    st.fixed_dictionaries({}, optional=SANE_TOP),
    st.sampled_from(["", "bf16", "fp16"]),
    st.fixed_dictionaries({}, optional=SANE_FP16),
).map(sane)
ODD_ONE = st.tuples(SANE, st.sampled_from([*TOP, *MORE_TOP]), ODD).map(lambda t: {**t[0], t[1]: t[2]})
CONFIGS = SANE | ODD_ONE | DS | DS.map(lambda c: {"deepspeed": c}) | LAUNCHED
SUBJECTS = st.builds(
    Subject,
    consumer=st.sampled_from(CONSUMERS),
    release=st.sampled_from([(0, 7), (0, 9, 5), (0, 14, 0), (0, 19, 8)]),
    gpus=st.sampled_from([None, 1, 7, 8]),
    mem_bytes=st.sampled_from([None, 8 * 2**30]),
    host_mem_bytes=st.sampled_from([None, 2**36]),
    num_params=st.sampled_from([None, 7 * 10**9]),
    trainable=st.sampled_from([None, 0, 10**6]),
    hidden=st.sampled_from([None, 4096]),
    largest_tensor=st.sampled_from([None, 131_072_000]),
    layers=st.sampled_from([None, 32]),
    vocab=st.sampled_from([None, 32000]),
    batch_norm=st.booleans(),
    experts=st.sampled_from([0, 8]),
    micro_batch=st.sampled_from([None, 4]),
    seq=st.sampled_from([None, 8192]),
    was_batch=st.sampled_from([None, 16]),
    was_gpus=st.sampled_from([None, 4]),
)


def put_through(config, subject, world_size):
    """Everything that reads configs."""
    text = json.dumps(config)
    report = check_document(read_document(text, "x.json"), "x.json", subject)
    assert lint_text(report) and json.loads(lint_json(report))["valid"] is not bool(report.count("error"))
    check_script(f"config = {config!r}\n", "x.py", subject)
    try:
        read = from_mapping(json.loads(text), world_size=world_size)
    except ZplanError as e:
        assert e.message and "\n" not in e.message
        return False
    again = from_mapping(to_mapping(read, largest_block_numel=1000), world_size=world_size)
    for name in ("train_batch_size", "stage", "precision", "clip", "loss_scale", "overlap", "persist_numel"):
        assert getattr(again, name) == getattr(read, name), name
    if isinstance(read.schedule, Schedule):
        assert again.schedule.lr(3, again.lr) == read.schedule.lr(3, read.lr)
    return True


def answer(config):
    """A whole estimate; the shape of the model is of no matter here."""
    try:
        assert zplan.estimate("smollm2-135m", gpus=2, mem=24, seq=128, config=config).peak_bytes > 0
    except ZplanError as e:
        assert e.message


RELAXED = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=150, **RELAXED)
@given(CONFIGS, SUBJECTS, st.sampled_from([1, 2, 7]))
def test_no_config_causes_a_traceback(config, subject, world_size):
    put_through(config, subject, world_size)


@settings(max_examples=30, **RELAXED)
@given(SANE | ODD_ONE | DS)
def test_no_config_makes_an_estimate_fail(config):
    answer(config)


@settings(max_examples=60, **RELAXED)
@given(SANE, st.sampled_from([1, 2, 7]))
def test_sane_configs_are_read(config, world_size):
    """All but a loss scale that begins below its minimum."""
    if not put_through(config, Subject(), world_size):
        with pytest.raises(ZplanError, match="below its minimum"):
            from_mapping(json.loads(json.dumps(config)), world_size=world_size)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_20000_configs_cause_no_traceback():
    counts = {"tried": 0, "read": 0}

    @settings(max_examples=20_000, database=None, derandomize=False, **RELAXED)
    @given(CONFIGS, SUBJECTS, st.sampled_from([1, 2, 7]))
    def run(config, subject, world_size):
        counts["tried"] += 1
        counts["read"] += put_through(config, subject, world_size)
        if counts["tried"] % 20 == 0:
            answer(config)

    run()
    print(counts)  # noqa: T201 - shown with -s
    assert counts["tried"] >= 20_000 and counts["read"] > 2000
