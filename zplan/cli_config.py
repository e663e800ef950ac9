"""Commands about configs of other tools: `check` reads them, `emit` writes them. Options in, text out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zplan.planner.errors import ZplanError

if TYPE_CHECKING:
    from zplan.planner.lint import Subject
    from zplan.planner.relaxed import Document


def _read(file: str) -> Document:
    """A config file; YAML where its name says so, for a broken JSON file is better explained as JSON."""
    from zplan.planner.reading import read_text
    from zplan.planner.relaxed import read_document

    text = read_text(file)
    if file.lower().endswith((".yaml", ".yml")):
        from zplan.yaml_reading import read_yaml

        return read_yaml(text, file)
    return read_document(text, file)


@click.command(
    epilog="\b\nExamples:\n  zplan check ds_config.json --gpus 8\n"
    "  zplan check ds_config.json --model llama-2-7b --gpus 8 --mem 24 --for hf\n"
    "  zplan check ds_config.json --model llama-2-7b --gpus 8 --oom train.log --fix fixed.json\n"
    "  zplan check --explain overlap_comm",
)
@click.argument("file", type=click.Path(), required=False)
@click.option("--for", "consumer", metavar="TOOL", help="any, deepspeed, hf, accelerate or lightning.  [default: any]")
@click.option("--deepspeed", metavar="RELEASE", help="Release to check for, such as 0.15.4.  [default: 0.19.8]")
@click.option("--model", metavar="NAME", help="A name of `zplan models`, a folder, a config.json, or a hub id.")
@click.option("--params", metavar="COUNT", help="A count alone (7e9, 7B).")
@click.option("--trainable", metavar="COUNT", help="Parameters that are trained, as with LoRA.  [default: all]")
@click.option("--largest-tensor", metavar="COUNT", help="Elements of the largest tensor.  [default: the model's]")
@click.option("--gpus", type=int, metavar="N", help="GPUs over all nodes.")
@click.option("--nodes", type=int, metavar="N", help="Machines.  [default: 1]")
@click.option("--mem", metavar="SIZE", help="Memory per GPU: 24 is GiB, 24GB is 24e9.")
@click.option("--gpu", metavar="NAME", help="A name of `zplan gpus`, instead of --mem.")
@click.option("--host-mem", metavar="SIZE", help="Memory per node.")
@click.option("--micro-batch", type=int, metavar="N", help="What the launcher passes per GPU.")
@click.option("--seq", type=int, metavar="N", help="Tokens per sequence: counts what no number of GPUs splits.")
@click.option("--was-batch", type=int, metavar="N", help="Global batch of the run that the learning rate is from.")
@click.option("--was-gpus", type=int, metavar="N", help="Ranks of the run whose checkpoint is resumed.")
@click.option("--checkpointing", metavar="HOW", help="none or full, with --oom: the config can't say.  [default: none]")
@click.option("--attention", metavar="HOW", help="sdpa or eager, with --oom.  [default: sdpa]")
@click.option("--oom", metavar="LOG", type=click.Path(), help="A log that ends with torch's out-of-memory message.")
@click.option("--fix", metavar="OUT", type=click.Path(), help="With --oom: write the config that fits.")
@click.option("--explain", metavar="KEY", help="Say what a key of DeepSpeed's configs does there and in zplan.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with exact bytes.")
def check(  # one option each
    *, file: str | None, as_json: bool, oom: str | None, fix: str | None, explain: str | None, **given: Any
) -> int:
    """Say what is wrong in a DeepSpeed, accelerate or FSDP config, what is silently ignored, and what it costs.

    FILE is JSON, YAML, or a Python script with the config as a dict. With --oom, say which line of the ledger did not
    fit, what each change saves and costs, and what to change. Exits with 1 when there are errors (or nothing fits), 2
    when a file cannot be read at all.
    """
    from zplan.planner.lint import check_document
    from zplan.planner.lint_report import lint_json, lint_text
    from zplan.planner.lint_subject import make_subject

    if explain is not None:
        from zplan.planner.explain import explanation

        click.echo(explanation(explain), nl=False)
        return 0
    if file is None:
        raise ZplanError("no FILE is given", "`zplan check ds_config.json`, or `zplan check --explain KEY`")
    how = {name: given.pop(name) for name in ("checkpointing", "attention")}
    subject = make_subject(given)
    if oom is not None:
        return _diagnose(file, oom, fix, subject, {**given, **how}, as_json=as_json)
    for name, value in {"fix": fix, **how}.items():
        if value is not None:
            raise ZplanError(f"--{name} is for --oom", f"give --oom LOG too, or leave --{name} out")
    if file.lower().endswith(".py"):
        from zplan.planner.lint_script import check_script
        from zplan.planner.reading import read_text

        report = check_script(read_text(file), file, subject)
    else:
        report = check_document(_read(file), file, subject)
    click.echo(lint_json(report) if as_json else lint_text(report), nl=False)
    return 1 if report.count("error") else 0


def _diagnose(file: str, log: str, out: str | None, subject: Subject, given: dict[str, Any], *, as_json: bool) -> int:
    """`check --oom`: 0 when a change fits and nothing else is asked, 1 when none does."""
    from zplan.planner.oom_report import diagnose, diagnosis_json, diagnosis_text, fixed_file, pace_of
    from zplan.planner.oom_setup import make_setup
    from zplan.planner.reading import read_text
    from zplan.planner.writing import render, write_files

    document = _read(file)
    setup = make_setup(document, file, subject, given)
    found = diagnose(read_text(log), log, setup, subject.mem_bytes, pace_of(given.get("gpu")))
    click.echo(diagnosis_json(found) if as_json else diagnosis_text(found), nl=False)
    if out is not None:
        write_files({out: render(fixed_file(found, document)) + "\n"})
        click.echo(f"wrote {out}", err=as_json)
    return 1 if found.ladder is not None and found.ladder.fixed is None else 0


@click.command(
    epilog="\b\nExamples:\n  zplan emit plan.json --format deepspeed\n"
    "  zplan emit plan.json --format fsdp2 -o train_fsdp2.py",
)
@click.argument("plan", type=click.Path())
@click.option(
    "--format",
    "form",
    required=True,
    metavar="TOOL",
    help="zplan, deepspeed, accelerate, hf, fsdp2, torchtitan or slurm.",
)
@click.option("-o", "--out", metavar="FILE", help="Where to write.  [default: standard output]")
def emit(*, plan: str, form: str, out: str | None) -> int:
    """Write a plan as the config or script of another tool, with every value explicit."""
    from zplan.planner.emit import emit as emit_plan
    from zplan.planner.plan_file import load_plan
    from zplan.planner.writing import write_files

    text, notes = emit_plan(load_plan(plan), form)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(text, nl=False)
    else:
        write_files({out: text})
        click.echo(f"wrote {out}")
    return 0
