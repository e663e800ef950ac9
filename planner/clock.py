"""Times choices of one model on one machine; what choices share is worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field

from zplan.planner.config import Choice, Precision
from zplan.planner.folding import Folding
from zplan.planner.hardware import Hardware
from zplan.planner.speeds import Speeds, speeds
from zplan.planner.step_time import StepTime, step_time, unit_sizes, wire
from zplan.planner.work import model_flops


@dataclass
class Clock:
    """A machine and what was said about its speed.

    Attributes
    ----------
    efficiency
        Share of the peak that matrix products reach; None for the usual.
    network
        Bytes a second that a node sends; None for what its kind usually has.
    """

    hardware: Hardware
    efficiency: float | None = None
    network: int | None = None
    memo: dict[Choice, StepTime | None] = field(default_factory=dict)
    rates: dict[Precision, Speeds | None] = field(default_factory=dict)
    token_flops: dict[int, int] = field(default_factory=dict)

    def speeds(self, precision: Precision) -> Speeds | None:
        """Of the machine in this dtype; None where its card or that dtype's peak is not known."""
        if precision not in self.rates:
            self.rates[precision] = speeds(self.hardware, precision, efficiency=self.efficiency, network=self.network)
        return self.rates[precision]

    def time(self, choice: Choice, folding: Folding) -> StepTime | None:
        """One optimizer step of a choice; None where no time can be told."""
        if choice not in self.memo:
            self.memo[choice] = self._time(choice, folding)
        return self.memo[choice]

    def _time(self, choice: Choice, folding: Folding) -> StepTime | None:
        at = self.speeds(choice.precision)
        parallel = choice.tensor_parallel * choice.pipeline_parallel * choice.context_parallel * choice.hpz
        if at is None or choice.runtime == "deepspeed" or parallel > 1 or choice.device == "cpu":
            return None  # See [Note: not DeepSpeed] in peer_time.py.
        shallow = folding.specs[0]
        if choice.seq not in self.token_flops:
            self.token_flops[choice.seq] = folding.affine(lambda spec: model_flops(spec, choice.seq))
        link, per_token = wire(choice, self.hardware, at), self.token_flops[choice.seq]
        if choice.runtime != "zplan":
            from zplan.planner.peer_time import peer_step_time

            return peer_step_time(shallow, choice, link, at, per_token=per_token)
        sizes = unit_sizes(folding, choice)
        return step_time(shallow, choice, sizes, link, at, per_token=per_token)
