"""Commands that train: `run`, `verify`, `demo`. Options in, one call of the runtime, its tables out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from zplan.planner.errors import ZplanError

PLAN = click.argument("plan", type=click.Path(path_type=Path))
SEED = click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Of the initial weights and the order of samples.",
)
DATA_HELP = "Text: a file, or a folder of .txt and .jsonl files."
TOKENIZER = click.option(
    "--tokenizer",
    metavar="FOLDER|bytes",
    help="A folder with a tokenizer.json, or `bytes`.  [default: the plan's model folder where it has one, else bytes]",
)


class ScriptCommand(click.Command):
    """A command whose second positional argument starts a program's own command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _protect_script(args, self.get_params(ctx)))


def _protect_script(args: list[str], params: list[click.Parameter]) -> list[str]:
    """Put `--` before the second positional argument, so that what follows is the program's.

    Examples
    --------
    >>> data = click.Option(["--data"])
    >>> _protect_script(["--data", "x", "plan.json", "train.py", "--data", "y"], [data])
    ['--data', 'x', 'plan.json', '--', 'train.py', '--data', 'y']
    """
    takes_value = {o for p in params if isinstance(p, click.Option) and not p.is_flag for o in p.opts}
    positionals, at = 0, 0
    while at < len(args):
        if args[at] == "--":
            return args
        if args[at].startswith("-") and args[at] != "-":
            at += 2 if args[at] in takes_value else 1
            continue
        positionals += 1
        if positionals == 2:
            return [*args[:at], "--", *args[at:]]
        at += 1
    return args


@contextmanager
def interruptible() -> Iterator[None]:
    """A stopped run is no error: one line, and the exit code that shells expect."""
    from zplan.runtime.launch import Interrupted

    try:
        yield
    except Interrupted as stopped:
        click.echo(f"zplan: stopped by {stopped}", err=True)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        click.echo("zplan: stopped by SIGINT", err=True)
        sys.exit(130)


def tolerance_of(outcome: Any, given: float | None = None) -> float:
    """As a fraction: what was given, else nothing on a CPU and 1 % on a GPU, where kernels choose workspaces."""
    if given is not None:
        return given
    return 0.01 if any(m.device.startswith("cuda") for m in outcome.measured) else 0.0


