"""The command line: options in, text out. No arithmetic here; a command imports what it needs when it runs."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zplan import __version__

if TYPE_CHECKING:
    from zplan.planner.request import Request

F = TypeVar("F", bound=Callable[..., Any])

COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "estimate": ("Plan", "zplan.cli", "estimate", "Say whether a training fits, and how to run it."),
    "plan": ("Plan", "zplan.cli", "plan", "Choose, and write plan.json and ds_config.json."),
    "check": ("Plan", "zplan.cli_config", "check", "Say what is wrong in a DeepSpeed, accelerate or FSDP config."),
    "emit": ("Plan", "zplan.cli_config", "emit", "Write a plan as another tool's config or script."),
    "run": ("Run", "zplan.cli_run", "run", "Train what a plan says, on real text or with a script."),
    "verify": ("Run", "zplan.cli_run", "verify", "Run a few steps and compare every line with the plan."),
    "demo": ("Run", "zplan.cli_run", "demo", "Plan and train a small model on two CPU ranks."),
    "checkpoint": ("Run", "zplan.cli_checkpoint", "checkpoint", "List, verify, export and compare checkpoints."),
    "trace": ("Inspect", "zplan.cli_trace", "trace", "Print the units of a model with their sizes."),
    "models": ("Inspect", "zplan.cli", "models", "List the models that zplan knows by name."),
    "gpus": ("Inspect", "zplan.cli", "gpus", "List the GPUs that zplan knows by name."),
}
"""Name -> section of the help, module, attribute, one line. Modules are imported when their command runs."""


class LazyGroup(click.Group):
    """A group whose commands are looked up in `COMMANDS`, so that `estimate` never imports what `run` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        _, module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from zplan.planner.errors import ZplanError, did_you_mean

            near = did_you_mean(args[0], COMMANDS)
            raise ZplanError(f"unknown command `{args[0]}`", near or "`zplan --help` lists the commands")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each kind of command, from the table alone."""
        for section in dict.fromkeys(row[0] for row in COMMANDS.values()):
            rows = [(name, row[3]) for name, row in COMMANDS.items() if row[0] == section]
            with formatter.section(section):
                formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nExamples:\n  zplan estimate --params 7e9 --gpus 8 --mem 24\n"
    "  zplan plan --model smollm2-135m --gpus 2 --mem 8 --seq 256 --global-batch 8 -o plan.json",
)
@click.version_option(__version__, prog_name="zplan", message="%(prog)s %(version)s")
def cli() -> None:
    """Say before a GPU is rented whether a training fits and how best to run it, then prove it by running it."""


def main(args: list[str] | None = None) -> None:
    """Run one command line and exit: 0 answered, 1 does not fit, 2 asked wrongly."""
    from zplan.planner.errors import ZplanError

    try:
        code = cli.main(args, prog_name="zplan", standalone_mode=False)
        sys.stdout.flush()
    except ZplanError as e:
        code = _complain(e.message, e.hint, 1 if type(e).__name__ == "DoesNotFit" else 2)
    except click.UsageError as e:
        if isinstance(e, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 on; before, help is no error.
            print(e.format_message(), file=sys.stderr)  # noqa: T201
            sys.exit(2)
        path = e.ctx.command_path if e.ctx else "zplan"
        message = _lower(e.format_message())
        digits = message.endswith("is not a valid integer")
        hint = "write a whole number in digits, such as 2048" if digits else f"`{path} --help` shows the options"
        code = _complain(message, hint, 2)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("stopped", None, 130)
    except BrokenPipeError:
        # The reader went away, as in `zplan models | head`. Nothing more can be written, not even at exit.
        _drop_output()
        code = 141
    except OSError as e:
        if e.errno not in _FULL or e.filename is not None:
            raise
        _drop_output()
        code = _complain(f"the answer cannot be written: {str(e.strerror).lower()}", "send it where there is room", 2)
    if args is None:
        # The process ends here, and the system takes its memory back: nothing for the last collection to walk through,
        # which would be a tenth of an answer's time.
        gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to a full disk, a spent quota, a file size limit and a broken disk end with."""


def _drop_output() -> None:
    """Let what is still buffered for standard output vanish at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, hint: str | None, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)  # noqa: T201
    return code


def _lower(text: str) -> str:
    text = text.rstrip(".").replace("\n", " ")
    return text[:1].lower() + text[1:]


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)  # noqa: T201


def coloured() -> bool:
    """Whether standard output may have colour: a terminal, and NO_COLOR not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


