"""The linter: what it says about configs as people write them, and that DeepSpeed itself agrees on what it refuses."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.errors import ZplanError
from zplan.planner.lint import Subject, check_document
from zplan.planner.lint_report import lint_json, lint_text
from zplan.planner.lint_subject import BATCH_NORM, make_subject
from zplan.planner.relaxed import Document, read_document

E8 = 100_000_000.0
MICRO = {"train_micro_batch_size_per_gpu": 1}


def check(config, **subject):
    return check_document(Document(config, "json"), "ds.json", Subject(**subject))


def errors(report):
    return sorted(f.rule for f in report.findings if f.severity == "error")


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
AUTO_SIZES = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
BOTH_AUTO = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
NO_OFFLOAD = {"device": "none", "pin_memory": True}
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}

# name -> config, errors in full, and warnings or notes that must be there
FILES = {
    "deprecated offload": (
        {"train_batch_size": 96, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}}
        | zero(2, cpu_offload=True, contiguous_gradients=True, overlap_comm=False),
        [],
        {"deprecated-key"},
    ),
    "apex block that is off": ({**MICRO, "amp": {"enabled": False}}, ["removed-key"], set()),
    "trainer, stage 2": (
        {**TRAINER, **BOTH_AUTO, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
        | zero(2, offload_optimizer=NO_OFFLOAD, allgather_bucket_size=2 * E8, overlap_comm=True),
        [],
        {"no-effect", "log-warmup"},
    ),
    "trainer, stage 3": (
        {**TRAINER, **BOTH_AUTO} | zero(3, **AUTO_SIZES, sub_group_size=10 * E8, stage3_max_live_parameters=10 * E8),
        [],
        set(),
    ),
    "power 32": ({**TRAINER, "fp16": {"enabled": "auto", "initial_scale_power": 32}}, [], {"initial-scale-power"}),
    "names without prefix": (
        {**TRAINER, **BOTH_AUTO}
        | zero(
            3, sub_group_size=0, max_live_parameters=0, max_reuse_distance=0, gather_16bit_weights_on_model_save=True
        ),
        [],
        {"no-reuse", "sub-group-size"},
    ),
    "quoted booleans": (
        zero(2, overlap_comm="true", contiguous_gradients="true", reduce_scatter="true", reduce_bucket_size=2 * E8),
        ["string-boolean"] * 3,
        {"no-batch-size"},
    ),
    "unknown key": (
        {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 32, "fp16": {"enabled": True}}
        | zero(1, grad_hooks=True),
        ["unknown-key"],
        set(),
    ),
    "block of a removed feature": ({**MICRO, "sparse_attention": {"mode": "fixed"}}, ["removed-key"], set()),
    "misspelt NVMe keys": (
        {**MICRO, "fp16": {"enabled": True, "loss_scale": 1024}, "activation_checkpointing": {"profile": True}}
        | zero(
            3,
            stage3_param_persitence_threshold=E8,
            offload_optimizer={**NVME, "buffer_size": 10 * E8},
            offload_param={**NVME, "buffer_count": 5, "buffer_size": 10 * E8, "max_in_nvme": 10 * E8},
        ),
        ["unknown-key"] * 3,
        {"static-loss-scale", "pinned-buffers", "activation-checkpointing-inert"},
    ),
    "formulas as strings": (
        {**MICRO, "fp16": {"enabled": False}, "bf16": {"enabled": False}}
        | zero(3, stage3_prefetch_bucket_size="0.1*h*h", stage3_param_persistence_threshold="10*h"),
        ["string-number"] * 2,
        {"fp32"},
    ),
    "full offload with stage-2 keys": (
        {**MICRO, "fp16": {"enabled": True}, "activation_checkpointing": {"partition_activations": True}}
        | zero(3, offload_optimizer=CPU, offload_param=CPU, allgather_bucket_size=2 * E8, allgather_partitions=True),
        [],
        {"activation-checkpointing-inert", "no-effect-at-stage"},
    ),
    "quoted precisions": (
        {**TRAINER, "bf16": {"enabled": "true"}, "fp16": {"enabled": "false"}} | zero(3),
        ["string-boolean"] * 2,
        {"both-precisions"},
    ),
    "torch Adam with offload": (
        {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
        | zero(3, offload_optimizer=CPU, offload_param=CPU),
        [],
        {"torch-adam-offload", "no-batch-size"},
    ),
    "blank in a key": (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "autotuning": {"arg_mappings": {"gradient_accumulation_steps ": "--x"}},
        },
        [],
        {"key-whitespace"},
    ),
    "tiny buckets": (
        {"pipe_parallel_size": 0, "optimizer": {"type": "CPU_Adam"}}
        | zero(3, allgather_bucket_size=50_000, reduce_bucket_size=50_000, offload_optimizer=CPU),
        [],
        {"bucket-too-small", "no-effect-at-stage", "foreign-key"},
    ),
    "every option of the manual": (
        {"fp16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False}
        | zero(
            3,
            allgather_bucket_size=5 * E8,
            round_robin_gradients=True,
            elastic_checkpoint=True,
            stage3_prefetch_bucket_size=5 * E8,
            sub_group_size=1e12,
        ),
        [],
        {"no-effect-at-stage", "bucket-too-large", "sub-group-size"},
    ),
    "number as text": ({"deepspeed": zero(3, reduce_bucket_size="5e8")}, ["string-number"], set()),
    "small buckets, all offloaded": (
        zero(3, stage3_prefetch_bucket_size=1e7, reduce_bucket_size=1e7, offload_optimizer=CPU, offload_param=CPU),
        [],
        {"no-batch-size"},
    ),
    "NVMe without a folder": (
        zero(3, offload_param={"device": "nvme", "buffer_count": 5, "buffer_size": E8}),
        [],
        {"nvme-path", "pinned-buffers", "buffer-smaller-than-tensor"},
    ),
    # the two articles' fragments
    "F1": (
        {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": False}},
        [],
        {"adam-means-adamw", "fp32"},
    ),
    "F2": ({"train_batch_size": 128, "micro_batch_size": 8, "gradient_accumulation_steps": 4}, ["ignored-key"], set()),
    "F3": (
        {"train_batch_size": 64, "gradient_accumulation_steps": 2, "fp16": {"enabled": True, "loss_scale": 0}}
        | {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "total_num_steps": 10000}}}
        | zero(2, reduce_bucket_size=5 * E8, overlap_comm=True),
        [],
        {"log-warmup"},
    ),
    "F4": (zero(3, stage3_prefetch_bucket_size=5e7, stage3_max_live_parameters=1e9), [], {"no-batch-size"}),
    "F5": (
        zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/path/to/nvme", "buffer_size": E8}),
        ["unknown-key"],
        {"nvme-path"},
    ),
    "F6": (
        {**MICRO, "bf16": {"enabled": True}} | zero(2, overlap_comm=True, reduce_bucket_size=5e5),
        [],
        {"bucket-too-small"},
    ),
    "F7": (zero(1, reduce_bucket_size=2e5), [], {"bucket-too-small", "no-batch-size"}),
    "F8": (
        zero(2, contiguous_gradients=False, reduce_bucket_size=1e5, sub_group_size=5e5),
        [],
        {"bucket-too-small", "no-effect-at-stage"},
    ),
    "F9": (
        zero(3, offload_optimizer={**CPU, "pin_memory": True}, stage3_max_live_parameters=1e9),
        [],
        {"no-batch-size"},
    ),
    "F10": (
        {"bf16": {"enabled": True}} | zero(3, stage3_gather_16bit_weights_on_model_save=False),
        [],
        {"no-batch-size", "gather-off"},
    ),
    "F11": ({**MICRO, "gradient_accumulation_steps": 8}, [], set()),
    "F12": ({"gradient_clipping": 1.0, "communication_data_type": "fp32"}, [], {"no-batch-size"}),
    # further reports
    "micro-batch at the top of the zero block": ({**MICRO, "reduce_bucket_size": 1e8}, ["ignored-key"], set()),
    "both precisions": ({**MICRO, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both-precisions"], set()),
    "fractional prefetch": ({**MICRO} | zero(3, stage3_prefetch_bucket_size=15099494.4), ["fractional-number"], set()),
    "offload below its stage": ({**MICRO} | zero(2, offload_param=CPU), [], {"offload-param-below-stage-3"}),
    "zero bucket": ({**MICRO} | zero(2, reduce_bucket_size=0), ["out-of-range"], set()),
    "stage 4": ({**MICRO} | zero(4), ["out-of-range"], set()),
    "clipping in the optimizer": (
        {**MICRO, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        ["max-grad-norm"],
        set(),
    ),
    "unknown optimizer": ({**MICRO, "optimizer": {"type": "AdamW8bit"}}, ["optimizer-type"], set()),
    "schedule without its length": (
        {**MICRO, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_step": 5}}},
        ["scheduler-params", "scheduler-params"],
        set(),
    ),
    "partial offload at stage 2": (
        {**MICRO} | zero(2, offload_optimizer={**CPU, "ratio": 0.5}),
        ["offload-ratio"],
        set(),
    ),
    "nobody fills it in": ({**TRAINER} | zero(2, sub_group_size="auto"), [], {"auto-unresolved"}),
    "zero as a switch": ({**MICRO, "zero_optimization": True}, [], {"deprecated-key"}),
}


@pytest.mark.parametrize("name", FILES)
def test_configs_as_people_write_them(name):
    config, wrong, said = FILES[name]
    config = json.loads(json.dumps(config))
    report = check_document(read_document(json.dumps(config, indent=2), "ds.json"), "ds.json", Subject())
    assert errors(report) == wrong
    assert said <= report.rules
    assert lint_text(report).splitlines()[-1].startswith("not fit for use" if wrong else "valid")
    assert all(f.place for f in report.findings if f.key and not f.rule.startswith("scheduler-p")), (
        "a finding has no line"
    )


@pytest.mark.witness
@pytest.mark.parametrize("name", FILES)
def test_deepspeed_itself_refuses_what_is_marked_so(name, monkeypatch):
    """Witness: DeepSpeed's own config class on one rank."""
    pytest.importorskip("deepspeed", reason="needs the witness extra: deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = FILES[name][0]
    config = json.loads(json.dumps(config.get("deepspeed", config)))
    report = check(config, gpus=1, consumer="deepspeed")
    try:
        DeepSpeedConfig(config)
        refused = False
    except Exception:  # noqa: BLE001 - pydantic's, assertions and type errors all mean no
        refused = True
    assert any(f.refused for f in report.findings) is refused, [f.rule for f in report.findings if f.refused]


@pytest.mark.parametrize(
    ("config", "gpus", "wrong", "words"),
    [
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, 7, True, ("252 or 266", "8 GPUs")),
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, 8, False, ()),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
            1,
            True,
            ("32", "2 GPUs", "DeepSpeed saw 1 rank"),
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            1,
            True,
            ("4 GPUs", "DeepSpeed saw 1 rank"),
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, 4, False, ()),
        ({"train_batch_size": 64}, 6, True, ("60 or 66",)),
        ({"train_batch_size": 64}, 8, False, ()),
        ({"train_batch_size": 1}, 4, True, ("use 4",)),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, None, True, ("28 or 32",)),
        ({"train_batch_size": 28, "train_micro_batch_size_per_gpu": 4}, None, False, ()),
    ],
)
def test_batch_triples(config, gpus, wrong, words):
    report = check(config, gpus=gpus)
    assert ("batch-triple" in report.rules) is wrong
    fix = next((f.fix for f in report.findings if f.rule == "batch-triple"), "")
    assert all(word in fix for word in words), fix


