"""Activities beside the step: what the runtime holds in them on a CPU, to the byte, and what must follow from that."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import workload as w
from phases import DTYPES, choose, unit_modules

from zplan.planner.activations import evaluation_peaks
from zplan.planner.activities import activities, kv_cache_bytes
from zplan.planner.activities_disk import RANDOM_STATE_BYTES
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import merge
from zplan.planner.models import Architecture
from zplan.planner.predict import predict
from zplan.planner.saving import RANGE_NUMEL
from zplan.runtime import checkpoint_format
from zplan.runtime.decoder import Decoder
from zplan.runtime.initialize import initialize
from zplan.runtime.meter import StorageRegistry

ARCHS = {
    "llama": w.LLAMA4,
    "tied": replace(w.LLAMA4, tied=True, kv_heads=4),
    "gpt2": replace(w.GPT2, layers=4),
}
PLACES = [(0, None, "bf16"), (0, None, "fp32"), (1, 4, "bf16"), (3, 4, "fp32"), (3, 4, "bf16")]
"""Stage, ranks of which one is real, precision."""
HOW = {"init": "initialise", "fresh": "initialise, meta_init", "built": "initialise, built model"}


@pytest.fixture
def start():
    """`start(registry, arch, stage, world, how, ...)`: an engine under a registry, closed whatever happens."""
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())

        def call(registry, arch, stage, world, how="init", *, precision="fp32", accumulation=1, **kinds):
            config = w.config(stage, accumulation, precision=precision, piece=16384, **kinds)
            with torch.device("cpu" if how == "built" else "meta"):
                model = Decoder(arch, **kinds)
            with registry:
                registry.adopt(*(model.parameters() if how == "built" else ()))
                registry.enter("initialise")
                engine, *_ = initialize(model=model, config=config, init=w.fill if how == "init" else None, world=world)
                registry.enter("started")
            stack.callback(engine.close)
            return engine

        yield call


def predicted(arch, engine):
    """By name, for the sequence of the test's batches."""
    choice, spec = replace(engine.choice, seq=w.SEQ), w.spec(arch)
    return {a.name: a for a in activities(spec, choice, predict(spec, choice))}


def in_memory(activity):
    """Bytes of an activity on a CPU, where host and device are one. What torch takes inside an op nobody sees."""
    ledger = activity.ledger
    lines = [x._replace(tier="device") for x in ledger.lines if x.id != "summon.checksum"]
    return merge(ledger.phases, lines).peak_bytes()


# The norms of the llama decoder have no rule of their own, so there `init=` is required.
STARTS = [(a, h) for a in ARCHS for h in HOW if a == "gpt2" or h != "fresh"]


@pytest.mark.parametrize(("arch", "how"), STARTS)
@pytest.mark.parametrize(("stage", "world", "precision"), PLACES, ids=[f"stage{s}x{n or 1}-{p}" for s, n, p in PLACES])
def test_starting_takes_what_is_predicted(start, arch, stage, world, precision, how):
    for accumulation in (1, 2) if arch == "llama" else (1,):
        registry = StorageRegistry()
        engine = start(registry, ARCHS[arch], stage, world, how, precision=precision, accumulation=accumulation)
        activity = predicted(ARCHS[arch], engine)[HOW[how]]
        assert registry.peaks["initialise"] == activity.ledger.peak_bytes(), activity.phase
        assert registry.live_bytes == activity.ledger.per_phase()[-1], "what is left when it has started"
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "world", "precision"), PLACES, ids=[f"stage{s}x{n or 1}-{p}" for s, n, p in PLACES])
@pytest.mark.parametrize("arch", ARCHS)
def test_between_steps_everything_takes_what_is_predicted(start, arch, stage, world, precision, tmp_path, capsys):
    vocab, registry = ARCHS[arch].vocab, StorageRegistry()
    engine = start(registry, ARCHS[arch], stage, world, precision=precision)
    with registry:
        loss = engine(*w.batch(vocab, 0, 0, 0))
        engine.backward(loss)
        engine.step()
        del loss
        registry.enter("evaluate")
        with torch.no_grad():
            float(engine(*w.batch(vocab, 1, 0, 0)))
        registry.enter("summon")
        with engine.summon():
            pass
        if world is None:  # one rank that pretends to be of many has nothing to save
            registry.enter("export")
            engine.save_16bit_model(tmp_path / "model")
            registry.enter("save")
            engine.save_checkpoint(tmp_path / "runs")
            registry.enter("load, resume")
            engine.load_checkpoint(tmp_path / "runs")
        registry.enter("end")
    found = predicted(ARCHS[arch], engine)
    seen = {name: peak for name, peak in registry.peaks.items() if name in found}
    assert len(seen) == (6 if world is None else 3)
    assert seen == {name: in_memory(found[name]) for name in seen}


