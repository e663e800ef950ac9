"""Time of one optimizer step: what computes, what communication cannot hide behind it, and the step itself.

[Note: overlap] zplan gathers a unit while the one before computes, and reduces a unit's gradients while the next one's
backward runs, each in order on a stream of its own. So a queue of transfers runs beside a queue of computations, and
what is exposed is by how much the later of the two is late. Blocks are all alike, so a queue is a few runs of equal
entries, and the latest moment lies at the first or last entry of a run: 126 blocks cost what one costs. Both kinds of
transfers share the links. That NCCL's kernels take multiprocessors from compute is not counted.

[Note: two levels] A ring over several nodes crosses each node's network once with everything that it carries, over all
of the node's network cards, so it runs at the slower of the links within a node and the whole node's network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zplan.planner.buffers import in_rank_order
from zplan.planner.comm import num_reduces, ring_bytes, wire_itemsize
from zplan.planner.config import Choice
from zplan.planner.folding import Folding
from zplan.planner.hardware import Hardware
from zplan.planner.models import ModelSpec
from zplan.planner.offload_work import OffloadWork, offload_work
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import grad_itemsize, place, shards_states, splits_masters
from zplan.planner.speeds import PASSES, Speeds
from zplan.planner.work import StepWork, Work, step_work


def step_bytes(choice: Choice) -> int:
    """Read and written by the optimizer for each element: the gradient, and its states and the weight twice.

    States of whole matrices, such as Adafactor's rows and columns, count for nothing beside these.

    Examples
    --------
    >>> step_bytes(Choice(3, 8)), step_bytes(Choice(0, 1))
    (28, 26)
    """
    kind = kind_of(choice.optimizer)
    states = sum(state.itemsize for state in kind.states if state.numel_of is None)
    own = kind.master or choice.precision == "fp32"
    if splits_masters(choice):
        return grad_itemsize(choice) + 2 * 4 + 2 * states
    written = choice.itemsize if own and choice.precision != "fp32" and not choice.sharded else 0
    return choice.reduce_itemsize + 2 * (4 if own else choice.itemsize) + 2 * states + written


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what they are spent on; they add up."""

    compute: float
    """Forward and backward."""
    recompute: float
    """Forward passes of checkpointed blocks run again."""
    gathers: float
    """Of parameters, as far as compute does not hide them."""
    reduces: float
    """Of gradients, likewise."""
    optimizer: float
    """One pass over the states on the GPU."""
    offload: float
    """Host optimizer, PCIe and disk, as far as nothing hides them."""
    hidden: float
    """Transfers that run beside compute: no part of the total."""
    offload_bound: str
    """Which of host, PCIe and disk sets `offload`; empty without it."""
    tokens: int
    """Of all ranks."""
    mfu: float
    """Model FLOPs utilisation: operations of `work.model_flops` over what the peak allows in this time."""

    @property
    def total(self) -> float:
        return sum(self.bounds().values())

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.total

    def bounds(self) -> dict[str, float]:
        """Seconds by what sets them, in the order of a step."""
        names = ("compute", "recompute", "gathers", "reduces", "optimizer", "offload")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Sizes:
    """The flat units before the blocks, of one block, and after them; padding included."""

    trained: tuple[float, float, float]
    """Elements that are reduced and updated."""
    gathered: tuple[float, float, float]
    """Bytes of a whole gather, once: of what is trained, and of what else is in a ring."""
    again: float
    """Bytes that each further pass of a step gathers, forward or backward: rings only."""
    guests: float
    """Trained elements of a ring that are no block's."""
    layers: int
    ringed: bool
    """Whether the blocks are gathered into a ring."""

    @property
    def total(self) -> float:
        """Trained elements of the whole model."""
        front, block, end = self.trained
        return front + block * self.layers + end