def cost(report, name):
    return next(c.nbytes for c in report.costs if c.name == name)


def test_bytes_of_buckets_and_gathered_parameters():
    half = {"fp16": {"enabled": True}}
    assert cost(check({**half} | zero(2, reduce_bucket_size=5e8, overlap_comm=True)), "reduce buckets") == 2 * 10**9
    assert cost(check({**half} | zero(2, reduce_bucket_size=5e8)), "reduce bucket") == 10**9
    assert cost(check({**half} | zero(3)), "reduce bucket") == 10**9
    assert cost(check({**half} | zero(2, reduce_bucket_size=5e9)), "reduce bucket") == 10 * 10**9
    assert cost(check({**half, "communication_data_type": "fp32"} | zero(3)), "reduce bucket") == 2 * 10**9
    assert not check({**half} | zero(2, contiguous_gradients=False)).costs
    r = check(zero(3, stage3_prefetch_bucket_size=5e8))
    assert cost(r, "gathered parameters") == 2 * 10**9 and cost(r, "of these prefetched") == 10**9
    nvme = zero(3, offload_param={**NVME, "buffer_count": 6, "buffer_size": 6e8})
    assert cost(check({**MICRO, "bf16": {"enabled": False}} | nvme), "NVMe buffers, pinned") == 14_400_000_000
    assert cost(check(zero(3, offload_param={**NVME, "buffer_size": 1e8})), "NVMe buffers, pinned") == 10**9


