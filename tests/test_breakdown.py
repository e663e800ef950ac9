"""Times of the parts of a step: they are there when asked for, add up, and cost nothing otherwise."""

import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import zplan
from zplan.runtime.breakdown import COLLECTIVE, PARTS, Breakdown
from zplan.runtime.streams import Streams


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        time.sleep(0.02)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def engine(request):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **request.param}
    made, *_ = zplan.initialize(model=Slow(), config=config, world=2)
    yield made
    made.close()


def steps(engine, count):
    for _ in range(count):
        for _ in range(engine.choice.accumulation):
            engine.backward(engine(torch.ones(1, 8)))
        engine.step()
        with torch.no_grad():
            engine(torch.ones(1, 8))


ON = {"wall_clock_breakdown": True, "steps_per_print": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("engine", [ON], indirect=True)
def test_every_part_is_told_every_so_many_steps(engine, capsys):
    steps(engine, 5)
    lines = [x for x in capsys.readouterr().err.splitlines() if "ms a step" in x]
    assert [x.partition(", ms")[0] for x in lines] == ["zplan: steps 1 to 2", "zplan: steps 3 to 4"]
    seconds = engine.breakdown.last.seconds
    assert set(seconds) == set(PARTS) and all(v > 0 for v in seconds.values())
    assert 0.04 <= seconds["forward"] < 0.16, "two micro-steps of 20 ms; forwards without backward are not counted"
    assert seconds["exposed"] == pytest.approx(seconds["gather"] + seconds["reduce"]), "collectives block on the CPU"
    assert seconds["exposed"] < seconds["forward"] + seconds["backward"] + seconds["step"]


@pytest.mark.parametrize("engine", [{"steps_per_print": 2}], indirect=True)
def test_progress_alone(engine, capsys):
    steps(engine, 3)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("zplan: step")]
    assert line.startswith("zplan: step 2, 0 skipped, lr 0.0001, grad norm ")
    assert engine.breakdown is None and engine.collectives.watch is None


@pytest.mark.parametrize("engine", [{}], indirect=True)
def test_nothing_is_told_or_timed_unasked(engine, capsys):
    steps(engine, 11)
    assert "step" not in capsys.readouterr().err
    assert engine.telling is None and engine.streams.watch is None


@pytest.mark.parametrize(
    "engine", [{"fp16": {"enabled": True, "initial_scale_power": 4}, "steps_per_print": 1}], indirect=True
)
def test_skipped_steps_and_the_loss_scale_are_told(engine, capsys):
    loss = engine(torch.ones(1, 8))
    engine.backward(loss * float("inf"))
    engine.step()
    assert "step 1, 1 skipped, lr 0.0001, grad norm inf, loss scale 16" in capsys.readouterr().err.replace("nan", "inf")


class Event:
    """A stand-in for an event: a clock that moves by 1 ms a record."""

    clock, waited = 0, 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, other):
        return float(other.at - self.at)


def test_events_are_read_one_step_late(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    b = Breakdown(torch.device("cuda"))
    with b.span("step"), b.span("gather"):
        pass
    b.end_step()
    assert Event.waited == 0 and not any(b.sums.values()), "the step that was just queued was waited for"
    with b.span("step"):
        pass
    b.end_step()
    assert Event.waited == 2 and (b.sums["step"], b.sums["gather"]) == (0.003, 0.001)
    times = b.take(7)
    assert (times.first_step, times.last_step) == (6, 7)
    assert times.seconds["step"] == pytest.approx(0.002) and times.seconds["exposed"] == 0.0
    assert b.steps == 0 and not b.finished


def test_only_waits_of_the_computing_stream_are_exposed(monkeypatch):
    class Stream:
        def __init__(self, number):
            self.number, self.events = number, []

        def wait_event(self, event):
            self.events.append(event)

    compute, gather, reduce = (Stream(i) for i in range(3))
    streams = Streams(torch.device("cpu"))
    streams.gather, streams.reduce = gather, reduce
    seen = []

    @contextmanager
    def watch(part):
        seen.append(part)
        yield

    for here in (compute, gather, reduce):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda here=here: here)
        streams.watch = None
        streams.wait("unwatched")
        streams.watch = watch
        streams.wait("watched")
        streams.wait(None)
        assert here.events == ["unwatched", "watched"]
    assert seen == ["exposed"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_time_the_device():
    b = Breakdown(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        with b.span("forward"):
            for _ in range(10):
                x = x @ x * 1e-3
        b.end_step()
    torch.cuda.synchronize()
    times = b.take(3)
    assert times.seconds["forward"] > 1e-3 and not any(times.seconds[part] for part in COLLECTIVE)
