"""`zplan checkpoint`: look at saved checkpoints, check them, compare them, make model folders of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
TAG = click.option("--tag", metavar="TAG", help="Which checkpoint of the folder.  [default: what `latest` names]")


@click.group(
    epilog="\b\nExamples:\n  zplan checkpoint list runs/a\n  zplan checkpoint export runs/a model-folder --dtype bf16",
)
def checkpoint() -> None:
    """List, verify, export, compare and import checkpoints. Needs no GPU."""


@checkpoint.command(
    "list", epilog="\b\nExamples:\n  zplan checkpoint list runs/a\n  zplan checkpoint list runs/a --json"
)
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path, *, as_json: bool) -> None:
    """List the checkpoints of a FOLDER, newest first, and which are whole."""
    from zplan.runtime.checkpoint_report import list_table, listing

    if as_json:
        click.echo(json.dumps([x.to_mapping() for x in listing(folder)], indent=2))
    else:
        click.echo(list_table(folder), nl=False)


@checkpoint.command(
    epilog="\b\nExamples:\n  zplan checkpoint verify runs/a\n  zplan checkpoint verify runs/a --tag global_step100"
)
@FOLDER
@TAG
def verify(folder: Path, tag: str | None) -> None:
    """Read every byte of a checkpoint and compare it with its crc32. Exit code 1 when something is wrong."""
    from zplan.runtime.checkpoint_format import Damaged
    from zplan.runtime.checkpoint_read import Checkpoint
    from zplan.runtime.checkpoint_report import resolve

    path = resolve(folder, tag)
    try:
        with Checkpoint(path) as opened:
            wrong = [error.message for error in opened.verify()]
            m = opened.manifest
    except Damaged as error:
        wrong = [error.message]
    for message in wrong:
        click.echo(message)
    if wrong:
        sys.exit(1)
    click.echo(
        f"{path}: step {m.global_step}, {len(m.parameters)} parameters, {m.nbytes:,} bytes of {len(m.files)} ranks, "
        "every crc32 right"
    )


@checkpoint.command(
    epilog="\b\nExamples:\n  zplan checkpoint export runs/a model-folder\n"
    "  zplan checkpoint export runs/a model-fp32 --tag global_step100 --dtype fp32 --shard-size 2GiB"
)
@FOLDER
@click.argument("out", type=click.Path(path_type=Path))
@TAG
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--shard-size", default="4GiB", show_default=True, metavar="SIZE", help="Largest file of weights.")
def export(folder: Path, out: Path, tag: str | None, dtype: Literal["bf16", "fp32"], shard_size: str) -> None:
    """Write the weights as a folder OUT that transformers' from_pretrained loads."""
    from zplan.planner.units import parse_bytes
    from zplan.runtime.checkpoint_read import Checkpoint
    from zplan.runtime.checkpoint_report import resolve
    from zplan.runtime.hf_export import export_checkpoint, loading_class

    with Checkpoint(resolve(folder, tag)) as opened:
        export_checkpoint(opened, out, dtype=dtype, shard_bytes=parse_bytes(shard_size, "--shard-size"))
        name = loading_class(opened.manifest.model)
    click.echo(f'{name}.from_pretrained("{out}")')


@checkpoint.command(
    epilog="\b\nExamples:\n  zplan checkpoint diff runs/a runs/b\n"
    "  zplan checkpoint diff runs/a/global_step100 runs/a/global_step200"
)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
def diff(first: Path, second: Path) -> None:
    """Compare two checkpoints bit for bit, whatever ranks wrote them. Exit code 1 when they differ."""
    from zplan.planner.report import table
    from zplan.runtime.checkpoint_read import Checkpoint
    from zplan.runtime.checkpoint_report import differences, facts_that_differ, resolve

    with Checkpoint(resolve(first, None)) as a, Checkpoint(resolve(second, None)) as b:
        facts, found = facts_that_differ(a.manifest, b.manifest), differences(a, b)
        count = len(a.manifest.parameters)
    for fact in facts:
        click.echo(fact)
    if found:
        rows = [[d.name, d.state, f"{d.num_different:,}", f"{d.largest:.3g}"] for d in found]
        click.echo("\n".join(table(["parameter", "state", "elements", "largest difference"], rows, "llrr")))
    if facts or found:
        sys.exit(1)
    click.echo(f"alike: {count} parameters with master weights and moments, counters and client state")


@checkpoint.command(
    "import",
    epilog="\b\nExamples:\n  zplan checkpoint import deepspeed-run runs/a\n"
    "  zplan checkpoint import deepspeed-run runs/a --tag global_step500 --model my-model/config.json",
)
@click.argument("source", metavar="DS_FOLDER", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@TAG
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="CONFIG", help="Its config.json (or folder), for exports later."
)
def import_(source: Path, out: Path, tag: str | None, model: Path | None) -> None:
    """Make a checkpoint in OUT of one that DeepSpeed wrote at stage 1, 2 or 3. No pickled code is run."""
    from zplan.runtime.ds_import import import_deepspeed

    found = import_deepspeed(source, out, tag=tag, config=None if model is None else _model_config(model))
    m = found.manifest
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{found.path}: step {m.global_step}, {m.global_samples:,} samples, {len(m.parameters)} parameters of "
        f"{m.world_size} ranks at stage {m.training['stage']}, {m.training['precision']}"
    )


def _model_config(path: Path) -> dict[str, Any]:
    from zplan.planner.reading import read_json

    return read_json(path / "config.json" if path.is_dir() else path)
