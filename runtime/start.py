"""From a plan and what to do with it to running ranks, and to what they leave behind."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import Plan, load_plan
from zplan.planner.predict import predict
from zplan.planner.runnable import refuse_unrunnable
from zplan.runtime import preflight
from zplan.runtime.data import Corpus, check_enough, find_files, prepare
from zplan.runtime.job import Job
from zplan.runtime.launch import launch
from zplan.runtime.outcome import Outcome, read_measured
from zplan.runtime.tokenizer import find_tokenizer

WORKER = "zplan.runtime.worker"

MEASURED_STEPS = 2
"""The first step fixes the order of units; the second is a whole one to compare."""


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a run. `every` None: at the end only; `keep` None: all; `resume`: `auto`, a tag or None."""

    folder: Path
    every: int | None = None
    keep: int | None = None
    resume: str | None = None


@dataclass(frozen=True)
class Training:
    """What to do with a plan's own model.

    Attributes
    ----------
    data
        File or folder of text; None for random tokens, whose memory is the same.
    tokenizer
        A folder, `bytes`, or None for the plan's model folder where it has one.
    measured_steps
        Steps, from the first, during which every storage is followed.
    world
        Be rank 0 of this many in one process; None starts the plan's ranks.
    cap_bytes
        What the CUDA allocator may take.
    eval_data
        Text to evaluate on, at every save and at the end.
    saving
        Checkpoints: where, when, and whether to go on from one.
    weights
        A model folder to start from.
    export
        Where a model folder is written at the end.
    """

    data: Path | None
    steps: int
    seed: int = 0
    tokenizer: str | None = None
    print_every: int = 1
    measured_steps: int = MEASURED_STEPS
    world: int | None = None
    cap_bytes: int | None = None
    eval_data: Path | None = None
    saving: Saving | None = None
    weights: Path | None = None
    export: Path | None = None


def train(path: Path, wanted: Training) -> Outcome:
    """Start the plan's ranks on its own model and wait for them."""
    plan, gpus = look(path, world=wanted.world)
    if wanted.cap_bytes is not None and not gpus:
        raise ZplanError("--cap limits a GPU's allocator and this run is on the CPU", "leave --cap out")
    check_files(plan, wanted)
    saving = wanted.saving
    with tempfile.TemporaryDirectory(prefix="zplan-") as name:
        folder = Path(name)
        job = Job(
            task="train",
            folder=folder,
            plan=path.resolve(),
            corpus=corpus_for(plan, wanted, folder),
            steps=wanted.steps,
            seed=wanted.seed,
            measured_steps=wanted.measured_steps if wanted.steps >= MEASURED_STEPS else 0,
            print_every=wanted.print_every,
            world=wanted.world,
            cap_bytes=wanted.cap_bytes,
            eval_corpus=eval_corpus_for(plan, wanted, folder),
            save_dir=saving and saving.folder.resolve(),
            save_every=saving and saving.every,
            keep=saving and saving.keep,
            resume=saving and saving.resume,
            weights=wanted.weights and wanted.weights.resolve(),
            export=wanted.export and wanted.export.resolve(),
        )
        ranks = plan.choice.world_size if wanted.world is None else 1
        fixed = plan.choice.deterministic
        launch(WORKER, [str(job.write())], world_size=ranks, folder=folder, cpu=not gpus, deterministic=fixed)
        steps = tuple(json.loads(line) for line in job.results.read_text().splitlines())
        return Outcome(steps, tuple(read_measured(folder)))


def run_script(path: Path, script: Path, arguments: list[str]) -> None:
    """Run a program of the user's on the plan's ranks."""
    if not script.is_file():
        raise ZplanError(f"there is no script `{script}`", "zplan run plan.json train.py ARGS...")
    plan, gpus = look(path, script=True)
    with tempfile.TemporaryDirectory(prefix="zplan-") as name:
        job = Job("script", Path(name), path.resolve(), script=script, arguments=tuple(arguments))
        c = plan.choice
        options = {"world_size": c.world_size, "folder": job.folder, "cpu": not gpus}
        launch(WORKER, [str(job.write())], **options, deterministic=c.deterministic)


