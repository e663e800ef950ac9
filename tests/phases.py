"""Phases of the ledger in a step of the bare decoder, for observers on a CPU and for CUDA's allocator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from zplan.cuda_ops.linear_cross_entropy import give_gradient_to
from zplan.planner.activations import activation_lines
from zplan.planner.config import Choice
from zplan.planner.hfconfig import read_architecture
from zplan.planner.ledger import Ledger, merge
from zplan.planner.models import Architecture, ModelSpec, decoder_units
from zplan.planner.timeline import timeline
from zplan.runtime.decoder import Decoder
from zplan.runtime.meter import StorageRegistry

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def choose(batch: int, seq: int, precision="bf16", checkpointing="none", attention="sdpa", device="cpu") -> Choice:
    """One rank at stage 0, where activations are all there is to choose about."""
    return Choice(
        0,
        1,
        micro_batch=batch,
        seq=seq,
        precision=precision,
        checkpointing=checkpointing,
        attention=attention,
        device=device,
    )


class Observer(Protocol):
    def enter(self, phase: str) -> None: ...


def decoder_of(arch: Architecture, choice: Choice) -> Decoder:
    """The bare model of a choice."""
    return Decoder(
        arch,
        checkpointing=choice.checkpointing,
        attention=choice.attention,
        cross_entropy=choice.cross_entropy,
        kernels=choice.kernels,
    )


def switch_on(model: nn.Module, **how: bool) -> None:
    """The model's own checkpointing, whose switch transformers has renamed."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def unit_modules(model: Decoder) -> dict[str, nn.Module]:
    return {u.name: model.get_submodule(u.name) for u in decoder_units(model.arch)}


def mark_phases(  # noqa: C901  (four small hooks)
    modules: dict[str, nn.Module], registry: Observer, *, keep: bool = True
) -> None:
    """Hooks that enter the phases.

    With `keep` a unit's gradients stay until the next unit's have landed, as in the runtime; without, each is taken as
    it comes.
    """
    retained: list[Tensor] = []
    summed: dict[int, Tensor] = {}

    def recomputing() -> bool:
        return torch._C._current_graph_task_id() != -1

    def before(name):
        return lambda module, args: None if recomputing() else registry.enter(f"forward.{name}")

    def after(name):
        def hook(module, args, out):
            if not recomputing():
                out = out[0] if isinstance(out, tuple) else out
                if out.requires_grad:
                    out.register_hook(lambda grad: registry.enter(f"backward.{name}"))
                if name == "head":
                    registry.enter("loss")

        return hook

    def reduce(name, params):
        # A hook that led back to its parameter would keep the model for good: autograd's references are not collected.
        missing, refs, is_first = [len(params)], [weakref.ref(p) for p in params], bool(params) and params[0] is first

        def hook(param):
            missing[0] -= 1
            if not keep:
                param.grad = None
            if not missing[0]:
                params = [ref() for ref in refs]
                retained.clear()
                registry.enter(f"reduce.{name}")
                missing[0] = len(params)
                retained.extend(summed.pop(id(p), p.grad) for p in params if keep)
                for p in params:
                    p.grad = None
                if is_first:
                    torch.autograd.Variable._execution_engine.queue_callback(retained.clear)

        return hook

    # What is frozen lands nowhere; the unit of the first trained parameter is the last to land.
    first = next(p for module in modules.values() for p in module.parameters() if p.requires_grad)
    taken: set[nn.Parameter] = set()
    for name, module in modules.items():
        module.register_forward_pre_hook(before(name))
        module.register_forward_hook(after(name))
        # A tied weight belongs to the first unit that uses it.
        params = [p for p in module.parameters() if p not in taken and p.requires_grad]
        taken.update(params)
        hook = reduce(name, params)
        for p in params:
            p.register_post_accumulate_grad_hook(hook)
            if name == "head":
                give_gradient_to(p, partial(summed.__setitem__, id(p)))


class AllocatorMeter:
    """Peak of requested bytes per phase, from CUDA's allocator itself."""

    def __init__(self) -> None:
        self.phase = "idle"
        self.peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase


