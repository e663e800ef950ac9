"""What a step computes: operations of its matrix products, and bytes that its other ops write.

Both are counted on the tape that the activation lines come from, so recomputed blocks, attention kernels that leave the
masked half out and experts that see few tokens count as often as they run. Attention's backward makes the scores again,
which is counted as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from zplan.planner.activations import simulation
from zplan.planner.config import Choice
from zplan.planner.models import Architecture, ModelSpec
from zplan.planner.tape import BASIS


@dataclass(frozen=True)
class Work:
    """One pass of one rank through one unit, or a sum of such."""

    products: int = 0
    """Multiplications and additions of matrix products."""
    attention: int = 0
    """Those of fused attention."""
    written: int = 0
    """Bytes that all other ops write."""

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention, self.written + other.written)

    def __mul__(self, times: int) -> Work:
        return Work(self.products * times, self.attention * times, self.written * times)

    @property
    def flops(self) -> int:
        """All operations."""
        return self.products + self.attention


@dataclass(frozen=True)
class StepWork:
    """One micro-step of one rank, apart by what can hide communication: the blocks are all alike."""

    front: Work
    """Forward of what comes before the blocks: the embedding."""
    block: Work
    """Forward of one block."""
    end: Work
    """Forward of what comes after them, the loss included."""
    end_backward: Work
    block_backward: Work
    """Backward of one block, what is run again for it included."""
    front_backward: Work
    layers: int

    @property
    def forward(self) -> Work:
        return self.front + self.block * self.layers + self.end

    @property
    def backward(self) -> Work:
        return self.end_backward + self.block_backward * self.layers + self.front_backward


def step_work(arch: Architecture, choice: Choice) -> StepWork:
    """Work of one micro-step of a model whose ops are counted."""
    sim = simulation(arch, choice)
    values = [choice.micro_batch**i * choice.seq**j for i, j in BASIS]
    parts: dict[str, Work] = {}
    blocks_seen = False
    for phase, *counts in zip(sim.phases, sim.flops, sim.attention, sim.written, strict=True):
        pass_, _, unit = phase.partition(".")
        direction = "forward" if pass_ in ("idle", "forward", "loss") else "backward"
        blocks_seen = blocks_seen or unit.startswith("blocks.")
        if unit.startswith("blocks."):
            if unit != sim.middle:
                continue
            part = "block"
        else:
            part = "front" if unit in ("embed", "positions") or not blocks_seen else "end"
        work = Work(*(_dot(coefficients, values) for coefficients in counts))
        key = f"{part}.{direction}"
        parts[key] = parts.get(key, Work()) + work
    nothing = Work()
    return StepWork(
        front=parts.get("front.forward", nothing),
        block=parts.get("block.forward", nothing),
        end=parts.get("end.forward", nothing),
        end_backward=parts.get("end.backward", nothing),
        block_backward=parts.get("block.backward", nothing),
        front_backward=parts.get("front.backward", nothing),
        layers=arch.layers,
    )


def _dot(coefficients: tuple[int, ...], values: list[int]) -> int:
    return sum(c * v for c, v in zip(coefficients, values, strict=True) if c)


def model_flops(spec: ModelSpec, seq: int) -> int:
    """Operations of a token that MFU is told in: 6 a matrix parameter it meets, and 12 L H D T for attention.

    The convention of the PaLM paper (appendix B): nothing that is recomputed, attention without a causal half. A
    table that is only looked up multiplies nothing; tied, it is the head's and counts.
    """
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    window = min(seq, arch.window) if arch.window else seq
    return 6 * matrix_params(spec) + 12 * arch.layers * arch.heads * arch.head_dim * window


def matrix_params(spec: ModelSpec) -> int:
    """Parameters that multiply every token: matrices of blocks and head; of experts those that one token meets."""
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    experts, met = arch.trait("experts"), arch.trait("experts_per_token")
    total = arch.vocab * arch.hidden if arch.tied else 0
    for unit in spec.units:
        if unit.kind not in ("block", "head"):
            continue
        for p in unit.params:
            if len(p.shape) > 1:
                total += p.numel // experts * met if experts and ".experts." in p.name else p.numel
    return total