def look(path: Path, *, world: int | None = None, script: bool = False) -> tuple[Plan, int]:
    """The plan, and how many GPUs its ranks will use here (0 for CPU ranks); refused when it can't run here and now.

    A script brings a module of its own, so limits of zplan's own decoders do not hold there.
    """
    preflight.require_torch()
    plan = load_plan(path)
    refuse_unrunnable(plan.choice, None if script else plan.spec)
    gpus = 0 if plan.choice.device == "cpu" else preflight.num_gpus()
    ranks = plan.choice.world_size if world is None else 1
    if gpus and world is None:
        preflight.check_world(ranks, gpus, replan_line(plan, gpus, path))
    if not gpus:
        if plan.choice.device != "cpu":
            _say(f"no GPU here: {ranks} rank{'s' if ranks > 1 else ''} on the CPU over gloo")
        choice = replace(plan.choice, device="cpu", world_size=world or ranks)
        ledger = predict(plan.spec, choice)
        peak = ledger.peak_bytes() + ledger.peak_bytes("pinned")
        preflight.check_host_memory(
            ranks, peak, available=preflight.available_host_bytes(), base=preflight.process_bytes()
        )
    elif pinned := plan.ledger.peak_bytes("pinned"):
        preflight.check_pinned_memory(min(ranks, gpus), pinned, available=preflight.available_host_bytes())
    return plan, gpus


def _say(text: str) -> None:
    print(f"zplan: {text}", file=sys.stderr)  # noqa: T201


def replan_line(plan: Plan, gpus: int, path: Path) -> str:
    """The `zplan plan` command that asks the same of this machine's GPUs, whose memory it reads itself."""
    words = plan.command(gpus=gpus, mem=None, gpu=None, nodes=None, host_mem=None)
    return f"{words} -o {shlex.quote(str(path))}"


def corpus_for(plan: Plan, wanted: Training, folder: Path) -> Corpus:
    """Tokens to train on: the user's text, or random ones."""
    t = plan.choice
    assert plan.spec.arch is not None, f"{plan.spec.name} has no shape"
    vocab = plan.spec.arch.vocab
    if wanted.data is None:
        return random_corpus(vocab, t.seq * t.global_batch * wanted.steps + 1, wanted.seed, folder)
    tokenizer = find_tokenizer(_tokenizer_folder(plan, wanted.tokenizer), vocab=vocab)
    corpus = prepare(find_files(wanted.data), tokenizer, folder)
    check_enough(corpus, wanted.data, seq=t.seq, global_batch=t.global_batch)
    _say(
        f"{corpus.num_tokens:,} tokens ({tokenizer.name}) of {corpus.num_documents:,} documents in "
        f"{corpus.num_files:,} files: {corpus.num_samples(t.seq):,} sequences of {t.seq:,}"
    )
    return corpus


def eval_corpus_for(plan: Plan, wanted: Training, folder: Path) -> Corpus | None:
    """Tokens to evaluate on, with the tokenizer of training."""
    if wanted.eval_data is None:
        return None
    t = plan.choice
    assert plan.spec.arch is not None, f"{plan.spec.name} has no shape"
    tokenizer = find_tokenizer(_tokenizer_folder(plan, wanted.tokenizer), vocab=plan.spec.arch.vocab)
    (folder / "eval").mkdir()
    corpus = prepare(find_files(wanted.eval_data), tokenizer, folder / "eval")
    check_enough(corpus, wanted.eval_data, seq=t.seq, global_batch=t.micro_batch * t.world_size)
    return corpus


def check_files(plan: Plan, wanted: Training) -> None:
    """Refuse before any rank starts what would otherwise be found at the first save, or at the very end."""
    if wanted.export is not None and wanted.export.exists():
        raise ZplanError(f"`{wanted.export}` exists", "name a folder for --export that does not exist yet")
    if wanted.weights is not None:
        from zplan.runtime.hf_import import ModelWeights

        assert plan.spec.arch is not None, f"{plan.spec.name} has no shape"
        ModelWeights(wanted.weights, plan.spec.arch)
    saving = wanted.saving
    if saving is not None and saving.folder.is_dir() and saving.resume is None:
        from zplan.runtime.checkpoint_folder import manifests

        found = [tag for tag, _ in manifests(saving.folder)]
        if found:
            raise ZplanError(
                f"`{saving.folder}` holds checkpoints of an earlier run, the newest `{found[0]}`",
                "go on from them with --resume auto, or name another --save-dir",
            )


def _tokenizer_folder(plan: Plan, asked: str | None) -> Path | None:
    if asked == "bytes":
        return None
    if asked is not None:
        return Path(asked)
    model = Path(str(plan.asked.get("model", "")))
    folder = model.parent if model.suffix == ".json" else model
    return folder if str(plan.asked.get("model", "")) and (folder / "tokenizer.json").is_file() else None


def random_corpus(vocab: int, num_tokens: int, seed: int, folder: Path) -> Corpus:
    """Tokens that mean nothing, for measuring: memory does not depend on them."""
    path = folder / "tokens.uint32"
    tokens = np.random.default_rng(seed).integers(0, vocab, num_tokens, dtype=np.uint32)
    try:
        tokens.tofile(path)
    except OSError as error:  # numpy raises it without an errno when a disk is full.
        raise ZplanError(f"`{path}` cannot be written: {error}", "set TMPDIR to another folder") from None
    return Corpus(path, "uint32", num_tokens, 1, 1)
