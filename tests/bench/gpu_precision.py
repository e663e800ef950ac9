"""fp16 on a GPU: its bytes, its loss scale without a host sync, its last error, and where a step's time goes.

bash tests/bench/run_gpu.sh N tests/bench/gpu_precision.py [--model 350m]      (ZPLAN_DEVICE=cpu --model tiny: dry run)

One line a check, `ok` or `BAD`; the exit code is 1 where one is BAD.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import workload as w
from loss_scale_model import Model
from shapes import SHAPES

from zplan.planner.errors import ZplanError
from zplan.planner.loss_scale import LossScale
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.overhead import workspace_lines
from zplan.planner.predict import predict
from zplan.planner.timeline import timeline
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import engines, initialize, meta_init
from zplan.runtime.mesh import Mesh, join
from zplan.runtime.verify import Meter

ARCHS = {"tiny": w.LLAMA4, **SHAPES}
TELL = 10
"""Steps of one printed interval."""
Config = dict[str, object]


def config(stage: int, seq: int, *, micro_batch: int = 2, accumulation: int = 1, **more: object) -> Config:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": stage},
        "zplan": {"seq": seq},
        **more,
    }


def build(arch: Architecture, settings: Config, world: int | None = None) -> Engine:
    with meta_init():
        model = Decoder(arch)
    return initialize(model=model, config=settings, init=lambda n, t: init_parameter(n, t, 0), world=world)[0]


def batch(engine: Engine, arch: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (engine.choice.micro_batch, engine.choice.seq)
    ids = torch.randint(0, arch.vocab, shape, device=engine.device)
    return ids, torch.randint(0, arch.vocab, shape, device=engine.device)


def fresh(device: torch.device) -> None:
    """As a process that has not trained yet: no garbage, no cuBLAS workspaces."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def measured_bytes(mesh: Mesh, arch: Architecture, settings: Config, world: int | None) -> tuple[bool, str]:
    """What `zplan verify` compares: all to the byte on a CPU; on a GPU the peak to the byte, each row within 1 %."""
    fresh(mesh.device)
    with Meter(mesh.device) as meter:
        engine = build(arch, settings, world)
        meter.attach(engine)
        for _ in range(3 * engine.choice.accumulation):
            ids, labels = batch(engine, arch)
            loss = engine(ids, labels)
            engine.backward(loss)
            engine.step()
            del ids, labels, loss
        spec, lines = ModelSpec("m", decoder_units(arch), arch), ()
        if mesh.device.type == "cuda":
            capability = "{}.{}".format(*torch.cuda.get_device_capability())
            lines = workspace_lines(capability, timeline(spec.units).phases, biased=False)
        c = meter.compare(predict(spec, engine.choice, overheads=lines))
    engine.close()
    rows, predicted = [*c.lines, *c.peaks], max(r.predicted for r in c.peaks)
    off = [r for r in rows if r.difference]
    good = predicted == c.peak.measured and not c.off_by_more_than(0.01 if mesh.device.type == "cuda" else 0.0)
    said = f"{len(off)} of {len(rows)} rows differ, peak {predicted:,} predicted {c.peak.measured:,} measured"
    worst = sorted((*off, *c.unattributed), key=lambda r: -abs(r.difference))[:3]
    return good, said + "".join(f"; {r.name[:40]} in {r.where} {r.difference:+,}" for r in worst)


def overflows(mesh: Mesh, stage: int) -> tuple[bool, str]:
    """40 steps with overflows, none of which may wait for the device: scale, rate and weights against plain rules."""
    arch, fp16 = w.LLAMA, {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 4, "hysteresis": 2}
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 30, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}
    engine = build(arch, config(stage, w.SEQ, fp16=fp16, scheduler=warmup))
    model, bad = Model(LossScale(power=16, window=4)), {2, 9, 10, 11, 20, 21, 30}
    one, inf = (torch.full((), x, device=engine.device) for x in (1.0, float("inf")))
    ids, labels = batch(engine, arch)
    scales, rates, weights, expected = [], [], [], []
    scaler, on_cuda = engine.optimizer.scaler, mesh.device.type == "cuda"
    for step in range(40):
        if on_cuda and step == 2:  # the first compiles and builds tables
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        # The last rank's alone: all must skip.
        loss = engine(ids, labels) * (inf if step in bad and mesh.rank == mesh.world_size - 1 else one)
        rates.append((engine.scheduler.schedule.lr(model.applied - 1, 1e-3), step))
        engine.backward(loss)
        engine.step()
        rates[-1] = (rates[-1][0], engine.optimizer.param_groups[0]["lr"])
        model.update(step in bad)
        expected.append(model.scale)
        scales.append(scaler.scale.clone())
        if step in (8, 9, 12):
            weights.append(engine.optimizer.weights(engine.trained[1])[0].clone())
    if on_cuda:
        torch.cuda.set_sync_debug_mode("default")
    got, applied = torch.stack(scales).tolist(), int(engine.optimizer.applied)
    engine.close()
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    moved = [i for i, (a, b) in enumerate(rates) if a != b]
    kept, trained = torch.equal(weights[0], weights[1]), not torch.equal(weights[1], weights[2])
    good = not wrong and not moved and kept and trained and applied == model.applied == 40 - len(bad)
    return good, (
        f"{len(bad)} of 40 steps overflow: {40 - applied} skipped, scale wrong in steps {wrong}, rate wrong in "
        f"{moved}, weights of a skipped step {'kept' if kept else 'CHANGED'}; "
        f"{'sync debug mode error' if on_cuda else 'no sync mode on a CPU'}"
    )


