"""torch's out-of-memory messages, read from logs: what was asked for, what was free, in use and reserved, and when.

The words changed over the years; what they say did not. Sizes are printed with two decimals, so each is known to half
of the last one only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from zplan.planner.units import MIB

Phase = Literal["", "start", "forward", "loss", "backward", "step", "save"]
"""When memory ran out, as far as the traceback tells; "" where it does not."""

_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMG]i?B|B)\b"


@dataclass(frozen=True)
class Size:
    """A size as printed."""

    nbytes: int
    within: int
    """Bytes that it may be off by, since two decimals are printed."""

    def matches(self, nbytes: int) -> bool:
        """Whether so many bytes print like this."""
        return abs(nbytes - self.nbytes) <= self.within


@dataclass(frozen=True)
class OutOfMemory:
    """One message. None where it does not say."""

    device: str
    """`CUDA`, `HIP`, `XPU`, `MPS` or `CPU`."""
    tried: Size | None = None
    gpu: int | None = None
    rank: int | None = None
    total: Size | None = None
    """What the card has."""
    free: Size | None = None
    in_use: Size | None = None
    """By this process, context and libraries included."""
    allocated: Size | None = None
    """Tensors that are alive."""
    unallocated: Size | None = None
    """Reserved by torch and not in a tensor."""
    allowed: Size | None = None
    """What the process may take, where a limit is set."""
    phase: Phase = ""
    where: str = ""
    """Innermost function of the user's or a library's code, in words."""

    @property
    def reserved_bytes(self) -> int | None:
        """What torch holds of the card."""
        if self.allocated is None or self.unallocated is None:
            return None
        return self.allocated.nbytes + self.unallocated.nbytes

    @property
    def outside_bytes(self) -> int | None:
        """What the card holds beside torch's own: context, libraries, other processes."""
        if self.total is None or self.free is None or self.reserved_bytes is None:
            return None
        return max(0, self.total.nbytes - self.free.nbytes - self.reserved_bytes)

    @property
    def fragmented(self) -> bool:
        """Whether what torch holds and does not use would have been enough for what was asked for."""
        return self.tried is not None and self.unallocated is not None and self.unallocated.nbytes >= self.tried.nbytes


def segment_bytes(nbytes: int) -> int:
    """What torch's CUDA allocator asks the driver for, to serve a tensor of so many bytes; this is what it prints.

    Up to 1 MiB a 2 MiB block, below 10 MiB a 20 MiB one, beyond that the next multiple of 2 MiB
    (`c10/cuda/CUDACachingAllocator.cpp`).

    Examples
    --------
    >>> [segment_bytes(n) // 2**20 for n in (1, 2**20 + 1, 10 * 2**20, 11 * 2**20 + 1)]
    [2, 20, 10, 12]
    """
    if nbytes <= MIB:
        return 2 * MIB
    return 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB


POOL_BLOCKS = (2 * MIB, 20 * MIB)
"""Sizes that stand for any small tensor."""