QUESTION = (
    click.option("--model", metavar="NAME", help="A name of `zplan models`, a folder, a config.json, or a hub id."),
    click.option("--params", metavar="COUNT", help="A count alone (7e9, 7B): a Llama-like shape is assumed."),
    click.option("--gpus", type=int, metavar="N", help="GPUs over all nodes.  [default: this machine's]"),
    click.option("--nodes", type=int, metavar="N", help="Machines.  [default: 1]"),
    click.option("--mem", metavar="SIZE", help="Memory per GPU: 24 is GiB, 24GB is 24e9.  [default: this machine's]"),
    click.option("--gpu", metavar="NAME", help="A name of `zplan gpus`, instead of --mem."),
    click.option("--host-mem", metavar="SIZE", help="Memory per node."),
    click.option("--nvme", metavar="SIZE", help="Disk space per node for what is offloaded there."),
    click.option("--margin", metavar="SIZE|%", help="Keep this free beyond the interval of the total.  [default: 0]"),
    click.option("--stage", type=int, metavar="0..3", help="ZeRO stage.  [default: the fastest that fits]"),
    click.option("--offload", metavar="TO", help="Of the optimizer: none, cpu or nvme.  [default: none]"),
    click.option("--offload-params", metavar="TO", help="Of parameters, stage 3: none, cpu or nvme.  [default: none]"),
    click.option("--offload-ratio", type=float, metavar="SHARE", help="Of the elements, 0 to 1.  [default: 1]"),
    click.option(
        "--optimizer",
        metavar="NAME",
        help="adamw, adam, sgd, lion, adagrad, ...; others as estimates.  [default: adamw]",
    ),
    click.option("--accumulation", type=int, metavar="N", help="Micro-steps per optimizer step.  [default: 1]"),
    click.option("--micro-batch", type=int, metavar="N", help="Sequences per GPU and micro-step.  [default: 1]"),
    click.option("--global-batch", type=int, metavar="N", help="Sequences per optimizer step over all GPUs."),
    click.option("--seq", type=int, metavar="N", help="Tokens per sequence.  [default: 2048 or the model's limit]"),
    click.option("--precision", metavar="TYPE", help="bf16, fp16 or fp32.  [default: bf16]"),
    click.option("--checkpointing", metavar="HOW", help="none, selective or full.  [default: none where it fits]"),
    click.option("--checkpoint-every", type=int, metavar="N", help="Blocks in one checkpointed segment.  [default: 1]"),
    click.option("--checkpoint-offload", is_flag=True, help="Let inputs of checkpointed segments wait on the host."),
    click.option(
        "--loss", "cross_entropy", metavar="HOW", help="plain, bf16, chunked or fused with the head.  [default: plain]"
    ),
    click.option("--reduce-dtype", metavar="TYPE", help="Of gradients between ranks: fp32 or bf16.  [default: fp32]"),
    click.option("--attention", metavar="HOW", help="sdpa or eager.  [default: sdpa]"),
    click.option("--compile", is_flag=True, help="Compile each block; its activations are then an upper bound."),
    click.option("--device", metavar="TYPE", help="cuda or cpu: what the ranks run on.  [default: cuda]"),
    click.option("--runtime", metavar="NAME", help="Whose buffers: zplan, deepspeed, fsdp2, ddp.  [default: zplan]"),
    click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks; deepspeed and fsdp2.  [default: 1]"),
    click.option("--pp", type=int, metavar="N", help="Pipeline stages; deepspeed and fsdp2.  [default: 1]"),
    click.option("--cp", type=int, metavar="N", help="Ranks that share a sequence; deepspeed and fsdp2.  [default: 1]"),
    click.option("--hpz", type=int, metavar="N", help="Ranks of a second parameter shard, stage 3.  [default: 1]"),
    click.option("--saving", metavar="HOW", help="foreground, or background: from a copy in host memory."),
    click.option("--beyond-limit", is_flag=True, help="--seq may be more than the model is made for."),
    click.option("--padded", is_flag=True, help="Sequences are padded to --seq with a mask, not packed."),
    click.option("--config", metavar="FILE", help="A DeepSpeed config; it fixes what it names."),
    click.option("--lora", type=int, metavar="RANK", help="Freeze the model and train adapters of this rank."),
    click.option("--lora-targets", metavar="NAMES", help="q,v; attention; all-linear; or names.  [default: q,v]"),
    click.option("--lora-embeddings", is_flag=True, help="Train embedding and head in full beside the adapters."),
    click.option("--qlora", is_flag=True, help="Keep the frozen linear maps in 4 bits (nf4)."),
    click.option("--efficiency", metavar="SHARE", help="Of the card's peak, in products.  [default: 0.5, A100 0.7]"),
    click.option("--network", metavar="GB/S", help="What a node sends to others.  [default: by the kind of card]"),
    click.option("--tokens", metavar="COUNT", help="Train on so many (20e9): hours and GPU-hours are told."),
    click.option("--epochs", type=int, metavar="N", help="Train so many times on --examples, instead of --tokens."),
    click.option("--examples", metavar="COUNT", help="Sequences of an epoch."),
    click.option("--price", metavar="PRICE", help="Of one GPU for one hour: the cost is told."),
    click.option("--offline", is_flag=True, help="Never touch the network."),
)
"""Options of `estimate` and `plan`, by the names of `request.ARGUMENTS`."""


