"""`zplan trace`: look into a module without running it."""

from __future__ import annotations

import click

from zplan.planner.errors import ZplanError
from zplan.planner.units import parse_count


@click.command(
    epilog="\b\nExamples:\n  zplan trace --units --model ./Llama-3.1-8B --gpus 8\n"
    '  zplan trace --units --model train:build_model --unit "encoder.layers.*" --table-cap 64e6 --json',
)
@click.option("--units", "show_units", is_flag=True, help="Print the units that are gathered and reduced together.")
@click.option(
    "--model",
    required=True,
    metavar="WHICH",
    help="A folder, a config.json, or package.module:function that builds one.",
)
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(min=1), help="Ranks at stage 3.")
@click.option("--unit", "patterns", multiple=True, metavar="PATTERN", help="Name the blocks, as `units=` does; repeat.")
@click.option("--resident", multiple=True, metavar="PATTERN", help="Keep units whole, as `resident=` does; repeat.")
@click.option(
    "--table-cap",
    metavar="COUNT",
    help="Cut embeddings and heads with more elements than this, as `zplan.cap_tables` does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trace(
    *,
    show_units: bool,
    model: str,
    gpus: int,
    patterns: tuple[str, ...],
    resident: tuple[str, ...],
    table_cap: str | None,
    as_json: bool,
) -> None:
    """Print the units of a model with their sizes, and what stage 3 keeps whole."""
    if not show_units:
        raise ZplanError("`zplan trace` was not told what to print", "add `--units`")
    try:
        from zplan.runtime import tables, unit_list
    except ImportError:
        raise ZplanError("`zplan trace` needs torch", "pip install 'zplan[runtime]'") from None
    try:
        module = unit_list.load_model(model)
    except ValueError as e:
        if ":" in model:
            raise  # A function of the user's: its own traceback says more.
        why = str(e).split(". ")[0].rstrip(".")
        raise ZplanError(f"transformers builds no model of `{model}`: {why}", "give package.module:function") from None
    if table_cap is not None:
        cap = parse_count(table_cap, "--table-cap")
        if not tables.cap_tables(module, cap):
            click.echo(f"zplan: no table has more than {cap:,} elements", err=True)
    rows = unit_list.list_units(module, world_size=gpus, units=list(patterns) or None, resident=resident)
    click.echo(unit_list.as_json(rows) if as_json else unit_list.as_text(rows, gpus), nl=False)