_FIELDS: dict[str, tuple[str, ...]] = {
    "tried": (rf"[Tt]ried to allocate {_SIZE}",),
    "total": (rf"total capac(?:i)?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"max allowed: {_SIZE}"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allocated": (
        rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"MPS allocated: {_SIZE}",
    ),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached"),
    "allowed": (rf"{_SIZE} allowed;",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
}
_MESSAGE = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)(?: error:)? out of memory|DefaultCPUAllocator: (?:can't|not enough|not allocate)"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",
    re.IGNORECASE,
)
"""The last is torch out of memory where it may not ask the driver what is in use, as in a container with a MIG slice:
the assertion stands where the message is made.
"""


def read_messages(text: str) -> tuple[OutOfMemory, ...]:
    """Every out-of-memory message of a log, in order; one that is repeated for the same rank once."""
    found: list[OutOfMemory] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        match = _MESSAGE.search(line)
        if not match:
            continue
        message = _message(line[match.start() :] + _wrapped(lines[i + 1 : i + 8]), match.group(0))
        rank = _rank(line)
        phase, where = _phase(lines[:i], rank)
        one = replace(message, rank=rank, phase=phase, where=where)
        if one not in found and not (one.tried is None and found):
            found.append(one)
    return tuple(found)


def _wrapped(lines: list[str]) -> str:
    """Further lines of one message, where a terminal or a logger broke it: up to an empty line or a new record."""
    out = ""
    for line in lines:
        if not line.strip() or re.match(r"\s*(Traceback|File |\[|\w+Error|\d{4}-)", line):
            break
        out += " " + line.strip()
    return out


def _message(text: str, head: str) -> OutOfMemory:
    sizes: dict[str, Size] = {}
    for name, patterns in _FIELDS.items():
        for pattern in patterns:
            match = re.search(pattern, text)
            if match:
                sizes[name] = _size(match.group(1), match.group(2))
                break
    reserved = sizes.pop("reserved", None)
    if reserved is not None and "allocated" in sizes:
        rest = max(0, reserved.nbytes - sizes["allocated"].nbytes)
        sizes["unallocated"] = Size(rest, reserved.within + sizes["allocated"].within)
    in_use = _in_use(text, sizes.pop("in_use", None))
    if in_use is not None:
        sizes["in_use"] = in_use
    gpu = re.search(r"GPU (\d+)", text)
    device = head.split()[0].upper()
    device = {"DEFAULTCPUALLOCATOR:": "CPU", "NVML_SUCCESS": "CUDA"}.get(device, device)
    found = OutOfMemory(device, gpu=int(gpu.group(1)) if gpu else None)
    # The names of `_FIELDS` are those of the sizes, which mypy can't see.
    return replace(found, **sizes)  # type: ignore[arg-type]


def _in_use(text: str, own: Size | None) -> Size | None:
    """What the process holds, of all that are listed.

    A container may hide which of them it is, or what it holds: torch then prints 0, or gives it the host's number. A
    single process is this one; of several nobody can tell.
    """
    if own is not None:
        return own if own.nbytes else None
    found = re.findall(rf"Process \d+ has {_SIZE} memory in use", text)
    return _size(*found[0]) if len(found) == 1 else None


def _size(number: str, unit: str) -> Size:
    scale = _UNITS[unit.lower()]
    decimals = len(number.partition(".")[2])
    # Half of the last digit, and what rounding to whole bytes may add: 131,072 print as 0.12 MiB.
    return Size(round(float(number) * scale), scale // (2 * 10**decimals) + 1 if decimals else 0)


def _rank(line: str) -> int | None:
    match = re.search(r"\[rank ?(\d+)\]|\bRank (\d+)\b|\[default(\d+)\]", line[:80], re.IGNORECASE)
    return int(next(g for g in match.groups() if g is not None)) if match else None


_FRAME = re.compile(r'File "([^"]*)", line \d+, in (\S+)')
_PHASES: tuple[tuple[Phase, str], ...] = (
    ("save", r"save_\w*|_save\w*|consolidate\w*|_zero3_consolidated\w*|state_dict|gather_16bit\w*"),
    ("step", r"step|_take_model_step|_optimizer_step|optimizer_step|_init_group|clip_grad_norm_?|_unscale_grads_?"),
    ("backward", r"backward|_engine_run_backward|run_backward|unpack_hook|recompute\w*"),
    ("start", r"from_pretrained|_load_\w*pretrained\w*|initialize|_configure_\w+|prepare|to_empty|_load_state_dict\w*"),
    ("loss", r"cross_entropy|\w*[lL]oss_function|\w*LMLoss|fixed_cross_entropy|log_softmax|nll_loss|compute_loss_func"),
    ("forward", r"forward|_call_impl|_wrapped_call_impl|compute_loss"),
)
"""Phase -> names of functions that only run in it. The first with a frame counts, since each calls those below it."""


def _phase(before: list[str], rank: int | None) -> tuple[Phase, str]:
    """What the traceback above a message says."""
    frames: list[tuple[str, str]] = []
    for line in reversed(before[-400:]):
        if rank is not None and _rank(line) not in (None, rank):
            continue
        if "Traceback (most recent call last)" in line:
            break
        match = _FRAME.search(line)
        if match:
            frames.append((match.group(1), match.group(2)))
    names = [name for _, name in frames]
    where = ""
    if frames:
        file = frames[0][0].replace("\\", "/").rsplit("/", 1)[-1]
        where = f"{frames[0][1]} of {file}"
    for phase, pattern in _PHASES:
        if any(re.fullmatch(pattern, name) for name in names):
            return phase, where
    return "", where
