"""What the same articles say about speed, batches, settings and saving, put to zplan. See `claims_memory.py`."""

import json
import math
import tempfile
from pathlib import Path

from claims_memory import HALF, Said, check, config, cost, gb

import zplan
from zplan.cli_run import run
from zplan.planner.autofill import auto_size
from zplan.planner.batch import KEYS, solve_batch
from zplan.planner.dsconfig import from_mapping
from zplan.planner.ladder import climb
from zplan.planner.lint import Subject, deepspeed_view
from zplan.planner.loss_scale import LossScale
from zplan.planner.need import Setup
from zplan.planner.oom_log import read_messages
from zplan.planner.presets import read_preset
from zplan.planner.questions import ask
from zplan.planner.relaxed import Document
from zplan.planner.request import make_request
from zplan.planner.schedules import read_schedule
from zplan.planner.sources import model_from

NVLINK, PCIE = "A100 SXM 80GB", "A100 PCIe 80GB"
SMALLEST_FP16 = 2.0**-24


def traffic(stage):
    """Bytes that a rank of DeepSpeed sends in one step of 7B over 8, without accumulation."""
    e = zplan.estimate("llama-2-7b", gpus=8, mem=1000, seq=128, stage=stage, runtime="deepspeed")
    return e.traffic[e.rows.index(e.row)].total_bytes


def seconds(model="llama-2-7b", **more):
    """A step's time of one choice."""
    more = {"gpus": 8, "gpu": NVLINK, "stage": 3, "micro_batch": 1, "checkpointing": "full", **more}
    return next(t.time for t in zplan.estimate(model, **more).timings if t.choice.stage == more["stage"])


def batch(train, micro, accumulation, gpus):
    return solve_batch(train=train, micro=micro, accumulation=accumulation, world_size=gpus, names=KEYS)


def equal_traffic():
    e = zplan.estimate("llama-2-7b", gpus=8, mem=1000, seq=128)
    _, one, two, three = e.textbook_traffic()
    four = zplan.estimate("llama-2-7b", gpus=8, mem=1000, seq=128, accumulation=4).textbook_traffic()
    theirs = traffic(3) / traffic(2)
    number = (
        f"stage 3 / stage 2: {three / two:.2f} at k = 1, {four[3] / four[2]:.2f} at 4; DeepSpeed's own {theirs:.2f}"
    )
    return Said(number, (one, three) == (two, 1.5 * two), math.isclose(four[3], 1.5 * four[2]))


def stage_3_is_slower():
    ratio = {
        gpu: seconds("opt-1.3b", gpus=4, gpu=gpu, seq=1024).total
        / seconds("opt-1.3b", gpus=4, gpu=gpu, seq=1024, stage=2).total
        for gpu in (NVLINK, PCIE)
    }
    number = f"1.3B on 4 x A100: x {ratio[PCIE]:.2f} over PCIe, x {ratio[NVLINK]:.2f} over NVLink"
    return Said(number, ratio[PCIE] > 1.1, ratio[NVLINK] > 1.1)


def product_of_three():
    found = batch(None, 8, 4, 4).train
    return Said(f"8 x 4 x 4 = {found}", found == 128)


def explicit_train_batch():
    alone = {KEYS.micro: config(3), KEYS.train: {"train_batch_size": 8, "zero_optimization": {"stage": 3}}}
    found = [from_mapping(given, world_size=8).train_batch_size for given in alone.values()]
    return Said(f"micro-batch 1 alone on 8 GPUs: {found[0]}; {found[1]} alone: accepted", found != [8, 8])


def too_small_a_batch():
    small, large = (batch(train, 2, None, 8).accumulation for train in (16, 128))
    return Said(f"k = {small} for 16, {large} for 128 (micro-batch 2, 8 GPUs)", small > large)


def launcher_initializes():
    words = run.help or ""
    return Said("nothing to count", "SCRIPT that calls zplan.initialize" not in words)


def nvme_costs():
    share = {
        gib: seconds("llama-2-13b", micro_batch=4, accumulation=k).total
        / seconds("llama-2-13b", micro_batch=4, accumulation=k, offload="nvme").total
        for gib, k in ((1, 1), (2048, 2048))
    }
    number = f"13B on 8 x A100: {share[1]:.1%} of the speed at k = 1, {share[2048]:.0%} at k = 2,048"
    return Said(number.replace("%", " %"), share[2048] >= 0.4, share[1] >= 0.4)


