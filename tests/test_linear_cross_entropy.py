"""Linear and cross-entropy in one, chunk by chunk: equal to torch's with whole logits."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.cuda_ops.linear_cross_entropy import linear_cross_entropy, padded_vocab
from zplan.runtime.meter import StorageRegistry

N, C, V = 13, 6, 11


def case(dtype=torch.float64, *, bias=False, ignored=(2, 7), seed=0):
    torch.manual_seed(seed)
    x, weight, offset = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((N, C), (V, C), (V,)))
    target = torch.randint(V, (N,))
    target[list(ignored)] = -100
    return x, weight, offset if bias else None, target


def theirs(x, weight, bias, target, **kind):
    return F.cross_entropy(F.linear(x, weight, bias), target, **kind)


@pytest.mark.parametrize(
    ("bias", "smoothing", "reduction", "chunk"), list(product((False, True), (0.0, 0.3), ("mean", "sum"), (1, 5, 64)))
)
def test_float64_is_torchs(bias, smoothing, reduction, chunk):
    x, weight, offset, target = case(bias=bias)
    kind = {"label_smoothing": smoothing, "reduction": reduction}
    inputs = [t for t in (x, weight, offset) if t is not None]
    ours = linear_cross_entropy(x, weight, target, bias=offset, chunk=chunk, **kind)
    want = theirs(x, weight, offset, target, **kind)
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(ours * 3.5, inputs)
    torch.testing.assert_close(found, torch.autograd.grad(want * 3.5, inputs), rtol=1e-11, atol=1e-13)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 30), st.integers(1, 50), st.integers(0, 2**31))
@settings(max_examples=30)
def test_any_size(tokens, width, vocab, chunk, seed):
    torch.manual_seed(seed)
    x, weight = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((tokens, width), (vocab, width))
    )
    target = torch.randint(vocab, (tokens,)).masked_fill_(torch.rand(tokens) < 0.2, 77)
    ours = linear_cross_entropy(x, weight, target, ignore_index=77, chunk=chunk, reduction="sum")
    want = theirs(x, weight, None, target, ignore_index=77, reduction="sum")
    torch.testing.assert_close(ours, want)
    torch.testing.assert_close(torch.autograd.grad(ours, [x, weight]), torch.autograd.grad(want, [x, weight]))


@pytest.mark.parametrize("ignored", [range(N), ()], ids=["every label ignored", "none"])
def test_ignored_labels(ignored):
    x, weight, _, target = case(ignored=ignored)
    ours, want = linear_cross_entropy(x, weight, target), theirs(x, weight, None, target)
    torch.testing.assert_close(ours, want, equal_nan=True)
    found, wanted = (torch.autograd.grad(y, [x, weight]) for y in (ours, want))
    if ignored:
        assert ours.isnan() and all(not g.nan_to_num(7.0).any() or g.isnan().all() for g in found)
    else:
        torch.testing.assert_close(found, wanted)


@pytest.fixture
def filled_with_nan():
    """Memory that nobody has written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan() and torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [31, 64])
def test_nothing_is_read_that_was_not_written(filled_with_nan, dtype, bias, chunk):
    """Rows of 101 logits end in three elements of padding, and the CPU's 16-bit product reads them."""
    torch.manual_seed(0)
    x, weight, offset = (torch.randn(n, dtype=dtype).requires_grad_() for n in ((64, 64), (101, 64), (101,)))
    inputs = [x, weight, offset] if bias else [x, weight]
    loss = linear_cross_entropy(x, weight, torch.randint(101, (64,)), bias=offset if bias else None, chunk=chunk)
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, inputs))


def test_no_tokens():
    x, weight = torch.zeros(0, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.int64), reduction="sum")
    loss.backward()
    assert loss == 0 and x.grad.shape == (0, C) and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_gradient_is_added_up_in_fp32(dtype):
    """4,096 equal chunks of one token: sums in 16 bits would stand still long before the end."""
    x, weight = torch.ones(4096, 1, dtype=dtype, requires_grad=True), torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(4096, dtype=torch.int64), chunk=1, reduction="sum").backward()
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0] and weight.grad.dtype == dtype


def test_small_fp16_gradients_survive():
    """One over 4,096 tokens and one over 16,384 words is 2**-26, below fp16; the loss scale brings it back."""
    tokens, vocab, scale = 4096, 16384, 2.0**12
    x, weight = torch.ones(tokens, 1).half(), torch.zeros(vocab, 1).half().requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.zeros(tokens, dtype=torch.int64), chunk=1024)
    (loss * scale).backward()
    assert weight.grad[1:].unique().tolist() == [scale / vocab]


def test_only_gradients_that_are_wanted_are_made():
    x, weight, _, target = case()
    linear_cross_entropy(x, weight.detach(), target).backward()
    assert x.grad is not None and weight.grad is None
    x.grad = None
    linear_cross_entropy(x.detach(), weight, target).backward()
    assert x.grad is None and weight.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, target).requires_grad


def test_a_second_backward_is_refused():
    x, weight, _, target = case()
    loss = linear_cross_entropy(x, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_inputs_can_go_after_the_forward():
    """Features and weight are not kept: what lives until backward is their gradients, and one scalar."""
    x, weight, _, target = case(torch.bfloat16)
    with StorageRegistry() as registry:
        registry.adopt(x, weight, target)
        before = registry.live_bytes
        loss = linear_cross_entropy(x, weight, target, chunk=4)
        assert registry.live_bytes - before == 2 * N * C + 4 * V * C + 4 + 4
        peak = registry.peaks["idle"]
    loss.backward()
    fp32_logits = 4 * N * V
    assert peak - before < 2 * N * C + 4 * V * C + 4 * N + 2 * 4 * padded_vocab(V, 2) + fp32_logits


@pytest.mark.parametrize(
    ("vocab", "itemsize", "expected"), [(1, 2, 8), (8, 2, 8), (50257, 2, 50264), (9, 4, 12), (9, 8, 10)]
)
def test_rows_begin_at_whole_vectors(vocab, itemsize, expected):
    assert padded_vocab(vocab, itemsize) == expected