def runs_ahead(mesh: Mesh) -> tuple[bool, str]:
    """The host queues a whole step behind a device that is asleep: whatever waited in it would wait for that too."""
    if mesh.device.type != "cuda":
        return True, "not on a CPU"
    engine = build(w.LLAMA, config(3, w.SEQ, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 30}}))
    ids, labels = batch(engine, w.LLAMA)
    for step in range(4):
        if step == 3:
            torch.cuda.synchronize()
            asleep = torch.cuda.Event()
            torch.cuda._sleep(2_000_000_000)  # about a second
            asleep.record()
            begun = time.perf_counter()
        engine.backward(engine(ids, labels))
        engine.step()
    queued, still = time.perf_counter() - begun, not asleep.query()
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    engine.close()
    return still, f"a step was queued in {queued * 1e3:.1f} ms behind a sleep that ended after {whole * 1e3:.0f} ms"


def last_error(mesh: Mesh, stage: int) -> tuple[bool, str]:
    """Infinities in one weight's gradient on the last rank until the scale gives up."""
    fp16, name = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}, "blocks.1.up.weight"
    engine, last = build(w.LLAMA, config(stage, w.SEQ, fp16=fp16)), mesh.world_size - 1
    if mesh.rank == last:
        dict(engine.module.named_parameters())[name].register_hook(lambda g: g * float("inf"))
    ids, labels = batch(engine, w.LLAMA)
    said = "no error in 8 steps"
    try:
        for _ in range(8):
            engine.backward(engine(ids, labels))
            engine.step()
    except ZplanError as error:
        said = error.message
    engine.close()
    where = f"first in `{name}` of unit `blocks.1` on rank {last}, micro-step 1"
    wanted = f"gradients of optimizer step 4 overflowed at the minimum loss scale 1: {where}"
    return said == wanted, said


def breakdown(mesh: Mesh, arch: Architecture, stage: int, seq: int, micro_batch: int) -> tuple[bool, str]:
    """The printed parts of `wall_clock_breakdown` against the clock on the wall, over the same steps."""
    asked = {"wall_clock_breakdown": True, "steps_per_print": TELL}
    engine = build(arch, config(stage, seq, micro_batch=micro_batch, accumulation=2, **asked))
    ids, labels = batch(engine, arch)
    heard, begun = io.StringIO(), 0.0
    with contextlib.redirect_stderr(heard):
        for step in range(2 * TELL):
            if step == TELL:
                torch.cuda.synchronize() if mesh.device.type == "cuda" else None
                begun = time.perf_counter()
            for _ in range(2):
                engine.backward(engine(ids, labels))
                engine.step()
        torch.cuda.synchronize() if mesh.device.type == "cuda" else None
    wall = (time.perf_counter() - begun) / TELL * 1e3
    told = engine.breakdown.last
    engine.close()
    if mesh.rank:
        return True, ""
    line = [x for x in heard.getvalue().splitlines() if "ms a step" in x][-1]
    parts = {name: float(ms) for name, ms in re.findall(r"(\w+) ([\d.]+)(?:,|$)", line.partition("ms a step: ")[2])}
    total = parts["forward"] + parts["backward"] + parts["step"]
    traffic = parts["gather"] > 0 and parts["reduce"] > 0 if mesh.world_size > 1 and stage else True
    good = abs(total / wall - 1) < 0.05 and traffic and parts["exposed"] < total and told.last_step == 2 * TELL
    return good, f"{line.partition(', ')[2]}; forward + backward + step {total:.2f}, the wall {wall:.2f} ms"


class Checks:
    """Makes checks one after the other, and a line of each."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.bad = mesh, 0

    def __call__(self, what: str, of: Callable[..., tuple[bool, str]], *given: object) -> None:
        try:
            good, said = of(self.mesh, *given)
        except Exception as error:  # the others are still worth their time
            good, said = False, f"{type(error).__name__}: {error}"
            for engine in engines():
                engine.close()
        finally:
            if self.mesh.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        self.bad += not good
        if self.mesh.rank == 0 or not good:
            sys.stdout.write(f"{'ok ' if good else 'BAD'} {what}, world {self.mesh.world_size}: {said}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="350m", choices=sorted(ARCHS))
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4)
    args = parser.parse_args()
    mesh = join()
    check = Checks(mesh)
    arch, seq = ARCHS[args.model], w.SEQ if args.model == "tiny" else args.seq
    for stage in (3, 2):
        settings = config(stage, seq, micro_batch=args.micro_batch)
        check(f"fp16 bytes, {args.model}, stage {stage}", measured_bytes, arch, settings, None)
    for stage in range(4):
        settings = config(stage, w.SEQ, accumulation=2)
        check(f"fp16 bytes, tiny, stage {stage}, k 2", measured_bytes, w.LLAMA, settings, None)
    for stage in (1, 2, 3) if mesh.world_size == 1 else ():
        settings = config(stage, seq, micro_batch=args.micro_batch)
        check(f"fp16 bytes, {args.model}, stage {stage}, one of 8", measured_bytes, arch, settings, 8)
    for stage in (0, 2, 3):
        check(f"forced overflows, stage {stage}", overflows, stage)
    check("the host runs ahead", runs_ahead)
    for stage in (1, 3):
        check(f"error at the minimum scale, stage {stage}", last_error, stage)
    for stage in (2, 3):
        check(f"wall_clock_breakdown, stage {stage}", breakdown, arch, stage, seq, args.micro_batch)
    if mesh.rank == 0:
        sys.stdout.write(f"{check.bad} bad\n")
    mesh.close()
    sys.exit(bool(check.bad))


if __name__ == "__main__":
    main()
