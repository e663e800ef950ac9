"""The rules of the tape one by one, each beside what torch does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zplan.planner.aten import Aten
from zplan.planner.aten_devices import DEVICES
from zplan.planner.efficient_attention import gradient_sums, row_products
from zplan.planner.graph import PARAMETER_GRADIENT, UnitGradients
from zplan.planner.monomials import PRIME_B, PRIME_T, TILE_128, WIDTH, monomials
from zplan.planner.strides import dense_like, is_dense, row_major, view_strides
from zplan.planner.tape import Tape


def start(*, in_place: bool = False) -> tuple[Tape, Aten]:
    tape = Tape(in_place_accumulation=in_place)
    return tape, Aten(tape, DEVICES["cpu"]._replace(in_place_accumulation=in_place))


def peak(tape: Tape, phase: int = -1, b: int = 1, t: int = 1) -> int:
    scale = monomials(b, t, (0, 0, 0), 0)
    return max(sum(x * y for x, y in zip(level, scale, strict=True)) for level in tape.levels[phase])


def test_a_storage_lives_as_long_as_its_last_view():
    tape, _ = start()
    x = tape.new((10,), 4, "x")
    y = x.alias()
    tape.enter("one")
    del x
    tape.enter("two")
    assert peak(tape) == 40
    del y
    tape.enter("three")
    assert peak(tape) == 0
    assert [(s.born, s.died) for s in tape.storages] == [(0, 2)]


def test_levels_are_exact_for_every_batch_and_sequence():
    tape, _ = start()
    tape.enter("one")
    kept = [tape.new((PRIME_B, PRIME_T, 3), 2, "a"), tape.new((PRIME_B, 5, PRIME_T, PRIME_T), 4, "b")]
    kept += [tape.new((7,), 4, "c"), tape.new((PRIME_T, 3), 8, "d")]
    tape.close()
    for b, t in ((1, 1), (3, 7), (64, 8192)):
        assert peak(tape, b=b, t=t) == b * t * 6 + b * 5 * t * t * 4 + 28 + t * 24
    kept.clear()


def test_what_is_beside_a_storage_lives_as_long():
    """T (T + 1) elements are two monomials."""
    tape, op = start()
    x = op.scale(tape.parameter((PRIME_T, PRIME_T), 2, UnitGradients("u")))
    tape.enter("one")
    out = tape.new((PRIME_T, PRIME_T), 2, "wide")
    tape.extend(out, (PRIME_T, 1))
    assert peak(tape, t=10) == 2 * 10 * 10
    again = out.alias()
    del out
    tape.enter("two")
    assert peak(tape, t=10) == 2 * (10 * 10 + 10 * 11)
    del again
    tape.enter("three")
    tape.enter("four")
    assert peak(tape, t=10) == 2 * 10 * 10
    del x


@pytest.mark.parametrize(
    ("heads", "wide", "values", "itemsize", "expected"),
    [
        # 200 tokens are four tiles of 64, or two of 128; 16 bytes are a lock.
        (2, 64, 64, 2, 2 * 4 * (16 + 4 * 64 * 64)),
        (2, 80, 80, 2, 2 * 2 * (16 + 4 * 128 * 128)),
        # Three blocks of 64 for the 192 elements of a query, and a block of 64 keys and values in tiles of 128.
        (16, 192, 128, 2, 16 * (2 * 3 * (16 + 4 * 128 * 64) + 4 * 64 * (256 + 128))),
        (2, 64, 64, 4, 2 * 4 * (16 + 4 * 64 * 64)),
        (2, 80, 80, 4, 2 * 2 * 2 * (16 + 4 * 128 * 64)),
        (16, 192, 128, 4, 16 * 2 * 3 * (16 + 4 * 128 * 64)),
    ],
    ids=["narrow", "tile of 128", "two widths", "fp32", "fp32, tile of 128", "fp32, two widths"],
)
def test_sums_of_the_memory_efficient_kernel(heads, wide, values, itemsize, expected):
    tape, _ = start()
    tape.enter("one")
    sums = gradient_sums(tape, (1, heads, 200, wide), values, itemsize)
    tape.close()
    assert peak(tape, t=200) == expected
    del sums


@pytest.mark.parametrize(("itemsize", "during"), [(2, 0), (4, 4 * 3 * 10 * (128 + 1))], ids=["bf16", "fp32"])
def test_in_fp32_torch_multiplies_output_and_gradient_before_the_kernel(itemsize, during):
    tape, _ = start()
    tape.enter("one")
    delta = row_products(tape, (1, 3, 10, 192), 128, itemsize)
    tape.enter("two")
    tape.close()
    assert peak(tape, t=10, phase=1) == during + 4 * 3 * 10
    assert peak(tape, t=10) == 4 * 3 * 10
    del delta


@pytest.mark.parametrize("kernels", [False, True])
def test_summing_a_bias_gradient_takes_a_buffer_beside_its_result(kernels):
    """One place in a level for each shape of rows, zero before it was met, and only where kernels are seen."""
    tape = Tape(in_place_accumulation=True, kernels=kernels)
    op, unit = Aten(tape, DEVICES["cuda"]), UnitGradients("one")
    biases = [tape.parameter((8,), 2, unit) for _ in range(2)]
    x = tape.new((PRIME_B, PRIME_T, 8), 2, "x")
    for bias in biases:
        x = op.add(x, bias)
    loss = op.sum(op.sum(op.sum(x, 2), 1), 0)
    tape.enter("backward")
    tape.backward(loss)
    tape.close()
    width = 2 * WIDTH + kernels
    assert all(len(level) == width for levels in tape.levels for level in levels)
    assert [x.at(3, 5) for x in tape.row_sums] == [(15, 8, 2)] * kernels
    assert not any(v[-1] for v in tape.levels[0]) and max(v[-1] for v in tape.levels[1]) == kernels


def test_kernel_bytes_count_in_their_own_half():
    tape, _ = start()
    tape.enter("one")
    held = tape.new((PRIME_T,), 4, "tensor"), tape.padded(40, TILE_128, "tiles", kernel=True)
    tape.close()
    (level,) = (v for v in tape.levels[-1] if any(v))
    assert level[WIDTH + TILE_128] == 40 * 128
    assert peak(tape, b=2, t=129) == 4 * 129 + 40 * 2 * 256
    del held


@pytest.mark.parametrize("in_place", [False, True])
def test_two_gradients_of_one_value_are_added_up(in_place):
    tape, op = start(in_place=in_place)
    x = op.scale(tape.parameter((100,), 4, UnitGradients("u")))
    loss = op.add(op.unary(x, "silu"), op.unary(x, "silu"))
    del x
    tape.backward(loss)
    assert [s.label for s in tape.storages].count("grad.sum") == (0 if in_place else 1)


@pytest.mark.parametrize(("products", "sums"), [(0, 0), (1, 1), (2, 1)])
def test_a_tied_weight_is_added_up_in_place_but_onto_the_gradient_of_a_product(products, sums):
    """Three uses, the first gradients of products: T5's table is used by its head and by two embeddings."""
    tape, op = start(in_place=True)
    weight, ids = tape.parameter((100, 8), 4, UnitGradients("u")), tape.new((5,), 8, "ids")
    out = [op.embedding(weight, ids) for _ in range(3 - products)]
    x = tape.new((5, 8), 4, "x")
    parts = [op.sum(op.sum(e, 1), 0) for e in out] + [
        op.sum(op.sum(op.linear(x, weight), 1), 0) for _ in range(products)
    ]
    loss = parts[0]
    for part in parts[1:]:
        loss = op.add(loss, part)
    del out, parts, part
    tape.backward(loss)
    assert [s.label for s in tape.storages].count(PARAMETER_GRADIENT) == 1 + sums


