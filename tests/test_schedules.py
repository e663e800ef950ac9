"""Schedules: DeepSpeed's formulas, and DeepSpeed's own classes as witness."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.dsconfig import TrainingConfig, from_mapping
from zplan.planner.dswriting import to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.schedules import read_schedule

W, T, BASE = 10, 100, 0.02


def schedule(kind, **params):
    return read_schedule({"type": kind, "params": params}, "`scheduler`")


LINEAR = {"warmup_num_steps": W, "warmup_type": "linear"}
LOG = {"warmup_num_steps": W}

# (type, parameters) -> rates at t = -1, 0, 1, W-1, W, T, T+10, written out
TABLE = [
    ("WarmupLR", {**LINEAR, "warmup_max_lr": 1.0}, [0, 0, 0.1, 0.9, 1, 1, 1]),
    ("WarmupLR", {**LINEAR, "warmup_min_lr": 0.5, "warmup_max_lr": 1.0}, [0.5, 0.5, 0.55, 0.95, 1, 1, 1]),
    ("WarmupLR", {**LOG, "warmup_max_lr": 1.0}, [0, 0, math.log10(2), 1, 1, 1, 1]),
    ("WarmupLR", LINEAR, [0, 0, 0.1 * BASE, 0.9 * BASE, BASE, BASE, BASE]),
    ("WarmupDecayLR", {**LINEAR, "total_num_steps": T, "warmup_max_lr": 1.0}, [0, 0, 0.1, 0.9, 1, 0, 0]),
    ("WarmupDecayLR", {**LOG, "total_num_steps": T}, [0, 0, 1e-3 * math.log10(2), 1e-3, 1e-3, 0, 0]),
    (
        "WarmupCosineLR",
        {**LINEAR, "total_num_steps": T, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.2},
        [
            0,
            0.5 * BASE,
            0.55 * BASE,
            0.95 * BASE,
            BASE * (0.2 + 0.8 * (1 + math.cos(math.pi / 90)) / 2),
            0.2 * BASE,
            0.2 * BASE,
        ],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.6,
            "cycle_first_step_size": W,
            "decay_lr_rate": 1,
            "decay_step_size": 5,
        },
        [0.1, 0.15, 0.2, 0.6, 0.55, 0.1 / (1 + 81 / 5), 0.1 / (1 + 91 / 5)],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 20, "lr_range_test_step_rate": 2.0},
        [0.1, 0.1 * (1 + 0.1), 0.1 * (1 + 0.2), 0.1 * 2, 0.1 * 2.1, 0.1 * (1 + 2 * 101 / 20), 0.1 * (1 + 2 * 111 / 20)],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 20, "lr_range_test_staircase": True},
        [0.1, 0.1, 0.1, 0.1, 0.1, 0.6, 0.6],
    ),
]


@pytest.mark.parametrize(("kind", "params", "expected"), TABLE, ids=lambda x: x if isinstance(x, str) else "")
def test_rates_are_the_formulas(kind, params, expected):
    s = schedule(kind, **params)
    got = [s.lr(t, BASE) for t in (-1, 0, 1, W - 1, W, T, T + 10)]
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-15)


CYCLE = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 0.6,
    "cycle_first_step_size": 7,
    "cycle_second_step_size": 13,
    "cycle_first_stair_count": 3,
    "decay_step_size": 4,
    "decay_lr_rate": 0.5,
    "decay_mom_rate": 0.1,
}
WITNESSED = [
    *((kind, params) for kind, params, _ in TABLE),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "cycle_momentum": False, "cycle_first_stair_count": 0}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 9}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 4}),
]


@pytest.mark.witness
@pytest.mark.parametrize(("kind", "params"), WITNESSED)
def test_deepspeeds_own_classes_agree(kind, params):
    """Witness: t = -1 to 130, rates and moments, to the last bits."""
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=BASE, betas=(0.7, 0.95))
    theirs, ours = getattr(lr_schedules, kind)(optimizer, **params), schedule(kind, **params)
    for t in range(-1, 131):
        group = optimizer.param_groups[0]
        assert ours.lr(t, BASE) == pytest.approx(group["lr"], rel=1e-13, abs=1e-18), t
        assert ours.betas(t, (0.7, 0.95)) == pytest.approx(group["betas"], rel=1e-13), t
        theirs.step()


def test_the_first_two_steps_run_at_the_minimum():
    s = schedule("WarmupLR", warmup_num_steps=100)
    assert s.lr(-1, BASE) == s.lr(0, BASE) == 0.0 < s.lr(1, BASE)


@pytest.mark.parametrize(
    ("block", "message", "hint"),
    [
        ({"type": "WarmupLr"}, "no schedule `WarmupLr`", "`WarmupLR`"),
        ({"type": "WarmupDecayLR"}, "needs `total_num_steps`", "add"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 5}}, "unknown key `warmup_steps`", "`warmup_num_steps`"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "`warmup_num_steps`", "at least 1"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cos"}}, "`warmup_type`", "log, linear"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, 'is "auto"', "whole number"),
        ({"params": {}}, "`type`", "a string"),
    ],
)
def test_bad_schedules_are_refused(block, message, hint):
    with pytest.raises(ZplanError) as caught:
        read_schedule(block, "`scheduler` of `ds.json`")
    assert message in caught.value.message and hint in caught.value.hint


@given(st.sampled_from(WITNESSED), st.floats(1e-6, 1))
def test_a_config_with_a_schedule_comes_back(row, lr):
    kind, params = row
    config = from_mapping(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": lr}},
            "scheduler": {"type": kind, "params": params},
        },
        world_size=1,
    )
    written = to_mapping(config, largest_block_numel=1)
    assert None not in written["scheduler"]["params"].values()
    again = from_mapping(written, world_size=1)
    for t in (-1, 0, 3, 9, 10, 50, 200):
        assert again.schedule.lr(t, again.lr) == config.schedule.lr(t, config.lr)
    assert to_mapping(again, largest_block_numel=1) == written


def test_no_schedule_is_none():
    assert TrainingConfig(1, 1, 1).schedule is None
    assert "scheduler" not in to_mapping(TrainingConfig(1, 1, 1), largest_block_numel=1)


def test_auto_rates_are_the_optimizers():
    s = schedule("WarmupDecayLR", total_num_steps=20, warmup_num_steps=4, warmup_min_lr="auto", warmup_max_lr="auto")
    assert (s.lr(-1, BASE), s.lr(4, BASE), s.peak(BASE)) == (0.0, BASE, BASE)
