"""What checkpoints and whole parameters take: to save, load, summon and export."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.activity import BF16, Activity, Kept, activity_of, largest, one_of_each
from zplan.planner.config import Choice
from zplan.planner.ledger import Line, merge
from zplan.planner.models import ModelSpec
from zplan.planner.placement import Placement
from zplan.planner.saving import ALIGN_BYTES, BLOCK_BYTES, BLOCKS, CHECKSUM_NUMEL, PART_NUMEL, RANGE_NUMEL
from zplan.planner.states import FP32, by_class

INT64 = 8

RANDOM_STATE_BYTES = 5056
"""Of torch's generator on the CPU."""


# --- checkpoints ---------------------------------------------------------------------------------------------------


def save(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """A checkpoint, through a few blocks (`runtime/checkpoint_write.py`). In the background it is the pinned copy's."""
    trained = sum(p.layout.numel for p in placements if not p.frozen)
    frozen = sum(p.buffer_bytes(choice) for p in placements if p.frozen)
    own = [Line("save.random", RANDOM_STATE_BYTES, ((0, 0),), "buffers", "host", "derived")]
    phases = ("save.begin", *(("save.frozen",) if frozen else ()), "save.write")
    last = len(phases) - 1
    blocks, span = BLOCKS * BLOCK_BYTES, ((last, last),)
    if choice.device != "cpu" and choice.saving == "foreground":
        own.append(Line("save.blocks", blocks, span, "buffers", "pinned"))
    else:
        own.append(Line("save.blocks", blocks + ALIGN_BYTES, span, "buffers", "host"))
    if frozen:
        # `runtime/checkpoint_frozen.py: bit_sum`: indices, values and their product in 64 bits.
        nbytes = min(2**24, max(p.buffer_bytes(choice) for p in placements if p.frozen)) * INT64
        own.append(Line("save.bit_sum", nbytes, ((1, 1),) * 3, "buffers"))
        if choice.saving == "background":
            share = -(-frozen // choice.world_size)
            own.append(Line("save.frozen", share, ((last, last),), "buffers", "host"))
    own += _masters_on_the_way(placements, choice, last)
    disk = 3 * FP32 * trained + frozen
    return activity_of("save", phases, kept, own, f"{choice.saving}; {disk / 1e9:.1f} GB on the disk, all ranks")


def _masters_on_the_way(placements: Sequence[Placement], choice: Choice, last: int) -> list[Line]:
    """Masters in halves are put together on their way: range by range as a file is written.

    A save in the background copies them first, by stretches that end with a piece, not with a parameter.
    """
    stretch, range_ = _longest(placements)
    behind = choice.saving == "background"
    numel = min(RANGE_NUMEL, stretch if behind else range_)
    nbytes = (numel + min(PART_NUMEL, numel)) * FP32
    at = 0 if behind else last
    note = "fp32 masters, put together of their halves, and the bits of a part of them"
    return [Line("save.masters", nbytes, ((at, at),), "buffers", note=note)] if nbytes else []


def _longest(placements: Sequence[Placement]) -> tuple[int, int]:
    """Most elements of a stretch of split masters that a rank writes, and of its part of one parameter."""
    split = one_of_each([p for p in placements if p.split])
    stretches = [_own(p) for p in split]
    ranges = [min(n, max(e.numel for e in p.layout.entries)) for n, p in zip(stretches, split, strict=True)]
    return max(stretches, default=0), max(ranges, default=0)


def _own(p: Placement) -> int:
    """Elements of a rank's slice of the largest piece."""
    return max(piece.numel for piece in p.layout.pieces) // p.layout.world_size


def taken_apart(p: Placement) -> int:
    """Work space while a split unit's values are cut: bits, and in a resident unit lower halves that others keep."""
    if p.ringed:
        return FP32 * min(PART_NUMEL, _own(p))
    return (FP32 + BF16) * min(PART_NUMEL, p.layout.padded_numel)


def _halves(placements: Sequence[Placement], phase: tuple[int, int], *, copies: int = 1) -> list[Line]:
    """Work space for taking fp32 values apart (`runtime/halves.py`)."""
    nbytes = min(PART_NUMEL, _longest(placements)[1]) * FP32 * copies
    note = "bits of masters that are taken apart"
    return [Line("load.halves", nbytes, (phase,), "buffers", note=note)] if nbytes else []


def load(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """Ranges of a checkpoint straight into the final buffers, or resuming (`runtime/checkpoint_load.py`)."""
    own = [_range(placements), *_halves(placements, (0, 0), copies=1 if choice.device == "cpu" else 2)]
    return activity_of("load, resume", ("load.fill",), kept, own, "after initialise")


def _range(placements: Sequence[Placement]) -> Line:
    """What a range is read into. Ranges of a checkpoint end with their parameter, whoever wrote it."""
    nbytes = min(RANGE_NUMEL, largest(placements)) * FP32
    return Line("load.range", nbytes, ((0, 0),), "buffers", "host", note="one range as it is read")


# --- whole parameters ----------------------------------------------------------------------------------------------


def _checksum(placements: Sequence[Placement]) -> list[Line]:
    """Of each unit's values, to tell whether somebody wrote to them."""
    numel = max((p.layout.padded_numel for p in placements), default=0)
    note = "a part of a unit in 64 bits, which torch makes inside its sum"
    return [
        Line("summon.checksum", min(CHECKSUM_NUMEL, numel) * INT64, ((0, 0),), "buffers", source="derived", note=note),
        Line("summon.sum", INT64, ((0, 0),) * 2, "buffers"),
    ]


def summon(placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """`zplan.summon(model)`: every ringed unit gathered beside the ring (`runtime/summon.py`)."""
    ringed = [p for p in placements if p.ringed]
    copies = by_class("summon", [(p, p.buffer_bytes(choice), (0, 0)) for p in ringed], "buffers")
    own = [*copies, *_checksum(placements)]
    return activity_of(
        "summon", ("summon",), kept, own, "a script: the whole model at once, on every rank", plain=False
    )


def export(spec: ModelSpec, placements: Sequence[Placement], choice: Choice, kept: Kept) -> Activity:
    """`save_16bit_model` and `--export`, unit by unit (`runtime/hf_export.py`, `runtime/model_folder.py`)."""
    ringed = [p.buffer_bytes(choice) for p in placements if p.ringed]
    own = [Line("summon.unit", max(ringed, default=0), ((0, 1),), "buffers"), *_checksum(placements)]
    turned = spec.arch is not None and spec.arch.family == "gpt2"
    cast = choice.precision != "bf16"
    most = max(
        (BF16 * p.numel * (cast + (turned and x.unit.kind == "block" and len(p.shape) == 2)))
        for x in one_of_each(placements)
        for p in x.unit.params
    )
    own.append(Line("export.cast", most, ((1, 1),), "buffers", note="one parameter as the folder has it"))
    if choice.device != "cpu":
        own.append(Line("export.host", BF16 * largest(placements), ((1, 1),), "buffers", "host", note="rank 0"))
    return activity_of("export", ("export.gather", "export.write"), kept, own, "16-bit folder, unit by unit")


def export_checkpoint(placements: Sequence[Placement]) -> Activity:
    """`zplan checkpoint export`: one process without a GPU, a parameter at a time (`runtime/hf_export.py`)."""
    numel = largest(placements)
    own = [
        Line("export.whole", numel * FP32, ((0, 0),), "buffers", "host"),
        Line("export.cast", numel * BF16, ((0, 0),), "buffers", "host"),
        _range(placements),
    ]
    ledger = merge(("export.parameter",), own)
    return Activity("checkpoint export", ledger, every_rank=False, note="one process, no GPU", plain=False)