def test_a_shared_gradient_is_never_added_in_place():
    """Both inputs of the add get the same gradient; the first to arrive at x must not be overwritten by the second."""
    tape, op = start(in_place=True)
    x = op.scale(tape.parameter((100,), 4, UnitGradients("u")))
    loss = op.add(x, x)
    del x
    tape.enter("backward.loss")
    tape.backward(loss)
    assert [s.label for s in tape.storages].count("grad.sum") == 1


def test_the_ready_node_that_was_recorded_last_runs_first():
    tape, op = start()
    unit = UnitGradients("u")
    weight = tape.parameter((100,), 4, unit)
    a, b = op.scale(weight), op.unary(weight, "silu")
    loss = op.add(a, b)
    assert a.node is not None
    assert b.node is not None
    a.node.on_gradient, b.node.on_gradient = "a", "b"
    del a, b
    tape.backward(loss)
    assert tape.phases == ["idle", "b", "a", "reduce.u"]


def test_checkpoint_keeps_inputs_only_and_stops_early():
    tape, op = start()
    weight = tape.parameter((100,), 4, UnitGradients("u"))
    calls = []

    def run(x):
        calls.append("start")
        x = op.unary(op.unary(x, "silu"), "silu")
        calls.append("saved all")
        x = op.scale(x)
        return x

    x = op.scale(weight)
    out = tape.checkpoint(run, x)
    tape.enter("held")
    assert peak(tape) == 800, "input and output"
    tape.backward(out)
    assert calls == ["start", "saved all", "start"], "the last save ends the recompute, before its op runs"


