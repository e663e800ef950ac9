"""The torch path here, the kernels where there is a GPU, and machine code for every architecture without one."""

import ctypes
import enum
from types import SimpleNamespace

import kernel_checks as k
import pytest
import torch

from zplan.cuda_ops import adamw, compiler, grads, norm, reference

ARCHS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
SOURCES = sorted(compiler.TUNED)


def nvrtc_or_skip():
    try:
        return compiler.nvrtc_version()
    except Exception as problem:
        pytest.skip(f"NVRTC is not installed here: {problem}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zplan" / "cubin"


@pytest.mark.parametrize("case", k.CASES)
def test_torch_path_against_float64(case):
    torch.manual_seed(sum(case.encode()))
    assert k.CASES[case](torch.device("cpu")) <= 2.0, "torch keeps constants in fp32: twice what kernels are held to"


@pytest.mark.cuda
@pytest.mark.parametrize("case", k.CASES)
def test_kernels_against_float64(case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if (reason := compiler.available()) is not None:
        pytest.skip(reason)
    torch.manual_seed(sum(case.encode()))
    assert k.CASES[case](torch.device("cuda")) <= 1.0


def test_reference_is_torch_adamw():
    """Against torch's own AdamW in float64, over three steps with a factor on the gradients."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], **k.ADAMW)
    ours, m, v = p.detach().clone(), torch.zeros(50), torch.zeros(50)
    for step in (1, 2, 3):
        grad = torch.randn(50, dtype=torch.float64)
        p.grad = grad / 5
        optimizer.step()
        ours, m, v = reference.adamw(ours, grad, m, v, step=step, scale=5.0, **k.ADAMW)
    torch.testing.assert_close(ours, p.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_source_compiles_for_every_architecture(arch, cache):
    nvrtc_or_skip()
    variants = [("adamw", {"SPLIT": 1}), ("adamw", {"SPLIT": 1, "GRAD": 1})]
    for name, defines in [*((name, None) for name in SOURCES), *variants]:
        code = compiler.cubin(name, arch, defines)
        assert code[:4] == b"\x7fELF" and len(code) > 1000
    assert len(list(cache.iterdir())) == len(SOURCES) + len(variants)


def test_every_source_is_listed():
    folder = compiler.resources.files("zplan.cuda_ops") / "csrc"
    assert sorted(p.name.removesuffix(".cu") for p in folder.iterdir() if p.name.endswith(".cu")) == SOURCES


def test_cache_is_used_and_repaired(cache, monkeypatch):
    nvrtc_or_skip()
    code = compiler.cubin("norm", "sm_90")
    (path,) = cache.iterdir()

    def refuse(*_):
        raise AssertionError("compiled again")

    with monkeypatch.context() as m:
        m.setattr(compiler, "_compile", refuse)
        assert compiler.cubin("norm", "sm_90") == code
        with pytest.raises(AssertionError, match="compiled again"):
            compiler.cubin("norm", "sm_90", {"BLOCK": 128})
    data = path.read_bytes()
    for damaged in (
        data[:-1],
        data[:50],
        b"",
        data[:200] + b"\0" + data[201:] if data[200] else data[:200] + b"\1" + data[201:],
    ):
        path.write_bytes(damaged)
        assert compiler.cubin("norm", "sm_90")[:4] == b"\x7fELF"
        assert compiler._read(path) is not None
    assert len(list(cache.iterdir())) == 1, "a temporary file was left behind"


def test_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    nvrtc_or_skip()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler.cubin("norm", "sm_90")[:4] == b"\x7fELF"


def test_failing_replace_leaves_nothing(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    compiler._write(cache / "x.cubin", b"code")
    assert list(cache.iterdir()) == []


def test_message_of_a_compiler_names_file_and_line(cache, monkeypatch):
    nvrtc_or_skip()
    text = compiler.source_of("norm").replace("extern", "extrn", 1)
    line = next(i for i, x in enumerate(text.split('"norm.cu"\n')[1].splitlines(), 1) if "extrn" in x)
    monkeypatch.setattr(compiler, "source_of", lambda _: text)
    with pytest.raises(Exception, match=rf"norm\.cu\({line}\)"):
        compiler.cubin("norm", "sm_90")


def test_no_gpu_has_a_reason_and_it_is_said_once(capsys, monkeypatch):
    compiler.available.cache_clear()
    if not torch.cuda.is_available():
        assert "CUDA" in compiler.available()
    monkeypatch.setattr(compiler, "available", lambda _: "a reason of this test")
    device = torch.device("cuda", 0)
    assert not compiler.usable(device) and not compiler.usable(device)
    assert capsys.readouterr().err.count("a reason of this test") == 1
    assert not compiler.usable(torch.device("cpu")) and capsys.readouterr().err == ""


class Driver:
    """Launches where the thread has a context."""

    def __init__(self, *answers):
        self.answers, self.bound = list(answers), []

    def cuLaunchKernel(self, *_):  # noqa: N802  the driver's own name
        return (self.answers.pop(0),)

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.bound.append(context)


class Results(enum.Enum):
    CUDA_SUCCESS, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_LAUNCH_FAILED = range(3)


def launched(monkeypatch, *answers):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    kernel = object.__new__(compiler.Kernel)
    kernel._driver, kernel._results, kernel._stream_type = Driver(*answers), Results, int
    kernel._function, kernel._context, kernel.name = 0, "the one of its code", "rescale"
    kernel.launch(2, 32, norm._Settle())
    return kernel._driver


def test_a_thread_without_a_context_is_given_that_of_the_kernel(monkeypatch):
    done, none, failed = Results
    assert launched(monkeypatch, done).bound == []
    assert launched(monkeypatch, none, done).bound == ["the one of its code"]
    for answers in ((failed,), (none, failed), (none, none)):
        with pytest.raises(RuntimeError, match=f"rescale was not launched on a grid of 2 x 32: {answers[-1].name}"):
            launched(monkeypatch, *answers)


def test_structures_have_the_sizes_that_kernels_expect():
    assert ctypes.sizeof(adamw._Row) == 64 and ctypes.sizeof(adamw._AdamW) == 104
    assert ctypes.sizeof(norm._SquareSum) == 48 and ctypes.sizeof(norm._Settle) == 64
    assert ctypes.sizeof(grads._Entries) == 24 + 32 * grads.NUM_ENTRIES
    assert ctypes.sizeof(grads._CopyGrads) == 24 + ctypes.sizeof(grads._Entries)
    assert ctypes.sizeof(grads._SumGrads) == 72 + ctypes.sizeof(grads._Entries) <= 4096