def test_states_on_the_card_and_on_the_host():
    p = 46_702_792_704
    r = check(zero(2), num_params=p, gpus=8, mem_bytes=80 * 10**9)
    assert round(cost(r, "model states") / 10**9) == 175 and "states-do-not-fit" in errors(r)
    full = zero(3, offload_optimizer=CPU, offload_param=CPU)
    r = check(full, num_params=6_173_000_000, gpus=7, mem_bytes=16 * 2**30, host_mem_bytes=512 * 10**9)
    assert cost(r, "offloaded states") == 18 * 6_173_000_000 and not errors(r)
    assert "16 bytes a parameter in host memory" in check(zero(3, offload_optimizer=CPU)).headline
    r = check(zero(3), num_params=8_030_261_248, trainable=20_000_000, gpus=3, mem_bytes=40 * 2**30)
    assert "stage-3-where-lower-fits" in r.rules
    assert "stage-3-where-lower-fits" not in check(zero(3), num_params=7 * 10**9, gpus=8, mem_bytes=24 * 2**30).rules


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        (3, {"optimizer": "nvme", "param": "nvme"}, {"NVMe": 18}),
        (3, {"optimizer": "nvme", "param": "cpu"}, {"host": 2, "NVMe": 16}),
        (3, {"optimizer": "nvme"}, {"GPU": 2 / 8, "NVMe": 16}),
        (3, {"param": "nvme"}, {"GPU": 14 / 8, "NVMe": 2}),
        (3, {"param": "cpu"}, {"GPU": 14 / 8, "host": 2}),
        (2, {"optimizer": "nvme"}, {"GPU": 2, "host": 16}),
        (1, {"param": "nvme"}, {"GPU": 4 + 12 / 8}),
    ],
    ids=str,
)
def test_states_lie_in_the_memory_that_the_config_sends_them_to(stage, offload, expected):
    p = 70_000_000_000
    blocks = {f"offload_{what}": {**NVME, "device": device} for what, device in offload.items()}
    r = check({**MICRO, "bf16": {"enabled": True}} | zero(stage, **blocks), num_params=p, gpus=8)
    found = {c.tier: c.nbytes for c in r.costs if c.name in ("model states", "offloaded states")}
    assert found == {tier: rate * p for tier, rate in expected.items()}


