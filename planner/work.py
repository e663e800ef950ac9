"""What a step computes: operations of its matrix products, and bytes that its other ops write.

Both are counted on the tape that the activation lines come from, so recomputed blocks, attention kernels that leave the
masked half out and experts that see few tokens count as often as they run. Attention's backward makes the scores again,
which is counted as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from zplan.planner.config import Choice
from zplan.planner.models import Adapters, Architecture, ModelSpec
from zplan.planner.monomials import BASIS
from zplan.planner.simulation import simulation
from zplan.planner.stacks import Stacks, stacks_of


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
    """One micro-step of one rank, apart by what can hide communication."""

    front: Work
    """Forward of what comes before the blocks: the embedding."""
    blocks: Work
    """Forward of all blocks, which hardly differ."""
    end: Work
    """Forward of what comes after them, the loss included."""
    end_backward: Work
    blocks_backward: Work
    """Backward of all blocks, what is run again for it included."""
    front_backward: Work

    @property
    def forward(self) -> Work:
        return self.front + self.blocks + self.end

    @property
    def backward(self) -> Work:
        return self.end_backward + self.blocks_backward + self.front_backward


def step_work(arch: Architecture, choice: Choice, adapters: Adapters | None = None) -> StepWork:
    """Work of one micro-step of a model whose ops are counted."""
    sim = simulation(arch, choice, adapters)
    values = [choice.micro_batch**i * choice.seq**j for i, j in BASIS]
    stacks = Stacks.of(arch, sim.small)
    parts: dict[str, Work] = {}
    blocks_seen = False
    for phase, *counts in zip(sim.phases, sim.flops, sim.attention, sim.written, strict=True):
        pass_, _, unit = phase.partition(".")
        direction = "forward" if pass_ in ("idle", "forward", "loss") else "backward"
        work = Work(*(_dot(coefficients, values) for coefficients in counts))
        part = "front" if unit in ("embed", "positions") or not blocks_seen else "end"
        if stacks.place(unit):
            part, blocks_seen = "blocks", True
            work *= len(stacks.instances(unit))
        key = f"{part}.{direction}"
        parts[key] = parts.get(key, Work()) + work
    nothing = Work()
    return StepWork(
        front=parts.get("front.forward", nothing),
        blocks=parts.get("blocks.forward", nothing),
        end=parts.get("end.forward", nothing),
        end_backward=parts.get("end.backward", nothing),
        blocks_backward=parts.get("blocks.backward", nothing),
        front_backward=parts.get("front.backward", nothing),
    )


def _dot(coefficients: tuple[int, ...], values: list[int]) -> int:
    return sum(c * v for c, v in zip(coefficients, values, strict=True) if c)


def model_flops(spec: ModelSpec, seq: int) -> int:
    """Operations of a token that MFU is told in: 6 a matrix parameter it meets, and 12 L H D T for attention.

    Of an encoder-decoder a token is one on each side, and a layer of the decoder attends twice.

    D is the mean width of a key and a value. The convention of the PaLM paper (appendix B): nothing that is recomputed,
    attention without a causal half. What is frozen has no gradient and counts 4. A table that is only looked up
    multiplies nothing; tied, it is the head's and counts.
    """
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    window = min(seq, arch.window) if arch.window else seq
    trained, frozen = matrix_params(spec)
    attends = arch.layers + 2 * arch.trait("decoder_layers")
    return 6 * trained + 4 * frozen + 6 * attends * arch.heads * (arch.head_dim + arch.value_dim) * window


def matrix_params(spec: ModelSpec) -> tuple[int, int]:
    """Trained and frozen parameters that multiply every token: matrices of blocks and head; of experts those met.

    Blocks that a step does not run, an image tower's in a batch of text, multiply none.
    """
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    experts, met = arch.trait("experts"), arch.trait("experts_per_token")
    counts = [0, 0]
    for unit in spec.units:
        tied = unit.kind == "embed" and unit.base_name == "embed" and arch.tied
        runs = unit.kind == "head" or unit.base_name.rpartition(".")[0] in stacks_of(arch)
        if not runs and not tied:
            continue
        for p in unit.params:
            if len(p.shape) > 1:
                numel = p.numel // experts * met if experts and ".experts." in p.name else p.numel
                counts[unit.frozen] += numel
    return counts[0], counts[1]