def unit_sizes(folding: Folding, choice: Choice) -> Sizes:
    """Sizes of a model's units for a choice, from the shallow models that stand for it."""
    spec = folding.specs[0]
    assert spec.arch is not None, f"{spec.name} has no known shape"
    trained, gathered = [0.0] * 3, [0.0] * 3
    met = ringed = False
    guests = 0.0
    for p in place(spec, choice):
        block = p.unit.kind == "block"
        part, of = (1, spec.arch.layers) if block else (2, 1) if met else (0, 1)
        met, ringed = met or block, ringed or (block and p.ringed)
        if not p.frozen:
            trained[part] += p.layout.padded_numel / of
            guests += p.layout.padded_numel if p.ringed and not block else 0
        if p.ringed or not p.frozen:
            gathered[part] += p.buffer_bytes(choice) / of
    again = 0.0
    if choice.sharded:
        again = folding.affine(lambda s: _gathered_again(s, choice)) / (2 * choice.accumulation - 1)
    layers = spec.arch.layers + folding.extra
    parts = ((trained[0], trained[1], trained[2]), (gathered[0], gathered[1], gathered[2]))
    return Sizes(*parts, again, guests, layers, ringed)


def _gathered_again(spec: ModelSpec, choice: Choice) -> int:
    """Bytes that rings gather in a step beyond once."""
    placements = place(spec, choice)
    return ring_bytes(placements, choice) - sum(p.buffer_bytes(choice) for p in placements if p.ringed)


@dataclass(frozen=True)
class Queue:
    """Entries that compute for `seconds` each and transfer for `moved` each, `count` times."""

    count: int
    seconds: float
    moved: float


def gathered_first(runs: Sequence[Queue]) -> float:
    """When the last entry has computed, each after its own transfer; transfers run one after another from the start.

    Examples
    --------
    >>> gathered_first([Queue(1, 1.0, 2.0), Queue(3, 4.0, 1.0)])
    15.0
    """
    total = sum(r.count * r.seconds for r in runs)
    latest, moved, before = total, 0.0, 0.0
    for r in runs:
        for i in (1, r.count) if r.count else ():
            latest = max(latest, moved + i * r.moved + total - before - (i - 1) * r.seconds)
        moved, before = moved + r.count * r.moved, before + r.count * r.seconds
    return latest


def reduced_after(runs: Sequence[Queue]) -> float:
    """When the last transfer has ended, each after its own computation; computations run from the start.

    Examples
    --------
    >>> reduced_after([Queue(1, 1.0, 2.0), Queue(3, 4.0, 1.0)])
    14.0
    """
    left = sum(r.count * r.moved for r in runs)
    latest, done = 0.0, 0.0
    for r in runs:
        for i in (1, r.count) if r.count else ():
            latest = max(latest, done + i * r.seconds + left - (i - 1) * r.moved)
        done, left = done + r.count * r.seconds, left - r.count * r.moved
    return latest


@dataclass(frozen=True)
class Wire:
    """Collectives of one job."""

    world_size: int
    per_node: int
    """Ranks that share a node."""
    rate: float
    """Bytes a second that a rank sends; see [Note: two levels]."""
    latency: float
    """Of one collective."""

    def seconds(self, nbytes: float, *, calls: int = 1) -> float:
        """Of a gather or reduce-scatter of so many bytes in all, in so many pieces."""
        if self.world_size == 1 or not nbytes:
            return 0.0
        return calls * self.latency + nbytes * (self.world_size - 1) / self.world_size / self.rate


