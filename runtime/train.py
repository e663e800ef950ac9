"""The training loop of `zplan run`: the reference decoder under a plan, on token batches, the first steps measured."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from zplan.planner.errors import ZplanError
from zplan.planner.ledger import Ledger, Line
from zplan.planner.overhead import workspace_lines
from zplan.planner.plan_file import Plan, load_plan
from zplan.planner.predict import predict
from zplan.planner.timeline import timeline
from zplan.runtime.board import Board
from zplan.runtime.data import Batches
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine
from zplan.runtime.hf_import import ModelWeights
from zplan.runtime.initialize import initialize, meta_init
from zplan.runtime.job import Job
from zplan.runtime.materialize import Initializer
from zplan.runtime.mesh import own_device
from zplan.runtime.outcome import write_measured
from zplan.runtime.preflight import check_device_memory, limit_device_memory
from zplan.runtime.progress import Progress, StepRecord, memory_now
from zplan.runtime.verify import Meter

EVAL_BATCHES = 64
"""Most micro-batches per rank of one evaluation."""


def train(job: Job, board: Board) -> None:
    """Train for `job.steps` steps. Rank 0 prints progress and leaves the records; every rank leaves its comparison."""
    plan = load_plan(job.plan)
    if job.world is not None:
        plan = replace(plan, training=replace(plan.training, world_size=job.world))
    device = own_device()
    if device.type == "cuda":
        check_device_memory(plan.ledger, device)
        if job.cap_bytes is not None:
            limit_device_memory(job.cap_bytes, plan.ledger, device)
    board.enter("initialization")
    with Meter(device) if job.measured_steps else nullcontext() as meter:
        engine = build(plan, job)
        resume(engine, job)
        if engine.global_steps:
            board.step = engine.global_steps + 1
        run = Run(engine, plan, job, board, meter)
        first = engine.global_steps + 1
        measured = first + job.measured_steps if job.steps - first + 1 >= job.measured_steps else first
        for step in range(first, measured):
            run.step(step)
        if meter is not None and measured > first:
            write_measured(job.folder, board.rank, str(device), meter.compare(ledger_of(plan, engine)))
    run.follow(None)
    for step in range(measured, job.steps + 1):
        run.step(step)
    run.finish()
    board.enter("end")
    if board.rank == 0:
        run.progress.write(job.results)
    engine.close()


def build(plan: Plan, job: Job) -> Engine:
    """An engine around the plan's model, born on the meta device and filled shard by shard."""
    arch = plan.spec.arch
    assert arch is not None, f"{plan.spec.name} has no shape"
    with meta_init():
        model = Decoder(
            arch,
            checkpointing=plan.training.checkpointing,
            attention=plan.training.attention,
            cross_entropy=plan.training.cross_entropy,
            kernels=plan.training.kernels,
        )
    init: Initializer = partial(init_parameter, seed=job.seed)
    if job.weights is not None:
        init = ModelWeights(job.weights, arch).fill
    engine, *_ = initialize(model=model, config=plan, init=init, seed=job.seed, world=job.world)
    return engine


def resume(engine: Engine, job: Job) -> None:
    """Go on from a checkpoint where the job says so; refused when it was trained on other data."""
    if job.resume is None:
        return
    assert job.save_dir is not None
    if job.resume == "auto":
        path, state = engine.load_checkpoint(job.save_dir, resume="auto")
    else:
        path, state = engine.load_checkpoint(job.save_dir, job.resume)
    mine = data_identity(job)
    if path is not None and state != mine:
        said = ", ".join(
            f"{k} {state.get(k, 'unknown')} there and {mine[k]} here" for k in mine if state.get(k) != mine[k]
        )
        raise ZplanError(
            f"`{path}` stands in the middle of other data: {said}",
            "give the same --data and --seed; to train on other data, export and start with --weights",
        )
    if engine.global_steps >= job.steps and engine.rank == 0:
        say(f"step {engine.global_steps} of {job.steps} is done: nothing is left to train")


def data_identity(job: Job) -> dict[str, int]:
    """What makes a position in the data mean the same samples."""
    assert job.corpus is not None
    return {"seed": job.seed, "num_tokens": job.corpus.num_tokens}


def say(text: str) -> None:
    print(f"zplan: {text}", file=sys.stderr, flush=True)  # noqa: T201


def ledger_of(plan: Plan, engine: Engine) -> Ledger:
    """What the plan's model must hold under this engine's choice, on this engine's device.

    Of the overheads only those that torch's allocator counts are in it.
    """
    lines: tuple[Line, ...] = ()
    if engine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.device)
        biased = plan.spec.arch is not None and plan.spec.arch.family == "gpt2"
        phases, fixed = timeline(plan.spec.units).phases, engine.choice.deterministic
        lines = workspace_lines(f"{major}.{minor}", phases, biased=biased, deterministic=fixed)
    return predict(plan.spec, engine.choice, overheads=lines)


