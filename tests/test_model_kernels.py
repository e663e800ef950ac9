"""RMSNorm, SwiGLU and rotary embedding: the torch path here, the kernels where there is a GPU; autograd around both."""

import ctypes

import model_kernel_checks as k
import pytest
import torch
import torch.nn.functional as F

from zplan.cuda_ops import compiler, rms_norm, rotary, swiglu
from zplan.cuda_ops import linear_cross_entropy as lce
from zplan.runtime.decoder import rotate

ON_CPU = [c for c in k.CASES if c != "bad label"]
"""Torch refuses a label out of range by itself."""


@pytest.mark.parametrize("case", ON_CPU)
def test_torch_path_against_float64(case):
    torch.manual_seed(sum(case.encode()))
    assert k.CASES[case](torch.device("cpu")) <= 1.0


@pytest.mark.cuda
@pytest.mark.parametrize("case", k.CASES)
def test_kernels_against_float64(case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if (reason := compiler.available()) is not None:
        pytest.skip(reason)
    torch.manual_seed(sum(case.encode()))
    assert k.CASES[case](torch.device("cuda")) <= 1.0


def leaves(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def expect_equal(ours, theirs, inputs):
    """Outputs and gradients of two float64 computations of the same leaves."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(ours)
    found, want = (torch.autograd.grad(y, inputs, grad) for y in (ours, theirs))
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


def test_rms_norm_is_torchs():
    x, weight = leaves((3, 5, 24), (24,))
    expect_equal(rms_norm.rms_norm(x, weight, 1e-3), F.rms_norm(x, (24,), weight, 1e-3), [x, weight])


def test_swiglu_is_torchs():
    gate, up = leaves((3, 7), (3, 7))
    expect_equal(swiglu.swiglu(gate * 1, up * 1), F.silu(gate) * up, [gate, up])


def test_rotary_is_the_decoders():
    x, cos, sin = leaves((2, 5, 3, 8), (5, 4), (5, 4))
    expect_equal(rotary.rotary(x, cos.detach(), sin.detach()), rotate(x, cos.detach(), sin.detach()), [x])


def test_each_saves_only_what_backward_needs():
    saved = []
    x, weight, other = (t.bfloat16().detach().requires_grad_() for t in leaves((2, 3, 4, 8), (8,), (2, 3, 4, 8)))
    tables = torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.shape)), lambda t: t):
        rms_norm.rms_norm(x, weight, 1e-5)
        swiglu.swiglu(x * 1, other * 1)
        rotary.rotary(x, *tables)
    whole, table = (torch.bfloat16, x.shape), (torch.bfloat16, tables[0].shape)
    norm = [whole, (torch.bfloat16, weight.shape), (torch.float32, (2, 3, 4, 1))]
    assert saved == [*norm, *[whole] * 2, *[table] * 2]


def test_swiglu_writes_gradients_over_its_inputs_and_runs_back_once():
    a, b = leaves((4, 6), (4, 6))
    gate, up = a * 1, b * 1
    out = swiglu.swiglu(gate, up)
    found = torch.autograd.grad(out.sum(), [gate, up], retain_graph=True)
    assert [t.data_ptr() for t in found] == [gate.data_ptr(), up.data_ptr()]
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_a_second_derivative_is_refused():
    x, weight, cos, sin = leaves((2, 3, 2, 8), (8,), (3, 4), (3, 4))
    target = torch.tensor([1, 2, 3])
    for y in (
        rms_norm.rms_norm(x, weight, 1e-5).sum(),
        swiglu.swiglu(x * 1, x * 2).sum(),
        rotary.rotary(x, cos.detach(), sin.detach()).sum(),
        lce.linear_cross_entropy(x[0].flatten(1), x[1].flatten(1), target.clamp(max=2)),
    ):
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(y, x, create_graph=True)


def test_structures_have_the_sizes_that_kernels_expect():
    assert ctypes.sizeof(lce._CrossEntropy) == 64 and ctypes.sizeof(lce._Rescale) == 48
    assert ctypes.sizeof(rms_norm._RmsNorm) == 40 and ctypes.sizeof(rms_norm._RmsNormBackward) == 64
    assert ctypes.sizeof(rms_norm._RmsNormWeight) == 24
    assert ctypes.sizeof(swiglu._SwiGlu) == 48 and ctypes.sizeof(rotary._Rotary) == 56


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 100, 4096, 11008, rms_norm.MAX_WIDTH])
@pytest.mark.parametrize("per_thread", [8, rms_norm.SHARE])
def test_threads_cover_a_row(width, lanes, per_thread):
    shape = rms_norm._defines(width, per_thread, 1, lanes)
    assert shape["BLOCK"] % 32 == 0 and 32 <= shape["BLOCK"] <= 1024
    assert shape["BLOCK"] * shape["VECTORS"] * lanes >= width > shape["BLOCK"] * (shape["VECTORS"] - 1) * lanes
    assert shape["VECTORS"] * lanes <= per_thread + 8 or shape["BLOCK"] == 1024