@click.command(
    cls=ScriptCommand,
    epilog="\b\nExamples:\n  zplan run plan.json --data books/ --steps 100\n  zplan run plan.json train.py --lr 3e-4",
)
@PLAN
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option("--data", type=click.Path(path_type=Path), help=DATA_HELP)
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps.  [default: 10]")
@SEED
@TOKENIZER
@click.option("--save-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="Checkpoints: one at the end ...")
@click.option("--save-every", type=click.IntRange(1), metavar="STEPS", help="... and one after every so many steps.")
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Delete all but the newest N.  [default: keep all]")
@click.option("--resume", metavar="auto|TAG", help="Go on from --save-dir: its newest whole checkpoint, or this one.")
@click.option("--weights", type=click.Path(path_type=Path), metavar="FOLDER", help="Start from a model folder.")
@click.option("--eval-data", type=click.Path(path_type=Path), help="Held-out text: its loss at every save and the end.")
@click.option("--export", type=click.Path(path_type=Path), metavar="FOLDER", help="Write a model folder at the end.")
def run(plan: Path, script: tuple[str, ...], data: Path | None, steps: int | None, seed: int, **more: Any) -> None:
    """Train under a plan: its own model on --data, or a SCRIPT that calls zplan.initialize.

    One process per rank is started on this machine. Progress goes to stderr, the table of predicted and measured bytes
    to stdout. With --resume, --steps counts from the very first step.
    """
    from zplan.runtime.start import Training, run_script, train

    if bool(script) == bool(data):
        what = "both --data and a script are" if script else "neither --data nor a script is"
        raise ZplanError(f"{what} given", "zplan run plan.json --data FILE_OR_FOLDER, or zplan run plan.json train.py")
    if script:
        for name, value in (("steps", steps), *more.items()):
            if value is not None:
                raise ZplanError(
                    f"`--{name.replace('_', '-')}` is for --data: a script decides that itself",
                    "give it after the script's name",
                )
        with interruptible():
            run_script(plan, Path(script[0]), list(script[1:]))
        return
    assert data is not None
    given = {name: more[name] for name in ("tokenizer", "weights", "eval_data", "export")}
    with interruptible():
        outcome = train(plan, Training(data, steps or 10, seed=seed, saving=_saving(more), **given))
    click.echo(outcome.table(tolerance_of(outcome)))
    if given["export"] is not None:
        click.echo(f'\nAutoModelForCausalLM.from_pretrained("{given["export"]}")')


def _saving(options: dict[str, Any]) -> Any:
    from zplan.runtime.start import Saving

    if options["save_dir"] is None:
        for name in ("save_every", "keep", "resume"):
            if options[name] is not None:
                raise ZplanError(
                    f"`--{name.replace('_', '-')}` needs a folder of checkpoints", "give --save-dir FOLDER"
                )
        return None
    return Saving(options["save_dir"], options["save_every"], options["keep"], options["resume"])


class Percent(click.ParamType):
    """`1%` or `1` as the fraction 0.01."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(str(value).removesuffix("%")) / 100
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            self.fail(f"`{value}` is not between 0% and 100%", param, ctx)
        return number


class Size(click.ParamType):
    """`24GiB`, `24GB`, or GiB when bare."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from zplan.planner.units import parse_bytes

        return parse_bytes(value, "--cap")


@click.command(epilog="\b\nExamples:\n  zplan verify plan.json\n  zplan verify plan.json --world 64 --cap 24GiB")
@PLAN
@click.option("--steps", type=click.IntRange(2), default=3, show_default=True, help="Optimizer steps; the last counts.")
@click.option(
    "--tolerance", type=Percent(), help="Largest difference of a line or peak.  [default: 0% on a CPU, 1% on a GPU]"
)
@click.option(
    "--world", type=click.IntRange(1), help="Be rank 0 of this many in one process; collectives move nothing."
)
@click.option("--cap", type=Size(), help="On a GPU: keep the allocator to what a card of this size leaves it.")
@click.option("--data", type=click.Path(path_type=Path), help=DATA_HELP + "  [default: random tokens]")
@SEED
@click.option("--json", "as_json", is_flag=True, help="Every line of every rank, in exact bytes, on stdout.")
def verify(
    *,
    plan: Path,
    steps: int,
    tolerance: float | None,
    world: int | None,
    cap: int | None,
    data: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run a few steps and lay every measured byte beside the predicted one.

    Exit code 1 when a line or a phase's peak is outside the tolerance, or when there are bytes that no line claims.
    """
    from zplan.runtime.start import Training, train

    with interruptible():
        outcome = train(plan, Training(data, steps, seed=seed, measured_steps=steps, world=world, cap_bytes=cap))
    allowed = tolerance_of(outcome, tolerance)
    click.echo(outcome.to_json(allowed) if as_json else outcome.table(allowed))
    sys.exit(0 if outcome.good(allowed) else 1)


@click.command(epilog="\b\nExamples:\n  zplan demo\n  zplan demo --out /tmp/demo --steps 50")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("zplan-demo"), show_default=True, help="Folder to write."
)
@click.option("--steps", type=click.IntRange(2), default=150, show_default=True, help="Optimizer steps.")
@SEED
def demo(out: Path, steps: int, seed: int) -> None:
    """Plan and train a small model on this machine's own Python sources: two CPU ranks, stage 3, under 90 seconds."""
    from zplan.runtime.demo import demo as show

    with interruptible():
        outcome, closing = show(out, num_steps=steps, seed=seed)
    click.echo(outcome.table(0.0))
    click.echo(f"\n{closing}")
