"""Times of the parts of a step: they are there when asked for, add up, and cost nothing otherwise."""

import time

import pytest
import torch
from torch import nn

import zplan
from zplan.runtime.breakdown import COLLECTIVE, PARTS, Breakdown


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
    assert 0.04 <= seconds["forward"] < 0.06, "two micro-steps of 20 ms; forwards without backward are not counted"
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
