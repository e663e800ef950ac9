"""Where each quantity of a case's `check` stands in zplan's answer: in bytes where its name ends in a unit.

Nothing here knows what the answer should be.
"""

import json

from case_asking import (
    ANY_SIZE,
    BYTES_A_PARAM,
    CONFIGS,
    PURE_BF16,
    Given,
    check,
    cost,
    deepspeed_config,
    estimate,
    line_bytes,
    model,
    num_params,
    plain,
    rate,
    subject,
)

from zplan.planner.batch import KEYS, solve_batch
from zplan.planner.oom_report import diagnose
from zplan.planner.oom_setup import make_setup
from zplan.planner.textbook import textbook_states
from zplan.planner.units import GIB, MIB

UNITS = {"gb": 10**9, "gib": GIB, "mib": MIB, "b": 10**9, "m": 10**6}
"""Last word of a quantity's name -> what it is told in."""


def states(given):
    """The textbook row; where a report says 8 bytes, or fp32, what zplan counts for just that choice."""
    n, stage = given.ranks, given.get("stage", 0)
    if given.get("tensor_parallel", 1) > 1:
        return tensor_parallel_states(given)
    if given.get("bytes_per_param") in (6, 8):
        asked_for = plain(given, stage=stage, **BYTES_A_PARAM[given.get("bytes_per_param")])
        return rate(asked_for).of(num_params(asked_for), n)
    if given.get("precision") == "fp32":
        asked_for = plain(given, stage=stage)
        return rate(asked_for).of(num_params(asked_for), n)
    return estimate(plain(given, stage=None)).textbook()[stage]


def tensor_parallel_states(given):
    """One rank's lines under DeepSpeed: weights, masters, moments and gradients."""
    tp = given.get("tensor_parallel")
    answer = estimate(given.with_(gpus=tp * given.get("data_parallel", 1), stage=0, accumulation=None))
    return line_bytes(answer, "params.", "optim.", "grads.full.")


def weights(given):
    """What `zplan check` counts where nothing is trained; of 4-bit weights the textbook row without the adapters."""
    if given.get("quantization") == "4-bit":
        answer = estimate(given)
        return answer.textbook()[3] - textbook_states(answer.model.reckoned_params, 3, given.ranks)
    stage = 3 if given.get("sharded") else given.get("stage", 0)
    return cost(plain(given, stage=stage, gpus=given.ranks), "model states", trainable=0)


