"""Are 20 steps the same bits with overlap on and off, two and three slots, checked mode, and at all stages?

torchrun --standalone --nproc-per-node N tests/bench/gpu_bits.py

All with torch's deterministic algorithms, since atomics in kernels that are not ours have no order. That stages agree
is what `deterministic` is for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import workload as w
from job import join_job
from training import say, wait_for_all

from zplan.runtime.initialize import initialize

STEPS, MICRO_STEPS = 20, 2


def train(stage: int, *, checked: bool = False, overlap: bool = True, **zplan) -> list[torch.Tensor]:
    """Parameters and moments after the last step."""
    config = w.config(stage, MICRO_STEPS, precision="bf16", piece=16384, **zplan)
    config["zero_optimization"]["overlap_comm"] = overlap
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=config, init=w.fill, checked=checked)
    for step in range(STEPS):
        for k in range(MICRO_STEPS):
            engine.backward(engine(*(x.to(engine.device) for x in w.batch(w.LLAMA4.vocab, step, engine.rank, k))))
            engine.step()
    with engine.summon(optim=True) as whole:
        bits = [p.detach().clone() for p in engine.module.parameters()]
        bits += [t.clone() for states in whole.optim.values() for t in states.values()]
    engine.close()
    return bits


def main() -> None:
    mesh = join_job()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    cases = {f"stage {s} {name}": (s, options) for s in range(4) for name, options in MODES.items()}
    cases |= {f"stage {s} deterministic": (s, {"deterministic": True}) for s in range(4)}
    cases["stage 3 deterministic, again"] = (3, {"deterministic": True})
    firsts: dict[str, list] = {}
    bad = 0
    for name, (stage, options) in cases.items():
        bits = train(stage, **options)
        first = firsts.setdefault("deterministic" if "deterministic" in name else f"stage {stage}", bits)
        differ = sum(not torch.equal(a, b) for a, b in zip(bits, first, strict=True))
        bad += differ > 0
        say(mesh, f"{'BAD' if differ else 'ok '} {name}: {differ} of {len(bits)} tensors differ")
    say(mesh, f"{bad} bad")
    wait_for_all(mesh)
    mesh.close()


MODES = {
    "as it is": {},
    "again": {},
    "without overlap": {"overlap": False},
    "three slots": {"ring_slots": 3},
    "checked": {"checked": True},
    "by collectives": {"transport": "collectives"},
}

if __name__ == "__main__":
    main()
