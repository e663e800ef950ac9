"""A training of which the last rank ends badly in its fourth step: `failing_script.py FOLDER HOW`, under the launcher.

`kill` and `raise` end it in the backward of a block; `diverge` lets it run a forward that the others do not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import workload as w

from zplan.runtime.initialize import initialize

STEP, PHASE = 3, "backward.blocks.1"
STEPS = 10_000
"""More than anybody waits for."""


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    engine, *_ = initialize(model=w.build(w.LLAMA4), config=w.config(3, precision="bf16"), init=w.fill, checked=False)
    rank, victim = engine.rank, engine.world_size - 1
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    follow = engine.on_phase

    def listen(phase: str) -> None:
        follow(phase)
        if rank == victim and engine.global_steps == STEP and phase == PHASE and how != "diverge":
            (folder / "began").write_text(str(time.monotonic()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("seven")

    engine.on_phase = listen
    for step in range(STEPS):
        batch = [x.to(engine.device) for x in w.batch(w.LLAMA4.vocab, step, rank, 0)]
        if how == "diverge" and step == STEP and rank == victim:
            (folder / "began").write_text(str(time.monotonic()))
            with torch.no_grad():
                engine(*batch)
        engine.backward(engine(*batch))
        engine.step()


if __name__ == "__main__":
    main()