def allocator_peaks(arch: Architecture, choice: Choice) -> dict[str, int]:
    """What the second step holds beside the parameters and cuBLAS's workspaces, by phase, on a GPU."""
    with torch.device("cuda"):
        model = decoder_of(arch, choice)
    model.to(DTYPES[choice.precision])
    meter = AllocatorMeter()
    mark_phases(unit_modules(model), meter)
    shape = (choice.micro_batch, choice.seq)

    def step() -> None:
        meter.enter("forward.embed")
        inputs, labels = (torch.randint(arch.vocab, shape, device="cuda") for _ in range(2))
        loss = model(inputs, labels)
        meter.enter("backward.loss")
        loss.backward()
        meter.enter("step")
        # Batch and loss are there until a training loop makes the next ones.
        meter.enter("idle")
        del inputs, labels, loss

    step()  # cuBLAS takes its workspaces for good
    states = torch.cuda.memory_stats()["requested_bytes.all.current"]
    meter.peaks.clear()
    step()
    return {phase: peak - states for phase, peak in meter.peaks.items()}


def activation_ledger(arch: Architecture, choice: Choice) -> Ledger:
    """The activation lines alone, over the phases of a step."""
    spec = ModelSpec("m", decoder_units(arch), arch)
    phases = timeline(spec.units).phases
    return merge(phases, activation_lines(spec, choice, phases))


def observe_step(model: Decoder, choice: Choice, *, steps: int = 1) -> dict[str, int]:
    """`observe` of a decoder in its own dtype."""
    model = model.to(DTYPES[choice.precision])
    return observe(model, unit_modules(model), choice, model, (0, model.arch.vocab), steps=steps)


def observe(
    model: nn.Module,
    modules: dict[str, nn.Module],
    choice: Choice,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    ids: tuple[int, int],
    *,
    steps: int = 1,
) -> dict[str, int]:
    """Peak bytes per phase of everything but parameters and buffers, as a registry of storages sees them in real steps.

    Parameters
    ----------
    modules
        By unit.
    loss_of
        Of inputs and labels, whose ids are from the first of `ids` on and below the second.
    """
    registry = StorageRegistry()
    mark_phases(modules, registry)
    shape = (choice.micro_batch, choice.seq)
    with registry:
        registry.adopt(*model.parameters(), *model.buffers())
        states = registry.live_bytes
        for _ in range(steps):
            registry.enter("forward.embed")
            inputs, labels = torch.randint(*ids, shape), torch.randint(*ids, shape)
            loss = loss_of(inputs, labels)
            registry.enter("backward.loss")
            loss.backward()
            registry.enter("step")
            del inputs, labels, loss
            registry.enter("idle")
    assert registry.live_bytes == states, "something outlived the step"
    return {phase: peak - states for phase, peak in registry.peaks.items() if phase != "idle"}


def observe_class(
    model: nn.Module,
    modules: dict[str, nn.Module],
    choice: Choice,
    make_batch: Callable[[], dict[str, Tensor]],
) -> dict[str, int]:
    """Peaks of the phases of one step of a transformers model, beside its states, as an observer on a CPU sees them.

    `make_batch` gives the keyword arguments of the call, whose `.loss` it is.
    """
    model.to(DTYPES[choice.precision]).train()
    if choice.checkpointing == "full":
        # Without the state of the random number generator, which is 5 KB on the host a layer.
        switch_on(model, use_reentrant=False, preserve_rng_state=False)
    registry = StorageRegistry()
    mark_phases(modules, registry)
    with registry:
        registry.adopt(*model.parameters(), *model.buffers())
        states = registry.live_bytes
        registry.enter("forward.embed")
        batch = make_batch()
        loss = model(**batch).loss
        registry.enter("backward.loss")
        loss.backward()
        registry.enter("step")
        del batch, loss
        registry.enter("idle")
    assert registry.live_bytes == states, "something outlived the step"
    return {phase: peak - states for phase, peak in registry.peaks.items() if phase != "idle"}


def expect_phases(config: dict, choice: Choice, seen: dict[str, int], *, but: tuple[str, ...] = ()) -> None:
    """Every phase of the ledger of a config is what was seen, to the byte, `but` those of units that start so."""
    arch, _ = read_architecture(config, "m")
    ledger = activation_ledger(arch, choice)
    expected = dict(zip(ledger.phases, ledger.per_phase(), strict=True))
    del expected["idle"]
    expected = {p: n for p, n in expected.items() if not (but and p.partition(".")[2].startswith(but))}
    wrong = {p: (n, seen.get(p, 0)) for p, n in expected.items() if n != seen.get(p, 0)}
    assert not wrong, wrong
