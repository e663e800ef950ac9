"""Configs in DeepSpeed's schema: what is honoured, what is refused by name, and the writer that leaves nothing out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner import dskeys
from zplan.planner.autofill import SETTLED, settle_autos
from zplan.planner.batch import KEYS, solve_batch
from zplan.planner.config import Choice
from zplan.planner.dsconfig import TrainingConfig, from_mapping, read_settings
from zplan.planner.dswriting import from_choice, to_mapping
from zplan.planner.errors import ZplanError

ONE = {"train_micro_batch_size_per_gpu": 1}


def refusal(mapping, world_size=8):
    with pytest.raises(ZplanError) as caught:
        from_mapping(mapping, world_size=world_size, source="ds.json")
    return caught.value


@pytest.mark.parametrize(
    ("train", "micro", "accum", "expected"),
    [
        (64, 2, 4, (2, 4)),
        (64, 2, None, (2, 4)),
        (64, None, 4, (2, 4)),
        (None, 2, 4, (2, 4)),
        (64, None, None, (8, 1)),
        (None, 3, None, (3, 1)),
    ],
    ids=["all", "train+micro", "train+accumulation", "micro+accumulation", "train", "micro"],
)
def test_batch_triple_follows_deepspeed(train, micro, accum, expected):
    b = solve_batch(train=train, micro=micro, accumulation=accum, world_size=8, names=KEYS)
    assert (b.micro, b.accumulation) == expected
    assert b.train == b.micro * b.accumulation * 8


@pytest.mark.parametrize(
    ("train", "micro", "accum", "message", "hint"),
    [
        (100, None, None, "100 / 8 = 12.5 sequences a GPU", "use 96 or 104"),
        (100, 3, None, "100 / 8 = 12.5", "use 96 or 120"),
        (40, 2, None, "5 sequences a GPU", "use 32 or 48"),
        (40, None, 3, "5 sequences a GPU", "use 24 or 48"),
        (64, 3, 4, "is not 3 x 4 x 8 GPUs = 96", "use 96"),
        (1, None, None, "does not split over 8 GPUs", "use 8"),
        (None, None, 4, "neither", "train_micro_batch_size_per_gpu"),
    ],
)
def test_bad_batches_name_the_nearest_valid_ones(train, micro, accum, message, hint):
    with pytest.raises(ZplanError) as caught:
        solve_batch(train=train, micro=micro, accumulation=accum, world_size=8, names=KEYS)
    assert message in caught.value.message
    assert hint in caught.value.hint


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_any_two_of_the_triple_give_the_third(micro, accum, world):
    train = micro * accum * world
    for given_ in ({"train": train, "micro": micro}, {"train": train, "accumulation": accum}):
        args = {"train": None, "micro": None, "accumulation": None, **given_}
        b = solve_batch(**args, world_size=world, names=KEYS)
        assert (b.micro, b.accumulation, b.train) == (micro, accum, train)


def test_a_whole_config_is_read():
    c = from_mapping(
        {
            "train_batch_size": 128,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01},
            },
            "gradient_clipping": 0.5,
            "steps_per_print": 20,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 5e8,
                "offload_optimizer": {"device": "none"},
            },
            "zplan": {"ring_slots": 3, "checkpointing": "full", "seq": 512},
        },
        world_size=4,
    )
    assert (c.train_batch_size, c.micro_batch, c.accumulation) == (128, 8, 4)
    assert (c.precision, c.stage, c.piece_numel) == ("bf16", 2, 500_000_000)
    assert (c.lr, c.betas, c.eps, c.weight_decay, c.clip) == (2e-5, (0.9, 0.95), 1e-6, 0.01, 0.5)
    assert (c.steps_per_print, c.ring_slots, c.checkpointing, c.seq) == (20, 3, "full", 512)
    assert c.notes == ()
    assert {"stage", "lr", "seq"} <= c.given and "attention" not in c.given


def test_what_is_left_out_has_deepspeeds_meaning():
    c = from_mapping({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}, world_size=1)
    assert (c.precision, c.stage, c.clip) == ("fp32", 0, 1.0)
    assert c.lr == 1e-3 and any("0.001" in n for n in c.notes)
    # Nothing is said about precision or stage, so a planner may still choose them.
    assert {"precision", "stage"}.isdisjoint(read_settings(ONE)[0])
    assert read_settings({"fp16": {"enabled": False}})[0]["precision"] == "fp32"


@pytest.mark.parametrize(
    ("mapping", "message", "hint"),
    [
        ({"micro_batch_size": 8}, "unknown key `micro_batch_size`", "`train_micro_batch_size_per_gpu`"),
        ({"gradient_cliping": 1}, "unknown key `gradient_cliping` in `ds.json`", "did you mean `gradient_clipping`?"),
        (
            {"gradient_checkpointing": True},
            "unknown key `gradient_checkpointing`",
            "did you mean `gradient_clipping`, `activation_checkpointing` or `checkpoint`?",
        ),
        ({"foo_bar": 1}, "unknown key `foo_bar`", "remove it; `docs/config.md` lists the "),
        (
            {"zplan": {"foo_bar": 1}},
            "unknown key `foo_bar`",
            "remove it; known keys: attention, check_replicas_every, ",
        ),
        (
            {"zero_optimization": {"stage3_param_persitence_threshold": 1}},
            "unknown key `stage3_param_persitence_threshold` in `zero_optimization` of `ds.json`",
            "`stage3_param_persistence_threshold`",
        ),
        ({"zero_optimization": {"stage": 4}}, "`stage` of `zero_optimization` of `ds.json` is 4", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, 'is the string "2"', "whole number"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "is the number 0", "at least 1"),
        ({"zero_optimization": True}, "is true", "an object"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, "`device`", "nvme"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "`super_offload`", "leave it out"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "`offload_param`", '"offload_optimizer"'),
        ({"zero_optimization": {"overlap_comm": "true"}}, 'is the string "true"', "without quotes"),
        ({"bf16": {"enabled": "true"}}, 'the string "true"', "without quotes"),
        ({"steps_per_print": "auto"}, 'is "auto"', "write a whole number"),
        ({"gradient_clipping": -1}, "is the number -1", "at least 0"),
        ({"train_batch_size": True}, "`train_batch_size` of `ds.json` is true", "whole number"),
        ({"train_batch_size": 1.5}, "1.5", "whole number"),
        ({"train_batch_size": -8}, "-8", "at least 1"),
        ({"scheduler": {"type": "Warmup"}}, "no schedule `Warmup`", "`WarmupLR`"),
        ({"wall_clock_breakdown": "true"}, 'is the string "true"', "without quotes"),
        ({"gradient_predivide_factor": 0}, "`gradient_predivide_factor` of `ds.json` is 0", "1.0"),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": -1}}, "is the number -1", "at least 0"),
        ({"elasticity": {"enabled": True}}, "`elasticity` of `ds.json` asks for", "leave it out"),
        ({"zero_optimization": {"cpu_offload": "true"}}, 'is the string "true"', "without quotes"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            "both `cpu_offload` and `offload_optimizer`",
            "drop `cpu_offload`",
        ),
        ({"zero_optimization": {"cpu_offload_param": True}}, "`offload_param`", '"offload_optimizer"'),
        ({"communication_data_type": "fp16"}, "`communication_data_type`", ""),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer `OneBitAdam` is not built yet", "AdamW"),
        ({"optimizer": {"type": "AdmW"}}, "unknown optimizer `AdmW`", "`adamw`"),
        ({"optimizer": {"params": {}}}, "has no `type`", "AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "clips nothing", "gradient_clipping"),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "`adam_w_mode`", "decouples"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "`nesterov`", "0.9"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}, "`betas`", ""),
        ({"optimizer": {"type": "Lion"}, "zplan": {"optimizer": "adagrad"}}, "is of lion", "drop one"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "`betas`", "two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "`betas`", "below 1"),
        ({"zplan": {"ring_slots": 1}}, "`ring_slots`", "at least 2"),
        ({"zplan": {"checkpointing": "ful"}}, "`checkpointing`", "`full`"),
    ],
)
def test_refusals(mapping, message, hint):
    e = refusal({**ONE, **mapping} if "train_batch_size" not in mapping else mapping)
    assert message in e.message
    assert hint in e.hint


def test_no_batch_size_is_refused_like_deepspeed_does():
    assert "neither `train_batch_size` nor" in refusal({"gradient_clipping": 1.0}).message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value):
    assert "number" in refusal({**ONE, "gradient_clipping": value}).hint


@pytest.mark.parametrize("key", sorted(dskeys.ZERO_INERT))
def test_inert_keys_are_accepted_with_a_note(key):
    c = from_mapping({**ONE, "zero_optimization": {key: 7}}, world_size=2)
    assert len(c.notes) == 1 and f"`{key}`" in c.notes[0] and "changes nothing" in c.notes[0]
    if ("zero_optimization", key) not in SETTLED:
        assert 'is "auto"' in refusal({**ONE, "zero_optimization": {key: "auto"}}).message


@pytest.mark.parametrize("key", sorted(dskeys.TOP_INERT))
def test_blocks_that_steer_nothing_here_are_accepted_with_a_note(key):
    (note,) = from_mapping({**ONE, key: {"partition_activations": True}}, world_size=2).notes
    assert f"`{key}`" in note and "changes nothing" in note


def test_the_old_name_of_bf16():
    old = from_mapping({**ONE, "bfloat16": {"enabled": True}}, world_size=1)
    assert (old.precision, old.notes) == ("bf16", ())
    assert from_mapping({**ONE, "bfloat16": {"enabled": "auto"}}, world_size=1).precision == "bf16"
    assert "both `bf16` and `bfloat16`" in refusal({**ONE, "bfloat16": {"enabled": True}, "bf16": {}}).message


def test_old_offload_keys_are_the_blocks_of_today():
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    c = from_mapping({**ONE, "zero_optimization": zero}, world_size=2)
    assert (c.offload.optimizer, c.offload.params) == ("cpu", "cpu")
    assert [n for n in c.notes if "is the old name" in n] == list(c.notes) and len(c.notes) == 2
    off = from_mapping({**ONE, "zero_optimization": {"stage": 3, "cpu_offload": False}}, world_size=2)
    assert off.offload.optimizer == "none" and not off.notes


def test_steps_that_are_not_finite_are_skipped_whatever_bf16_says():
    """The engine knows no other way, so true is what is written and false is told about."""
    for value, noted in ((True, False), (None, False), (False, True)):
        c = from_mapping({**ONE, "bf16": {"enabled": True, "check_grad_overflow": value}}, world_size=1)
        assert any("`check_grad_overflow`" in n and "is skipped" in n for n in c.notes) is noted
    assert to_mapping(c, largest_block_numel=1)["bf16"] == {"enabled": True, "check_grad_overflow": True}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("amp", {"enabled": False}),
        ("fp16", {}),
        ("scheduler", None),
        ("data_types", {"grad_accum_dtype": "fp32"}),
        ("activation_checkpointing", {"partition_activations": False, "number_checkpoints": None}),
        ("zero_allow_untested_optimizer", True),
    ],
)
def test_neutral_values_are_accepted(key, value):
    assert from_mapping({**ONE, key: value}, world_size=2).notes == ()


@pytest.mark.parametrize("key", sorted(dskeys.ZERO_MAPPED))
def test_mapped_keys_take_the_one_way_there_is(key):
    value, why = dskeys.ZERO_MAPPED[key]
    for given_, noted in ((value, 0), (not value, 1), (None, 0)):
        c = from_mapping({**ONE, "zero_optimization": {key: given_}}, world_size=2)
        assert [why in n and "is taken as" in n for n in c.notes] == [True] * noted


TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


def test_auto_is_settled_and_told():
    found, notes = read_settings(TRAINER)
    assert found == {
        "clip": 1.0,
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "optimizer": "adamw",
        "stage": 2,
    }
    assert sum('is "auto"' in n for n in notes) == 11
    assert any("`train_batch_size`" in n and "zplan chooses" in n for n in notes)
    assert TRAINER["optimizer"]["params"]["lr"] == "auto", "the user's own mapping was changed"


def test_auto_without_a_planner():
    """The engine has nobody to choose a batch; a precision it has."""
    assert '"auto", and nothing else says the batch' in refusal(TRAINER).message
    c = from_mapping({**TRAINER, "train_micro_batch_size_per_gpu": 2}, world_size=4)
    assert (c.micro_batch, c.precision, c.piece_numel) == (2, "bf16", 32 * 2**20)
    assert from_mapping({**ONE, "fp16": {"enabled": "auto"}}, world_size=1).precision == "bf16"
    off = {**ONE, "fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert from_mapping(off, world_size=1).precision == "bf16"


def test_settling_leaves_everything_else_alone():
    plain = {"a": 1, "optimizer": {"type": "auto"}, "zero_optimization": {"sub_group_size": "auto"}, "fp16": None}
    assert settle_autos(plain) == (plain, {})


configs = st.builds(
    TrainingConfig,
    micro_batch=st.integers(1, 32),
    accumulation=st.integers(1, 32),
    world_size=st.integers(1, 64),
    precision=st.sampled_from(["bf16", "fp32"]),
    stage=st.integers(0, 3),
    piece_numel=st.integers(1, 10**9),
    lr=st.floats(0, 1, allow_nan=False),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    eps=st.floats(0, 1),
    weight_decay=st.floats(0, 10),
    clip=st.floats(0, 100),
    steps_per_print=st.integers(1, 1000),
)


@given(configs, st.integers(1, 10**9))
def test_writing_then_reading_gives_the_config_back(config, block):
    text = json.dumps(to_mapping(config, largest_block_numel=block))
    back = from_mapping(json.loads(text), world_size=config.world_size)
    for name in ("micro_batch", "accumulation", "precision", "stage", "piece_numel", "lr", "betas", "eps"):
        assert getattr(back, name) == getattr(config, name)
    assert (back.weight_decay, back.clip, back.steps_per_print) == (
        config.weight_decay,
        config.clip,
        config.steps_per_print,
    )
    assert back.train_batch_size == config.train_batch_size


def test_the_writer_leaves_nothing_to_a_default():
    c = from_choice(Choice(stage=3, world_size=8, checkpointing="full", ring_slots=2), {"lr": 3e-4})
    m = to_mapping(c, largest_block_numel=1000)
    assert m["train_batch_size"] == 8
    assert m["optimizer"]["params"] == {
        "lr": 3e-4,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
    }
    zero = m["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 2000 and zero["stage3_prefetch_bucket_size"] == 1000
    assert zero["reduce_bucket_size"] == 32 * 2**20
    assert "zplan" not in m
    # Every key of DeepSpeed's zero block that we honour or watch is there, so no release's default can move the run.
    assert {"stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "offload_param"} <= set(zero)


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [(0, "bf16", None), (1, "bf16", "fp32"), (3, "bf16", "fp32"), (0, "fp32", "fp32")],
)
def test_accumulation_is_fp32_wherever_deepspeed_allows_it(stage, precision, expected):
    """At stage 0 DeepSpeed 0.19 raises on bf16 with fp32 accumulation; zplan itself accumulates in fp32 everywhere."""
    c = TrainingConfig(1, 1, 1, stage=stage, precision=precision)
    m = to_mapping(c, largest_block_numel=1)
    assert m["data_types"] == {"grad_accum_dtype": expected}
    assert from_mapping(m, world_size=1).precision == precision


def test_live_parameters_are_ring_slots():
    block = 1000
    for live, slots in ((0, 2), (2999, 2), (3000, 3), (10**9, 4)):
        c = from_mapping({**ONE, "zero_optimization": {"stage": 3, "max_live_parameters": live}}, world_size=2)
        assert c.slots([block] * 4) == slots
        assert to_mapping(c, largest_block_numel=block)["zero_optimization"]["stage3_max_live_parameters"] == live
    own = {**ONE, "zero_optimization": {"stage3_max_live_parameters": 3000}, "zplan": {"ring_slots": 2}}
    assert from_mapping(own, world_size=2).slots([block] * 4) == 2, "zplan's own key counts"


@pytest.mark.parametrize("own", [None, 2])
def test_live_parameters_are_a_line_of_the_plans_ledger(own):
    import zplan

    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 11_000_000}}
    if own:
        config["zplan"] = {"ring_slots": own}
    plan = zplan.plan("smollm2-135m", gpus=2, mem=8, seq=64, config=config)
    assert 3 * 3_540_096 < 11_000_000 < 4 * 3_540_096, "three blocks of this model"
    assert plan.choice.ring_slots == (own or 3) and len(plan.ledger.line("params.ring.block").spans) == (own or 3)
    assert plan.training.max_live is None and plan.settings == ()


@pytest.mark.parametrize(
    ("kind", "params", "own", "name", "values"),
    [
        ("AdamW", {"betas": [0.8, 0.9]}, None, "adamw", {"betas": (0.8, 0.9)}),
        ("Adam", {"adam_w_mode": False}, None, "adam", {"betas": (0.9, 0.999)}),
        ("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True}, None, "sgd-momentum", {"momentum": 0.5}),
        ("sgd", {"lr": 0.1}, None, "sgd", {"momentum": 0.0}),
        ("Lion", {"lr": 0.1}, None, "lion", {"betas": (0.9, 0.99)}),
        ("Adagrad", {"lr": 0.1, "eps": 1e-6}, None, "adagrad", {"eps": 1e-6}),
        ("AdamW", {}, "adamw-bf16", "adamw-bf16", {"lr": 1e-3}),
    ],
)
def test_optimizers_are_read_and_written_back(kind, params, own, name, values):
    block = {**ONE, "optimizer": {"type": kind, "params": params}, "zplan": {} if own is None else {"optimizer": own}}
    c = from_mapping(block, world_size=8)
    assert c.optimizer == name and {k: getattr(c, k) for k in values} == values
    written = to_mapping(c, largest_block_numel=100)
    again = from_mapping({**written, "zplan": {"optimizer": name}}, world_size=8)
    assert again.optimizer == name and again.nesterov == c.nesterov
    assert {k: getattr(again, k) for k in values} == values