def test_the_way_out_counts_what_is_offloaded_already():
    half, card = {**MICRO, "bf16": {"enabled": True}}, {"num_params": 13 * 10**9, "gpus": 8, "mem_bytes": 24 * 2**30}
    r = check(half | zero(2, offload_optimizer=CPU), **card)
    assert [f.fix for f in r.findings if f.rule == "states-do-not-fit"] == ["stage 3 needs 3.25 GB"]
    larger = {**card, "num_params": 405 * 10**9}
    r = check(half | zero(3, offload_optimizer=CPU), **larger)
    fixes = [f.fix for f in r.findings if f.rule == "states-do-not-fit"]
    assert fixes == ["more GPUs, or offload of the parameters"]
    nowhere = zero(3, offload_optimizer=NVME, offload_param=NVME)
    assert "states-do-not-fit" not in errors(check(half | nowhere, **larger))
    adapters = check(half | zero(3, offload_optimizer=CPU, offload_param=CPU), **larger, trainable=10**9)
    assert cost(adapters, "offloaded states") == 2 * 404 * 10**9 + 18 * 10**9, "frozen weights lie with the others"


def test_frozen_and_narrow_states_at_their_own_size():
    """fp32 weights that nobody trains are 4 bytes each; bf16 masters and moments make 16 bytes of a parameter 10."""
    p = 12_900_000_000
    frozen = {"num_params": p, "trainable": 0, "gpus": 2}
    assert cost(check({**MICRO} | zero(3), **frozen), "model states") == 4 * p // 2
    assert cost(check({**MICRO} | zero(2), **frozen), "model states") == 4 * p
    assert cost(check({**MICRO, "bf16": {"enabled": True}} | zero(3), **frozen), "model states") == 2 * p // 2
    masters = {"enabled": True, "bf16_master_weights_and_grads": True}
    for states, offloaded, rate in ((False, 12, 14), (True, 8, 10)):
        config = {**MICRO, "bf16": {**masters, "bf16_optimizer_states": states}}
        for stage in (0, 1, 2, 3):
            whole = {0: rate, 1: 4, 2: 2, 3: 0}[stage]
            found = cost(check({**config} | zero(stage), num_params=p, gpus=8), "model states")
            assert found == p * whole + p * (rate - whole) // 8
        r = check({**config} | zero(3, offload_optimizer=CPU), num_params=p, gpus=8)
        assert cost(r, "offloaded states") == offloaded * p, "masters, moments and gradients of 2 bytes"