def warm_up_counts_steps():
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10_000, "warmup_num_steps": 500}}
    last = read_schedule(block, "x").corners()[-1]
    tokens = 16 * 2048 * last
    e = zplan.estimate("llama-2-7b", gpus=8, gpu=NVLINK, micro_batch=1, accumulation=2, seq=2048, tokens=tokens)
    steps = e.timings[0].cost.steps
    return Said(f"{steps:,} steps = {2 * steps:,} batches at k = 2", steps == last == 10_000)


def dynamic_scale():
    default, low = LossScale(), LossScale(power=12)
    flushed = SMALLEST_FP16 / LossScale(static=128.0).start
    starts = f"starts at {default.start:,.0f}, at power 12 at {low.start:,.0f}"
    number = f"{starts}; a static 128 loses gradients below {flushed:.1e}"
    return Said(number, default.start == 2**16 and not default.static and low.start < default.start)


def batch_norm():
    found = [f for f in check(HALF, model="resnet-50", batch_norm=True).findings if f.rule == "batch-norm-in-half"]
    return Said(f"{len(found)} warning of `zplan check`", bool(found))


def learning_rate():
    report = check({"train_batch_size": 256}, was_batch=64, gpus=8)
    fix = next(f.fix for f in report.findings if f.rule == "batch-changed")
    return Said(
        "64 to 256: " + fix.partition(" keeps")[0].removeprefix("learning rate "), "x 2 " in fix and "x 4 " in fix
    )


def grow_to_oom():
    most = {}
    for margin in (None, "15%"):
        given = {"model": "llama-2-7b", "gpus": 8, "gpu": "A100 SXM 40GB", "stage": 3, "checkpointing": "full"}
        most[margin] = ask(make_request({**given, "margin": margin}), {"max": "micro-batch"}).json()["micro_batch"]
    number = f"7B on 8 x 40 GB: micro-batch {most[None]}, with --margin 15% {most['15%']}"
    return Said(number, most["15%"] < most[None], False)


def checkpointing_costs():
    more = {gpu: seconds(gpu=gpu).total / seconds(gpu=gpu, checkpointing="none").total - 1 for gpu in (NVLINK, PCIE)}
    number = f"7B on 8 x A100: {more[NVLINK]:.0%} over NVLink, {more[PCIE]:.0%} over PCIe, whose gathers hide it"
    return Said(number.replace("%", " %"), 0.2 <= more[NVLINK] <= 1 / 3, more[PCIE] >= 0.2)


def consolidation():
    given = config(3, stage3_gather_16bit_weights_on_model_save=True)
    gathered = cost(given, "gathered model on each save", num_params=7 * 10**9, gpus=8)
    shell = check(config(3, stage3_gather_16bit_weights_on_model_save=False))
    e = zplan.estimate("llama-2-7b", gpus=8, mem=80, stage=3, checkpointing="full")
    export = next(a for a in e.activities if a.name == "export")
    number = f"7B: {gb(gathered)} on rank 0 with DeepSpeed; zplan's export {gb(export.host_bytes)} at a time"
    return Said(number, "gather-off" in shell.rules, False)


def tied_embeddings():
    once = zplan.estimate("gpt2", gpus=8, mem=24, stage=3).model
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({**read_preset("gpt2"), "tie_word_embeddings": False}), encoding="utf-8")
        twice = zplan.estimate(str(file), gpus=8, mem=24, stage=3).model
    tables = [p for u in once.spec.units for p in u.params if once.arch.vocab in p.shape]
    number = f"GPT-2: {once.num_params:,} parameters, {twice.num_params:,} where the tie is missed"
    return Said(number, twice.num_params > once.num_params, len(tables) > 1)


def full_gradients():
    e = [zplan.estimate("llama-2-7b", gpus=8, mem=1000, stage=s, checkpointing="full") for s in (0, 2)]
    whole, shard = (
        sum(x.total_bytes for x in one.lines if x.id.startswith(("grads.full.", "grads.shard."))) for one in e
    )
    return Said(
        f"7B on 8: a rank ends backward with {gb(whole)} at stage 0, {gb(shard)} at stage 2", shard < whole, False
    )


