"""`zplan checkpoint`: look at saved checkpoints, check them, compare them, make model folders of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
TAG = click.option("--tag", metavar="TAG", help="Which checkpoint of the folder.  [default: what `latest` names]")


@click.group(
    epilog="\b\nExamples:\n  zplan checkpoint list runs/a\n  zplan checkpoint export runs/a model-folder --dtype bf16",
)
def checkpoint() -> None:
    """List, verify, export and compare checkpoints. Needs no GPU."""


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
    from zplan.runtime.hf_export import export_checkpoint

    with Checkpoint(resolve(folder, tag)) as opened:
        export_checkpoint(opened, out, dtype=dtype, shard_bytes=parse_bytes(shard_size, "--shard-size"))
    click.echo(f'AutoModelForCausalLM.from_pretrained("{out}")')


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
