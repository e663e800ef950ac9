"""What is counted but can't be run: such an answer is marked `estimate only`, and `zplan run` refuses it by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.models import LLAMA_CLASS, ModelSpec
from zplan.planner.optimizers import KINDS, kind_of
from zplan.planner.peer_rules import NAMES


class Limit(NamedTuple):
    """One thing that zplan's runtime does not do."""

    key: str
    """Field of the choice, as an option where there is one."""
    value: str
    why: str
    instead: str
    """What can be run."""

    def told(self) -> str:
        return f"`{self.words}`: {self.why}"

    @property
    def words(self) -> str:
        """As it is asked for: `--optimizer lion`."""
        return f"{self.key} {self.value}".strip()


def limits(choice: Choice, spec: ModelSpec | None = None) -> tuple[Limit, ...]:
    """Everything about a choice that `zplan run` refuses; empty where it runs.

    Parameters
    ----------
    choice
        What was asked for or chosen.
    spec
        The model that `zplan run` would build by itself; None for a module of the user's own.
    """
    return (*_model_limits(spec), *_limits(choice)) if spec is not None else tuple(_limits(choice))


def _model_limits(spec: ModelSpec) -> Iterator[Limit]:
    if spec.arch is not None and not spec.arch.runnable:
        why = "zplan has no decoder of its own for it"
        if spec.arch.family == LLAMA_CLASS:
            why = "zplan's own decoder has neither biases nor rotary scalings but linear and llama3"
        yield Limit(
            "model_type",
            spec.arch.family.removesuffix("_class"),
            why,
            "train it by your own script, with zplan.initialize",
        )
    if spec.adapters is not None:
        why = "zplan's own decoders have no adapters; a module that has some trains through zplan.initialize"
        instead = "zplan run plan.json train.py, where train.py builds the module with its adapters"
        if spec.adapters.quantized:
            yield Limit("--qlora", "nf4", why, instead)
        yield Limit("--lora", str(spec.adapters.rank), why, instead)


def _limits(c: Choice) -> Iterator[Limit]:
    if not kind_of(c.optimizer).runnable:
        can = ", ".join(name for name, kind in KINDS.items() if kind.runnable)
        yield Limit("--optimizer", c.optimizer, f"zplan's step is {can}", f"use --optimizer {can}")
    if c.runtime != "zplan":
        why = f"the buffers counted are {NAMES[c.runtime]}'s, and zplan runs its own runtime"
        yield Limit("--runtime", c.runtime, why, "use --runtime zplan")
        return
    if c.cross_entropy in ("bf16", "chunked"):
        yield Limit("--loss", c.cross_entropy, "zplan's decoders take it plain or fused", "use --loss plain or fused")
    if c.padded:
        yield Limit("--padded", "", "zplan packs text into whole sequences, without a mask", "leave --padded out")
    if c.checkpointing == "selective":
        why = "zplan's decoders checkpoint a block whole or not at all"
        yield Limit("--checkpointing", "selective", why, "use --checkpointing full or none")
    if c.checkpoint_every > 1:
        why = "zplan gathers a segment's blocks for its recompute one by one, each alone"
        yield Limit("--checkpoint-every", str(c.checkpoint_every), why, "use --checkpoint-every 1")
    if c.checkpoint_offload:
        yield Limit("--checkpoint-offload", "", "zplan keeps checkpoints on the GPU", "leave --checkpoint-offload out")
    if c.offload.optimizer != "none":
        why = "zplan's runtime keeps all states on the GPU"
        yield Limit("--offload", c.offload.told(), why, "use --offload none, and more GPUs or --checkpointing full")
    if c.reduce_dtype != "fp32":
        why = "zplan reduces and accumulates gradients in fp32 (`communication_data_type` of a config)"
        yield Limit("--reduce-dtype", c.reduce_dtype, why, "use --reduce-dtype fp32")


def refuse_unrunnable(choice: Choice, spec: ModelSpec | None = None) -> None:
    """Raise a `ZplanError` that names the first key which can't be run."""
    for limit in limits(choice, spec):
        raise ZplanError(f"`{limit.words}` is estimate only: {limit.why}", limit.instead)
