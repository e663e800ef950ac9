"""Configs in DeepSpeed's schema: how to train, and a strict reader.

The planner reads `--config` files with it; the engine reads what users pass to `initialize`. The writer of plans is
`planner/dswriting.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zplan.planner import dskeys
from zplan.planner.autofill import settle_autos
from zplan.planner.batch import KEYS, solve_batch
from zplan.planner.config import (
    DEFAULT_CLIP,
    Attention,
    Checkpointing,
    CrossEntropy,
    Kernels,
    Offload,
    Precision,
    Reduce,
    Runtime,
    Saving,
    Transport,
)
from zplan.planner.dsblocks import (
    PAGE,
    read_bf16,
    read_extras,
    read_fp16,
    read_optimizer_block,
    read_prescaling,
    read_zero,
    screen,
)
from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import LossScale
from zplan.planner.reading import (
    check_keys,
    want_bool,
    want_int,
    want_number,
    want_object,
    want_one_of,
)
from zplan.planner.schedules import Schedule, read_schedule

REDUCE_DTYPES = ("fp32", "bf16")
"""dtypes in which gradients may be reduced."""

DEFAULT_LR = 1e-4
"""A plain starting point for AdamW, used and stated when nobody gives a learning rate."""


@dataclass(frozen=True)
class TrainingConfig:
    """How to train, as far as it is not the model or the machine."""

    micro_batch: int
    """Sequences per rank and micro-step."""
    accumulation: int
    """Micro-steps per optimizer step."""
    world_size: int
    """Data-parallel ranks that the batch was derived for."""
    precision: Precision = "fp32"
    """dtype of compute. A config without a `bf16` block trains in fp32, as in DeepSpeed."""
    stage: int = 0
    """ZeRO stage, 0 to 3."""
    piece_numel: int = 32 * 2**20
    """Elements; cap of one reduce (`reduce_bucket_size`)."""
    lr: float = DEFAULT_LR
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled for AdamW and Lion, else added to the gradient."""
    optimizer: str = "adamw"
    """A name of `planner/optimizers.py`."""
    momentum: float = 0.9
    """Of `sgd-momentum`."""
    nesterov: bool = False
    """Of `sgd-momentum`."""
    clip: float = DEFAULT_CLIP
    """Largest global L2 norm of the gradient; 0.0 is off. An absent key means 1.0, as in DeepSpeed since mid-2026."""
    loss_scale: LossScale = LossScale()
    """Of fp16 training."""
    schedule: Schedule | None = None
    """Of the learning rate, in applied optimizer steps; None keeps it constant."""
    reduce_dtype: Precision = "fp32"
    """dtype in which gradients are reduced and accumulated."""
    offload: Offload = Offload()
    """What lies off the device between its uses."""
    steps_per_print: int = 10
    """Optimizer steps between progress lines, where the config asks for some."""
    breakdown: bool = False
    """Time forward, backward, gathers, reduces and step (`wall_clock_breakdown`)."""
    overlap: bool = True
    """Gathers and reduces run beside compute (`overlap_comm`); else on its stream, and nothing is gathered ahead."""
    prefetch_numel: int | None = None
    """Elements gathered ahead (`stage3_prefetch_bucket_size`): one unit at least unless 0. None is one unit."""
    persist_numel: int = 0
    """Stage 3: units of fewer elements stay whole on every rank."""
    ring_slots: int = 2
    """Stage 3: gathered blocks held at once, where `max_live` does not say it."""
    max_live: int | None = None
    """Stage 3: elements that may be gathered at once (`stage3_max_live_parameters`)."""
    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 1
    """Blocks in one checkpointed segment."""
    checkpoint_offload: bool = False
    """Inputs of checkpointed segments wait in host memory."""
    padded: bool = False
    """Sequences are padded to `seq`, and attention takes a mask."""
    attention: Attention = "sdpa"
    compile: bool = False
    """Each block's `forward` goes through `torch.compile`."""
    deterministic: bool = False
    """The same bits at every stage and in every run, at equal world size."""
    check_replicas_every: int = 0
    """Optimizer steps from one comparison of replicated state to the next; 0 for none."""
    optimizer_in_backward: bool = False
    """Each unit is updated as soon as its gradients are reduced. Needs accumulation 1, no clipping and no loss scale.
    """
    reduce: Reduce | None = None
    """None: an exchange where all ranks are on one host, a reduce-scatter elsewhere."""
    transport: Transport | None = None
    """None: copies where every GPU of the one host can read the others' memory, collectives elsewhere."""
    cross_entropy: CrossEntropy = "plain"
    """`fused`: the built-in decoder's head and loss in one, without whole logits."""
    kernels: Kernels = "torch"
    """`fused`: norms, gates and rotary embeddings of the built-in decoder by zplan's own kernels."""
    saving: Saving = "foreground"
    """`background`: checkpoints are copied to host memory first and written behind training."""
    seq: int | None = None
    """Tokens per sequence, where the config says it."""
    given: frozenset[str] = frozenset()
    """Names of the fields above that the config itself names."""
    notes: tuple[str, ...] = ()
    """Sentences a user should see: accepted keys that change nothing here."""

    def __post_init__(self) -> None:
        if self.optimizer_in_backward:
            from zplan.planner.in_backward import check_in_backward

            check_in_backward(self, clip=self.clip)

    def slots(self, blocks: Sequence[int]) -> int:
        """Gathered blocks held at once, for blocks of so many elements."""
        return self.ring_slots if self.max_live is None else slots_within(self.max_live, blocks)

    @property
    def train_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.world_size


