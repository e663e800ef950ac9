"""The CUDA kernels' own sources, compiled by g++ and run on the CPU: their logic is tested where there is no GPU.

What stays untested there: rounding of the GPU's own instructions, timing, memory order between blocks, and PTX, which
`host_cuda.h` has in C++.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zplan.cuda_ops import adamw, compiler, linear_cross_entropy, rms_norm, rotary, swiglu

HERE = Path(__file__).parent
COMPILER = "g++"
OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
# `host_cuda.cpp` answers the sanitizer's calls, so its library is left out.
CHECKED = ["-fsanitize=alignment,bounds", "-nodefaultlibs"]
PTX = re.compile(r'\basm\("([a-z0-9.]+) %0, %1;" : "=\w"\((\w+)\) : "\w"\((\w+)\)\);')
TAIL = """
extern "C" {{
// The linker's names of where a section begins and ends; null where a source shares nothing.
extern char __start_host_shared[] __attribute__((weak)), __stop_host_shared[] __attribute__((weak));
static void body(const void* params) {{ host_call({function}, params); }}
const char* launch(unsigned grid, unsigned block, const void* params, int backwards) {{
    unsigned long shared = __stop_host_shared - __start_host_shared;
    return host_run(body, params, grid, block, backwards, __start_host_shared, shared);
}}
}}
"""


def source_of(name: str, function: str) -> str:
    """A kernel's source as g++ takes it, with what launches one of its functions."""
    text = PTX.sub(lambda m: f"{m[2]} = ptx_{m[1].replace('.', '_')}({m[3]});", compiler.source_of(name))
    assert not re.search(r"\basm\b", text), f"{name}.cu has PTX of a form that tests/host_kernels.py does not read"
    return f'#include "host_cuda.h"\nnamespace {{\n{text}\n}}\n{TAIL.format(function=function)}'


def build(folder: Path, source: str, options: list[str]) -> Path:
    """A shared library, made at most once for equal contents, whichever worker needs it first."""
    shim = (HERE / "host_cuda.h").read_text()
    recipe = "\0".join([source, shim, *options])
    path = folder / f"{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        command = [COMPILER, *OPTIONS, f"-I{HERE}", "-x", "c++", "-", "-o", temporary, *options]
        made = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
        assert made.returncode == 0, made.stderr
        os.replace(temporary, path)
    return path


class HostKernel:
    """In the place of `compiler.Kernel`."""

    def __init__(self, owner: HostKernels, library: Path, name: str, function: str) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int]

    def launch(self, grid: int, block: int, params: ctypes.Structure) -> None:
        assert 0 < grid < 2**31 and 0 < block <= 1024, (grid, block)
        self._owner.launched.append(self._function)
        wrong = self._launch(grid, block, ctypes.addressof(params), self._owner.backwards)
        if wrong is not None:
            raise RuntimeError(f"{self._name}.cu, {self._function}: {wrong.decode()}")


class HostKernels:
    """Kernels of one process, with the order in which blocks and threads come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.backwards = folder, False
        self.launched: list[str] = []
        self._kernels: dict[tuple[object, ...], HostKernel] = {}
        fibers = build(folder, (HERE / "host_cuda.cpp").read_text(), [])
        self._fibers = ctypes.CDLL(str(fibers), mode=ctypes.RTLD_GLOBAL)

    def build(self, name: str, function: str, macros: Mapping[str, int]) -> HostKernel:
        defines = [f"-D{key}={value}" for key, value in sorted(macros.items())]
        options = [*defines, *CHECKED, "-lm", "-lc", "-lgcc"]
        return HostKernel(self, build(self.folder, source_of(name, function), options), name, function)

    def kernel(self, name: str, function: str, _index: int, defines: Mapping[str, int] | None = None) -> HostKernel:
        """In the place of `compiler.kernel`."""
        macros = {**compiler.TUNED[name], **(defines or {})}
        key = (name, function, *sorted(macros.items()))
        if key not in self._kernels:
            self._kernels[key] = self.build(name, function, macros)
        return self._kernels[key]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Margins:
        """Have wrappers give tensors of the CPU to these kernels, forwards, with nothing launched yet."""
        monkeypatch.setattr(compiler, "usable", lambda device: device.type == "cpu")
        monkeypatch.setattr(compiler, "kernel", self.kernel)
        margins = Margins()
        for module in (adamw, linear_cross_entropy, rms_norm, rotary, swiglu):
            monkeypatch.setattr(module, "torch", margins)
        self.launched.clear()
        self.backwards = False
        return margins


class Margins:
    """`torch` for the wrappers, but that what they allocate lies between marked elements, and nothing is pinned."""

    WIDTH = 1024

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: int, pin_memory: bool, **kind: Any) -> torch.Tensor:
        """Pinned memory is only where a GPU is."""
        return torch.empty(*shape, **kind)

    def empty_like(self, like: torch.Tensor, **kind: Any) -> torch.Tensor:
        plain = torch.empty_like(like, **kind)
        assert plain.is_contiguous(), plain.stride()
        whole = torch.full((plain.numel() + 2 * self.WIDTH,), 77, dtype=plain.dtype)
        self._made.append(whole)
        return whole[self.WIDTH : -self.WIDTH].view(plain.shape)

    def check(self) -> None:
        for whole in self._made:
            edges = torch.cat([whole[: self.WIDTH], whole[-self.WIDTH :]])
            assert bool((edges == 77).all()), f"written outside of {len(whole) - 2 * self.WIDTH} elements"
