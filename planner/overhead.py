"""What a card holds beside zplan's own buffers: driver, context, NCCL, cuBLAS.

Measured on named machines, estimated elsewhere. None of it follows from the model, so each is a line of its own that
says where its number comes from. On the CPU there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zplan.planner.config import Choice
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Line, Source, Tier
from zplan.planner.units import MIB


class Constant(NamedTuple):
    """One machine constant."""

    id: str
    mib: int
    note: str
    source: Source = "measured"
    instances: int = 1
    communicator: int = 0
    """1: there where a rank has one; 2: as often as it has more."""
    between: tuple[int, int] | None = None
    """Bounds in MiB; None where it is as exact as its source is."""
    tier: Tier = "device"

    def line(self, span: tuple[int, int]) -> Line:
        low, high = (None, None) if self.between is None else (mib * MIB for mib in self.between)
        spans = (span,) * self.instances
        return Line(self.id, self.mib * MIB, spans, "overhead", self.tier, self.source, self.note, low, high)


_ON_H200 = "H200, torch 2.11, driver 580, 2026-11"
_ROUNDING = Constant(
    "alloc.rounding",
    32,
    "blocks that the allocator holds beyond what was asked for: 0.3 GiB on 59 of a 7B run on two H200s",
    "estimate",
    between=(0, 320),
)

_PROCESS = Constant(
    "host.process",
    1700,
    "Python, torch and CUDA of one rank without tensors: 1,588 to 1,976 MiB resident in DDP and FSDP2 on H200",
    "estimate",
    between=(1024, 2048),
    tier="host",
)

MEASURED: dict[str, tuple[Constant, ...]] = {
    "H200 SXM 141GB": (
        Constant("overhead.driver", 526, f"in use before any context ({_ON_H200})"),
        Constant("overhead.context", 94, f"the CUDA context ({_ON_H200})"),
        Constant("overhead.kernels", 148, f"kernels loaded while training ({_ON_H200})"),
        Constant(
            "overhead.nccl",
            840,
            f"first communicator of 2 ranks, its kernels included ({_ON_H200}); less if only scalars move",
            communicator=1,
            between=(512, 882),
        ),
        Constant(
            "overhead.nccl2",
            556,
            f"second communicator: what one without traffic takes ({_ON_H200}); published are 0.5 to 0.65 GiB",
            communicator=2,
            between=(512, 666),
        ),
        Constant(
            "overhead.cublas",
            32,
            f"cuBLAS workspace, one per thread that multiplies ({_ON_H200})",
            instances=2,
            between=(32, 32),
        ),
        _ROUNDING,
        _PROCESS,
    ),
}
"""By name in the GPU table."""

_NOT_MEASURED = "not measured on this card"
ESTIMATED: tuple[Constant, ...] = (
    Constant(
        "overhead.driver",
        512,
        f"in use before any context; {_NOT_MEASURED}, 526 MiB on an H200",
        "estimate",
        between=(320, 600),
    ),
    Constant(
        "overhead.context",
        512,
        f"CUDA context and loaded kernels; {_NOT_MEASURED}, 242 MiB on an H200, 0.47 GiB published for an A100",
        "estimate",
        between=(242, 768),
    ),
    Constant(
        "overhead.nccl",
        512,
        f"first communicator; {_NOT_MEASURED}, 0.82 GiB on two H200s, published are 0.5 to 0.65 GiB",
        "estimate",
        communicator=1,
        between=(384, 840),
    ),
    Constant(
        "overhead.nccl2",
        512,
        f"second communicator; {_NOT_MEASURED}, 0.54 GiB on two H200s",
        "estimate",
        communicator=2,
        between=(384, 556),
    ),
    _ROUNDING,
    _PROCESS,
)

_LARGE_WORKSPACE = ("9.", "10.", "12.")
"""Compute capabilities for which torch takes 32 MiB for cuBLAS; elsewhere 8 MiB and a little."""

CUBLAS = "overhead.cublas"
"""The one overhead that lies inside torch's allocator: the forward and the backward thread have a workspace each."""


WORKSPACE = ":4096:8"
"""`CUBLAS_WORKSPACE_CONFIG` of deterministic runs: 8 buffers of 4096 KiB on any card."""


def workspace_bytes(compute_capability: str, *, deterministic: bool = False) -> int:
    """Bytes of one cuBLAS workspace (`ATen/cuda/CublasHandlePool.cpp`: 4096 KiB x 8, or 4096 KiB x 2 + 16 KiB x 8)."""
    large = deterministic or not compute_capability or compute_capability.startswith(_LARGE_WORKSPACE)
    return 32 * MIB if large else 8 * MIB + 128 * 1024


CUBLASLT = "overhead.cublaslt"
"""1 MiB that torch takes once a linear with a bias has run (`ATen/cuda/CUDABlas.cpp`)."""


def workspace_lines(
    compute_capability: str, phases: Sequence[str], *, biased: bool, deterministic: bool = False
) -> tuple[Line, ...]:
    """The workspaces alone, as an allocator counts them. `biased`: whether the model's linears have biases."""
    span = (0, len(phases) - 1)
    nbytes = workspace_bytes(compute_capability, deterministic=deterministic)
    lines = (Line(CUBLAS, nbytes, (span,) * 2, "overhead", source="derived"),)
    return (*lines, Line(CUBLASLT, MIB, (span,), "overhead", source="derived")) if biased else lines


def constants(hardware: Hardware) -> tuple[Constant, ...]:
    """The constants of a card, workspace included."""
    if hardware.gpu in MEASURED:
        return MEASURED[hardware.gpu]
    mib = -(-workspace_bytes(hardware.compute_capability or "") // MIB)
    note = f"cuBLAS workspace, torch's default; {_NOT_MEASURED}"
    # The default follows from the card's generation; where that is not known it may be the smaller one.
    between = (mib, mib) if hardware.compute_capability else (9, mib)
    return (*ESTIMATED, Constant(CUBLAS, mib, note, "estimate", instances=2, between=between))


def overhead_lines(hardware: Hardware, choice: Choice, phases: Sequence[str]) -> tuple[Line, ...]:
    """Lines over all phases, for one rank.

    Parameters
    ----------
    hardware
        Decides which constants apply.
    choice
        Decides how many communicators there are; its device, whether there is a card at all.
    phases
        Of the ledger that the lines join.
    """
    if choice.device == "cpu":
        return ()
    always = (0, len(phases) - 1)
    found = [
        c._replace(instances=choice.communicators - 1) if c.communicator == 2 else c
        for c in constants(hardware)
        if c.communicator <= choice.communicators
    ]
    if choice.deterministic:
        mib, note = workspace_bytes("", deterministic=True) // MIB, f"cuBLAS workspace, {WORKSPACE}"
        found = [c._replace(mib=mib, note=note, between=(mib, mib)) if c.id == CUBLAS else c for c in found]
    return tuple(c.line(always) for c in found)
