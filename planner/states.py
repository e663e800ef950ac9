"""Lines of the model states: parameters, master weights, moments, and the optimizer's scalars."""

from __future__ import annotations

from collections.abc import Sequence

from zplan.planner.config import Choice
from zplan.planner.ledger import Kind, Line, Tier
from zplan.planner.optimizers import SCRATCH_NUMEL, OptimizerKind, kind_of, workspace_bytes
from zplan.planner.placement import (
    NF4_CLASS,
    SHARED,
    Placement,
    shards_states,
    shares_flat,
    single_gradients,
    splits_masters,
)
from zplan.planner.timeline import Timeline

FP32, BF16 = 4, 2

NORM_BLOCKS = 1024
"""Most blocks of one norm launch (`cuda_ops/norm.py`)."""

NUM_SCALARS = 7
"""fp32 scalars of the optimizer: step, norm, clip coefficient, gradient scale, non-finite flag, tokens, scratch."""


NUM_COEFFICIENTS = 8
"""fp32 scalars at the end of the scratch buffer (`runtime/elementwise.py`)."""


def by_class(line_id: str, rows: Sequence[tuple[Placement, int, tuple[int, int]]], kind: Kind) -> list[Line]:
    """One line per size class from `(placement, bytes, span)` rows; equal class means equal bytes."""
    groups: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for p, nbytes, span in rows:
        groups.setdefault(p.size_class, []).append((nbytes, span))
    return [
        Line(f"{line_id}.{name}", found[0][0], tuple(span for _, span in found), kind) for name, found in groups.items()
    ]


def state_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """Everything that lives between steps. Moments and masters are there from the first step on."""
    always = time.always
    lines: list[Line] = []
    lines += frozen_lines([p for p in placements if p.frozen], choice, always)
    placements = [p for p in placements if not p.frozen]
    for shared, note in ((False, ""), (True, SHARED)):
        resident = [p for p in placements if not p.ringed and shares_flat(p, choice) == shared]
        found = by_class("params.flat", [(p, p.buffer_bytes(choice), always) for p in resident], "states")
        lines += (line._replace(note=note) for line in found)
    lines += by_class("optim.master", [(p, p.owned_numel * FP32, always) for p in placements if p.has_master], "states")
    halves = [(p, p.owned_numel * BF16, always) for p in placements if p.split]
    lines += by_class("params.shard", [row for row in halves if row[0].ringed], "states")
    lines += by_class("optim.master_low", halves, "states")
    lines += moment_lines(placements, choice, time)
    lines.append(Line("optim.scalars", NUM_SCALARS * FP32, (always,), "states"))
    if choice.precision == "fp16":
        from zplan.planner.loss_scale import NUM_SCALARS as NUM_SCALE_SCALARS

        lines.append(Line("optim.loss_scale", NUM_SCALE_SCALARS * FP32, (always,), "states"))
    lines.append(Line("optim.norms", norm_bytes(placements, choice), (always,), "states"))
    lines.append(Line("optim.table", table_bytes(placements, choice), (always,), "states"))
    lines.append(Line("optim.scratch", scratch_numel(placements, choice) * FP32, (always,), "states"))
    return lines


def moment_lines(placements: Sequence[Placement], choice: Choice, time: Timeline) -> list[Line]:
    """What the optimizer keeps of each unit, and what its step holds for a moment. See [Note: optimizer bytes].

    Without master weights a ringed unit keeps a shard in the compute dtype, from which its slot is filled.
    """
    kind, always = kind_of(choice.optimizer), time.always
    shares = choice.world_size if shards_states(choice) else 1
    lines: list[Line] = []
    for state in kind.states:
        rows = [(p, state.nbytes(p.unit, p.owned_numel, shares), always) for p in placements]
        lines += by_class(f"optim.{state.name}", rows, "states")
    if not kind.master:
        shards = [(p, p.owned_numel * choice.itemsize, always) for p in placements if p.ringed]
        lines += by_class("params.shard", shards, "states")
    if kind.workspace is not None:
        workspace = workspace_bytes(kind.name, tuple(p.unit for p in placements))
        updating = ((time.at("step"),) * 2,)
        if choice.optimizer_in_backward:
            updating = (time.reducing(placements[-1].unit.name),)
        lines.append(Line("optim.workspace", workspace, updating, "buffers"))
    if kind.per_slice:
        # torch keeps step counts on the host.
        tier: Tier = "device" if choice.device == "cpu" else "host"
        lines.append(Line("optim.steps", kind.per_slice * num_rows(placements, choice), (always,), "states", tier))
    return [_as_estimate(line, kind) for line in lines]


def _as_estimate(line: Line, kind: OptimizerKind) -> Line:
    return line if kind.runnable else line._replace(source="estimate", note=kind.note or f"{kind.name} as published")


