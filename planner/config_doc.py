"""The tables of `docs/config.md`: what zplan does with each key of DeepSpeed's schema, from the reader's own data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from zplan.planner import dskeys
from zplan.planner.autofill import SETTLED
from zplan.planner.dsconfig import EXTRAS, TrainingConfig
from zplan.planner.dsschema import STRICT, TOP, ZERO

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
    "steps_per_print": "steps between progress lines",
    "communication_data_type": "dtype of gradients between ranks: fp32; bf16 is estimate only",
    "zplan": f"zplan's own keys: {', '.join(f'`{name}`' for name in EXTRAS)}",
    "stage": "ZeRO stage, 0 to 3",
    "reduce_bucket_size": "largest piece of one reduce, in elements: it caps the ledger's `grads.slot` lines",
    "stage3_max_live_parameters": "stage 3: the ring holds as many of the largest block as fit in, two at least",
    "offload_optimizer": "`device` none, cpu or nvme, and `ratio`: counted, *estimate only*",
    "offload_param": "stage 3, with the optimizer offloaded: `device` none, cpu or nvme; *estimate only*",
    "device": "none, cpu or nvme",
    "ratio": "share of the elements that is offloaded; `offload_optimizer` only",
    "lr": "learning rate",
    "betas": "decay of both moments",
    "eps": "added to the denominator",
    "weight_decay": "decoupled from the gradient for AdamW and Lion, added to it for the others",
    "momentum": "of SGD; with 0 there is no buffer for it",
    "nesterov": "of SGD with momentum",
}


def config_tables() -> str:
    """Markdown: one table for each block, then what becomes of "auto"."""
    zero_inert = {k: f"nothing: {why}" for k, why in dskeys.ZERO_INERT.items()}
    zero_mapped = {k: f"taken as {str(v).lower()}: {why}" for k, (v, why) in dskeys.ZERO_MAPPED.items()}
    top_inert = {k: f"nothing: {why}" for k, why in dskeys.TOP_INERT.items()}
    bf16 = {"enabled": "honoured", "check_grad_overflow": "true: a step whose gradient norm is not finite is skipped"}
    parts = [
        _table("Top level", (*dskeys.TOP_HONOURED,), {**_refused(dskeys.TOP_NEUTRAL), **top_inert}, ()),
        _table("`bf16`", (), {**_refused(dskeys.BF16_NEUTRAL), **bf16}, ("bf16",)),
        _table(
            "`zero_optimization`",
            dskeys.ZERO_HONOURED,
            {**zero_mapped, **zero_inert, **_refused(dskeys.ZERO_NEUTRAL)},
            ("zero_optimization",),
        ),
        _table(
            "`offload_optimizer` and `offload_param`",
            dskeys.OFFLOAD_HONOURED,
            {k: f"nothing: {v}" for k, v in dskeys.OFFLOAD_INERT.items()},
            ("zero_optimization", "offload_optimizer"),
        ),
        _table(
            "`optimizer.params`",
            dskeys.OPTIMIZER_HONOURED,
            {**_refused(dskeys.OPTIMIZER_NEUTRAL), **{k: f"nothing: {v}" for k, v in dskeys.OPTIMIZER_INERT.items()}},
            ("optimizer", "params"),
        ),
        _autos(),
    ]
    return "\n".join(parts)


def _refused(neutral: Iterable[str]) -> dict[str, str]:
    return {key: f"refused where it asks for something{_instead(key)}" for key in neutral}


def _instead(key: str) -> str:
    return f" ({dskeys.INSTEAD[key]})" if key in dskeys.INSTEAD else ""


def _table(title: str, honoured: Iterable[str], others: dict[str, str], path: tuple[str, ...]) -> str:
    rows = [f"## {title}", "", "| key | zplan | left out |", "| --- | --- | --- |"]
    rows += [f"| `{key}` | {_FIELD[key]} | {_left_out(key, path)} |" for key in honoured]
    rows += [f"| `{key}` | {others[key]} | {_left_out(key, path)} |" for key in sorted(others)]
    return "\n".join(rows) + "\n"


_FIELD_OF = {"gradient_clipping": "clip", "reduce_bucket_size": "piece_numel"}


def _left_out(key: str, path: tuple[str, ...]) -> str:
    """What counts where a key is missing: zplan's own default, else DeepSpeed's."""
    own = {f.name: f.default for f in fields(TrainingConfig)}
    name = _FIELD_OF.get(key, key)
    if key == "lr":
        return "0.001"
    if name in own and isinstance(own[name], (int, float, tuple)):
        value = own[name]
        return f"{value:,}" if isinstance(value, int) else str(value)
    row = STRICT.get(path, {} if path else TOP).get(key) or (ZERO.get(key) if path == ("zero_optimization",) else None)
    if row is None or row.default is None:
        return ""
    return str(row.default).lower() if isinstance(row.default, bool) else str(row.default)


def _autos() -> str:
    rows = ['## "auto"', "", "| key | becomes |", "| --- | --- |"]
    rows += [f"| `{'.'.join(path)}` | {words} |" for path, (_, words) in SETTLED.items()]
    return "\n".join(rows) + "\n"