def with_bucket_keys(given):
    """The config of a case with the bucket keys that a question sets."""
    keys = ("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "stage")
    config = deepspeed_config(given).value
    zero = {**config.get("zero_optimization", {}), **{k: given.get(k) for k in keys if given.get(k) is not None}}
    zero.setdefault("stage", 2)
    return given.with_(config={**config, "zero_optimization": zero})


def reduce_buckets(given):
    found = with_bucket_keys(given)
    return cost(found, "reduce bucket") + cost(found, "reduce buckets")


def nvme_buffers(given):
    config = json.loads((CONFIGS / given.get("config")).read_text(encoding="utf-8"))
    config["zero_optimization"]["offload_param"] |= {k: given.get(k) for k in ("buffer_count", "buffer_size")}
    return cost(given.with_(config=config), "NVMe buffers, pinned")


def on_tokens(given):
    """The answer for one sequence of all tokens, checkpointed, on one card of any size."""
    facts = {"seq_len": given.tokens, "checkpointing": "full", "stage": 0, "mem_gib": ANY_SIZE}
    return estimate(Given(given.model, {**facts, "vocab": given.get("vocab")}, given.folder))


def logits_fp32(given):
    """The logits that the loss keeps."""
    return line_bytes(on_tokens(given), "act.loss.saved")


def logits(given):
    return logits_fp32(given) + line_bytes(on_tokens(given), "act.head.output")


def checkpoints(given):
    return line_bytes(on_tokens(given), "act.block.output")


def hidden_state(given):
    return next(x.nbytes for x in on_tokens(given).lines if x.id == "act.block.output")


def tokens_of(given):
    """Tokens whose fp32 logits are the 49 GiB that were asked for."""
    return 49 * GIB / (logits_fp32(given) / given.tokens)


def params_of_state(given):
    """Parameters whose second moment, as zplan splits it, is what was asked for."""
    answer = estimate(given.with_(stage=2))
    return given.get("tried_gib") * GIB * num_params(given) / line_bytes(answer, "optim.exp_avg_sq")


def host_states(given):
    """States and gradients that lie in the host memory of all nodes; 12 bytes are without gradients."""
    size = given.get("bytes_per_param")
    facts = {"stage": 3, "offload": "optimizer" if size == 12 else "both", "gpus": given.ranks, **BYTES_A_PARAM[size]}
    answer = estimate(plain(given, **facts))
    lines = ("optim.",) if size == 12 else ("optim.", "params.shard.", "grads.host.", "states.remainder")
    return given.ranks * line_bytes(answer, *lines, tier="pinned")


BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def bytes_per_param(given):
    """Of one rank: the textbook's, or what zplan counts where gradients or masters are not those of the textbook."""
    n, num = given.ranks, 10**9
    if given.get("master"):
        config = BF16_MASTERS if given.get("master") == "bf16" else {"bf16": {"enabled": True}}
        on_one = given.with_(gpus=1, config={**config, "zero_optimization": {"stage": 3}})
        return cost(on_one, "model states") / num_params(plain(on_one))
    if given.get("gradients") == "fp32":
        # With whole masters beside 16-bit weights, as that rule counts; in bf16 zplan keeps them in halves.
        return rate(plain(given, stage=0, precision="fp16")).of(num, n) / num
    if given.get("precision") == "pure-bf16":
        return rate(plain(given, precision="bf16", stage=given.get("stage", 0), **PURE_BF16)).of(num, n) / num
    return textbook_states(num, given.get("stage", 0), n) / num


def lora_params(given):
    return estimate(given).model.reckoned_params


def extra_states(given):
    """What embedding and head add once they are trained beside the adapters."""
    return estimate(given, lora_embeddings=True).textbook()[0] - estimate(given).textbook()[0]


def trained_states(given):
    """Gradients, masters and moments of what is trained at stage 2, without its weights."""
    num = round(given.get("trainable"))
    return textbook_states(num, 2, given.ranks) - 2 * num


def stage1_saving(given):
    before, after = estimate(plain(given)).textbook()[:2]
    return before - after


def max_params(given):
    """The largest count whose textbook row is no more than the card."""
    room, low, high = given.get("mem_gb") * 10**9, 1, 10**13
    while high - low > 1:
        middle = (low + high) // 2
        fits = textbook_states(middle, given.get("stage"), given.ranks) <= room
        low, high = (middle, high) if fits else (low, middle)
    return low


def breakeven(given):
    """Bytes a second at which sending takes as long as computing, by the rule of 8 operations a parameter and token."""
    answer = estimate(plain(given, stage=3))
    seconds = 8 * num_params(given) * given.get("tokens") / given.get("flops")
    return answer.textbook_traffic()[3] / seconds


def micro_steps(given):
    """What zplan solves the three batch sizes for."""
    return solve_batch(
        train=given.get("train_batch_size"),
        micro=given.get("micro_batch"),
        accumulation=None,
        world_size=given.get("data_parallel"),
        names=KEYS,
    ).accumulation


def fp32_lines(given, *names):
    return line_bytes(estimate(given.with_(precision="fp32", stage=2)), *names)


def softmax(given):
    """The tensor that `zplan check --oom` names for the allocation that failed."""
    return max(
        (c.nbytes for c in oom_lines(given, "896.00 MiB") if "softmax" in c.what or "scores" in c.what), default=0
    )


def oom_lines(given, tried):
    """Tensors of the case that an out-of-memory message of that size can be about."""
    log = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79 GiB"
    facts = {"seq": given.get("seq_len"), "attention": given.get("attention"), **model(given)}
    setup = make_setup(deepspeed_config(given), "ds.json", subject(given, seq=given.get("seq_len")), facts)
    return diagnose(log, "train.log", setup, None).matched


def gathered_embedding(given):
    spec = estimate(given).model.spec
    size = {"fp32": 4, "bf16": 2}[given.get("precision")]
    return size * max(p.numel for u in spec.units if u.kind == "embed" for p in u.params)


def gathered_layer(given):
    """One ring slot and one block's gradients in the compute dtype."""
    answer = estimate(given, config=None)
    one = {x.id: x.nbytes for x in answer.lines}
    return one["params.ring.block"] + one["grads.block"]


QUANTITIES = {
    "model_states_per_gpu": states,
    "model_states_fp32_master": lambda g: states(g.with_(bytes_per_param=16)),
    "model_states_total": lambda g: states(g.with_(stage=0, gpus=1)),
    "weights_per_gpu": weights,
    "reduce_bucket": reduce_buckets,
    "reduce_buckets": reduce_buckets,
    "nvme_param_buffers": nvme_buffers,
    "stage1_saving": stage1_saving,
    "lora_params": lora_params,
    "extra_states": extra_states,
    "trainable_grads_optimizer": trained_states,
    "logits_fp32": logits_fp32,
    "logits_fp32_and_16bit": logits,
    "checkpoints": checkpoints,
    "hidden_state": hidden_state,
    "tokens_from_49_gib_logits": tokens_of,
    "params_from_failing_state": params_of_state,
    "host_states": host_states,
    "host_load": lambda g: whole_model(g).nbytes,
    "bytes_per_param": bytes_per_param,
    "max_params": max_params,
    "breakeven_bytes_per_s_per_gpu": breakeven,
    "accumulation": micro_steps,
    "gpu_peak": lambda g: estimate(g).peak_bytes,
    "fp32_shard": lambda g: fp32_lines(g, "optim.master"),
    "allocated_before_failure": lambda g: fp32_lines(g, "params.flat", "optim.master"),
    "softmax_fp32": softmax,
    "gathered_embedding": gathered_embedding,
    "gathered_layer_weights_and_grads": gathered_layer,
}


def read(given, quantity):
    """zplan's number, in the unit of the quantity's name.

    No number depends on the card; one of any size spares the search for what would fit.
    """
    given = given.with_(gpu=None, mem_gib=ANY_SIZE)
    name, _, unit = quantity.rpartition("_")
    if unit in UNITS and name in QUANTITIES:
        return QUANTITIES[name](given) / UNITS[unit]
    return QUANTITIES[quantity](given)


def verdict(given):
    """`fits` or `does-not-fit`, of the card or of the tier that is asked about."""
    if given.get("load"):
        return "does-not-fit" if whole_model(given).severity == "warning" else "fits"
    answer = estimate(given)
    if given.get("tier") == "host":
        return "does-not-fit" if any(u.over_bytes for u in answer.tiers if u.tier != "device") else "fits"
    return "fits" if answer.row.fits and answer.counted else "does-not-fit"


def whole_model(given):
    """What `zplan check` says of a model that every rank loads whole."""
    found = check(plain(given, stage=3, gpus=given.ranks, host_ram_gb=given.get("host_ram_gb"), config=None))
    return next(f for f in found.findings if f.rule == "no-zero-init")


def named(given, cause):
    """Whether zplan names the cause of a report: in the ledger's peak, or as a rule of `zplan check`."""
    if cause == "no-zero-init":
        return whole_model(given).nbytes > 0
    answer = estimate(given, config=None)
    live = {x.id: x.nbytes * n for x, n in answer.row.ledger.live(answer.row.peak_phase)}
    if cause == "activations":
        return max(answer.row.kinds, key=answer.row.kinds.get) == "activations"
    assert cause == "reduce-bucket-at-backward"
    bucket = answer.row.ledger.line("grads.ipg")
    starts = {answer.row.ledger.phases[first] for first, _ in bucket.spans}
    return "grads.ipg" in live and answer.row.peak_phase.startswith("backward.") and starts == {"backward.head"}


def any_number_of_gpus(given):
    """The verdicts on 1, 8 and 64 times the cards."""
    return {verdict(given.with_(gpus=n * given.ranks, nodes=n * given.get("nodes", 1))) for n in (1, 8, 64)}


UNREAD = ("deepspeed_estimator_gpu", "deepspeed_estimator_host", "working_set_28_copies")
"""Quantities that are no number of zplan's."""
