"""What the launcher tells its ranks: one JSON file in the folder of the run, written once and read by every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from zplan.runtime.data import Corpus

Task = Literal["train", "script"]


@dataclass(frozen=True)
class Job:
    """One run of one plan.

    Attributes
    ----------
    folder
        Belongs to this run alone: boards, tokens, results.
    plan
        Path of the plan that ranks follow.
    steps
        Optimizer steps.
    measured_steps
        Steps, from the first, during which bytes are followed; the last of them is compared. 0 for none.
    print_every
        Steps between two progress lines.
    world
        Be rank 0 of this many in one process; None for a real job.
    cap_bytes
        Limit of the CUDA allocator; None for the whole card.
    eval_corpus
        Tokens to evaluate on; None for no evaluation.
    save_dir, save_every, keep
        Where checkpoints go, after how many steps each (None: at the end only), and how many stay (None: all).
    resume
        `auto`, a tag, or None for a fresh start.
    weights
        A model folder to start from; None for random weights.
    export
        Where the model folder goes at the end.
    script, arguments
        The user's program and its arguments, for task `script`.
    """

    task: Task
    folder: Path
    plan: Path
    corpus: Corpus | None = None
    steps: int = 0
    seed: int = 0
    measured_steps: int = 0
    print_every: int = 1
    world: int | None = None
    cap_bytes: int | None = None
    eval_corpus: Corpus | None = None
    save_dir: Path | None = None
    save_every: int | None = None
    keep: int | None = None
    resume: str | None = None
    weights: Path | None = None
    export: Path | None = None
    script: Path | None = None
    arguments: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.folder / "job.json"

    @property
    def results(self) -> Path:
        """What rank 0 leaves behind at the end."""
        return self.folder / "results.json"

    def write(self) -> Path:
        self.path.write_text(json.dumps(asdict(self), default=str))
        return self.path

    @staticmethod
    def read(path: Path) -> Job:
        raw = json.loads(path.read_text())
        corpora = {k: raw[k] and Corpus(**{**raw[k], "path": Path(raw[k]["path"])}) for k in ("corpus", "eval_corpus")}
        paths = {k: raw[k] and Path(raw[k]) for k in ("folder", "plan", "script", "save_dir", "weights", "export")}
        return Job(**{**raw, **paths, **corpora, "arguments": tuple(raw["arguments"])})
