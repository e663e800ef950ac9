"""Which tensor an out-of-memory message is about: ledger lines and buffers whose size prints like what was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zplan.planner.activations import counted, profile
from zplan.planner.costs import costs
from zplan.planner.lint import whole
from zplan.planner.need import Setup, setup_lines
from zplan.planner.oom_log import POOL_BLOCKS, OutOfMemory, Phase, segment_bytes
from zplan.planner.sequence import IMAGES
from zplan.planner.stacks import kind

FP32 = 4
_FORWARD: tuple[Phase, ...] = ("forward", "backward")
"""What forward makes; with checkpointing, backward makes it again."""


@dataclass(frozen=True)
class Candidate:
    """One tensor that a run allocates."""

    line: str
    """Line of the ledger that it is counted in."""
    what: str
    nbytes: int
    phases: tuple[Phase, ...]
    """When it is allocated."""


def candidates(setup: Setup) -> Iterator[Candidate]:
    """Every tensor of a run that is large enough to fail."""
    if counted(setup.spec):
        yield from _activations(setup)
    yield from _parameters(setup)
    yield from _buffers(setup)


def _activations(setup: Setup) -> Iterator[Candidate]:
    choice = setup.choice
    names: tuple[tuple[str, str, tuple[Phase, ...]], ...] = (
        ("act.head.output", f"logits in {choice.precision}", ("forward", "loss")),
        ("act.loss.forward", "logits in fp32, on the way to the loss", ("loss",)),
        ("act.loss.saved", "logits in fp32, kept for backward", ("loss", "forward")),
        ("act.loss.backward", "gradient of the logits in fp32", ("backward", "loss")),
        ("act.loss.grad", f"gradient of the logits in {choice.precision}", ("backward", "loss")),
    )
    by_id = {line.id: line for line in setup_lines(setup)}
    for line_id, what, phases in names:
        if line_id in by_id:
            yield Candidate(line_id, what, by_id[line_id].nbytes, phases)
    if setup.spec.arch is not None and "act.head.output" in by_id:
        images = setup.spec.arch.family in IMAGES  # One row of logits each.
        tokens = choice.micro_batch * (1 if images else choice.seq)
        yield Candidate("act.loss.saved", "logits in fp32", tokens * setup.spec.arch.vocab * FP32, ("loss", "backward"))
    every_block = setup if setup.checkpointing == "none" else None
    for unit, found in profile(setup.spec, choice).items():
        for label, nbytes in found.detail:
            yield Candidate(f"act.{unit}.saved", f"{label} of one {unit}", nbytes, _FORWARD)
    if every_block is None:
        from dataclasses import replace

        blocks = {kind(unit.name) for unit in setup.spec.units if unit.kind == "block"}
        for unit, found in profile(setup.spec, replace(choice, checkpointing="none")).items():
            if unit in blocks:
                for label, nbytes in found.detail:
                    yield Candidate(f"act.{unit}.backward", f"{label} of the block that is run again", nbytes, _FORWARD)


def _parameters(setup: Setup) -> Iterator[Candidate]:
    itemsize, stage = setup.choice.itemsize, setup.view.stage
    seen = set()
    for unit in setup.spec.units:
        for p in unit.params:
            if p.numel in seen:
                continue
            seen.add(p.numel)
            name = p.name.rsplit(".layers.", 1)[-1]
            when: tuple[Phase, ...] = ("start", "forward", "backward") if stage == 3 else ("start",)
            yield Candidate("params", f"`{name}`, loaded or gathered", p.numel * itemsize, when)
            yield Candidate("params", f"`{name}` in fp32, as it is loaded", p.numel * FP32, ("start",))
            yield Candidate("grads", f"gradient of `{name}`", p.numel * itemsize, ("backward",))


def _buffers(setup: Setup) -> Iterator[Candidate]:
    """DeepSpeed's flat buffers."""
    num, n, stage = setup.spec.num_params, setup.world_size, setup.view.stage
    for cost in costs(setup.view):
        if cost.name.startswith("reduce bucket"):
            nbytes = cost.nbytes // (2 if cost.name.endswith("s") else 1)
            yield Candidate("grads.bucket", f"a reduce bucket ({cost.formula})", nbytes, ("backward",))
    if not stage:
        return
    share = -(-num // n)
    if stage == 3:
        tile = min(whole(setup.view.zero.get("sub_group_size", 10**9)) or share, share)
        yield Candidate("optim.grad_fp32", "fp32 gradient of one sub-group", tile * FP32, ("step",))
    else:
        yield Candidate("params.flat", "all parameters in one flat buffer", num * setup.choice.itemsize, ("start",))
        yield Candidate("optim.grad_fp32", "fp32 gradient of the shard", share * FP32, ("step",))
    if setup.view.offload("optimizer") == "none":
        yield Candidate("optim.master", "fp32 master weights of the shard", share * FP32, ("start",))
        yield Candidate("optim.exp_avg", "a moment of the shard", share * FP32, ("step", "start"))


def matches(message: OutOfMemory, setup: Setup) -> tuple[Candidate, ...]:
    """Tensors of the size that was tried, those of the right phase first, the nearest first; at most four.

    None where the size is one of torch's blocks for small tensors, which say only that memory was full.
    """
    tried = message.tried
    if tried is None or (message.device != "CPU" and tried.nbytes in POOL_BLOCKS):
        return ()
    found: dict[tuple[str, str], Candidate] = {}
    for c in candidates(setup):
        size = c.nbytes if message.device == "CPU" else segment_bytes(c.nbytes)
        if tried.matches(size):
            found.setdefault((c.line, c.what), c)
    inside = [c for c in found.values() if message.phase in c.phases]
    chosen = inside or list(found.values())
    chosen.sort(key=lambda c: abs(segment_bytes(c.nbytes) - tried.nbytes))
    return tuple(chosen[:4])