@pytest.mark.parametrize(
    ("stage", "gpus", "host", "severity"),
    [(3, 8, None, "note"), (3, 8, 600, "note"), (3, 8, 256, "warning"), (3, 1, 256, None), (2, 8, 256, None)],
)
def test_a_model_that_is_loaded_before_the_config_is_whole_on_every_rank(stage, gpus, host, severity):
    r = check(zero(stage), num_params=15_517_480_960, gpus=gpus, host_mem_bytes=host and host * 10**9)
    found = [f for f in r.findings if f.rule == "no-zero-init"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if found:
        assert found[0].nbytes == 8 * 4 * 15_517_480_960
        assert "31.03 GB on each GPU" in found[0].message and "496.56 GB" in found[0].message
        assert ("more than 256.0 GB" in found[0].message) == (severity == "warning")


def test_saving_and_buffers_against_the_model():
    save = zero(3, stage3_gather_16bit_weights_on_model_save=True)
    r = check(save, num_params=9_400_000_000, mem_bytes=16 * 10**9)
    found = next(f for f in r.findings if f.rule == "gather-on-save")
    assert (found.severity, found.nbytes) == ("note", 18_800_000_000) and "runs out of memory there" in found.message
    r = check(save, num_params=9_400_000_000, mem_bytes=16 * 10**9, host_mem_bytes=16 * 10**9)
    assert next(f.severity for f in r.findings if f.rule == "gather-on-save") == "warning"
    small = zero(3, offload_param={**NVME, "buffer_size": E8})
    assert "buffer-smaller-than-tensor" in errors(check(small, largest_tensor=524_709_888))
    assert "buffer-smaller-than-tensor" not in check(small, largest_tensor=10**8).rules


def test_auto_is_resolved_from_the_width_of_the_model():
    config = {**TRAINER} | zero(3, **AUTO_SIZES)
    values = {
        h: {k.split(".")[-1]: v for k, v, _ in check(config, hidden=h).resolved} for h in (4096, 3584, 3072, 2048)
    }
    prefetch = [values[h]["stage3_prefetch_bucket_size"] for h in values]
    assert prefetch == ["15,099,494", "11,560,550", "8,493,465", "3,774,873"]
    assert (values[4096]["reduce_bucket_size"], values[4096]["stage3_param_persistence_threshold"]) == (
        "16,777,216",
        "40,960",
    )
    assert {v for _, v, _ in check(config).resolved} == {"?"}
    r = check({**TRAINER, "gradient_accumulation_steps": 4}, micro_batch=2, gpus=8)
    assert {k: v for k, v, _ in r.resolved}["train_batch_size"] == "64"


@pytest.mark.parametrize(
    ("config", "subject", "rule", "wanted"),
    [
        ({**TRAINER}, {"consumer": "deepspeed"}, "auto-unresolved", True),
        ({**TRAINER}, {"consumer": "hf"}, "auto-unresolved", False),
        (zero(2, reduce_bucket_size="auto"), {"consumer": "hf"}, "auto-unresolved", False),
        (zero(2, reduce_bucket_size="auto"), {"consumer": "deepspeed"}, "auto-unresolved", True),
        (zero(3, zero_hpz_partition_size=1), {"release": (0, 9, 5)}, "unknown-key", True),
        (zero(3, zero_hpz_partition_size=1), {}, "unknown-key", False),
        ({**MICRO}, {"micro_batch": 8}, "launcher-mismatch", True),
        ({**MICRO}, {"micro_batch": 1}, "launcher-mismatch", False),
        ({"gradient_accumulation_steps": 4}, {"consumer": "lightning"}, "owned-by-launcher", True),
        ({"gradient_accumulation_steps": 4}, {"consumer": "hf"}, "owned-by-launcher", False),
        ({"train_batch_size": 64}, {"was_batch": 16}, "batch-changed", True),
        ({"train_batch_size": 64}, {"was_batch": 64}, "batch-changed", False),
        ({"train_batch_size": 64}, {"was_gpus": 4, "gpus": 8}, "resume-world-size", True),
        ({"train_batch_size": 64}, {"was_gpus": 8, "gpus": 8}, "resume-world-size", False),
        ({**MICRO}, {"environment": {"NCCL_TIMEOUT": "1"}}, "inert-variable", True),
        ({**MICRO}, {"environment": {"NCCL_DEBUG": "INFO"}}, "inert-variable", False),
        (zero(3), {"experts": 60, "model_type": "qwen2_moe"}, "moe-leaf-modules", True),
        (zero(3, leaf_module={"names": ["x"]}), {"experts": 60}, "moe-leaf-modules", False),
        (zero(2), {"experts": 60}, "moe-leaf-modules", False),
        ({"fp16": {"enabled": True}}, {"dtype": "bfloat16"}, "fp16-on-bf16-model", True),
        ({"bf16": {"enabled": True}}, {"dtype": "bfloat16"}, "fp16-on-bf16-model", False),
    ],
)
def test_rules_that_need_more_than_the_file(config, subject, rule, wanted):
    assert (rule in check(config, **subject).rules) is wanted


BF16, ACCUMULATE = {"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}
FULL_SHARD = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_cpu_ram_efficient_loading": True}
LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}


def fsdp(**more):
    return {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {**FULL_SHARD, **more}}


@pytest.mark.parametrize(("bucket", "errors_"), [(2e8, ["states-do-not-fit"]), (1e8, [])])
def test_states_that_fit_alone_and_not_beside_their_buckets(bucket, errors_):
    """25.27 GB of 25.77: two buckets of 400 MB are too much, two of 200 are not."""
    config = {**MICRO, **BF16} | zero(2, reduce_bucket_size=bucket, overlap_comm=True)
    r = check(config, num_params=6_738_415_616, gpus=8, mem_bytes=24 * 2**30)
    assert errors(r) == errors_
    told = [f.nbytes for f in r.findings if f.rule == "states-do-not-fit"]
    assert told == [cost(r, "model states") + cost(r, "reduce buckets")][: len(errors_)]


def test_the_way_out_of_fsdp_is_fsdps():
    r = check(fsdp(), num_params=70 * 10**9, gpus=8, mem_bytes=80 * 2**30)
    fixes = [f.fix for f in r.findings if f.rule == "states-do-not-fit"]
    assert fixes == ["more GPUs, or `fsdp_offload_params: true`"], "no ZeRO stages"


def test_offloaded_states_of_fsdp_are_those_of_a_node():
    half = fsdp(fsdp_offload_params=True)
    (states,) = check(half, num_params=7 * 10**9, gpus=16, nodes=2).costs
    assert (states.tier, states.nbytes) == ("host", 16 * 7 * 10**9 * 8 // 16)
    assert states.formula == "16 B x 7,000,000,000 trained of 7,000,000,000 / 16 x 8 ranks of a node"


@pytest.mark.parametrize(
    ("config", "rule", "severity"),
    [
        ({**MICRO, **BF16, **ACCUMULATE}, "fp32-accumulation-at-stage-0", "error"),
        ({**MICRO, **BF16, **ACCUMULATE, **zero(1)}, "fp32-accumulation-at-stage-0", None),
        ({**MICRO, **ACCUMULATE}, "fp32-accumulation-at-stage-0", None),
        ({**MICRO, **BF16}, "clipping-default", "note"),
        ({**MICRO, **BF16, "gradient_clipping": 0.0}, "clipping-default", None),
        ({**MICRO, "scheduler": {"type": "WarmupCosine"}}, "scheduler-type", "error"),
        ({**MICRO, "scheduler": {"type": "WarmupCosineLR", "params": {}}}, "scheduler-type", None),
        ({**fsdp(), "deepspeed_config": {"zero_stage": 2}}, "two-engines", "error"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, "two-engines", None),
        (fsdp(fsdp_sync_module_states=False), "fsdp-sync", "error"),
        (fsdp(fsdp_sync_module_states=True), "fsdp-sync", None),
        (fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"), "fsdp-wrap", "note"),
        (fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", **LAYERS), "fsdp-wrap", None),
        (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), "fsdp-wrap", None),
    ],
)
def test_rules_speak_where_they_apply_and_nowhere_else(config, rule, severity):
    assert [f.severity for f in check(config).findings if f.rule == rule] == ([severity] if severity else [])


def test_every_rule_that_is_documented_has_a_test():
    root = Path(__file__).parent.parent
    text = (root / "docs" / "check.md").read_text(encoding="utf-8")
    rules = re.findall(r"`([a-z0-9-]+)`", text.partition("## Rules")[2].partition("\n## ")[0])
    tests = [*Path(__file__).parent.glob("test_*.py"), Path(__file__).parent / "golden" / "config_cases.json"]
    tested = "\n".join(p.read_text(encoding="utf-8") for p in tests)
    code = "\n".join(p.read_text(encoding="utf-8") for p in (root / "planner").glob("lint*.py"))
    assert len(rules) > 60 and [r for r in rules if f'"{r}"' not in tested or f'"{r}"' not in code] == []


def test_batch_norm_in_half_precision(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet", "hidden_sizes": [64]}), encoding="utf-8")
    s = make_subject({"model": str(tmp_path)}, {})
    found = check_document(Document({"fp16": {"enabled": True}}, "json"), "x", s).findings
    assert "DeepSpeed casts their running statistics to fp16" in next(
        f.message for f in found if f.rule == "batch-norm-in-half"
    )
    assert "batch-norm-in-half" not in check_document(Document({**MICRO}, "json"), "x", s).rules, "fp32 keeps them"


@pytest.mark.parametrize("kind", sorted(BATCH_NORM))
def test_transformers_has_batch_norm_there(kind):
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: transformers")
    folder = Path(transformers.__file__).parent / "models" / kind
    if not folder.exists():
        pytest.skip(f"this transformers has no {kind}")
    assert any("BatchNorm" in f.read_text(encoding="utf-8") for f in folder.glob("modeling_*.py"))


def test_both_scalings_of_the_learning_rate_are_shown():
    fix = next(f.fix for f in check({"train_batch_size": 64}, was_batch=16).findings if f.rule == "batch-changed")
    assert "x 2 (square root)" in fix and "x 4 (linear)" in fix


def test_skipped_steps_of_a_large_power():
    message = next(
        f.message
        for f in check({"fp16": {"enabled": True, "initial_scale_power": 32}}).findings
        if f.rule == "initial-scale-power"
    )
    assert "about 17 steps" in message


LOOSE = """{
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu",
    }
    "overlap_comm": true  # as in the tutorial
  }
}
"""


def test_hjson_is_read_and_every_departure_has_its_line():
    report = check_document(read_document(LOOSE, "x.json"), "x.json", Subject())
    at = [f.place[0] for f in report.findings if f.rule == "json-syntax"]
    assert at == [5, 6, 7] and errors(report) == ["json-syntax"] * 3
    alone = check_document(read_document(LOOSE, "x.json"), "x.json", Subject(consumer="deepspeed"))
    assert "json-syntax" not in errors(alone)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', "ends inside an object (line 1, column 8)"),
        ('{\n  "a" 1}', "colon is missing after `a` (line 2, column 7)"),
        ('{"a": "x\n"}', "string is not closed on its line (line 1, column 7)"),
        ('{"a": }', "a value is missing (line 1, column 7)"),
        ('{"a": 1} {', "more text after the end of the object (line 1, column 10)"),
        ("[1]", "a list where an object is needed"),
        ("   ", "is empty"),
        ('{"a": ' * 80, "nests too deeply"),
    ],
)
def test_broken_files_say_where(text, message):
    with pytest.raises(ZplanError) as caught:
        read_document(text, "x.json")
    assert message in caught.value.message


def test_duplicate_keys_are_an_error():
    report = check_document(read_document('{"train_batch_size": 1, "train_batch_size": 2}', "x"), "x", Subject())
    assert errors(report) == ["duplicate-key"]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 10**10)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=4), st.sampled_from([None, 2]))
