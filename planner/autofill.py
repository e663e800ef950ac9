"""What trainers make of "auto", from the model's width and the launcher's flags. DeepSpeed itself fills in nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zplan.planner.lint import View

SIZES: dict[str, tuple[str, Callable[[int], int]]] = {
    "reduce_bucket_size": ("h x h", lambda h: h * h),
    # A tenth less than a square is seldom whole, and DeepSpeed since 0.15 refuses fractions: rounded down.
    "stage3_prefetch_bucket_size": ("0.9 x h x h, rounded down", lambda h: 9 * h * h // 10),
    "stage3_param_persistence_threshold": ("10 x h", lambda h: 10 * h),
}
"""Elements, from the model's width h."""

_WHO = {
    "train_batch_size": "micro-batch x accumulation x GPUs",
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm; accelerate alone: 1.0",
    "lr": "--learning_rate",
    "betas": "--adam_beta1, --adam_beta2",
    "eps": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "warmup_min_lr": "0",
    "warmup_max_lr": "--learning_rate",
    "warmup_num_steps": "--warmup_steps or --warmup_ratio",
    "total_num_steps": "the number of optimizer steps",
    "stage3_gather_16bit_weights_on_model_save": "false",
    "enabled": "--bf16 or --fp16",
    "auto_cast": "--fp16",
}


def auto_size(key: str, hidden: int | None) -> int | None:
    """Elements that a size of "auto" becomes; None without a model.

    Examples
    --------
    >>> auto_size("stage3_prefetch_bucket_size", 4096), auto_size("reduce_bucket_size", 4096)
    (15099494, 16777216)
    """
    return SIZES[key][1](hidden) if key in SIZES and hidden is not None else None


def resolve_auto(view: View) -> tuple[tuple[str, str, str], ...]:
    """`(key, value, where it comes from)` of every "auto" that trainers fill in."""
    from zplan.planner.lint import whole
    from zplan.planner.lint_keys import auto_paths

    s = view.subject
    found = []
    for path in auto_paths(view):
        key = path[-1]
        prefixed = key if key in SIZES else f"stage3_{key}"
        if prefixed in SIZES:
            size = auto_size(prefixed, s.hidden)
            formula = SIZES[prefixed][0]
            value, why = (
                (f"{size:,}", f"{formula}, h = {s.hidden}") if size is not None else ("?", f"{formula}; give --model")
            )
        elif key == "train_micro_batch_size_per_gpu" and s.micro_batch is not None:
            value, why = str(s.micro_batch), _WHO[key]
        elif key == "train_batch_size" and s.micro_batch is not None and s.gpus is not None:
            accumulation = whole(view.config.get("gradient_accumulation_steps")) or 1
            value, why = str(s.micro_batch * accumulation * s.gpus), _WHO[key]
        else:
            value, why = "?", _WHO.get(key, "the trainer's own option")
        found.append((".".join(path), value, why))
    return tuple(found)


_OPEN = "zplan chooses"
SETTLED: dict[tuple[str, ...], tuple[object, str]] = {
    ("train_batch_size",): (None, _OPEN),
    ("train_micro_batch_size_per_gpu",): (None, _OPEN),
    ("gradient_accumulation_steps",): (None, _OPEN),
    ("gradient_clipping",): (1.0, "1.0, as in every trainer"),
    ("bf16", "enabled"): (None, "bf16"),
    ("fp16", "enabled"): (False, "off: bf16 has its range"),
    ("fp16", "auto_cast"): (False, "off"),
    ("optimizer", "params", "lr"): (1e-4, "0.0001, zplan's starting point"),
    ("optimizer", "params", "betas"): ([0.9, 0.999], "0.9 and 0.999"),
    ("optimizer", "params", "eps"): (1e-8, "1e-08"),
    ("optimizer", "params", "weight_decay"): (0.0, "0.0"),
    ("zero_optimization", "reduce_bucket_size"): (None, "zplan's own, 33,554,432 elements"),
    ("zero_optimization", "stage3_prefetch_bucket_size"): (None, "one unit ahead"),
    ("zero_optimization", "stage3_param_persistence_threshold"): (0, "0: every block of a ring is gathered"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): (False, "false"),
}
"""What zplan takes for "auto" where trainers would fill it in: a value, or None for what is left open; and in words."""


def settle_autos(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """A config without the "auto" that trainers fill in, and what became of each.

    Returns
    -------
    tuple
        The config with values, or without the keys that are left open; and path -> what it became, in words. "auto"
        anywhere else stays, for the reader to refuse.
    """
    settled: dict[str, Any] = dict(config)
    became: dict[tuple[str, ...], str] = {}
    for path, (value, words) in SETTLED.items():
        parents = [settled]
        for name in path[:-1]:
            inner = parents[-1].get(name)
            parents.append(dict(inner) if isinstance(inner, Mapping) else {})
        if parents[-1].get(path[-1]) != "auto":
            continue
        became[path] = words
        del parents[-1][path[-1]]
        if value is not None:
            parents[-1][path[-1]] = value
        for name, parent, child in reversed(list(zip(path[:-1], parents, parents[1:], strict=False))):
            parent[name] = child
    return settled, became