GRID = [(a, p, k, b) for a in ("llama", "gpt2") for p in DTYPES for k in ("sdpa", "eager") for b in (1, 3)]


@pytest.mark.parametrize(("arch", "precision", "attention", "batch"), GRID)
def test_every_phase_of_an_evaluation_equals_what_an_observer_sees(arch, precision, attention, batch):
    arch = ARCHS[arch]
    model, registry = Decoder(arch, attention=attention).to(DTYPES[precision]), StorageRegistry()
    modules = unit_modules(model)
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda module, args, name=name: registry.enter(f"forward.{name}"))
    modules["head"].register_forward_hook(lambda module, args, out: registry.enter("loss"))
    with torch.no_grad(), registry:
        registry.adopt(*model.parameters())
        states = registry.live_bytes
        registry.enter("forward.embed")
        inputs, labels = (torch.randint(arch.vocab, (batch, 10)) for _ in range(2))
        _loss = model(inputs, labels)
    predicted = evaluation_peaks(w.spec(arch), choose(batch, 10, precision, "none", attention))
    # The tape has three blocks: the first, the last, and one for all in between.
    assert "forward.blocks.2" in predicted and "forward.blocks.3" not in predicted
    for phase, nbytes in predicted.items():
        assert registry.peaks[phase] - states == nbytes, phase
    assert registry.peaks["forward.blocks.3"] - states == predicted["forward.blocks.2"]


@pytest.mark.parametrize(("kernels", "loss"), [("torch", "fused"), ("fused", "plain"), ("fused", "fused")])
def test_fused_kernels_evaluate_in_what_is_predicted(start, kernels, loss):
    registry, arch = StorageRegistry(), ARCHS["llama"]
    engine = start(registry, arch, 0, None, precision="bf16", kernels=kernels, cross_entropy=loss)
    with registry:
        registry.enter("evaluate")
        with torch.no_grad():
            float(engine(*w.batch(arch.vocab, 1, 0, 0)))
        registry.enter("end")
    assert registry.peaks["evaluate"] == predicted(arch, engine)["evaluate"].ledger.peak_bytes()


def test_constants_are_the_runtimes_own():
    assert RANGE_NUMEL == checkpoint_format.RANGE_NUMEL
    assert torch.get_rng_state().nbytes == RANDOM_STATE_BYTES


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_cache_is_as_large_as_that_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_layer=3, n_embd=32, n_head=4, n_positions=64)
        kv_heads, head_dim = 4, 8
    else:
        kv_heads, head_dim = 2, 16
        config = transformers.LlamaConfig(
            **shape, intermediate_size=48, num_key_value_heads=kv_heads, head_dim=head_dim
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.zeros((2, 8), dtype=torch.long), use_cache=True).past_key_values
    found = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    arch = Architecture(kind, 3, 32, 4, kv_heads, head_dim, 48, 64, 64, tied=False)
    assert kv_cache_bytes(arch, batch=2, length=8, itemsize=4) == found


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_a_cache_of_latents_is_what_the_class_keeps(kind):
    transformers = pytest.importorskip("transformers")
    config = {
        **{"model_type": kind, "vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "intermediate_size": 48, "kv_lora_rank": 12, "qk_nope_head_dim": 16},
        **{"qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 8, "n_group": 2},
        **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        cache = model(torch.zeros((2, 8), dtype=torch.long), use_cache=True).past_key_values
    found = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    arch, _ = read_architecture(config, "m")
    assert kv_cache_bytes(arch, batch=2, length=8, itemsize=4) == found == 3 * 2 * 8 * (12 + 8) * 4
