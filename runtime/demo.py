"""A folder that shows the whole chain on this machine: text, model, plan, losses and the table of bytes."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from zplan.planner.api import plan as make_plan
from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import save_plan, write_files
from zplan.runtime.outcome import Outcome
from zplan.runtime.preflight import require_torch
from zplan.runtime.start import Training, train
from zplan.runtime.tokenizer import BYTES_VOCAB

MARKER = ".zplan-demo"
"""Says that a folder is a demo's, which may be written over."""

TEXT_BYTES = 4_000_000
"""How much of the standard library is read."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": BYTES_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""0.8 million parameters over bytes: small enough to learn something in half a minute on two cores."""

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 4e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}


def open_folder(folder: Path) -> None:
    """Make the demo's folder, or take one that a demo made; anything else is not ours to write into."""
    if folder.exists() and not folder.is_dir():
        raise ZplanError(f"`{folder}` is a file", "name another folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ZplanError(f"`{folder}` is not empty and no demo made it", "name another folder with --out")
    try:
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as error:
        raise ZplanError(f"`{folder}` cannot be written: {error.strerror}", "name another folder with --out") from None


def standard_library_text(limit: int = TEXT_BYTES) -> str:
    """Python's own modules, in name order, up to about `limit` characters."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a module in another encoding: the text need not be complete
        parts.append(text)
        size += len(text)
        if size >= limit:
            break
    if not parts:
        raise ZplanError("this Python has no standard library in source form", "zplan run plan.json --data TEXT")
    return "".join(parts)


def write_inputs(folder: Path) -> Path:
    """Text, model and plan; returns the plan's path."""
    open_folder(folder)
    config = json.dumps(MODEL, indent=2) + "\n"
    write_files({str(folder / "text.txt"): standard_library_text(), str(folder / "model" / "config.json"): config})
    plan = make_plan(
        str(folder / "model"),
        gpus=2,
        mem=1,
        device="cpu",
        stage=3,
        precision="fp32",
        checkpointing="none",
        seq=128,
        micro_batch=4,
        accumulation=1,
        config=CONFIG,
        offline=True,
    )
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json"


def demo(folder: Path, *, num_steps: int, seed: int) -> tuple[Outcome, str]:
    """Plan, train on two CPU ranks at stage 3, compare; returns the outcome and a closing text."""
    require_torch()
    plan = write_inputs(folder)
    wanted = Training(folder / "text.txt", num_steps, seed=seed, tokenizer="bytes", print_every=max(1, num_steps // 10))
    outcome = train(plan, wanted)
    steps = "".join(json.dumps(s) + "\n" for s in outcome.steps)
    write_files({str(folder / "steps.jsonl"): steps, str(folder / "bytes.txt"): outcome.table(0.0) + "\n"})
    return outcome, closing(folder, outcome)


def closing(folder: Path, outcome: Outcome) -> str:
    first, last = outcome.steps[0]["loss"], [s["loss"] for s in outcome.steps[-10:]]
    again = f"zplan run {folder / 'plan.json'} --data {folder / 'text.txt'} --steps {len(outcome.steps)}"
    return "\n".join(
        [
            f"loss {first:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}",
            "",
            f"in {folder}: plan.json, ds_config.json, model/config.json, text.txt, steps.jsonl, bytes.txt",
            f"again: {again}",
        ]
    )
