"""Model states as textbooks count them, beside what zplan's runtime keeps.

P parameters, N ranks. Textbooks: 16-bit weights 2, 16-bit gradients 2, fp32 master weights 4 and moments 8 bytes a
parameter; stage 1 splits the last twelve, stage 2 the gradients too, stage 3 everything.
"""

from __future__ import annotations

from typing import NamedTuple

from zplan.planner.config import Choice, Place
from zplan.planner.ledger import Tier
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import grad_itemsize, shards_states, splits_masters


class Rate(NamedTuple):
    """Bytes a parameter: `whole` on every rank, `split` divided by the ranks."""

    whole: int
    split: int

    def of(self, num_params: int, world_size: int) -> int:
        """Bytes of one rank, the split part rounded up."""
        return self.whole * num_params - (-self.split * num_params // world_size)

    def formula(self) -> str:
        """`4P + 12P/N`."""
        parts = [f"{self.whole}P"] if self.whole else []
        parts += [f"{self.split}P/N"] if self.split else []
        return " + ".join(parts) or "0"


TEXTBOOK = (Rate(16, 0), Rate(4, 12), Rate(2, 14), Rate(0, 16))
"""Mixed precision with AdamW, by stage."""


def textbook_states(num_params: int, stage: int, world_size: int) -> int:
    """Bytes of model states on one rank.

    Examples
    --------
    >>> [textbook_states(7 * 10**9, s, 8) for s in range(4)]
    [112000000000, 38500000000, 26250000000, 14000000000]
    """
    return TEXTBOOK[stage].of(num_params, world_size)


def least_ranks(num_params: int, mem_bytes: int) -> int:
    """Ranks over which stage 3 must split the states so that each share is at most `mem_bytes`.

    Examples
    --------
    >>> least_ranks(671 * 10**9, 64 * 10**9)
    168
    """
    return max(1, -(-TEXTBOOK[3].split * num_params // mem_bytes))


def runtime_rate(choice: Choice) -> Rate:
    """Bytes a parameter that zplan's runtime holds between backward and step, working buffers apart.

    In bf16 with AdamW: weights 2, the lower halves of their fp32 masters 2, moments 8, fp32 gradients 4; in fp16 and
    with other optimizers masters are whole, 4. In fp32 the weights are their own master, except at stage 3, where only
    the shard is kept. Gradients are split where they are reduced into a shard; on one rank without accumulation, where
    masters are halves, they stay in bf16, 2. Other optimizers count their states to the whole byte. Where backward
    updates, no gradients are held. What is offloaded whole is not held here.
    """
    if choice.runtime != "zplan":
        from zplan.planner.peer_rate import peer_rate

        return peer_rate(choice)
    kind, weights = kind_of(choice.optimizer), choice.itemsize
    reduced = 0 if choice.optimizer_in_backward else grad_itemsize(choice)
    master = 4 if kind.master and choice.precision != "fp32" else 0
    if splits_masters(choice):
        master = 2
    if choice.offload.optimizer != "none" and choice.offload.ratio == 1:
        if choice.stage == 3 and (choice.world_size > 1 or choice.offload.params != "none"):
            return Rate(0, weights if choice.offload.params == "none" else 0)
        return Rate(weights, 0)
    if not shards_states(choice):
        return Rate(weights + master + kind.nominal + reduced, 0)
    if choice.stage == 3:
        return Rate(0, (4 if kind.master else weights) + kind.nominal + reduced)
    if choice.stage == 1 and choice.accumulation > 1 and not choice.deterministic:
        return Rate(weights + reduced, master + kind.nominal)
    return Rate(weights, master + kind.nominal + reduced)


def off_device_rates(choice: Choice) -> dict[Tier, Rate]:
    """Bytes a parameter that zplan's runtime holds off the device, by memory, where all is offloaded.

    States lie where the optimizer does, gradients on the host, shards where the parameters do; what the host steps on
    without fp32 masters is such a shard, or a copy of one.

    Examples
    --------
    >>> from zplan.planner.config import Offload
    >>> {t: r.formula() for t, r in off_device_rates(Choice(3, 8, offload=Offload("nvme", "cpu"))).items()}
    {'nvme': '12P/N', 'pinned': '6P/N'}
    """
    where = choice.offload
    if choice.runtime != "zplan" or where.optimizer == "none" or where.ratio != 1:
        return {}
    kind, weights = kind_of(choice.optimizer), choice.itemsize
    tiers: dict[Place, Tier] = {"cpu": "pinned", "nvme": "nvme"}
    stepped = 4 if kind.master else weights if where.params != where.optimizer else 0
    found: dict[Tier, int] = {tiers[where.optimizer]: stepped + kind.nominal}
    found["pinned"] = found.get("pinned", 0) + choice.reduce_itemsize
    if where.params != "none":
        found[tiers[where.params]] = found.get(tiers[where.params], 0) + weights
    split = shards_states(choice)
    return {tier: Rate(0, n) if split else Rate(n, 0) for tier, n in found.items()}
