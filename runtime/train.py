"""The training loop of `zplan run`: the reference decoder under a plan, on token batches."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from zplan.planner.plan_file import Plan, load_plan
from zplan.runtime.board import Board
from zplan.runtime.data import Batches
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine, initialize, meta_init
from zplan.runtime.job import Job
from zplan.runtime.progress import Progress, StepRecord, memory_now


def train(job: Job, board: Board) -> None:
    """Train for `job.steps` steps; rank 0 prints progress and leaves the records in the job's folder."""
    plan = load_plan(job.plan)
    board.enter("initialization")
    engine = build(plan, job)
    engine.on_phase = board.follow
    assert job.corpus is not None
    t = engine.choice
    batches = Batches(
        job.corpus, plan.seq, t.micro_batch, t.accumulation, t.world_size, engine.rank, seed=job.seed
    )
    progress = Progress(job.steps, job.print_every) if engine.rank == 0 else None
    for step in range(1, job.steps + 1):
        record = one_step(engine, batches, step)
        if progress is not None:
            progress.add(record)
    board.enter("end")
    if progress is not None:
        progress.write(job.results)
    engine.close()


def build(plan: Plan, job: Job) -> Engine:
    """An engine around the plan's model, born on the meta device and filled shard by shard."""
    with meta_init():
        model = Decoder(plan.arch, checkpointing=plan.training.checkpointing, attention=plan.training.attention)
    engine, *_ = initialize(
        model=model,
        config=plan,
        init=lambda name, tensor: init_parameter(name, tensor, job.seed),
        seed=job.seed,
        world=job.world,
    )
    return engine


def one_step(engine: Engine, batches: Batches, step: int) -> StepRecord:
    """All micro-steps of one optimizer step, and the step."""
    start = time.perf_counter()
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
    loss = 0.0
    for micro_step in range(batches.accumulation):
        loss += micro(engine, batches, step - 1, micro_step)
    engine.step()
    norm = float(engine.grad_norm)  # waits for the device, so the clock below covers the whole step
    loss = mean_over_ranks(engine, f"loss/{step}", loss / batches.accumulation)
    seconds = time.perf_counter() - start
    tokens = engine.choice.global_batch * batches.seq
    return StepRecord(step, loss, norm, seconds, tokens, memory_now(engine.device))


def micro(engine: Engine, batches: Batches, step: int, micro_step: int) -> float:
    """Forward and backward of one micro-batch; nothing of it is left alive on return."""
    ids, labels = (x.to(engine.device) for x in batches.batch(step, micro_step))
    loss = engine(ids, labels)
    engine.backward(loss)
    return float(loss.detach())


def mean_over_ranks(engine: Engine, key: str, value: float) -> float:
    """Mean of a number over ranks, through the store: a collective would cost a communicator of device memory."""
    if engine.world_size == 1 or dist.get_backend() == "fake":
        return value
    store = dist.distributed_c10d._get_default_store()
    store.set(f"zplan/{key}/{engine.rank}", repr(value))
    keys = [f"zplan/{key}/{rank}" for rank in range(engine.world_size)]
    store.wait(keys)
    return sum(float(store.get(k)) for k in keys) / engine.world_size
