"""Model shapes that the GPU scripts know by name, and what else a row of their tables says."""

from dataclasses import dataclass, replace

from zplan.planner.models import Architecture, ModelSpec, decoder_units

SHAPES = {
    "350m": Architecture("llama", 24, 1024, 16, 16, 64, 2816, 32000, 4096, tied=False),
    "1.3b": Architecture("llama", 24, 2048, 16, 16, 128, 5504, 32000, 4096, tied=False),
    "7b": Architecture("llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096, tied=False),
    "8b": Architecture("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, tied=False),
    "gpt2-xl": Architecture("gpt2", 48, 1600, 25, 25, 64, 6400, 50257, 1024, tied=True),
}


def spec(name: str) -> ModelSpec:
    return ModelSpec(name, decoder_units(SHAPES[name]), SHAPES[name])


PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200."""
FLAGS = {"compiled": "compile", "fused": "fused", "deterministic": "deterministic"}
"""Of a case, and the words that ask for them."""


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    model: str
    micro_batch: int
    seq: int
    stage: int = 3
    accumulation: int = 1
    checkpointing: str = "none"
    compiled: bool = False
    fused: bool = False
    """zplan's own kernels in model and loss."""
    deterministic: bool = False
    """zplan's own mode."""

    def __str__(self) -> str:
        words = [self.checkpointing, f"k {self.accumulation}", *(n for n in FLAGS if getattr(self, n))]
        return f"{self.model} mb {self.micro_batch} seq {self.seq} {' '.join(words)}"

    @property
    def flops_per_token(self) -> float:
        """6 times all parameters, and causal attention's two products forward and backward: 6 L T H D."""
        arch = SHAPES[self.model]
        return 6 * spec(self.model).num_params + 6 * arch.layers * self.seq * arch.heads * arch.head_dim

    def mfu(self, rate: float) -> float:
        """Share of the peak at `rate` tokens/s a GPU; what checkpointing computes again is not counted."""
        return rate * self.flops_per_token / PEAK_FLOPS


def number(words: list[str], prefix: str, default: int) -> int:
    return next((int(x[len(prefix) :]) for x in words if x.startswith(prefix)), default)


def read_case(words: list[str]) -> tuple[Case, list[str]]:
    """`MODEL MICRO_BATCH SEQ [full] [compile] [fused] [deterministic] [stageN] [accum=K]`, and the other words."""
    case = Case(words[0], int(words[1]), int(words[2]), number(words, "stage", 3), number(words, "accum=", 1))
    how = "full" if "full" in words else "none"
    case = replace(case, checkpointing=how, **{name: word in words for name, word in FLAGS.items()})
    return case, words[3:]
