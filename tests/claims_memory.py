"""What two widely read articles say about memory, put to zplan: the number, and whether the claim holds by it.

Each function is one claim of `golden/claims.csv`. `holds` is whether it is so under the condition that the row states,
`otherwise` whether it still is without that condition; None where there is none.
"""

import json
from dataclasses import dataclass

import zplan
from zplan.planner.config import ZeroSizes
from zplan.planner.lint import Subject, check_document
from zplan.planner.optimizers import kind_of
from zplan.planner.relaxed import read_document
from zplan.planner.textbook import TEXTBOOK
from zplan.planner.units import GIB

CARD_24, CARD_80 = 24 * GIB, 80 * GIB
HALF = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


@dataclass(frozen=True)
class Said:
    """zplan's word on a claim."""

    number: str
    holds: bool
    otherwise: bool | None = None

    def __post_init__(self):
        assert not (self.holds and self.otherwise), f"the same with and without its condition: {self.number}"

    @property
    def verdict(self):
        if not self.holds:
            return "false"
        return "true" if self.otherwise is None else "true if"


def gb(nbytes):
    return f"{nbytes / 10**9:,.4g} GB" if nbytes >= 10**8 or not nbytes else f"{nbytes / 10**6:,.3g} MB"


def percent(part, whole):
    return f"{100 * part / whole:.0f} %"


def config(stage, **zero):
    return {**HALF, "zero_optimization": {"stage": stage, **zero}}


def check(given, **subject):
    return check_document(read_document(json.dumps(given), "ds.json"), "ds.json", Subject(**subject))


def cost(given, name, **subject):
    return next(c.nbytes for c in check(given, **subject).costs if c.name == name)


def textbook(params, gpus):
    """Bytes by stage, of the first table of `zplan estimate`."""
    return zplan.estimate(params=params, gpus=gpus, mem=80, seq=128).textbook()


def activations(**more):
    e = zplan.estimate("llama-2-7b", gpus=8, mem=1000, stage=3, micro_batch=1, **more)
    return e.row.kinds["activations"]


def lines(answer, prefix):
    return sum(x.total_bytes for x in answer.lines if x.id.startswith(prefix) and x.tier == "device")


def sixteen_bytes():
    one, seven = textbook(1e9, 1)[0], textbook(7e9, 1)[0]
    return Said(f"{gb(one)}; 7B: {gb(seven)}", (one, seven) == (16 * 10**9, 112 * 10**9))


def activations_double():
    flash, eager = (
        activations(seq=4096, checkpointing="none", attention=how)
        / activations(seq=2048, checkpointing="none", attention=how)
        for how in ("sdpa", "eager")
    )
    return Said(f"7B, 2,048 to 4,096 tokens: x {flash:.2f} (SDPA), x {eager:.2f} (eager)", flash < 2.1, eager < 2.1)


def data_parallel():
    rows = [textbook(7e9, n)[0] for n in (1, 8, 64)]
    return Said(f"7B: {gb(rows[0])} on 1, 8 and 64 GPUs", len(set(rows)) == 1)


def seven_on_eight():
    e = zplan.estimate(params=7e9, gpus=8, mem=24, seq=1024, stage=3, checkpointing="full")
    _, _, two, three = e.textbook()
    peak = e.row.high_bytes
    number = f"{gb(two)} at stage 2, {gb(three)} at stage 3; 1,024 tokens with checkpointing: at most {gb(peak)}"
    return Said(number, e.fits and two > CARD_24 and 9e9 < CARD_24 - three < 12e9)


def rule_of_thumb():
    short = zplan.estimate(params=7e9, gpus=8, mem=24)
    share = short.textbook()[3]
    long = zplan.estimate(params=7e9, gpus=8, mem=24, seq=2 * short.longest_seq)
    roomy = share <= 0.6 * CARD_24
    number = f"7B on 8 x 24: states {percent(share, CARD_24)} of the card; fits up to {short.longest_seq:,} tokens"
    return Said(number, roomy and short.fits, roomy and long.fits)