def test_strict_json_is_read_as_the_standard_library_reads_it(config, indent):
    text = json.dumps(config, indent=indent)
    document = read_document(text, "x")
    assert document.value == config and document.syntax == "json"


@given(st.text(alphabet="{}[]:,\" \n#/'ab1.e-tru\\", max_size=40))
def test_any_text_is_read_or_refused_in_one_sentence(text):
    try:
        read_document("{" + text, "x")
    except ZplanError as e:
        assert "\n" not in e.message or "\n" in text


def _everything():
    from zplan.planner.dsschema import OFFLOAD_PARAM, TOP, ZERO

    odd = st.sampled_from([None, True, "auto", "true", "5e8", 0, -1, 1, 3, 1.5, 2e8, 1e30, "cpu", "nvme", {}, [], [1]])
    blocks = {
        "zero_optimization": st.dictionaries(st.sampled_from(sorted(ZERO)), odd, max_size=6),
        "offload_param": st.dictionaries(st.sampled_from(sorted(OFFLOAD_PARAM)), odd, max_size=4),
        "optimizer": st.fixed_dictionaries({}, optional={"type": odd, "params": odd}),
        "scheduler": st.fixed_dictionaries({}, optional={"type": odd, "params": odd}),
    }
    top = st.dictionaries(
        st.sampled_from([*TOP, "distributed_type", "fsdp_config", "deepspeed_config"]), odd, max_size=5
    )
    return st.tuples(top, st.fixed_dictionaries({}, optional=blocks)).map(_nest)


