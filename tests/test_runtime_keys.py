"""Each key that is honoured changes a line of the ledger, the schedule or the arithmetic: one row each."""

import json

import pytest
import torch
import workload as w
from test_engine import exact, same_bits, train
from torch import nn

import zplan
from zplan.planner import dskeys
from zplan.planner.config_doc import treatments
from zplan.planner.dsconfig import from_mapping
from zplan.planner.dswriting import to_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import load_plan, save_plan
from zplan.runtime.halves import values_of


class Tower(nn.Module):
    """Five equal blocks of 272 parameters and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 816},
}


def merged(base, changes):
    out = json.loads(json.dumps(base))
    for path, value in changes.items():
        *parents, key = path.split(".")
        block = out
        for name in parents:
            block = block.setdefault(name, {})
        block[key] = value
    return out


def seen(changes, steps=2, capsys=None):
    """As rank 0 of 2: memory by line, order of phases and collectives, weights and norms, and what was told."""
    torch.manual_seed(0)
    engine, *_ = zplan.initialize(model=Tower(), config=merged(BASE, changes), world=2)
    order = []
    engine.on_phase = order.append
    for name in ("all_gather", "reduce_scatter", "exchange_slices", "all_reduce"):
        call = getattr(engine.collectives, name)

        def told(*args, _call=call, _name=name, **kwargs):
            order.append(f"{_name} {args[-1] if isinstance(args[-1], str) else args[-2]}")
            return _call(*args, **kwargs)

        setattr(engine.collectives, name, told)
    try:
        return run(engine, order, steps, capsys)
    finally:
        engine.close()


def run(engine, order, steps, capsys):
    norms = []
    for _ in range(steps):
        for _ in range(engine.choice.accumulation):
            x = torch.linspace(-3, 3, 32).view(2, 16).to(torch.float32)
            engine.backward(engine(x).float().square().mean() * 50)
        engine.step()
        norms.append(engine.grad_norm.item())
    weights = [state.sum().item() for u in engine.trained for state in u.states.values()]
    weights += [engine.optimizer.param_groups[0]["lr"], *norms]
    weights += [values_of(u.weights).sum().item() for u in engine.trained]
    memory = {k: v for k, v in engine.arena.held().items()}
    err = capsys.readouterr().err if capsys else ""
    return {"ledger": memory, "schedule": order, "arithmetic": weights, "told": err}


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 0.001, "warmup_max_lr": 0.02}}
# key -> (changes, what is different, and from what where that is not the base)
ROWS = {
    "train_batch_size": ({"train_batch_size": 8, "gradient_accumulation_steps": None}, "ledger"),
    "train_micro_batch_size_per_gpu": (
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": None},
        "ledger",
    ),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 2}, "ledger"),
    "bf16": ({"bf16": {"enabled": True}}, "ledger"),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 4}}, "ledger"),
    "zero_optimization.stage": ({"zero_optimization.stage": 2}, "ledger"),
    "zero_optimization.reduce_bucket_size": ({"zero_optimization.reduce_bucket_size": 64}, "schedule"),
    "zero_optimization.stage3_max_live_parameters": ({"zero_optimization.stage3_max_live_parameters": 272}, "ledger"),
    "zero_optimization.overlap_comm": ({"zero_optimization.overlap_comm": False}, "schedule"),
    "zero_optimization.stage3_prefetch_bucket_size": (
        {"zero_optimization.stage3_prefetch_bucket_size": 544},
        "schedule",
    ),
    "zero_optimization.stage3_param_persistence_threshold": (
        {"zero_optimization.stage3_param_persistence_threshold": 300},
        "ledger",
    ),
    "gradient_clipping": ({"gradient_clipping": 0.001}, "arithmetic"),
    "optimizer.params.lr": ({"optimizer.params.lr": 0.5}, "arithmetic"),
    "optimizer.params.betas": ({"optimizer.params.betas": [0.5, 0.9]}, "arithmetic"),
    "optimizer.params.eps": ({"optimizer.params.eps": 0.1}, "arithmetic"),
    "optimizer.params.weight_decay": ({"optimizer.params.weight_decay": 10.0}, "arithmetic"),
    "optimizer.params.momentum": ({**SGD, "optimizer.params.momentum": 0.5}, "arithmetic", SGD),
    "optimizer.params.nesterov": ({**SGD, "optimizer.params.nesterov": True}, "arithmetic", SGD),
    "scheduler": ({"scheduler": SCHEDULE}, "arithmetic"),
    "steps_per_print": ({"steps_per_print": 1}, "told"),
    "wall_clock_breakdown": ({"wall_clock_breakdown": True, "steps_per_print": 2}, "told"),
    "zplan": ({"zplan": {"ring_slots": 2}}, "ledger"),
}


@pytest.mark.parametrize("key", ROWS)
def test_a_key_that_is_honoured_changes_something(key, capsys):
    changes, what, *base = ROWS[key]
    before = seen(*base or [{}], capsys=capsys)
    after = seen(changes, capsys=capsys)
    assert after[what] != before[what]


# key -> changes that are counted as an estimate, and that no engine is made for
ESTIMATES = {
    "communication_data_type": {"communication_data_type": "bf16", "bf16": {"enabled": True}},
    "zero_optimization.offload_optimizer": {"zero_optimization.offload_optimizer": {"device": "cpu"}},
    "zero_optimization.offload_param": {
        "zero_optimization.offload_optimizer": {"device": "cpu"},
        "zero_optimization.offload_param": {"device": "cpu"},
    },
    "zero_optimization.cpu_offload": {"zero_optimization.cpu_offload": True},
    "zero_optimization.cpu_offload_param": {
        "zero_optimization.cpu_offload": True,
        "zero_optimization.cpu_offload_param": True,
    },
}


@pytest.mark.parametrize("key", ESTIMATES)
def test_a_key_that_is_counted_only_is_refused_by_name(key):
    with pytest.raises(ZplanError) as caught:
        seen(ESTIMATES[key])
    assert key.rpartition(".")[2].removeprefix("cpu_").split("_")[0] in caught.value.message
    assert not zplan.runtime.initialize.engines()


def test_no_honoured_key_is_left_out():
    honoured = {*dskeys.TOP_HONOURED} - {"zero_optimization", "optimizer"}
    honoured |= {f"zero_optimization.{k}" for k in dskeys.ZERO_HONOURED}
    honoured |= {f"optimizer.params.{k}" for k in dskeys.OPTIMIZER_HONOURED}
    assert honoured == {*ROWS, *ESTIMATES}


def gathers(order, phase):
    """Units whose gather begins between one phase and the next."""
    start = order.index(phase)
    rest = order[start + 1 :]
    end = next(i for i, x in enumerate(rest) if not x.startswith(("all_gather", "exchange", "reduce")))
    return [x.split()[1] for x in rest[:end] if x.startswith("all_gather")]


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({}, ["blocks.2"]),
        ({"zero_optimization.stage3_prefetch_bucket_size": 1}, ["blocks.2"]),
        ({"zero_optimization.stage3_prefetch_bucket_size": 0}, []),
        ({"zero_optimization.overlap_comm": False}, []),
    ],
)
def test_what_is_gathered_ahead_in_forward(changes, ahead):
    """Three slots. After the first step, which fixes the order, block 1 of the second runs: block 0 is done."""
    order = seen(changes)["schedule"]
    second = order[order.index("idle") + 1 :]
    fetched = gathers(second, "forward.blocks.1")
    assert [name for name in fetched if name != "blocks.1"] == ahead


def test_more_elements_ahead_are_more_units():
    """While block 0 runs, the two other slots of three are free."""
    deep = seen({"zero_optimization.stage3_prefetch_bucket_size": 544})["schedule"]
    flat = seen({})["schedule"]
    after = [gathers(order[order.index("idle") + 1 :], "forward.blocks.0") for order in (deep, flat)]
    assert "blocks.2" in after[0] and "blocks.2" not in after[1]


def test_units_below_the_threshold_stay_whole():
    held = seen({"zero_optimization.stage3_param_persistence_threshold": 273})["ledger"]
    assert not any(name.startswith("params.ring") for name in held) and "params.flat.block" in held
    assert any(name.startswith("params.ring") for name in seen({})["ledger"])


def test_prescaling_is_mapped_with_a_note_and_bad_values_are_refused(capsys):
    for changes in ({"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}):
        after = seen(changes, capsys=capsys)
        assert "changes nothing: zplan adds up in fp32" in after["told"], "a note of a config was not shown"
        assert after["arithmetic"] == seen({})["arithmetic"]
    assert from_mapping(merged(BASE, {"prescale_gradients": False}), world_size=2).notes == ()


def test_keys_come_back_from_plans_and_files(tmp_path):
    changes = {
        "wall_clock_breakdown": True,
        "zero_optimization.overlap_comm": False,
        "zero_optimization.stage3_prefetch_bucket_size": 5,
        "zero_optimization.stage3_param_persistence_threshold": 7,
    }
    config = from_mapping(merged(BASE, changes), world_size=2)
    again = from_mapping(to_mapping(config, largest_block_numel=272), world_size=2)
    for name in ("breakdown", "overlap", "prefetch_numel", "persist_numel"):
        assert getattr(again, name) == getattr(config, name)
    for asked in (merged({"train_batch_size": 2}, changes), {"train_batch_size": 2}):
        plan = zplan.plan("smollm2-135m", gpus=2, mem=8, seq=64, config=asked)
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan
        assert plan.training.prefetch_numel == (5 if len(asked) > 1 else None)


def test_initialize_takes_a_configs_path(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE), encoding="utf-8")
    engine, *_ = zplan.initialize(model=Tower(), config=path, world=2)
    assert engine.choice.stage == 3
    engine.close()


def test_every_row_of_the_tables_says_something():
    for block, rows in treatments().items():
        assert all(words for words in rows.values()), block


@pytest.mark.gloo
def test_none_of_these_keys_changes_a_bit(run_ranks):
    """On two ranks, four blocks in three slots, checked: what is gathered when, and where, is not what is computed."""
    variants = {
        "far ahead": {"stage3_prefetch_bucket_size": 10**6},
        "no overlap": {"overlap_comm": False},
        "all whole": {"stage3_param_persistence_threshold": 10**9},
    }
    runs = {}
    for name, zero in variants.items():
        config = w.config(3, 2, precision="bf16", checkpointing="full", ring_slots=3)
        config["zero_optimization"].update(zero)
        config["wall_clock_breakdown"] = name == "far ahead"
        runs[name] = run_ranks(2, train, "llama4", config, 3, True, True)
        exact(runs[name])
    same_bits([dict(zip(runs, found, strict=True)) for found in zip(*runs.values(), strict=True)])
