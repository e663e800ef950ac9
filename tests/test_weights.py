"""A local safetensors folder goes straight into shards: each rank reads its own bytes, and never holds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import any_model as m
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_models_flow import Net
from torch import nn

from zplan.planner.errors import ZplanError
from zplan.runtime import initialize as start
from zplan.runtime import weights as w
from zplan.runtime.initialize import initialize, meta_init
from zplan.runtime.verify import Meter

pytest.importorskip("transformers")

from hf_models import build

NAMES = ("llama-tied", "gpt2", "bert")


OPENED: list[w.WeightFolder] = []


class Noted(w.WeightFolder):
    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        OPENED.append(self)


def loads(rank: int, world_size: int, folder: str, stages: tuple[int, ...]) -> dict[str, Any]:
    """Whole parameters, a loss, and what was read and held while loading."""
    out: dict[str, Any] = {}
    start.WeightFolder = Noted  # type: ignore[misc]
    for name in NAMES:
        for stage in stages:
            with meta_init():
                model = build(name)
            config = m.config(stage, precision="bf16")
            with Meter(torch.device("cpu")) as meter:
                engine, *_ = initialize(model=model, config=config, weights=f"{folder}/{name}")
                assert meter.registry is not None
                held, peak = meter.registry.live_bytes, meter.registry.peaks["idle"]
            largest = max(u.layout.padded_numel for u in engine.units)
            kept = sum(u.layout.shard_numel if stage else u.layout.padded_numel for u in engine.trained)
            params = m.whole(engine)
            out[f"{name} {stage}"] = params, OPENED[-1].bytes_read, kept, held, peak, largest
            engine.close()
    return out


@pytest.mark.gloo
def test_each_rank_reads_its_own_bytes_and_holds_no_model(run_ranks, tmp_path):
    pytest.importorskip("transformers")
    expected = {}
    for name in NAMES:
        model = build(name).bfloat16()
        model.save_pretrained(tmp_path / name, max_shard_size="30KB")
        expected[name] = {n: p.detach().float().numpy() for n, p in model.named_parameters()}
    for r in run_ranks(2, loads, str(tmp_path), (1, 3)):
        for name in NAMES:
            for stage in (1, 3):
                params, read, kept, held, peak, largest = r[f"{name} {stage}"]
                for n, value in expected[name].items():
                    np.testing.assert_array_equal(params[n], value, err_msg=f"{name} {n}")
                assert 0 < read <= 2 * kept, (name, stage)
                assert peak - held <= 4 * largest, (name, stage)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(x))


def save(model: nn.Module, folder: Path, **changes: torch.Tensor | None) -> Path:
    state = {**{k: v.clone() for k, v in model.state_dict().items()}, **changes}
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_saved_buffers_come_along(tmp_path):
    model = WithBuffers()
    model.norm.running_mean.fill_(3.0)
    save(model, tmp_path)
    with meta_init():
        empty = WithBuffers()
    engine, *_ = initialize(model=empty, config=m.config(0), weights=tmp_path)
    assert empty.norm.running_mean.tolist() == [3.0] * 4 and not empty.norm.num_batches_tracked.is_meta
    assert torch.equal(empty.line.weight.detach(), model.line.weight.detach())
    engine.close()


def test_parameters_with_values_of_their_own_keep_them(tmp_path):
    """Adapters are not in the folder of their base."""
    save(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    with meta_init():
        model = nn.Sequential(nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    mine = model[1].weight.detach().clone()
    engine, *_ = initialize(model=model, config=m.config(0), weights=tmp_path)
    assert torch.equal(model[1].weight.detach(), mine) and not model[0].weight.isnan().any()
    engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head.weight": None}, "lacks 1 of 40 tensors of the model, such as `head.weight`"),
        ({"head.weight": torch.zeros(2, 2)}, r"`head.weight` of .* is \(2, 2\) and the model's"),
        ({"head.weight": torch.zeros(m.VOCAB, 24, dtype=torch.int8)}, "is torch.int8 and the model's"),
    ],
)
def test_folders_of_another_model_are_refused_before_anything_is_allocated(tmp_path, changes, said):
    save(Net(""), tmp_path, **changes)
    with meta_init():
        model = Net("")
    with pytest.raises(ZplanError, match=said):
        initialize(model=model, config=m.config(0), weights=tmp_path)
    assert all(p.is_meta for p in model.parameters())


def test_folders_that_can_not_be_read(tmp_path):
    with pytest.raises(ZplanError, match="has neither"):
        w.WeightFolder(tmp_path)
    (tmp_path / w.SINGLE).write_bytes(b"\xff" * 20)
    with pytest.raises(ZplanError, match="can't be read"):
        w.WeightFolder(tmp_path)
    (tmp_path / w.INDEX).write_text(json.dumps({"nothing": 1}))
    with pytest.raises(ZplanError, match="can't be read"):
        w.WeightFolder(tmp_path)
    (tmp_path / w.INDEX).unlink()
    folder = w.WeightFolder(save(Net(""), tmp_path))
    folder.bind(Net(""))
    with (tmp_path / w.SINGLE).open("r+b") as file:
        file.truncate(folder.tensors["head.weight"].start + 8)
    with pytest.raises(ZplanError, match="ends before `head.weight` does"):
        folder.read("head.weight", 0, 24)