def wire(choice: Choice, hardware: Hardware, at: Speeds) -> Wire:
    """The links between the ranks of a choice, spread over the machine's nodes."""
    n = choice.world_size
    per_node = min(n, hardware.gpus_per_node)
    nodes = -(-n // per_node)
    rate = at.intra if nodes == 1 else at.network if per_node == 1 else min(at.intra, at.network)
    return Wire(n, per_node, rate, at.call + (n - nodes) * at.hop + (nodes - 1) * at.far_hop)


def seconds_of(work: Work, at: Speeds) -> float:
    """Of a unit's pass: products and attention at their shares of the peak, the other ops at the memory's rate."""
    products = work.products / at.efficiency + work.attention / at.attention
    return products / at.peak_flops + PASSES * work.written / at.hbm


@dataclass(frozen=True)
class Passes:
    """Seconds of computing of the parts of one micro-step."""

    front: float
    block: float
    end: float
    end_backward: float
    block_backward: float
    front_backward: float

    @classmethod
    def of(cls, w: StepWork, at: Speeds, layers: int) -> Passes:
        """Of work in which `layers` blocks are counted."""
        parts = (w.front, w.blocks, w.end, w.end_backward, w.blocks_backward, w.front_backward)
        front, blocks, end, end_backward, blocks_backward, front_backward = (seconds_of(part, at) for part in parts)
        return cls(front, blocks / layers, end, end_backward, blocks_backward / layers, front_backward)

    def forward(self, layers: int) -> float:
        return self.front + layers * self.block + self.end

    def backward(self, layers: int) -> float:
        return self.end_backward + layers * self.block_backward + self.front_backward


def passes_of(spec: ModelSpec, choice: Choice, at: Speeds, layers: int) -> tuple[Passes, float]:
    """Passes of a micro-step, and how many seconds of its backward run blocks again, for `layers` real blocks."""
    arch = spec.arch
    assert arch is not None, f"{spec.name} has no known shape"
    passes = Passes.of(step_work(arch, choice, spec.adapters), at, arch.layers)
    if choice.checkpointing == "none":
        return passes, 0.0
    plain = replace(choice, checkpointing="none", checkpoint_offload=False, checkpoint_every=1)
    without = Passes.of(step_work(arch, plain, spec.adapters), at, arch.layers)
    return passes, passes.backward(layers) - without.backward(layers)


def step_time(spec: ModelSpec, choice: Choice, sizes: Sizes, link: Wire, at: Speeds, *, per_token: int) -> StepTime:
    """Predict one optimizer step of zplan's runtime.

    Parameters
    ----------
    spec
        A model whose ops are counted; how many blocks it really has is what `sizes` says.
    choice
        Any stage and batch.
    sizes
        Of the model's units for this choice.
    link
        Between the ranks of this choice.
    at
        Speeds of their machine.
    per_token
        Operations of `model_flops`.
    """
    arch, layers = spec.arch, sizes.layers
    assert arch is not None, f"{spec.name} has no known shape"
    passes, again = passes_of(spec, choice, at, layers)
    k = choice.accumulation
    compute = k * (passes.forward(layers) + passes.backward(layers))
    block = sizes.trained[1]
    off = offload_work(choice, sizes.total, block, layers=layers, hidden=arch.hidden, guests=sizes.guests)
    gathers, reduces, carried, waits = _exposed(choice, sizes, passes, link, off.seconds_a_gather(at))
    owned = sizes.total / (choice.world_size if shards_states(choice) else 1) * (1 - off.share)
    late, bound = _offload(off, passes, choice, link, at, waits)
    tokens = choice.micro_batch * k * choice.seq
    found = StepTime(
        compute=compute - k * again,
        recompute=k * again,
        gathers=gathers,
        reduces=reduces,
        optimizer=owned * step_bytes(choice) / at.hbm,
        offload=late,
        hidden=max(0.0, carried - gathers - reduces),
        offload_bound=bound,
        tokens=tokens * choice.world_size,
        mfu=0.0,
    )
    return replace(found, mfu=tokens * per_token / (at.peak_flops * found.total))


def _exposed(c: Choice, sizes: Sizes, p: Passes, link: Wire, fetch: float) -> tuple[float, float, float, float]:
    """`(gathers, reduces, all transfers, those that backward waits for)` of a step in seconds; all but the third as far
    as they are exposed.

    `fetch`: seconds in which a block's shard comes from the host before it can be gathered.
    """
    if c.world_size == 1:
        return 0.0, 0.0, 0.0, 0.0
    n, k, layers = c.world_size, c.accumulation, sizes.layers
    gather = [link.seconds(nbytes) for nbytes in sizes.gathered]
    gather[1] = max(gather[1], fetch)
    ordered = in_rank_order(c)
    once = 1 if c.stage or ordered else 2  # An all-reduce is a reduce-scatter and a gather.
    pieces = [max(1, -(-int(numel) // max(c.piece_numel, 64 * n))) for numel in sizes.trained]
    reduce = [
        once * link.seconds(numel * wire_itemsize(c), calls=calls)
        for numel, calls in zip(sizes.trained, pieces, strict=True)
    ]
    kept = min(layers, c.ring_slots) if sizes.ringed else layers
    first = _forward(p, layers, gather if c.stage else (0.0, 0.0, 0.0))
    # Later passes find the last blocks of the one before where they are.
    further = max(link.seconds(sizes.again, calls=layers - kept), fetch * (layers - kept))
    each = further / max(1, layers - kept)
    later = [Queue(1, p.front, 0.0), Queue(kept, p.block, 0.0), Queue(layers - kept, p.block, each)]
    later.append(Queue(1, p.end, 0.0))
    back = [Queue(1, p.end_backward, 0.0), Queue(kept, p.block_backward, 0.0)]
    back += [Queue(layers - kept, p.block_backward, each), Queue(1, p.front_backward, 0.0)]
    up, up_later, down = gathered_first(first), gathered_first(later), gathered_first(back)
    forward, backward = p.forward(layers), p.backward(layers)
    gathers = up - forward + (k - 1) * (up_later - forward) + k * (down - backward)
    # The reduces of a pass share the links with its gathers.
    queue = [Queue(1, p.end_backward, reduce[2])]
    queue += [Queue(layers, p.block_backward, reduce[1] + further / layers)]
    queue += [Queue(1, p.front_backward, reduce[0])]
    ended = reduced_after(queue)
    times = num_reduces(c)
    # At stage 0 sums in rank order are gathered in the last pass, each right after it was made.
    whole = [link.seconds(n * c.reduce_itemsize) if ordered and not c.stage else 0.0 for n in sizes.trained]
    added = [q.moved + w for q, w in zip(queue, whole[::-1], strict=True)]
    last = reduced_after([replace(q, moved=m) for q, m in zip(queue, added, strict=True)])
    # All but the last micro-step's reduces may go on beside the next forward, as far as the links have time.
    busy = sum(q.count * q.moved for q in (*later, *queue))
    reduces = max(0.0, last - down) + (times - 1) * max(0.0, max(ended, busy) - up_later - down)
    carried = sum(q.count * q.moved for q in first) + (k - 1) * sum(q.count * q.moved for q in later)
    carried += k * sum(q.count * q.moved for q in back) + times * (reduce[0] + layers * reduce[1] + reduce[2])
    carried += whole[0] + layers * whole[1] + whole[2]
    return gathers, reduces, carried, k * (down - backward) + reduces


def _forward(p: Passes, layers: int, gather: Sequence[float]) -> list[Queue]:
    """The first forward of a step: every unit is gathered just before it is used."""
    return [Queue(1, p.front, gather[0]), Queue(layers, p.block, gather[1]), Queue(1, p.end, gather[2])]


def _offload(  # noqa: PLR0913 - what hides it
    off: OffloadWork, p: Passes, c: Choice, link: Wire, at: Speeds, waits: float
) -> tuple[float, str]:
    """Seconds that offloading adds, and what sets them.

    Gradients leave beside backward, and while it `waits` for transfers between GPUs. After it the host steps unit by
    unit, while units before it go back up and the next ones' states come from disk: the slowest of the three sets the
    pace. Offloaded inputs of checkpointed blocks leave beside forward and come back beside backward.
    """
    if not off:
        return 0.0, ""
    late = {
        "PCIe": off.up_bytes / at.pcie,
        "host": link.per_node * off.host_bytes / at.host,
        "disk": link.per_node * (off.disk_read_bytes / at.disk_read + off.disk_written_bytes / at.disk_write),
    }
    bound = max(late, key=lambda name: late[name])
    backward = p.backward(off.layers) * (c.accumulation if c.stage >= 2 else 1)  # As often as gradients leave.
    exposed = late[bound] + max(0.0, off.down_bytes / at.pcie - backward - waits)
    moved = off.input_bytes / at.pcie
    a_pass = max(0.0, moved - p.block) + max(0.0, moved - p.block_backward)
    return exposed + c.accumulation * off.layers * a_pass, bound