def auto_prefetch():
    size = auto_size("stage3_prefetch_bucket_size", 4096)
    given = config(3, stage3_prefetch_bucket_size="auto")
    rules = {who: "auto-unresolved" in check(given, consumer=who, hidden=4096).rules for who in ("hf", "deepspeed")}
    return Said(f"{size:,} elements for a width of 4,096", not rules["hf"], not rules["deepspeed"])


def gather_keeps_bf16():
    report = check(config(3, stage3_gather_16bit_weights_on_model_save=False), num_params=7 * 10**9, gpus=8)
    on = check(config(3, stage3_gather_16bit_weights_on_model_save=True), num_params=7 * 10**9, gpus=8)
    same = [c for c in on.costs if "save" not in c.name] == [c for c in report.costs if "save" not in c.name]
    return Said("0 B of difference but on saving", not same)


def clipping():
    p = zplan.plan("smollm2-135m", gpus=2, mem=8, seq=256, config={"train_batch_size": 2, "gradient_clipping": 0.5})
    written = p.training.clip
    factor = written / math.nan
    number = f"{written:g} is written as asked; gradients of norm NaN are scaled by {factor:.0f}"
    return Said(number.replace("nan", "NaN"), written == 0.5, math.isfinite(factor))


def fp32_communication():
    more = {}
    for network in (200, 12.5):
        time = {
            dtype: seconds(gpus=16, nodes=2, stage=2, network=network, reduce_dtype=dtype).total
            for dtype in ("fp32", "bf16")
        }
        more[network] = time["fp32"] / time["bf16"] - 1
    number = f"7B on 2 nodes: {more[200]:.0%} at 200 GB/s between them, {more[12.5]:.0%} at 12.5"
    return Said(number.replace("%", " %"), more[200] <= 0.05, more[12.5] <= 0.05)


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.00 GiB is free."
)


def chosen(train, micro, seq):
    """The rungs that `zplan check --oom` takes for 7B at stage 2 on 8 cards of 80 GB, and all in their order."""
    model = model_from("llama-2-7b", None)
    given = {**HALF, "train_batch_size": train, KEYS.micro: micro, "zero_optimization": {"stage": 2}}
    subject = Subject(gpus=8, num_params=model.num_params, hidden=4096)
    setup = Setup(deepspeed_view(Document(given, "json"), subject), model.spec, seq)
    found = climb(setup, read_messages(OOM)[0], 79 * 2**30)
    return [r.name for r in found.chosen], list(dict.fromkeys(r.name for r in found.rungs))


def ladder():
    (short, order), (long, _) = chosen(64, 8, 2048), chosen(8, 1, 8192)
    number = f"{', '.join(order)}; 8 x 2,048 tokens take {' and '.join(short)}, 1 x 8,192 {' and '.join(long)}"
    first = order.index("micro-batch") < order.index("buckets") < order.index("checkpointing") < order.index("offload")
    return Said(number, first and short == ["micro-batch"], long[0] == "micro-batch")


def nccl_variables():
    names = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_TIMEOUT")
    report = check(HALF, environment=dict.fromkeys(names, "1"))
    inert = sum(f.rule == "inert-variable" for f in report.findings)
    return Said(f"{inert} of 2 have no effect", inert < 2)


SETTINGS = {
    **{"A5": equal_traffic, "A7": stage_3_is_slower, "A8": product_of_three, "A9": explicit_train_batch},
    **{"A10": too_small_a_batch, "A13": launcher_initializes, "A17": nvme_costs, "A18": warm_up_counts_steps},
    **{"A19": dynamic_scale, "A20": batch_norm, "A21": learning_rate, "A22": grow_to_oom, "A23": checkpointing_costs},
    **{"A25": consolidation, "A26": tied_embeddings, "A27": full_gradients, "B9": auto_prefetch},
    **{"B10": gather_keeps_bf16, "B11": clipping, "B12": fp32_communication, "B13": ladder, "B14": nccl_variables},
}