def test_checkpoint_takes_each_recomputed_value_once():
    tape, op = start()
    weight = tape.parameter((10,), 4, UnitGradients("u"))
    out = tape.checkpoint(lambda x: op.unary(op.unary(x, "silu"), "silu"), op.scale(weight))
    tape.backward(out)
    del out
    tape.enter("after")
    assert peak(tape) == 0, "nothing that was recomputed outlives the backward"


def test_what_a_dead_node_saved_is_not_kept_again():
    """A router ranks experts by scores that no gradient comes back to; their nodes are gone when forward is over."""
    tape, op = start()
    weight = tape.parameter((10,), 4, UnitGradients("u"))

    def run(x):
        ranked = op.unary(op.scale(x), "silu")
        del ranked
        x = op.unary(x, "silu")
        seen.append(sum(s.died is None and s.refs > 0 for s in tape.storages if s.coefficient))
        return op.unary(x, "silu")

    seen: list[int] = []
    out = tape.checkpoint(run, op.scale(weight))
    tape.backward(out)
    # The input and what came of it; in backward the output and its gradient too.
    assert seen == [2, 4]


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shapes, st.randoms(use_true_random=False))
def test_view_strides_are_torchs(shape, random):
    dims = list(range(len(shape)))
    random.shuffle(dims)
    x = torch.empty(shape).permute(dims)
    if random.random() < 0.5:
        x = x[..., : random.randint(1, x.shape[-1])]
    numel, new = x.numel(), []
    while numel > 1 and len(new) < 3:
        n = random.choice([d for d in range(1, numel + 1) if numel % d == 0])
        new.append(n)
        numel //= n
    new.append(numel)
    ours = view_strides(tuple(x.shape), x.stride(), new)
    try:
        theirs = x.view(new)
    except RuntimeError:
        assert ours is None
        return
    assert ours is not None
    assert [s for s, n in zip(ours, new, strict=True) if n > 1] == [
        s for s, n in zip(theirs.stride(), new, strict=True) if n > 1
    ]


@given(shapes, st.randoms(use_true_random=False))
def test_memory_order_is_torchs(shape, random):
    dims = list(range(len(shape)))
    random.shuffle(dims)
    x = torch.empty([2 * n + 1 for n in shape]).permute(dims)
    if random.random() < 0.5:
        x = x[..., :-1]
    theirs = torch.empty_like(x).stride()
    assert dense_like(tuple(x.shape), x.stride()) == theirs
    assert is_dense(tuple(x.shape), theirs)
    assert row_major(tuple(x.shape)) == torch.empty(x.shape).stride()
