"""Configs in DeepSpeed's schema: a writer that leaves nothing to a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from zplan.planner.batch import KEYS, Batch
from zplan.planner.config import (
    Choice,
    Offload,
)
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.dsoptimizer import STARTS, explicit_optimizer
from zplan.planner.loss_scale import explicit_loss_scale

FREE = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "clip", "schedule", "loss_scale"),
    *("steps_per_print", "breakdown", "overlap", "prefetch_numel"),
)
"""Fields that no `Choice` has: they decide no bytes."""


def from_choice(choice: Choice, settings: Mapping[str, Any]) -> TrainingConfig:
    """The config of a plan: the choice made, and from `settings` (of `read_settings`) what a choice does not say."""
    own = {f.name for f in fields(TrainingConfig)} & {f.name for f in fields(Choice)}
    asked = {n: settings[n] for n in FREE if n in settings}
    fields_of = {**STARTS.get(choice.optimizer, {}), **asked}
    return TrainingConfig(**{n: getattr(choice, n) for n in own}, **fields_of, given=frozenset(asked))


def to_mapping(config: TrainingConfig, *, largest_block_numel: int) -> dict[str, Any]:
    """The config in DeepSpeed's schema with every value explicit; only keys that DeepSpeed knows.

    Parameters
    ----------
    config
        What to write.
    largest_block_numel
        Elements of the largest transformer block. DeepSpeed's stage 3 is told to keep no more parameters gathered than
        zplan's ring does.
    """
    bf16 = config.precision == "bf16"
    live = config.ring_slots * largest_block_numel if config.max_live is None else config.max_live
    ahead = config.prefetch_numel
    batch = Batch(config.micro_batch, config.accumulation, config.world_size)
    return {
        KEYS.train: batch.train,
        KEYS.micro: batch.micro,
        KEYS.accumulation: batch.accumulation,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "fp16": explicit_loss_scale(config.loss_scale) if config.precision == "fp16" else {"enabled": False},
        "optimizer": explicit_optimizer(config.optimizer, vars(config)),
        **({} if config.schedule is None else {"scheduler": config.schedule.explicit(config.lr)}),
        "gradient_clipping": config.clip,
        "communication_data_type": config.reduce_dtype,
        "data_types": {"grad_accum_dtype": _accumulation_dtype(config)},
        "prescale_gradients": False,
        "zero_allow_untested_optimizer": False,
        "zero_optimization": {
            "stage": config.stage,
            "contiguous_gradients": True,
            "overlap_comm": config.overlap,
            "reduce_scatter": True,
            "reduce_bucket_size": config.piece_numel,
            "allgather_partitions": True,
            "allgather_bucket_size": config.piece_numel,
            "round_robin_gradients": False,
            "sub_group_size": 1_000_000_000,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": largest_block_numel if ahead is None else ahead,
            "stage3_param_persistence_threshold": config.persist_numel,
            "stage3_gather_16bit_weights_on_model_save": False,
            **_explicit_offload(config.offload),
        },
        "steps_per_print": config.steps_per_print,
        "wall_clock_breakdown": config.breakdown,
    }


def _explicit_offload(offload: Offload) -> dict[str, Any]:
    """Both blocks. Where NVMe is mounted is for whoever runs it to say."""
    optimizer: dict[str, Any] = {"device": offload.optimizer}
    if offload.ratio != 1:
        optimizer["ratio"] = offload.ratio
    return {"offload_optimizer": optimizer, "offload_param": {"device": offload.params}}


def _accumulation_dtype(config: TrainingConfig) -> str | None:
    """DeepSpeed refuses fp32 accumulation with 16 bits at stage 0; null leaves it to the model's dtype there."""
    whole = config.precision != "fp32" and config.stage == 0
    return None if whole or config.reduce_dtype != "fp32" else "fp32"
