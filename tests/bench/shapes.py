"""Model shapes that the GPU scripts know by name."""

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
