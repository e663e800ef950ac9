"""A DeepSpeed checkpoint folder becomes a checkpoint of zplan, which any ranks and stage load.

Each rank's file of optimizer states becomes one rank's file of ranges: nothing is gathered, and what one holds in
memory is one range. Masters and both moments, the steps taken, the loss scale, the learning rate, frozen parameters and
what of the client state JSON can hold move over. Random states are in no DeepSpeed checkpoint, and buffers of a module
in none of zplan's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from zplan.planner.errors import ZplanError
from zplan.runtime import checkpoint_folder as folder
from zplan.runtime import ds_import_files as files
from zplan.runtime.checkpoint_format import FROZEN, RANGE_NUMEL, WEIGHT, FileRecord, Manifest, Range
from zplan.runtime.checkpoint_ranges import NAMES
from zplan.runtime.checkpoint_read import coverage_faults
from zplan.runtime.checkpoint_write import Source, check_shared, write_rank
from zplan.runtime.ds_import_layout import Part, slice_numel, sliced_parameters, whole_groups
from zplan.runtime.ds_import_model import Model, manifest_of, read_model
from zplan.runtime.ds_import_states import RankStates, rank_states


@dataclass(frozen=True)
class Imported:
    """What came of it: the new checkpoint, its manifest, and what did not move over, one sentence each."""

    path: Path
    manifest: Manifest
    notes: tuple[str, ...]


def import_deepspeed(
    source: Path, out: Path, *, tag: str | None = None, config: Mapping[str, Any] | None = None
) -> Imported:
    """Write a checkpoint into the folder `out` from the DeepSpeed checkpoint `source`.

    Parameters
    ----------
    source
        What DeepSpeed's `save_checkpoint` was given, or the folder of one tag in it.
    config
        Content of the model's `config.json`, so that the checkpoint can be exported as a model folder.

    Raises
    ------
    ZplanError
        When files are missing, hold what can't be read safely, or are laid out in a way that is not known here.
    """
    found = files.find(files.tag_folder(source, tag))
    model = read_model(found.models[0])
    ranks = [rank_states(path, files.read(path)) for path in found.optims]
    _check_ranks(found, ranks)
    stage = ranks[0].stage
    lengths = [r.lengths for r in ranks]
    parts = (
        sliced_parameters(model.shapes, lengths)
        if stage == 3
        else whole_groups(model.shapes, ranks[0].paddings, lengths)
    )
    for path, rank, mine in zip(found.optims, ranks, parts, strict=True):
        _check_fragments(path, rank, mine)
    frozen = [list(_frozen(found, model, stage, r)) for r in range(len(ranks))]
    sources = [list(_trained(rank, mine)) for rank, mine in zip(ranks, parts, strict=True)]
    notes: list[str] = []
    manifest = manifest_of(found.folder.name, model, ranks[0], len(ranks), config, notes)
    return Imported(_write(out, manifest, sources, frozen), manifest, tuple(notes))


def _check_ranks(found: files.Files, ranks: list[RankStates]) -> None:
    first = ranks[0]
    for path, rank in zip(found.optims, ranks, strict=True):
        if (rank.stage, rank.step, rank.moments) != (first.stage, first.step, first.moments):
            raise ZplanError(
                f"`{path}` is of stage {rank.stage} and step {rank.step}, and rank 0's file of {first.stage} and "
                f"{first.step}",
                "the folder holds files of different saves: import one that is whole",
            )
    if first.partition_count not in (0, len(ranks)):
        raise ZplanError(
            f"`{found.folder}` has the optimizer states of {len(ranks)} ranks, and its parameters are spread over "
            f"{first.partition_count}",
            "copy the files of all ranks into one folder",
        )
    if first.stage == 3 and len(found.models) != len(ranks):
        raise ZplanError(
            f"`{found.folder}` has {len(found.models)} files of model states and {len(ranks)} of optimizer states",
            "copy the files of all ranks into one folder",
        )


def _check_fragments(path: Path, rank: RankStates, parts: list[Part]) -> None:
    """The layout against the places that the file itself names, where it does."""
    if rank.stage == 3 or rank.fragments is None:
        return
    mine = {(p.group, p.name): (p.at, p.numel) for p in parts}
    theirs = {(g, name): (f.start, f.numel) for g, row in enumerate(rank.fragments) for name, f in row.items()}
    if odd := sorted({k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}):
        name = odd[0]
        raise ZplanError(
            f"`{path}` puts `{name[1]}` at {theirs.get(name)} of its slice, and its parameters' sizes at "
            f"{mine.get(name)} (start, elements)",
            "move the weights over instead: `zero_to_fp32.py --safe_serialization`, then `zplan run --weights`",
        )


def _ranges(state: str, name: str, start: int, values: Tensor) -> Iterator[Source]:
    """Values of consecutive elements as ranges of bounded length."""
    for at in range(0, values.numel(), RANGE_NUMEL):
        part = values[at : at + RANGE_NUMEL]
        yield Range(state, name, start + at, start + at + part.numel(), NAMES[part.dtype]), part


def _trained(rank: RankStates, parts: list[Part]) -> Iterator[Source]:
    for state in (WEIGHT, *rank.moments):
        for p in parts:
            yield from _ranges(state, p.name, p.start, rank.flat[p.group][state][p.at : p.at + p.numel])


def _frozen(found: files.Files, model: Model, stage: int, rank: int) -> Iterator[Source]:
    """A rank's share of the frozen parameters: its slices at stage 3; elsewhere rank 0 has all of them."""
    if stage != 3:
        whole = {**model.content["module"], **(model.content.get("frozen_param_fragments") or {})}
        for name in model.frozen if rank == 0 else ():
            yield from _ranges(FROZEN, name, 0, whole[name].detach().contiguous().view(-1))
        return
    fragments = files.read(found.models[rank]).get("frozen_param_fragments") or {} if model.frozen else {}
    for name, shape in model.frozen.items():
        if name not in fragments:
            raise ZplanError(f"`{found.models[rank]}` lacks the frozen parameter `{name}`")
        per_rank = slice_numel(prod(shape), len(found.optims))
        start = rank * per_rank
        real = min(per_rank, prod(shape) - start)
        if real > 0:
            yield from _ranges(FROZEN, name, start, fragments[name].detach().view(-1)[:real])


def _write(out: Path, manifest: Manifest, sources: list[list[Source]], frozen: list[list[Source]]) -> Path:
    """Write, check and commit, under the same rules as any save. See [Note: commit]."""
    ranges = [r for rows in (*sources, *frozen) for r, _ in rows]
    if faults := coverage_faults(manifest.parameters, ranges):
        raise ZplanError(
            f"the ranks' files do not cover the parameters of `{manifest.tag}`: {', '.join(faults[:4])}",
            "copy the files of all ranks into one folder",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder.unwritable(out, error) from None
    lock = folder.WriteLock(out)
    partial: Path | None = None
    try:
        partial = folder.prepare(out, manifest.tag, overwrite=False)
        check_shared(partial, sum(r.nbytes for r in ranges))
        records: list[FileRecord] = []
        for rank, (mine, still) in enumerate(zip(sources, frozen, strict=True)):
            records.append(write_rank(partial, rank, mine, still or None, {})[0])
        folder.commit(out, partial, replace(manifest, files=tuple(records)))
    except OSError as error:
        raise folder.unwritable(out / manifest.tag, error) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when it was committed
        lock.release()
    return out / manifest.tag
