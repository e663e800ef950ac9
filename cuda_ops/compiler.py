"""Kernels from source at first use: NVRTC compiles for exactly the device present, cubins are kept on disk.

No nvcc, no ninja, no matching toolkit. `available` says why kernels can't be used here, and `usable` says so once on
stderr, so that whoever takes the torch path instead has told the user.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch

OLDEST_CAPABILITY = (7, 5)
"""The oldest that NVRTC 13 compiles for."""

PRELUDES: dict[str, tuple[str, ...]] = {
    "norm": ("numeric.cuh", "squares.cuh"),
    "copy": ("numeric.cuh", "entries.cuh"),
    "sums": ("numeric.cuh", "squares.cuh", "entries.cuh"),
}
"""What stands in front of each source; of those that are not here, `numeric.cuh` alone."""

NUM_ENTRIES = 64
"""Gradients of one launch: their list is the kernel's argument, of at most 4 KiB."""

TUNED: dict[str, dict[str, int]] = {
    "adamw": {"BLOCK": 512, "CHUNK": 8192, "UNROLL": 4, "STREAM": 1, "SPLIT": 0, "GRAD": 0},
    "norm": {"BLOCK": 512, "UNROLL": 4, "STREAM": 0},
    "copy": {"BLOCK": 256, "CHUNK": 8192, "UNROLL": 4, "STREAM": 0, "NUM_ENTRIES": NUM_ENTRIES},
    "sums": {"BLOCK": 256, "CHUNK": 8192, "UNROLL": 4, "STREAM": 1, "NUM_ENTRIES": NUM_ENTRIES},
    "cross_entropy": {"BLOCK": 512, "UNROLL": 2},
    "rms_norm": {"BLOCK": 128, "VECTORS": 4, "LANES": 8, "DTYPE": 1},
    "swiglu": {"BLOCK": 256, "CHUNK": 8192},
    "rotary": {"BLOCK": 256, "LANES": 8, "DTYPE": 1},
}
"""What each source is compiled with, unless a caller asks for something else: threads a block, elements of a block's
share, vectors in flight a thread, whether what is touched once leaves the caches first, dtype of gradients, gradients a
launch. What is compiled for one dtype and shape of threads (GRAD, DTYPE, LANES, VECTORS) has here those of a common
case."""

TUNED_SPLIT = {"SPLIT": 1, "UNROLL": 2, "BLOCK": 256}
"""For masters in two halves instead, whose elements need more instructions and fewer bytes. On an H200 1e9 parameters
take 6.7 ms, and 6.9 between matrix products that lower the clocks; with 512 threads a block 8.4 and 9.1."""

FUNCTIONS = {
    "adamw": ("adamw",),
    "norm": ("square_sum", "total_sum", "settle"),
    "copy": ("copy_grads",),
    "sums": ("sum_grads",),
    "cross_entropy": ("cross_entropy", "rescale"),
    "rms_norm": ("rms_norm", "rms_norm_backward", "rms_norm_weight"),
    "swiglu": ("swiglu", "swiglu_backward"),
    "rotary": ("rotary",),
}
"""What each source defines."""

_MAGIC = b"zplan-cubin-1\n"
_said: set[str] = set()


# --- may kernels be used? -----------------------------------------------------------------------------------------


@functools.cache
def available(index: int | None = None) -> str | None:
    """None if kernels can run on the CUDA device, else the reason why not. Compiles one, the first time.

    Parameters
    ----------
    index
        Of the device; the current one if left out.
    """
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    index = torch.cuda.current_device() if index is None else index
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return f"device {index} has compute capability {capability[0]}.{capability[1]}, older than 7.5"
    try:
        nvrtc_version()
    except ImportError:
        return "the package cuda-core is not installed"
    except Exception as problem:  # a library that is missing or does not match raises its own kinds of errors
        return f"NVRTC can't be loaded: {problem}"
    try:
        # All of them now: loading one later could make the host wait within a step.
        for name, functions in FUNCTIONS.items():
            for function in functions:
                kernel(name, function, index)
    except Exception as problem:
        return f"a kernel can't be compiled or loaded for {arch_of(index)}: {problem}"
    return None