def _nest(pair):
    top, blocks = pair
    config = json.loads(json.dumps({**top, **blocks}))  # sampled objects are shared, and would end up inside themselves
    param = config.pop("offload_param", None)
    if param is not None and isinstance(config.get("zero_optimization"), dict):
        config["zero_optimization"]["offload_param"] = param
    return config


@settings(max_examples=200)
@given(_everything(), st.sampled_from([None, 1, 7]), st.sampled_from(["any", "hf", "deepspeed"]))
def test_no_config_causes_a_traceback(config, gpus, consumer):
    subject = Subject(
        consumer=consumer, gpus=gpus, num_params=10**9, hidden=2048, mem_bytes=2**34, host_mem_bytes=2**37
    )
    report = check_document(Document(config, "json"), "x", subject)
    assert json.loads(lint_json(report))["valid"] is not bool(errors(report))
    assert lint_text(report).splitlines()[-1].startswith("not fit" if errors(report) else "valid")


ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("config", "wrong", "said"),
    [
        (
            {**ACCELERATE, "num_processes": 4, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            [],
            {"accumulation-elsewhere"},
        ),
        (
            {**ACCELERATE, "num_processes": 8, "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4}},
            [],
            {"accumulation-elsewhere"},
        ),
        ({**ACCELERATE, "num_process": 4}, ["unknown-key"], set()),
        ({**ACCELERATE, "deepspeed_config": {"zero_stages": 3}}, ["ignored-key"], set()),
        (
            {**ACCELERATE, "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}},
            [],
            {"offload-param-below-stage-3"},
        ),
        (
            {**ACCELERATE, "deepspeed_config": {"deepspeed_config_file": "x", "zero_stage": 2}},
            ["launcher-mismatch"],
            set(),
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, [], {"fsdp-dtype"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHAR"}},
            ["fsdp-strategy"],
            set(),
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}},
            [],
            {"no-effect"},
        ),
        ({"num_processes": 8}, ["distributed-type"], set()),
        ({**ACCELERATE, "num_processes": 7, "num_machines": 2}, ["out-of-range"], set()),
    ],
)
def test_accelerate_and_fsdp(config, wrong, said):
    report = check(config)
    assert errors(report) == wrong and said <= report.rules


def test_yaml_reads_a_power_of_ten_as_text():
    pytest.importorskip("yaml", reason="needs PyYAML")
    from zplan.yaml_reading import read_yaml

    document = read_yaml("zero_optimization:\n  stage: 3\n  reduce_bucket_size: 5e8\n", "x.yaml")
    found = [f for f in check_document(document, "x.yaml", Subject()).findings if f.rule == "string-number"]
    assert [f.place for f in found] == [(3, 3)] and "YAML 1.1" in found[0].message
    with pytest.raises(ZplanError, match="line 2"):
        read_yaml("a: 1\n b: 2\n", "x.yaml")


def test_models_that_cannot_be_planned_are_known_to_the_linter():
    s = make_subject({"model": "mixtral-8x7b", "gpus": 8, "mem": "80"}, {})
    assert (s.experts, s.num_params, s.hidden, s.largest_tensor) == (8, 46_702_792_704, 4096, 131_072_000)
    with pytest.raises(ZplanError, match="did you mean `deepspeed`"):
        make_subject({"consumer": "depspeed"})
    with pytest.raises(ZplanError, match="no release"):
        make_subject({"deepspeed": "new"})


def test_the_command(tmp_path, capsys):
    from zplan.cli import main

    file = tmp_path / "ds.json"
    for text, code in (('{"train_batch_size": 8}', 0), ('{"train_batch_sizes": 8}', 1), ("{", 2)):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as stopped:
            main(["check", str(file)])
        assert stopped.value.code == code
    out = capsys.readouterr().out
    assert "did you mean `train_batch_size`?" in out and out.count("valid") == 1
    file.write_text(json.dumps(zero(3)), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["check", str(file), "--json", "--params", "7e9", "--gpus", "8", "--mem", "8"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False and any(c["nbytes"] == 14 * 10**9 for c in answer["costs"])


def test_plans_read_what_deepspeed_reads(tmp_path, capsys):
    """`--config` takes Hjson too, and says so; a key given twice has no meaning."""
    import zplan
    from zplan.planner.plan_file import load_config

    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2,},  // as in a tutorial\n train_batch_size: 2}', encoding="utf-8"
    )
    plan = zplan.plan("smollm2-135m", gpus=2, mem=8, seq=64, config=file)
    assert plan.choice.stage == 2 and any("read as Hjson" in note for note in plan.notes)
    assert load_config(file) == {"zero_optimization": {"stage": 2}, "train_batch_size": 2}
    file.write_text('{"a": 1, "a": 2}', encoding="utf-8")
    with pytest.raises(ZplanError, match="given twice in one object .line 1, column 10."):
        load_config(file)


def test_the_documents_name_every_rule():
    root = Path(__file__).parent.parent
    source = " ".join(f.read_text(encoding="utf-8") for f in (root / "planner").glob("lint*.py"))
    rules = set(re.findall(r'(?:find|Finding)\(\s*"([a-z0-9-]+)"', source))
    text = (root / "docs" / "check.md").read_text(encoding="utf-8")
    table = text[text.index("## Rules") : text.index("## From")]
    assert rules == set(re.findall(r"`([a-z0-9-]+)`", table))
