"""What a card holds beside zplan's own buffers: driver, context, NCCL, cuBLAS.

Measured on named machines, estimated elsewhere. None of it follows from the model, so each is a line of its own that
says where its number comes from. On the CPU there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zplan.planner.config import Choice
from zplan.planner.hardware import Hardware
from zplan.planner.ledger import Line, Source
from zplan.planner.units import MIB


@dataclass(frozen=True)
class Constant:
    """One machine constant."""

    id: str
    mib: int
    note: str
    source: Source = "measured"
    count: int = 1
    distributed: bool = False
    """Only there with more than one rank."""


_ON_H200 = "H200, torch 2.11, driver 580, 2026-11"
_ROUNDING = Constant(
    "alloc.rounding", 32, "allocator blocks beyond what was asked for; 19 MiB on 62 GiB in a 7B run on H200", "estimate"
)

MEASURED: dict[str, tuple[Constant, ...]] = {
    "H200 SXM 141GB": (
        Constant("overhead.driver", 526, f"in use before any context ({_ON_H200})"),
        Constant("overhead.context", 94, f"the CUDA context ({_ON_H200})"),
        Constant("overhead.kernels", 148, f"kernels loaded while training ({_ON_H200})"),
        Constant(
            "overhead.nccl", 840, f"first communicator of 2 ranks, its kernels included ({_ON_H200})", distributed=True
        ),
        Constant(
            "overhead.nccl2",
            512,
            "second communicator: published values are 0.5 to 0.65 GiB",
            "estimate",
            distributed=True,
        ),
        Constant("overhead.cublas", 32, f"cuBLAS workspace, one per thread that multiplies ({_ON_H200})", count=2),
        _ROUNDING,
    ),
}
"""By name in the GPU table."""

_NOT_MEASURED = "not measured on this card"
ESTIMATED: tuple[Constant, ...] = (
    Constant("overhead.driver", 512, f"in use before any context; {_NOT_MEASURED}", "estimate"),
    Constant("overhead.context", 512, f"CUDA context and loaded kernels, 0.3 to 0.9 GiB; {_NOT_MEASURED}", "estimate"),
    Constant(
        "overhead.nccl", 1024, f"two communicators, 0.5 to 0.65 GiB each; {_NOT_MEASURED}", "estimate", distributed=True
    ),
    _ROUNDING,
)

_LARGE_WORKSPACE = ("9.", "10.", "12.")
"""Compute capabilities for which torch takes 32 MiB for cuBLAS; elsewhere 8 MiB and a little."""

CUBLAS = "overhead.cublas"
"""The one overhead that lies inside torch's allocator: the forward and the backward thread have a workspace each."""


def workspace_bytes(compute_capability: str) -> int:
    """Bytes of one cuBLAS workspace (`ATen/cuda/CublasHandlePool.cpp`: 4096 KiB x 8, or 4096 KiB x 2 + 16 KiB x 8)."""
    large = not compute_capability or compute_capability.startswith(_LARGE_WORKSPACE)
    return 32 * MIB if large else 8 * MIB + 128 * 1024


CUBLASLT = "overhead.cublaslt"
"""1 MiB that torch takes once a linear with a bias has run (`ATen/cuda/CUDABlas.cpp`)."""


def workspace_lines(compute_capability: str, phases: Sequence[str], *, biased: bool) -> tuple[Line, ...]:
    """The workspaces alone, as an allocator counts them. `biased`: whether the model's linears have biases."""
    span = (0, len(phases) - 1)
    lines = (Line(CUBLAS, workspace_bytes(compute_capability), (span,) * 2, "overhead", source="derived"),)
    return (*lines, Line(CUBLASLT, MIB, (span,), "overhead", source="derived")) if biased else lines


def constants(hardware: Hardware) -> tuple[Constant, ...]:
    """The constants of a card, workspace included."""
    if hardware.gpu in MEASURED:
        return MEASURED[hardware.gpu]
    mib = -(-workspace_bytes(hardware.compute_capability or "") // MIB)
    note = f"cuBLAS workspace, torch's default; {_NOT_MEASURED}"
    return (*ESTIMATED, Constant(CUBLAS, mib, note, "estimate", count=2))


def overhead_lines(hardware: Hardware, choice: Choice, phases: Sequence[str]) -> tuple[Line, ...]:
    """Lines over all phases, for one rank.

    Parameters
    ----------
    hardware
        Decides which constants apply.
    choice
        Its ranks decide whether there is a communicator, its device whether there is a card at all.
    phases
        Of the ledger that the lines join.
    """
    if choice.device == "cpu":
        return ()
    always = (0, len(phases) - 1)
    return tuple(
        Line(c.id, c.mib * MIB, (always,) * c.count, "overhead", source=c.source, note=c.note)
        for c in constants(hardware)
        if choice.world_size > 1 or not c.distributed
    )