class Run:
    """The steps of one training."""

    def __init__(self, engine: Engine, plan: Plan, job: Job, board: Board, meter: Meter | None) -> None:
        assert job.corpus is not None
        c = engine.choice
        self.engine, self.job, self.board = engine, job, board
        origin = engine.global_samples - engine.global_steps * c.global_batch
        self.batches = Batches(
            job.corpus, plan.choice.seq, c.micro_batch, c.accumulation, c.world_size, engine.rank, job.seed, origin
        )
        self.saved: int | None = None
        self.evaluated: int | None = None
        asked = engine.training_config
        every = asked.steps_per_print if "steps_per_print" in asked.given else job.print_every
        self.progress = Progress(job.steps, every)
        if engine.telling is not None:
            engine.telling.progress = False  # this loop tells more
        self.follow(meter)

    def follow(self, meter: Meter | None) -> None:
        """Let the board, and a meter where there is one, hear of every phase."""
        self.meter, board, engine = meter, self.board, self.engine
        if meter is None:
            engine.on_phase = board.follow
            return
        meter.attach(engine)
        heard = engine.on_phase
        assert heard is not None

        def both(phase: str) -> None:
            board.follow(phase)
            heard(phase)

        engine.on_phase = both

    def step(self, step: int) -> None:
        """All micro-steps of one optimizer step, and the step; prints on rank 0."""
        engine, accumulation = self.engine, self.batches.accumulation
        start = time.perf_counter()
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
        total = 0.0
        for micro_step in range(accumulation):
            ids, labels = (x.to(engine.device) for x in self.batches.batch(step - 1, micro_step))
            loss = engine(ids, labels)
            engine.backward(loss)
            total += float(loss.detach())
            # The ledger has batch and loss alive until the step that follows the last micro-step.
            if micro_step < accumulation - 1:
                del ids, labels, loss
        engine.step()
        del ids, labels, loss
        norm = float(engine.grad_norm)  # waits for the device, so the clock below covers the whole step
        mean = mean_over_ranks(engine, f"loss/{step}", total / accumulation)
        seconds = time.perf_counter() - start
        if engine.rank == 0:
            ranks = 1 if self.job.world else engine.world_size  # pretended ranks compute nothing
            tokens = ranks * self.batches.micro_batch * accumulation * self.batches.seq
            self.progress.add(StepRecord(step, mean, norm, seconds, tokens, memory_now(engine.device, self.meter)))
        if self.job.save_every and step % self.job.save_every == 0:
            self.save()
            if self.meter is None:  # a forward without backward has no place in the measured steps
                self.evaluate()

    def finish(self) -> None:
        """What is due at the end: the last checkpoint, the evaluation, the model folder."""
        engine, job = self.engine, self.job
        if job.save_dir is not None and self.saved != engine.global_steps and engine.global_steps:
            self.save()
        if self.evaluated != engine.global_steps:
            self.evaluate()
        if job.export is not None:
            self.board.enter("export")
            engine.save_16bit_model(job.export)

    def save(self) -> None:
        """A checkpoint of this step. One of an abandoned branch, beyond what was resumed, is replaced."""
        engine, job = self.engine, self.job
        assert job.save_dir is not None
        self.board.enter("save")
        start = time.perf_counter()
        path = engine.save_checkpoint(
            job.save_dir, client_state=data_identity(job), overwrite=job.resume is not None, keep=job.keep
        )
        self.saved = engine.global_steps
        if engine.rank == 0:
            behind = engine.choice.saving == "background"
            done = "is writing behind training" if behind else "saved"
            say(f"{done} `{path}`; training waited {time.perf_counter() - start:.2f} s")

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the first sequences of the evaluation text; prints on rank 0.

        Forwards of micro-batches as in training, without what backward would need, so it takes less memory than a step.
        """
        engine, corpus = self.engine, self.job.eval_corpus
        self.evaluated = engine.global_steps
        if corpus is None:
            return
        b = self.batches
        batches = Batches(corpus, b.seq, b.micro_batch, 1, b.world_size, b.rank)
        count = min(EVAL_BATCHES, corpus.num_samples(b.seq) // (b.micro_batch * b.world_size))
        total = 0.0
        for i in range(count):
            ids, labels = (x.to(engine.device) for x in batches.batch(i, 0))
            total += float(engine(ids, labels))
        mean = mean_over_ranks(engine, f"eval/{engine.global_steps}", total / count)
        if engine.rank == 0:
            num = count * b.micro_batch * b.world_size
            say(f"step {engine.global_steps}: loss {mean:.4f} on {num:,} held-out sequences")


def mean_over_ranks(engine: Engine, key: str, value: float) -> float:
    """Mean of a number over ranks, through the store: a collective would cost a communicator of device memory."""
    if engine.world_size == 1 or dist.get_backend() == "fake":
        return value
    store = dist.distributed_c10d._get_default_store()
    store.set(f"zplan/{key}/{engine.rank}", repr(value))
    keys = [f"zplan/{key}/{rank}" for rank in range(engine.world_size)]
    store.wait(keys)
    return sum(float(store.get(k)) for k in keys) / engine.world_size
