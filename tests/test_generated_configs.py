"""Generated configs of every shape: each is read and answered, or refused in one sentence; never a traceback."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zplan
from zplan.planner import dskeys
from zplan.planner.config_doc import treatments
from zplan.planner.dsconfig import from_mapping, to_mapping
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
CONFIGS = DS | DS.map(lambda c: {"deepspeed": c}) | LAUNCHED
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


RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=250, **RELAXED)
@given(CONFIGS, SUBJECTS, st.sampled_from([1, 2, 7]))
def test_no_config_causes_a_traceback(config, subject, world_size):
    put_through(config, subject, world_size)


@settings(max_examples=30, **RELAXED)
@given(DS)
def test_no_config_makes_an_estimate_fail(config):
    answer(config)


PLAIN = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
}


def test_a_plain_config_comes_through():
    """The generator's readers do not refuse everything."""
    assert put_through(PLAIN, Subject(), 2)


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
    assert counts["tried"] >= 20_000 and counts["read"] > 100