def batches_add_up():
    one, eight = (
        zplan.estimate("llama-2-7b", gpus=8, mem=1000, stage=2, micro_batch=2, accumulation=k, checkpointing="none")
        for k in (1, 8)
    )
    a, b = (lines(e, "act.") for e in (one, eight))
    kept = [x for x in eight.lines if x.id.startswith("grads.shard.")]
    whole_step = all(span == (0, len(eight.row.ledger.phases) - 1) for x in kept for span in x.spans)
    number = f"7B: activations x {b / a:.2f} at k = 8; only gradients stay, {gb(sum(x.total_bytes for x in kept))}"
    return Said(number, a != b or not whole_step)


def some_of_the_layers():
    e = zplan.estimate("llama-2-7b", gpus=8, mem=80, stage=3, checkpointing="full")
    block = next(u for u in e.model.spec.units if u.kind == "block").numel
    line = next(x for x in e.lines if x.id == "optim.exp_avg.block")
    number = f"Llama 2 7B on 8: {line.nbytes // 4:,} of {block:,} elements of each of {line.instances} blocks"
    return Said(number, not (line.instances == 32 and line.nbytes == block * 4 // 8))


def optimizer_before():
    import torch

    made = torch.optim.AdamW(torch.nn.Linear(64, 64).parameters())
    lazy, kept = len(made.state), kind_of("adamw").nominal
    return Said(f"{lazy} states before its first step, {kept} B a parameter after it", kept > 0, lazy > 0)


def bucket_of_elements():
    found = cost(config(2, reduce_bucket_size=5e9), "reduce bucket")
    return Said(gb(found), found == 10 * 10**9)


def stays_resident():
    small, large = (
        zplan.estimate(
            "llama-2-7b", gpus=8, mem=80, seq=512, checkpointing="full", runtime="deepspeed", config=config(3, **sizes)
        )
        for sizes in (
            {"stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e8},
            {"stage3_param_persistence_threshold": 2e7, "stage3_max_live_parameters": 1e9},
        )
    )
    resident = [lines(e, "params.persistent") for e in (small, large)]
    live = [max(e.row.ledger.per_phase(kind="buffers")) for e in (small, large)]
    number = (
        f"7B: {gb(resident[0])} resident at 1e5, {gb(resident[1])} at 2e7; all buffers {gb(live[0])} to {gb(live[1])}"
    )
    return Said(number, resident[0] < resident[1] and live[0] < live[1])


def fits_on_one():
    small, seven = (zplan.estimate(**m, gpus=8, mem=24, seq=1024) for m in ({"model": "gpt2"}, {"params": 7e9}))
    border = zplan.estimate(params=1e9, gpus=8, mem=24, seq=1024, checkpointing="none")
    words = "One GPU is enough"
    holds = words in small.verdict.text and words not in seven.verdict.text
    alone = [gb(e.single.peak_bytes) for e in (small, border, seven)]
    number = f"one GPU would need {alone[0]} for 124M, {alone[1]} for 1B, {alone[2]} for 7B"
    return Said(number, holds)


def half_against_full():
    peak = {
        (p, micro): zplan.estimate(
            "smollm2-135m", gpus=1, gpu="RTX 3090", stage=0, precision=p, checkpointing="none", micro_batch=micro
        ).peak_bytes
        for p in ("bf16", "fp16", "fp32")
        for micro in (1, 8)
    }
    one, eight, half = (
        1 - peak["bf16", micro] / peak[other, micro] for other, micro in (("fp32", 1), ("fp32", 8), ("fp16", 8))
    )
    number = f"135M: {eight:.0%} less than fp32 at micro-batch 8, {one:.0%} at 1; {abs(half):.0%} less than fp16"
    return Said(number.replace("%", " %"), eight >= 0.3, min(one, half) >= 0.3)


def stage_1_shards_gradients():
    one, two = TEXTBOOK[1].formula(), TEXTBOOK[2].formula()
    return Said(f"stage 1: {one}; stage 2: {two}", TEXTBOOK[1].whole < 4)


def thirteen_on_four():
    _, one, two, three = textbook(13e9, 4)
    return Said(f"{gb(two)} at stage 2, {gb(one)} at stage 1 ({gb(three)} at stage 3)", min(one, two) <= CARD_24)


def seven_on_two():
    found = textbook(7e9, 2)[1]
    return Said(gb(found), found <= CARD_24)


def twenty_on_four():
    plain = textbook(20e9, 4)[3]
    more = {"stage": 3, "seq": 512, "checkpointing": "full", "cross_entropy": "fused"}
    e = zplan.estimate(params=20e9, gpus=4, mem=24, offload="cpu", offload_params="cpu", **more)
    host = next(u.per_node_bytes for u in e.tiers if u.tier == "pinned")
    number = f"{gb(plain)} at stage 3; offloaded {gb(e.row.high_bytes)} a card and {gb(host)} of host memory"
    return Said(number, e.row.fits, plain <= CARD_24)


def default_bucket():
    e = zplan.estimate("llama-2-7b", gpus=8, mem=80, stage=2, seq=128)
    largest = max(p.numel for u in e.model.spec.units for p in u.params)
    default = ZeroSizes().reduce_bucket_size
    tiny = check(config(2, reduce_bucket_size=1e5))
    number = f"{default:,}; the largest gradient of 7B has {largest:,} elements"
    return Said(number, default == 5 * 10**6 or (largest <= 10**5 and "bucket-too-small" not in tiny.rules))


def second_bucket():
    one, two = (
        cost(config(2, overlap_comm=overlap), name)
        for overlap, name in ((False, "reduce bucket"), (True, "reduce buckets"))
    )
    small, large = (textbook(p, 8)[2] for p in (2e9, 7e9))
    number = (
        f"{gb(one)} to {gb(two)}: {percent(two - one, small)} of the states of 2B, {percent(two - one, large)} of 7B"
    )
    return Said(number, (two - one) / small > 0.1, (two - one) / large > 0.1)


def above_twenty_billion():
    wide, narrow = (textbook(20e9, n)[3] for n in (8, 4))
    number = f"20B: {gb(wide)} on 8 GPUs, {gb(narrow)} on 4"
    return Said(number, narrow > CARD_24, wide > CARD_80)


def flash_at_8192():
    peak = {
        (how, c): zplan.estimate(
            "llama-2-7b",
            gpus=8,
            mem=1000,
            stage=3,
            micro_batch=1,
            seq=8192,
            beyond_limit=True,
            checkpointing=c,
            attention=how,
        ).peak_bytes
        for how in ("sdpa", "eager")
        for c in ("full", "none")
    }
    full, none = (1 - peak["sdpa", c] / peak["eager", c] for c in ("full", "none"))
    short = [activations(seq=512, checkpointing="full", attention=how) for how in ("sdpa", "eager")]
    saved = 1 - short[0] / short[1]
    number = f"7B on 8: {full:.0%} less checkpointed, {none:.0%} less without; at 512 tokens {saved:.0%} of activations"
    return Said(number.replace("%", " %"), min(full, none) >= 0.4, saved >= 0.4)


MEMORY = {
    **{"A1": sixteen_bytes, "A2": activations_double, "A3": data_parallel, "A4": seven_on_eight, "A6": rule_of_thumb},
    **{"A11": batches_add_up, "A12": some_of_the_layers, "A14": optimizer_before, "A15": bucket_of_elements},
    **{"A16": stays_resident, "A24": fits_on_one, "B1": half_against_full, "B2": stage_1_shards_gradients},
    **{"B3": thirteen_on_four, "B4": seven_on_two, "B5": twenty_on_four, "B6": default_bucket, "B7": second_bucket},
    **{"B8": above_twenty_billion, "B15": flash_at_8192},
}
