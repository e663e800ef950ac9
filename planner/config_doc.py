"""The tables of `docs/config.md`: what zplan does with each key of DeepSpeed's schema, from the reader's own data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from zplan.planner import dskeys
from zplan.planner.autofill import SETTLED
from zplan.planner.dsblocks import EXTRAS
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.dsschema import STRICT, TOP, ZERO
from zplan.planner.loss_scale import LARGEST_POWER

_FIELD = {
    "train_batch_size": "sequences per step over all ranks",
    "train_micro_batch_size_per_gpu": "sequences per rank and micro-step",
    "gradient_accumulation_steps": "micro-steps per step",
    "bf16": "`enabled`: bf16 compute with fp32 master weights; without it fp32",
    "fp16": "fp16 compute with fp32 master weights and DeepSpeed's loss scale, dynamic or static",
    "zero_optimization": "see below",
    "gradient_clipping": "global L2 norm; 0 is off",
    "optimizer": "`AdamW`, `Adam` (AdamW unless `adam_w_mode` is false), `SGD`, `Lion`, `Adagrad`; others "
    "are counted, *estimate only*; see below",
    "scheduler": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, moved by applied steps only",
    "steps_per_print": "steps between progress lines on rank 0; without the key there are none in a script",
    "wall_clock_breakdown": "times forward, backward, gathers, reduces, step and what compute waited for; told with "
    "`steps_per_print`",
    "communication_data_type": "dtype of gradients between ranks: fp32; bf16 is estimate only",
    "zplan": f"zplan's own keys: {', '.join(f'`{name}`' for name in EXTRAS)}",
    "stage": "ZeRO stage, 0 to 3",
    "reduce_bucket_size": "largest piece of one reduce, in elements: it caps the ledger's `grads.slot` lines",
    "overlap_comm": "true: gathers and reduces on streams of their own; false: on the computing one, nothing ahead",
    "stage3_prefetch_bucket_size": "elements gathered ahead of use: one unit at least, 0 for none",
    "stage3_param_persistence_threshold": "blocks of fewer elements stay whole (`params.flat` lines): zplan gathers "
    "whole units, so the threshold is that of a unit",
    "stage3_max_live_parameters": "stage 3: the ring holds as many of the largest block as fit in, two at least",
    "offload_optimizer": "`device` none, cpu or nvme, and `ratio`: counted, *estimate only*",
    "offload_param": "stage 3, with the optimizer offloaded: `device` none, cpu or nvme; *estimate only*",
    **{old: f'old name of `"{new}": {{"device": "cpu"}}`' for old, new in dskeys.OLD_OFFLOADS.items()},
    "device": "none, cpu or nvme",
    "ratio": "share of the elements that is offloaded; `offload_optimizer` only",
    "lr": "learning rate",
    "betas": "decay of both moments",
    "eps": "added to the denominator",
    "weight_decay": "decoupled from the gradient for AdamW and Lion, added to it for the others",
    "momentum": "of SGD; with 0 there is no buffer for it",
    "nesterov": "of SGD with momentum",
}


Block = tuple[str, ...]

_FP16 = {
    "enabled": "honoured; not together with bf16",
    "loss_scale": "honoured: 0 is dynamic, else static",
    "initial_scale_power": f"honoured, up to {LARGEST_POWER}",
    "loss_scale_window": "honoured",
    "hysteresis": "honoured",
    "consecutive_hysteresis": "honoured",
    "min_loss_scale": "honoured; an overflow there ends the run and names the first bad parameter, unit, rank and step",
    "auto_cast": "refused where it is true",
    "fp16_master_weights_and_grads": "refused where it is true",
}
_TOP = {
    dskeys.OLD_BF16: "old name of `bf16`",
    "data_types": "`grad_accum_dtype`: fp32, which zplan adds up in anyway; anything else is refused",
}
_BF16 = {"enabled": "honoured", "check_grad_overflow": "true: a step whose gradient norm is not finite is skipped"}


def treatments() -> dict[Block, dict[str, str]]:
    """What zplan does with every key that its reader knows, by block, honoured ones first."""
    top_mapped = {k: f"any value, with a note: {why}" for k, why in dskeys.TOP_MAPPED.items()}
    top_inert = {k: f"nothing: {why}" for k, why in dskeys.TOP_INERT.items()}
    zero_inert = {k: f"nothing: {why}" for k, why in dskeys.ZERO_INERT.items()}
    zero_mapped = {k: f"taken as {str(v).lower()}: {why}" for k, (v, why) in dskeys.ZERO_MAPPED.items()}
    params_inert = {k: f"nothing: {v}" for k, v in dskeys.OPTIMIZER_INERT.items()}
    return {
        (): _ordered(dskeys.TOP_HONOURED, {**_refused(dskeys.TOP_NEUTRAL), **_TOP, **top_inert, **top_mapped}),
        ("bf16",): _ordered((), {**_refused(dskeys.BF16_NEUTRAL), **_BF16}),
        ("fp16",): _FP16,
        ("zero_optimization",): _ordered(
            dskeys.ZERO_HONOURED, {**zero_mapped, **zero_inert, **_refused(dskeys.ZERO_NEUTRAL)}
        ),
        ("zero_optimization", "offload_optimizer"): _ordered(
            dskeys.OFFLOAD_HONOURED,
            {
                "super_offload": "refused where it is true",
                **{k: f"nothing: {v}" for k, v in dskeys.OFFLOAD_INERT.items()},
            },
        ),
        ("optimizer", "params"): _ordered(
            dskeys.OPTIMIZER_HONOURED, {**_refused(dskeys.OPTIMIZER_NEUTRAL), **params_inert}
        ),
    }


def _ordered(honoured: Iterable[str], others: dict[str, str]) -> dict[str, str]:
    return {**{key: _FIELD[key] for key in honoured}, **{key: others[key] for key in sorted(others)}}


def treatment(block: Block, key: str) -> str:
    """What zplan does with one key; of keys inside a block that it takes or refuses whole, what it does with that."""
    found = treatments()
    while block not in found or (key not in found[block] and block):
        block, key = block[:-1], block[-1]
    return found[block].get(key, "refused: zplan's reader does not know it")


TITLES: dict[Block, str] = {
    (): "Top level",
    ("zero_optimization", "offload_optimizer"): "`zero_optimization.offload_optimizer` and `.offload_param`",
}


def config_tables() -> str:
    """Markdown: one table for each block, then what becomes of "auto"."""
    parts = [_table(TITLES.get(block, f"`{'.'.join(block)}`"), rows, block) for block, rows in treatments().items()]
    return "\n".join([*parts, _autos()])


def _refused(neutral: Iterable[str]) -> dict[str, str]:
    return {key: f"refused where it asks for something{_instead(key)}" for key in neutral}


def _instead(key: str) -> str:
    return f" ({dskeys.INSTEAD[key]})" if key in dskeys.INSTEAD else ""


def _table(title: str, treated: dict[str, str], path: Block) -> str:
    rows = [f"## {title}", "", "| key | zplan | left out |", "| --- | --- | --- |"]
    rows += [f"| `{key}` | {words} | {_left_out(key, path)} |" for key, words in treated.items()]
    return "\n".join(rows) + "\n"


_FIELD_OF = {
    "gradient_clipping": "clip",
    "reduce_bucket_size": "piece_numel",
    "wall_clock_breakdown": "breakdown",
    "overlap_comm": "overlap",
    "stage3_param_persistence_threshold": "persist_numel",
}


def _left_out(key: str, path: Block) -> str:
    """What counts where a key is missing: zplan's own default, else DeepSpeed's."""
    own = {f.name: f.default for f in fields(TrainingConfig)}
    name = _FIELD_OF.get(key, key)
    if key == "lr":
        return "0.001"
    if key == "stage3_prefetch_bucket_size":
        return "one unit"
    if name in own and isinstance(own[name], (int, float, tuple)):
        value = own[name]
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:,}" if isinstance(value, int) else str(value)
    row = STRICT.get(path, {} if path else TOP).get(key) or (ZERO.get(key) if path == ("zero_optimization",) else None)
    if row is None or row.default is None:
        return ""
    return str(row.default).lower() if isinstance(row.default, bool) else str(row.default)


def _autos() -> str:
    rows = ['## "auto"', "", "| key | becomes |", "| --- | --- |"]
    rows += [f"| `{'.'.join(path)}` | {words} |" for path, (_, words) in SETTLED.items()]
    return "\n".join(rows) + "\n"