def slots_within(max_live: int, blocks: Sequence[int]) -> int:
    """As many of the largest block as `max_live` elements hold, but two at least and no more than there are blocks.

    Examples
    --------
    >>> slots_within(1000, [300, 250, 300, 250]), slots_within(10**9, [300] * 4), slots_within(1, [300] * 4)
    (3, 4, 2)
    """
    return max(2, min(max_live // max(blocks, default=1), len(blocks)))


def read_settings(
    mapping: Mapping[str, Any], *, source: str = "config", runtime: Runtime = "zplan"
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of `TrainingConfig` that a config names, and notes; batch sizes are not derived yet.

    Parameters
    ----------
    mapping
        A config in DeepSpeed's schema, whole or a fragment. One object more is known: `zplan`, with `dsblocks.EXTRAS`.
    source
        What it is called in errors.
    runtime
        Whose buffers are counted. Notes are about what the config changes there.
    """
    where = f"`{source}`"
    found: dict[str, Any] = {}
    mapping, became = settle_autos(_renamed(mapping, where))
    known = (*dskeys.TOP_HONOURED, *dskeys.TOP_NEUTRAL, *dskeys.TOP_INERT, *dskeys.TOP_MAPPED)
    for key, meant in dskeys.MEANT.items():
        if key in mapping:
            raise ZplanError(f"unknown key `{key}` in {where}", f"did you mean `{meant}`?")
    check_keys(mapping, known, where, page=PAGE)
    autos = tuple(f'`{".".join(path)}` of {where} is "auto": {words}' for path, words in became.items())
    notes = screen(mapping, dskeys.TOP_NEUTRAL, dskeys.TOP_INERT, where)
    notes += read_prescaling(mapping, where)
    _numbers(mapping, where, found)
    _reduce_dtype(mapping, where, found)
    blocks = {
        "bf16": read_bf16,
        "fp16": read_fp16,
        "zero_optimization": read_zero,
        "optimizer": read_optimizer_block,
        "zplan": read_extras,
    }
    for key, read in blocks.items():
        if mapping.get(key) is not None:
            notes += read(want_object(key, where, mapping[key]), f"`{key}` of {where}", found)
    if mapping.get("scheduler") is not None:
        block = want_object("scheduler", where, mapping["scheduler"])
        found["schedule"] = read_schedule(block, f"`scheduler` of {where}")
    _settle_precision(mapping, found, auto=any(path[-1] == "enabled" for path in became))
    if runtime != "zplan":
        from zplan.planner.peer_keys import peer_notes

        notes = peer_notes(mapping, runtime, where)
    return found, autos + notes


def _numbers(mapping: Mapping[str, Any], where: str, found: dict[str, Any]) -> None:
    """The batch, and what else stands at the top level as one value."""
    names = {KEYS.train: "train_batch_size", KEYS.micro: "micro_batch", KEYS.accumulation: "accumulation"}
    for key, field in names.items():
        if mapping.get(key) is not None:
            found[field] = want_int(key, where, mapping[key])
    values: dict[str, tuple[str, Callable[[str, str, object], Any]]] = {
        "gradient_clipping": ("clip", want_number),
        "wall_clock_breakdown": ("breakdown", want_bool),
        "steps_per_print": ("steps_per_print", want_int),
    }
    for key, (field, want) in values.items():
        if mapping.get(key) is not None:
            found[field] = want(key, where, mapping[key])


def _renamed(mapping: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """With the name of today for the bf16 block."""
    if dskeys.OLD_BF16 not in mapping:
        return mapping
    if "bf16" in mapping:
        raise ZplanError(f"both `bf16` and `{dskeys.OLD_BF16}` of {where} are given", f"drop `{dskeys.OLD_BF16}`")
    return {"bf16" if key == dskeys.OLD_BF16 else key: value for key, value in mapping.items()}


def _reduce_dtype(mapping: Mapping[str, Any], where: str, found: dict[str, Any]) -> None:
    name = "communication_data_type"
    if mapping.get(name) is not None:
        found["reduce_dtype"] = want_one_of(name, where, mapping[name], REDUCE_DTYPES)


def _settle_precision(mapping: Mapping[str, Any], found: dict[str, Any], *, auto: bool) -> None:
    """What the two precision blocks say together."""
    if auto:
        if found.get("precision") == "fp32":
            found.pop("precision", None)  # The trainer decides between fp16, bf16 and fp32; here the planner.


def from_mapping(mapping: Mapping[str, Any], *, world_size: int, source: str = "config") -> TrainingConfig:
    """Read a config in DeepSpeed's schema, with DeepSpeed's meaning and its rules for the batch triple.

    Unknown keys, wrong types, and known keys that ask for what is not built yet are errors.
    """
    found, notes = read_settings(mapping, source=source)
    given = frozenset(found)
    if "ring_slots" in found:
        found.pop("max_live", None)  # zplan's own word for it counts
    auto = [key for key in (KEYS.train, KEYS.micro) if mapping.get(key) == "auto"]
    if auto and not given & {"train_batch_size", "micro_batch"}:
        raise ZplanError(
            f'`{auto[0]}` of `{source}` is "auto", and nothing else says the batch',
            "write a number, or let `zplan plan --config` choose",
        )
    if any(dict(mapping.get(block) or {}).get("enabled") == "auto" for block in ("bf16", dskeys.OLD_BF16, "fp16")):
        found.setdefault("precision", "bf16")
    batch = solve_batch(
        train=found.pop("train_batch_size", None),
        micro=found.pop("micro_batch", None),
        accumulation=found.pop("accumulation", None),
        world_size=world_size,
        names=KEYS,
    )
    return TrainingConfig(batch.micro, batch.accumulation, world_size, **found, given=given, notes=notes)
