"""transformers models, unmodified, on two ranks: every line and every phase of the ledger, activations included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_ledger import batches, engine_losses, ledger_of, spec_of
from hf_models import config_of, switch_on

from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Comparison, Meter

MODELS = ("llama", "llama-tied", "qwen2", "phi3", "mixtral", "gpt-neox")
SIZE = (2, 9)


def train(rank: int, world_size: int, stage: int, checkpointing: str) -> dict[str, Comparison]:
    out, device = {}, torch.device("cpu")
    for name in MODELS:
        kind, keys = config_of(name)
        config = {
            "train_micro_batch_size_per_gpu": SIZE[0],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 65536},
            "zplan": {"seq": SIZE[1], "checkpointing": checkpointing},
        }
        hf = getattr(transformers, kind)(**keys, use_cache=False, attn_implementation="sdpa")
        with Meter(device) as meter:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(hf).train()
            if checkpointing == "full":
                switch_on(model, use_reentrant=False, preserve_rng_state=False)
            engine, *_ = initialize(model=model, config=config)
            meter.attach(engine)
            engine_losses(engine, batches(keys["vocab_size"], SIZE, 2, device))
            out[name] = meter.compare(ledger_of(engine, spec_of(hf.to_dict())))
        engine.close()
    return out


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "checkpointing"),
    [
        (0, "none"),
        (2, "full"),
        (3, "none"),
        (3, "full"),
        pytest.param(0, "full", marks=pytest.mark.slow),
        pytest.param(2, "none", marks=pytest.mark.slow),
    ],
)
def test_every_line_and_every_peak_is_exact(run_ranks, stage, checkpointing):
    for result in run_ranks(2, train, stage, checkpointing, limit=200):
        for name, c in result.items():
            assert len(c.lines) > 20 and len(c.peaks) > 20, name
            assert not c.off_by_more_than(0.0), name
