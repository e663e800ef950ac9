"""The kernels' own sources on the CPU, block by block and thread by thread, within the bounds of a GPU."""

import ctypes

import kernel_checks
import model_kernel_checks
import pytest
import torch

from zplan.cuda_ops import compiler, rms_norm
from zplan.cuda_ops import linear_cross_entropy as lce
from zplan.cuda_ops.norm import GradNorm, norm_words

CASES = {**kernel_checks.CASES, **{f"model: {name}": check for name, check in model_kernel_checks.CASES.items()}}
WITHOUT_LAUNCH = {"copy strided", "model: rms norm, no row"}
ONCE = {"model: rms norm, many rows"}
"""Float64 takes seconds for it; `test_order_changes_no_bit` has its other order."""
RUNS = [(case, backwards) for case in CASES for backwards in (False, True) if not (backwards and case in ONCE)]


@pytest.mark.parametrize(("case", "backwards"), RUNS, ids=[case + ", backwards" * back for case, back in RUNS])
def test_kernels_against_float64(case, backwards, host_kernels):
    host_kernels.backwards = backwards
    torch.manual_seed(sum(case.encode()))
    assert CASES[case](torch.device("cpu")) <= 1.0
    assert bool(host_kernels.launched) == (case not in WITHOUT_LAUNCH)


def summed():
    """What comes from the parts of several blocks, warps or lanes."""
    torch.manual_seed(0)
    # Of many magnitudes: float64 adds up like ones exactly, in whatever order.
    grads = [torch.randn(n).mul(8).exp() for n in (1, 70003, 600001)]
    norm = GradNorm(torch.empty(norm_words(len(grads)), dtype=torch.int64), len(grads))
    for row, grad in enumerate(grads):
        norm.add(row, grad)
    norm.finish()
    rows = 2 * rms_norm.PARTS + 88
    x, grad, weight = torch.randn(rows, 600), torch.randn(rows, 600), torch.randn(600)
    out, rstd = rms_norm.forward(x, weight, 1e-5)
    logits, losses = torch.randn(5, 5000), torch.empty(5)
    lce.cross_entropy_(logits, torch.arange(5), losses, lce.Loss(label_smoothing=0.1), grads=True)
    return [
        norm.total,
        *(norm.square_sum(i) for i in range(3)),
        out,
        *rms_norm.backward(grad, x, weight, rstd),
        logits,
        losses,
    ]


def test_order_changes_no_bit(host_kernels):
    forwards, host_kernels.backwards = summed(), True
    for mine, other in zip(forwards, summed(), strict=True):
        assert torch.equal(mine, other) and mine.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_conversions_are_torchs(host_kernels, dtype):
    """Every 16-bit number read, and fp32 numbers at, next to and between them written."""
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = halves.float().view(torch.int32)
    unit = 2**16 if dtype == torch.bfloat16 else 2**13
    near = torch.cat([wide + d for d in (-1, 0, 1, unit // 2 - 1, unit // 2, unit // 2 + 1)]).view(torch.float32)
    small = torch.arange(-4096, 4096) * 2.0**-26  # of fp16 below its normal numbers: also between two
    loud = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for values in (torch.cat([near, small, loud]), halves):
        want = (values if values.dtype == torch.float32 else values.float() * 2).to(dtype)
        found = lce.rescale(values.clone(), one, one if values.dtype == torch.float32 else two, dtype)
        assert torch.equal(found.isnan(), want.isnan())
        number = ~want.isnan()
        assert torch.equal(found[number].view(torch.int16), want[number].view(torch.int16))


# --- what the threads' emulation itself finds ------------------------------------------------------------------------


class Toy(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p)]


@pytest.fixture
def toy(host_kernels, monkeypatch):
    """`toy(body, block)`: what a kernel of that body writes, one int a thread."""

    def run(body, block=64):
        text = (
            f'struct Toy {{ int* out; }};\nextern "C" void toy(Toy a) {{\nint t = threadIdx.x;\n#line 1\n{body}\n}}\n'
        )
        monkeypatch.setattr(compiler, "source_of", lambda _: text)
        out = torch.zeros(256, dtype=torch.int32)
        host_kernels.build("toy", "toy", {}).launch(2, block, Toy(out.data_ptr()))
        return out[:block].tolist()

    return run


REFUSED = {
    "two barriers": (
        "if (t < 32)\n__syncthreads();\nelse\n__syncthreads();",
        "block 0: thread 0 waits for its block at line 2, but thread 32 waits for its block at line 4",
    ),
    "a barrier beside a shuffle": (
        "if (t < 40)\n__syncthreads();\nelse\na.out[t] = __shfl_xor_sync(0xffffffffu, t, 1);",
        "block 0: thread 40 waits for its warp at line 4, but thread 32 waits for its block at line 2",
    ),
    "a lane that has left": (
        "if (t == 37) return;\na.out[t] = __shfl_xor_sync(0xffffffffu, t, 1);",
        "block 0: thread 32 waits for its warp at line 2, but thread 37 has returned",
    ),
    "a source outside of the mask": (
        "if (t < 4) a.out[t] = __shfl_down_sync(0x0000000fu, t, 1);",
        "block 0: thread 3 shuffles with lane 4 and mask 0000000f at line 1",
    ),
    "an address between two vectors": (
        "*(float4*)(a.out + t) = make_float4(0, 0, 0, 0);",
        "block 0: thread 1 uses a misaligned address at line 1",
    ),
    "an array's end": (
        "int x[4] = {1, 2, 3, 4};\na.out[t] = x[a.out[t] + t];",
        "block 0: thread 4 is past the end of an array at line 2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_gpu_would_hang_on_or_refuse_is_an_error(toy, what):
    body, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=f"^toy.cu, toy: {words}"):
        toy(body)
    assert toy("a.out[t] = __shfl_xor_sync(0xffffffffu, t, 1);") == [t ^ 1 for t in range(64)]


def test_a_warp_smaller_than_its_mask_is_an_error(toy):
    with pytest.raises(RuntimeError, match="mask ffffffff asks for lanes that its warp does not have"):
        toy("a.out[t] = __shfl_xor_sync(0xffffffffu, t, 1);", 16)
    assert toy("a.out[t] = __shfl_xor_sync(0xffffu, t, 1);", 16) == [t ^ 1 for t in range(16)]


def test_threads_that_have_left_are_not_waited_for(toy):
    assert toy("if (t >= 40) return;\n__syncthreads();\na.out[t] = 1;") == [1] * 40 + [0] * 24


@pytest.mark.parametrize("backwards", [False, True])
def test_a_missing_barrier_shows(toy, host_kernels, backwards):
    host_kernels.backwards = backwards
    body = "__shared__ int x[64];\nx[t] = t;\n{}\na.out[t] = x[t ^ 63];"
    right = [t ^ 63 for t in range(64)]
    assert toy(body.format("__syncthreads();")) == right
    # What nobody has written yet is -1, in the second block too.
    ahead = range(32, 64) if backwards else range(32)
    assert all(x == right[t] or (x == -1 and t in ahead) for t, x in enumerate(toy(body.format("")))) is True
    assert toy(body.format("")).count(-1) == 32
