"""What a DeepSpeed config needs of a card in each part of a step, so that changes to it can be weighed.

States, buckets and gathered parameters are DeepSpeed's (`costs.py`); activations are those of the model's ledger, which
do not depend on the runtime. This is an estimate: a log of a real run says by how much it is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zplan.planner.activations import activation_lines, counted
from zplan.planner.batch import KEYS, divisors, solve_batch
from zplan.planner.config import Attention, Checkpointing, Choice
from zplan.planner.costs import PER_RANK_ACTIVATIONS, costs
from zplan.planner.errors import ZplanError
from zplan.planner.ledger import Line
from zplan.planner.lint import View, whole
from zplan.planner.models import ModelSpec
from zplan.planner.oom_log import Phase
from zplan.planner.relaxed import Document
from zplan.planner.timeline import timeline

LOSS_LINES = ("act.head.output", "act.loss.saved", "act.loss.grad", "act.loss.forward", "act.loss.backward")
"""Everything of the size of the logits."""
CHUNKS = 16
"""A chunked loss holds a part of the logits at a time; this many parts are a usual choice."""

PARTS: dict[str, tuple[str, ...]] = {
    "start": ("idle",),
    "forward": ("forward.",),
    "loss": ("loss", "backward.loss"),
    "backward": ("backward.", "reduce."),
    "step": ("step",),
}
"""Part of a step -> the ledger's phases, whole names or beginnings."""


@dataclass(frozen=True)
class Setup:
    """A config in its place: the model, what the config can't say, and the config itself."""

    view: View
    spec: ModelSpec
    seq: int
    checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    chunked_loss: bool = False
    flash: bool = True
    """Whether the card has flash attention (`Hardware.flash`)."""
    cudnn_width: int = 0
    """Widest heads that the card's fused attention by cuDNN takes (`Hardware.cudnn_width`)."""

    def edited(self, edits: Mapping[tuple[str, ...], Any]) -> Setup:
        """The same with other values in the config; a value of None deletes a key."""
        config = edit(self.view.config, edits)
        return replace(self, view=replace(self.view, config=config, document=Document(config, "json"), prefix=()))

    @property
    def world_size(self) -> int:
        return self.view.subject.gpus or 1

    @property
    def micro(self) -> int:
        """Sequences per rank and micro-step."""
        return self._batch[0]

    @property
    def accumulation(self) -> int:
        return self._batch[1]

    @property
    def _batch(self) -> tuple[int, int]:
        train, micro, accumulation = (
            whole(self.view.config.get(name)) or None for name in (KEYS.train, KEYS.micro, KEYS.accumulation)
        )
        micro = micro or self.view.subject.micro_batch
        try:
            found = solve_batch(
                train=train, micro=micro, accumulation=accumulation, world_size=self.world_size, names=KEYS
            )
        except ZplanError:
            return micro or 1, accumulation or 1
        return found.micro, found.accumulation

    def smaller_batches(self) -> list[tuple[int, int]]:
        """(micro-batch, accumulation) of the same global batch with a smaller micro-batch, the largest first."""
        per_rank = self.micro * self.accumulation
        return [(m, per_rank // m) for m in reversed(divisors(per_rank)) if m < self.micro]

    @property
    def choice(self) -> Choice:
        return Choice(
            stage=self.view.stage,
            world_size=self.world_size,
            micro_batch=self.micro,
            accumulation=self.accumulation,
            seq=self.seq,
            precision="fp32" if self.view.itemsize == 4 else "fp16" if self.view.enabled("fp16") else "bf16",
            checkpointing=self.checkpointing,
            attention=self.attention,
            flash=self.flash,
            cudnn_width=0 if self.spec.arch is None or self.spec.arch.runnable else self.cudnn_width,
        )


def edit(config: Mapping[str, Any], edits: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of a config with values set, or keys deleted (None), by path."""
    found: dict[str, Any] = dict(config)
    for path, value in edits.items():
        block = found
        for name in path[:-1]:
            inner = block.get(name)
            block[name] = dict(inner) if isinstance(inner, Mapping) else {}
            block = block[name]
        if value is None:
            block.pop(path[-1], None)
        else:
            block[path[-1]] = value
    return found


@dataclass(frozen=True)
class Need:
    """Bytes on one card by part of a step."""

    fixed: tuple[tuple[str, int], ...]
    """What is there all the time, by name: states, buckets, gathered parameters."""
    moving: tuple[tuple[str, int], ...]
    """The most activations by part."""

    @property
    def fixed_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.fixed)

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max((nbytes for _, nbytes in self.moving), default=0)

    def at(self, phase: Phase) -> int:
        """Bytes in one part of the step; the peak where the part is not known."""
        moving = dict(self.moving)
        return self.fixed_bytes + moving[phase] if phase in moving else self.peak_bytes


def need_of(setup: Setup) -> Need:
    """What a setup needs, by part of a step."""
    fixed = [(c.name, c.nbytes) for c in costs(setup.view) if c.tier == "GPU" and c.name != "of these prefetched"]
    fixed = [(name, nbytes) for name, nbytes in fixed if name not in PER_RANK_ACTIVATIONS]
    phases = timeline(setup.spec.units).phases
    per_phase = [0] * len(phases)
    for line in setup_lines(setup):
        for first, last in line.spans:
            for i in range(first, last + 1):
                per_phase[i] += line.nbytes
    moving = []
    for part, names in PARTS.items():
        inside = [n for phase, n in zip(phases, per_phase, strict=True) if _within(phase, names)]
        moving.append((part, max(inside, default=0)))
    return Need(tuple(fixed), tuple(moving))


def setup_lines(setup: Setup) -> tuple[Line, ...]:
    """The activation lines; those of the logits in parts where the loss is chunked."""
    if not counted(setup.spec):
        return ()
    lines = activation_lines(setup.spec, setup.choice, timeline(setup.spec.units).phases)
    if not setup.chunked_loss:
        return lines
    return tuple(x._replace(nbytes=-(-x.nbytes // CHUNKS)) if x.id in LOSS_LINES else x for x in lines)


def _within(phase: str, names: tuple[str, ...]) -> bool:
    if phase == "backward.loss" and "backward." in names:
        return False
    return any(phase == n or (n.endswith(".") and phase.startswith(n)) for n in names)
