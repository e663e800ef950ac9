"""What the scripts about transformers models at real size share: a ledger for such an engine, a plain loop, a table."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zplan.planner.buffers import buffer_lines
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import Ledger, Line, merge
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.overhead import workspace_lines
from zplan.planner.predict import batch_lines
from zplan.planner.states import state_lines
from zplan.planner.timeline import Timeline, timeline
from zplan.runtime.detect import find_units
from zplan.runtime.engine import Engine
from zplan.runtime.verify import Comparison

EXACT = ("optim.", "params.", "model.", "grads.shard", "grads.full", "grads.slot")
"""Lines that follow from the layout alone, to the byte on any device. The rest are activations of a class."""

PEAK_TOLERANCE = 0.03
"""What the planner says of the op lists of transformers' classes on a GPU (`CLASS_SPREAD`)."""


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """Its op list. transformers' Llama is its Qwen2 without biases; zplan's own decoder is another program."""
    llama = config["model_type"] == "llama"
    arch, _ = read_architecture({**config, "model_type": "qwen2"} if llama else config, config["model_type"])
    if llama:
        arch = replace(arch, traits=tuple((k, v) for k, v in arch.traits if k != "qkv_bias"))
    return ModelSpec(config["model_type"], decoder_units(arch), arch)


def ledger_of(engine: Engine, spec: ModelSpec, *more: Line) -> Ledger:
    """States and buffers of the engine's own units under the activations of a spec with the same units by other names.

    To be called after a step, when the order of reduces is known. `more` is what neither knows of.
    """
    time, named = timeline([f.unit for f in find_units(engine.module)]), timeline(spec.units)
    kinds = [[p.partition(".")[0] for p in t.phases] for t in (time, named)]
    assert kinds[0] == kinds[1], f"the module has other units than {spec.name}: {time.phases} and {named.phases}"
    trained = [u.placement for u in reversed(engine.reducer.order)]
    placements = [*(u.placement for u in engine.units if u.placement.frozen), *trained]
    lines = state_lines(placements, engine.choice, time), buffer_lines(placements, engine.choice, time)
    buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in engine.module.buffers()}
    beside: tuple[Line, ...] = (
        *more,
        Line("model.buffers", sum(buffers.values()), (time.always,), "states"),
    )
    if engine.choice.device == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        beside += workspace_lines(capability, time.phases, biased=False)
    return merge(time.phases, *lines, _renamed(batch_lines(spec, engine.choice, named), time, named), beside)


def _renamed(lines: list[Line], time: Timeline, named: Timeline) -> list[Line]:
    """Gradients of units that are no blocks are called by the unit."""
    names = dict(zip(named.phases, time.phases, strict=True))
    out = []
    for line in lines:
        own = names.get(f"reduce.{line.id.removeprefix('grads.')}", "")
        out.append(line._replace(id=f"grads.{own.partition('.')[2]}") if own else line)
    return out


def batches(vocab: int, size: tuple[int, int], steps: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """`steps` times the same tokens, made anew each time, so that the loss must fall."""
    for _ in range(steps):
        g = torch.Generator().manual_seed(7)
        ids = torch.randint(0, vocab, size, generator=g)
        yield {"input_ids": ids.to(device), "labels": ids.clone().to(device)}


def plain_losses(model: nn.Module, data: Iterator[dict[str, Tensor]], *, lr: float, clip: float) -> list[float]:
    """One process, no engine: the compute dtype's gradients, fp32 master weights, clipping, torch's AdamW."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses


def engine_losses(engine: Engine, data: Iterator[dict[str, Tensor]]) -> list[float]:
    """The same under an engine. Nothing of a step outlives it, as in the ledger."""
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del batch, loss
    return losses


def start_clean() -> None:
    """Before a meter: what an earlier run left to the allocator, cuBLAS's workspaces too, is not the next one's."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def tell(title: str, comparison: Comparison) -> int:
    """Print peak and rows that differ; how many are outside what the planner promises."""
    wrong = sorted(
        (r for r in (*comparison.lines, *comparison.peaks) if r.difference), key=lambda r: -abs(r.difference)
    )
    bad = [r for r in comparison.lines if r.name.startswith(EXACT) and r.difference]
    bad += [r for r in comparison.peaks if r.outside(PEAK_TOLERANCE)]
    bad += comparison.unattributed
    top, predicted = comparison.peak, max(r.predicted for r in comparison.peaks)
    say = sys.stdout.write
    say(f"== {title}\n")
    for r in wrong[:12]:
        say(f"  {r.where:52} {r.name[:44]:44} {r.predicted:>15,} {r.measured:>15,} {r.difference:>+13,}\n")
    say(
        f"  {len(wrong)} of {len(comparison.lines) + len(comparison.peaks)} rows differ, {len(bad)} too much; "
        f"peak {top.where}: predicted {predicted:,} measured {top.measured:,} "
        f"({(predicted / top.measured - 1) * 100:+.3f} %)\n"
    )
    return len(bad)