def question(command: F) -> F:
    """Add all options of a question."""
    for option in reversed(QUESTION):
        command = option(command)
    return command


_SPECIAL = {"top": "top", "max": "max_", "min": "min_", "sweep": "sweep"}
"""Questions of `planner/questions.py`, and the parameters that ask them."""


@click.command(
    epilog="\b\nExamples:\n  zplan estimate --params 7e9 --gpus 8 --mem 24\n"
    '  zplan estimate --model llama-3-8b --gpus 4 --gpu "RTX 4090" --seq 4096 --check',
)
@question
@click.option("--json", "as_json", is_flag=True, help="Print exact bytes as JSON.")
@click.option("--check", is_flag=True, help="Exit with 1 when it does not fit.")
@click.option(
    "--explain", is_flag=False, flag_value="auto", metavar="[A,B]", help="Instead: why stage B uses more than A."
)
@click.option("--top", type=int, metavar="N", help="Instead: the N fastest of all ways that fit, and why others don't.")
@click.option("--max", "max_", metavar="WHAT", help="Instead: the largest seq, micro-batch or params that fits.")
@click.option("--min", "min_", metavar="WHAT", help="Instead: the fewest gpus, or the smallest card (mem).")
@click.option("--sweep", metavar="AXES", help="Instead: a table over one or two of seq, micro-batch, gpus, stage.")
def estimate(*, as_json: bool, check: bool, explain: str | None, **asked: Any) -> int:
    """Say whether a training fits, what it takes at each ZeRO stage, and how to run it.

    Without anything about a machine, and with no GPU here: the fewest of each common GPU.
    """
    from zplan.planner.request import make_request

    special = {name: asked.pop(key) for name, key in _SPECIAL.items()}
    special = {name: value for name, value in special.items() if value is not None}
    request = make_request(asked)
    if explain is not None:
        return _explain(request, explain, as_json=as_json)
    if special or not any(asked[name] for name in ("gpus", "mem", "gpu", "nodes", "host_mem", "nvme")):
        from zplan.planner.questions import ask, no_machine, reply_json

        if special or no_machine(request):
            reply = ask(request, special)
            click.echo(reply_json(reply, request) if as_json else reply.text(), nl=False)
            return 1 if check and not reply.fits else 0
    from zplan.planner.answer import answer

    found = answer(request)
    for note in found.notes:
        _note(note)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        from zplan.planner.report import report

        click.echo(report(found, colour=coloured()), nl=False, color=coloured())
    return 1 if check and not found.fits else 0


def _explain(request: Request, pair: str, *, as_json: bool) -> int:
    from zplan.planner.stage_differences import explain, explanation_json, explanation_text

    found = explain(request, pair)
    click.echo(explanation_json(found) if as_json else explanation_text(found), nl=False)
    return 0


@click.command(
    epilog="\b\nExamples:\n  zplan plan --model smollm2-135m --gpus 2 --mem 8 --seq 256 --global-batch 8 -o plan.json\n"
    "  zplan plan --model meta-llama/Llama-2-7b-hf --gpus 8 --mem 80 --global-batch 64 -o runs/plan.json",
)
@question
@click.option(
    "-o",
    "--out",
    default="plan.json",
    show_default=True,
    metavar="FILE",
    help="Where to write; ds_config.json goes beside.",
)
def plan(*, out: str, **asked: Any) -> int:
    """Choose as `estimate` does, and write the plan that `zplan run` takes and a ds_config.json beside it."""
    from zplan.planner.answer import make_plan
    from zplan.planner.plan_file import save_plan
    from zplan.planner.report import plan_report
    from zplan.planner.request import make_request

    made = make_plan(make_request(asked))
    for note in made.notes:
        _note(note)
    files = save_plan(made, out)
    click.echo(plan_report(made, files), nl=False)
    return 0


@click.command(epilog="\b\nExamples:\n  zplan models\n  zplan models --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(*, as_json: bool) -> None:
    """List the models of zplan's table: exact parameter counts, shapes, and whether they can be planned yet."""
    from zplan.planner.listing import list_models

    click.echo(list_models(as_json=as_json), nl=False)


@click.command(epilog="\b\nExamples:\n  zplan gpus\n  zplan gpus --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gpus(*, as_json: bool) -> None:
    """List the GPUs of zplan's table and what their drivers report as memory."""
    from zplan.planner.listing import list_gpus

    click.echo(list_gpus(as_json=as_json), nl=False)


if __name__ == "__main__":
    main()