def frozen_lines(placements: Sequence[Placement], choice: Choice, always: tuple[int, int]) -> list[Line]:
    """Frozen parameters: shards where ringed, and whole buffers that every rank holds alike. See [Note: frozen]."""
    shards = [(p, p.buffer_bytes(choice) // choice.world_size, always) for p in placements if p.ringed]
    whole = [(p, p.buffer_bytes(choice), always) for p in placements if not p.ringed]
    note = ""
    if choice.world_size > 1:
        why = "not in a ring" if choice.stage == 3 else f"stage {choice.stage} does not shard parameters"
        note = f"replicated on {choice.world_size} ranks: {why}"
    lines = [
        *by_class("params.frozen.shard", shards, "states"),
        *(line._replace(note=note) for line in by_class("params.frozen.whole", whole, "states")),
        *_constant_lines(placements, always, note),
    ]
    nf4 = "two elements a byte, 8-bit constants of 64, fp32 constants of 16,384 (nf4, double quantization)"
    return [x._replace(source="derived", note=nf4) if x.id.endswith(f".{NF4_CLASS}") else x for x in lines]


def _constant_lines(placements: Sequence[Placement], always: tuple[int, int], note: str) -> list[Line]:
    """What quantizers keep beside their integers, whole on every rank: one line, since layers may differ."""
    nbytes = sum(p.unit.constant_bytes for p in placements)
    return [Line("params.frozen.constants", nbytes, (always,), "states", note=note)] if nbytes else []


def measures_slices(choice: Choice) -> bool:
    """Whether a rank takes the norm of its own slices of the gradients alone, which is summed over ranks.

    See [Note: fixed order] in `planner/buffers.py`.
    """
    return shards_states(choice) or (choice.deterministic and choice.world_size > 1)


def num_slices(placements: Sequence[Placement], choice: Choice) -> int:
    """Contiguous stretches whose norms this rank takes: one per piece of its slices, or one per unit."""
    return sum(len(p.layout.pieces) if measures_slices(choice) else 1 for p in placements if not p.frozen)


def num_rows(placements: Sequence[Placement], choice: Choice) -> int:
    """Most stretches of one parameter group that a rank can have to update.

    [Note: groups] Learning rate and weight decay belong to a group of parameters, and those of one group need not lie
    side by side. A slice is therefore updated in runs of one group. Which runs of a piece a rank owns depends on the
    rank; there is room for all of them on each.
    """
    count = 0
    for p in placements:
        if p.frozen:
            continue
        # Pieces are equally long, but for the last one.
        length = p.layout.max_piece_numel if shards_states(choice) else p.layout.padded_numel
        if length:
            count += sum(-(-end // length) - start // length for start, end, _ in group_runs(p))
    return count


def group_runs(p: Placement) -> list[tuple[int, int, int]]:
    """`(start, end, group)` of each run of parameters of one group, in elements; padding belongs to what is before it.

    Together they cover the unit's flat buffer. See [Note: groups].
    """
    runs: list[tuple[int, int, int]] = []
    entries = p.layout.entries
    for i, param in enumerate(p.unit.params):
        end = entries[i + 1].offset if i + 1 < len(entries) else p.layout.padded_numel
        if runs and runs[-1][2] == param.group:
            runs[-1] = (runs[-1][0], end, param.group)
        else:
            runs.append((runs[-1][1] if runs else 0, end, param.group))
    return runs


def norm_bytes(placements: Sequence[Placement], choice: Choice) -> int:
    """Partial norms: the kernels' words on CUDA (`cuda_ops/norm.py`), one fp32 a stretch on the CPU."""
    if choice.device == "cuda":
        return 8 * (2 * NORM_BLOCKS + 4 + 2 * num_slices(placements, choice))
    total = 0
    for p in placements:
        if not p.frozen:
            lengths = _slice_lengths(p, choice, sliced=measures_slices(choice))
            total += sum(-(-n // norm_chunk(choice.device, n)) for n in lengths)
    return total * FP32


def _slice_lengths(p: Placement, choice: Choice, *, sliced: bool) -> list[int]:
    """Elements of a rank's slice of each piece of a unit; else of the whole."""
    if not sliced:
        return [p.layout.padded_numel]
    return [piece.numel // choice.world_size for piece in p.layout.pieces]


def table_bytes(placements: Sequence[Placement], choice: Choice) -> int:
    """The AdamW kernel's table of slices on CUDA: eight 64-bit words each (`cuda_ops/adamw.py`)."""
    return 64 * num_rows(placements, choice) if choice.device == "cuda" and choice.optimizer == "adamw" else 0


def scratch_numel(placements: Sequence[Placement], choice: Choice) -> int:
    """fp32 elements of what update rules without a fused kernel go through slices in, and their coefficients."""
    lengths = [n for p in placements if not p.frozen for n in _slice_lengths(p, choice, sliced=shards_states(choice))]
    num, coefficients = kind_of(choice.optimizer).scratch, NUM_COEFFICIENTS
    if splits_masters(choice) and choice.device == "cpu":
        # Masters made whole, bits, and gradients made fp32 (`runtime/adamw.py`).
        num, coefficients = (3 if single_gradients(choice) else 2), 0
    return num * min(SCRATCH_NUMEL, max(lengths, default=0)) + (coefficients if num else 0)


def norm_chunk(device: str, numel: int) -> int:
    """Elements of one partial norm.

    A GPU reduces a whole slice as a tree. The CPU kernel adds along lanes and is off by 1e-4 at 3e6 elements, so there
    it is given short stretches.
    """
    return 16384 if device == "cpu" else max(1, numel)