def usable(device: torch.device) -> bool:
    """Whether to run kernels on a device. False on the CPU; on CUDA without kernels says so once on stderr."""
    if device.type != "cuda":
        return False
    reason = available(device.index)
    if reason is not None and reason not in _said:
        _said.add(reason)
        sys.stderr.write(f"zplan: slower torch operations are used instead of fused kernels: {reason}\n")
    return reason is None


def arch_of(index: int) -> str:
    """`sm_90` for a device of compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


# --- compiling ------------------------------------------------------------------------------------------------------


def nvrtc_version() -> str:
    """Version of the NVRTC that would compile, as `13.0`; raises where there is none."""
    import cuda.core  # noqa: F401  what compiles later must be there too
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def source_of(name: str) -> str:
    """Text of `csrc/<name>.cu` with what it shares in front; line numbers in messages stay those of the files."""
    folder = resources.files("zplan.cuda_ops") / "csrc"
    files = (*PRELUDES.get(name, ("numeric.cuh",)), f"{name}.cu")
    return "\n".join(f'#line 1 "{file}"\n{(folder / file).read_text()}' for file in files)


def cubin(name: str, arch: str, defines: Mapping[str, int] | None = None) -> bytes:
    """Machine code of one source, from the cache on disk if it is there. Needs no GPU.

    Parameters
    ----------
    name
        Of a file of `csrc/`, without `.cu`.
    arch
        As `sm_90`.
    defines
        Macros that differ from `TUNED`.
    """
    macros = {**TUNED[name], **(defines or {})}
    source = source_of(name)
    recipe = "\0".join([source, arch, repr(sorted(macros.items())), nvrtc_version()])
    path = cache_dir() / f"{name}-{arch}-{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.cubin"
    code = _read(path)
    if code is None:
        code = _compile(name, source, arch, macros)
        _write(path, code)
    return code


def _compile(name: str, source: str, arch: str, macros: Mapping[str, int]) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{name}.cu", arch=arch, std="c++17", define_macro=[(key, str(value)) for key, value in macros.items()]
    )
    return bytes(Program(source, "c++", options).compile("cubin").code)


# --- the cache on disk ------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where cubins are kept: `$XDG_CACHE_HOME/zplan/cubin`, by default under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "zplan" / "cubin"


def _read(path: Path) -> bytes | None:
    """A cubin of the cache, or None where it is missing or damaged: then it is made again."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, digest, code = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    return code if head == _MAGIC and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Keep a cubin. Renamed into place, so that ranks that compile at once can't read each other's halves."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        # A full disk or a read-only home costs the next process 0.1 s, no more.
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


# --- loading and launching --------------------------------------------------------------------------------------


class Kernel:
    """One `extern "C"` function that takes one structure by value, loaded for one device."""

    def __init__(self, code: bytes, function: str) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._object = ObjectCode.from_cubin(code)
        self._loaded = self._object.get_kernel(function)
        self._function = driver.CUfunction(int(self._loaded.handle))
        self._driver, self._stream_type, self._results = driver, driver.CUstream, driver.CUresult
        _, self._context = driver.cuCtxGetCurrent()
        self.name = function

    def launch(self, grid: int, block: int, params: ctypes.Structure) -> None:
        """Launch on torch's current stream. The structure is copied by the call, so it may be changed at once."""
        stream = self._stream_type(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        where = (self._function, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        (result,) = self._driver.cuLaunchKernel(*where)
        if result == self._results.CUDA_ERROR_INVALID_CONTEXT:
            # A thread of autograd's in which torch has launched nothing yet.
            self._driver.cuCtxSetCurrent(self._context)
            (result,) = self._driver.cuLaunchKernel(*where)
        if result != self._results.CUDA_SUCCESS:
            raise RuntimeError(f"kernel {self.name} was not launched on a grid of {grid} x {block}: {result.name}")


@functools.cache
def _kernel(name: str, function: str, index: int, defines: tuple[tuple[str, int], ...]) -> Kernel:
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()  # makes the device's context, in which the code is loaded
        return Kernel(cubin(name, arch_of(index), dict(defines)), function)


def kernel(name: str, function: str, index: int, defines: Mapping[str, int] | None = None) -> Kernel:
    """A function of `csrc/<name>.cu`, compiled and loaded at most once a process. `index` is the CUDA device's."""
    return _kernel(name, function, index, tuple(sorted({**TUNED[name], **(defines or {})}.items())))
