"""The training loop of `zplan run`: the reference decoder under a plan, on token batches, the first steps measured."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from zplan.planner.ledger import Ledger, Line
from zplan.planner.overhead import workspace_lines
from zplan.planner.plan_file import Plan, load_plan
from zplan.planner.predict import predict
from zplan.planner.timeline import timeline
from zplan.runtime.board import Board
from zplan.runtime.data import Batches
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine, initialize, meta_init
from zplan.runtime.job import Job
from zplan.runtime.mesh import own_device
from zplan.runtime.outcome import write_measured
from zplan.runtime.preflight import check_device_memory, limit_device_memory
from zplan.runtime.progress import Progress, StepRecord, memory_now
from zplan.runtime.verify import Meter


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
        run = Run(engine, plan, job, board, meter)
        for step in range(1, job.measured_steps + 1):
            run.step(step)
        if meter is not None:
            write_measured(job.folder, board.rank, str(device), meter.compare(ledger_of(plan, engine)))
    run.follow(None)
    for step in range(job.measured_steps + 1, job.steps + 1):
        run.step(step)
    board.enter("end")
    if board.rank == 0:
        run.progress.write(job.results)
    engine.close()


def build(plan: Plan, job: Job) -> Engine:
    """An engine around the plan's model, born on the meta device and filled shard by shard."""
    arch = plan.spec.arch
    assert arch is not None, f"{plan.spec.name} has no shape"
    with meta_init():
        model = Decoder(arch, checkpointing=plan.training.checkpointing, attention=plan.training.attention)
    engine, *_ = initialize(
        model=model,
        config=plan,
        init=lambda name, tensor: init_parameter(name, tensor, job.seed),
        seed=job.seed,
        world=job.world,
    )
    return engine


def ledger_of(plan: Plan, engine: Engine) -> Ledger:
    """What the plan's model must hold under this engine's choice, on this engine's device.

    Of the overheads only those that torch's allocator counts are in it.
    """
    lines: tuple[Line, ...] = ()
    if engine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.device)
        biased = plan.spec.arch is not None and plan.spec.arch.family == "gpt2"
        lines = workspace_lines(f"{major}.{minor}", timeline(plan.spec.units).phases, biased=biased)
    return predict(plan.spec, engine.choice, overheads=lines)


class Run:
    """The steps of one training."""

    def __init__(self, engine: Engine, plan: Plan, job: Job, board: Board, meter: Meter | None) -> None:
        assert job.corpus is not None
        c = engine.choice
        self.engine, self.job, self.board = engine, job, board
        self.batches = Batches(
            job.corpus, plan.choice.seq, c.micro_batch, c.accumulation, c.world_size, engine.rank, seed=job.seed
        )
        self.progress = Progress(job.steps, job.print_every)
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


def mean_over_ranks(engine: Engine, key: str, value: float) -> float:
    """Mean of a number over ranks, through the store: a collective would cost a communicator of device memory."""
    if engine.world_size == 1 or dist.get_backend() == "fake":
        return value
    store = dist.distributed_c10d._get_default_store()
    store.set(f"zplan/{key}/{engine.rank}", repr(value))
    keys = [f"zplan/{key}/{rank}" for rank in range(engine.world_size)]
    store.wait(keys)
    return sum(float(store.get(k)) for k in keys) / engine.world_size
