"""The inner loops compute what NumPy does, whatever the layout, stack or overlap."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import LAYOUTS, arranged, whole_numbers
from plain_kernels import native  # noqa: F401

from tvmgemm import problem
from tvmgemm.frontend import matmul

#: Those of one element type that NumPy has a loop for.
DTYPES = {d.native_id: name for name, d in problem.DTYPES.items() if d.a == d.b == d.c and name != "bfloat16"}


@pytest.fixture(params=DTYPES)
def served(request, native):
    """Every problem of one dtype is served by a plain kernel."""
    native.dtype = request.param
    native.name = DTYPES[request.param]
    native.publish(native.kernel(f"plain_{native.name}"), native.dtype)
    native.lib.tg_reset_counters()
    return native


def assert_served(native, calls, *operands, **keywords):
    """The product is NumPy's, and so many inner loops were served, none declined."""
    before = native.lib.tg_served(native.dtype)
    result = matmul(*operands, **keywords)
    assert native.lib.tg_served(native.dtype) - before == calls
    assert native.lib.tg_declined(native.dtype) == 0
    expected = np.matmul(*(np.array(x) for x in operands[:2]))
    np.testing.assert_array_equal(result, expected)
    return result


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_input_layouts(served, a_layout, b_layout, batch):
    a = arranged(whole_numbers((*batch, 5, 7), served.name, 1), a_layout)
    b = arranged(whole_numbers((*batch, 7, 6), served.name, 2), b_layout)
    assert_served(served, 1, a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_layouts(served, layout):
    a, b = whole_numbers((4, 5, 7), served.name, 1), whole_numbers((4, 7, 6), served.name, 2)
    out = arranged(np.full((4, 5, 6), 55, served.name), layout)
    surroundings = out.base.copy() if layout in ("padded", "strided") else None
    assert assert_served(served, 1, a, b, out=out) is out
    if surroundings is not None:  # nothing between the elements was written
        out[...] = 55
        np.testing.assert_array_equal(out.base, surroundings)


@pytest.mark.parametrize("order", "CFAK")
def test_order(served, order):
    a, b = whole_numbers((5, 7), served.name, 1), whole_numbers((7, 6), served.name, 2)
    c = assert_served(served, 1, a, b, order=order)
    assert c.flags.f_contiguous == (order == "F")


@pytest.mark.parametrize("m", (1, 3))
@pytest.mark.parametrize("n", (1, 4))
@pytest.mark.parametrize("k", (1, 5))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unit_dimensions(served, m, n, k, layout):
    a = arranged(whole_numbers((m, k), served.name, 1), layout)
    b = arranged(whole_numbers((k, n), served.name, 2), layout)
    assert_served(served, 1, a, b)
    assert_served(served, 1, a, b, out=arranged(np.zeros((m, n), served.name), layout))


def test_zero_strides(served):
    a = np.broadcast_to(whole_numbers((1, 7), served.name, 1), (5, 7))
    b = np.broadcast_to(whole_numbers((7, 1), served.name, 2), (7, 6))
    assert_served(served, 1, a, b)


def test_vectors_and_broadcast_batches(served):
    x, y = whole_numbers(7, served.name, 1), whole_numbers(7, served.name, 2)
    a, b = whole_numbers((4, 1, 5, 7), served.name, 3), whole_numbers((3, 7, 6), served.name, 4)
    assert_served(served, 1, x, y)
    assert_served(served, 1, x, b[0])
    assert_served(served, 1, a[0, 0], y)
    count, _ = served.probe(lambda: matmul(a, b))
    assert_served(served, count, a, b)
    assert_served(served, 1, a[0, 0], b)


@pytest.mark.parametrize("step_a, step_b", [(5, 5), (-1, 2), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("m, n", [(5, 6), (1, 6), (5, 1), (1, 1)])
@pytest.mark.parametrize("a_layout, b_layout", [("row", "row"), ("col", "padded"), ("strided", "col"), ("negative", "row")])
def test_steps_of_a_stack(served, step_a, step_b, m, n, a_layout, b_layout):
    def stepped(x, step):
        return np.broadcast_to(x[:1], (3, *x.shape[1:])) if step == 0 else x[::step][:3]

    a = stepped(arranged(whole_numbers((15, m, 7), served.name, 1), a_layout), step_a)
    b = stepped(arranged(whole_numbers((15, 7, n), served.name, 2), b_layout), step_b)
    assert_served(served, 1, a, b)
    for order in ("row", "col", "strided"):
        assert_served(served, 1, a, b, out=arranged(np.zeros((3, m, n), served.name), order))


def test_no_inner_dimension_gives_zeros(served):
    out = np.full((5, 6), 9, served.name)
    assert_served(served, 1, np.ones((5, 0), served.name), np.ones((0, 6), served.name), out=out)
    assert not out.any()


@pytest.mark.parametrize(
    "shapes", [((0, 3), (3, 4)), ((3, 4), (4, 0)), ((2, 0, 3), (2, 3, 4)), ((0, 2, 3), (3, 4))]
)
def test_nothing_to_compute_calls_no_kernel(served, shapes):
    assert_served(served, 0, *(np.ones(shape, served.name) for shape in shapes))


def test_output_that_overlaps_an_input(served):
    a = whole_numbers((8, 8), served.name, 1)
    expected = np.matmul(a, a)
    assert_served(served, 1, a, a.copy())
    matmul(a, a, out=a)
    np.testing.assert_array_equal(a, expected)
    room = whole_numbers(70, served.name, 2)
    x, out = room[:64].reshape(8, 8), room[6:].reshape(8, 8)
    expected = np.matmul(x.copy(), x.copy())
    np.testing.assert_array_equal(matmul(x, x, out=out), expected)


def test_other_dtypes_stay_with_numpy(served):
    for dtype in ("longdouble", "clongdouble", "object"):
        a = whole_numbers((3, 4), dtype)
        np.testing.assert_array_equal(matmul(a, a.T), np.matmul(a, a.T))
    assert sum(served.lib.tg_served(d) + served.lib.tg_declined(d) for d in DTYPES) == 0


def test_kernel_flags_reach_errstate(served):
    if np.dtype(served.name).kind in "fc":
        big = np.full((2, 2), np.finfo(served.name).max, served.name)
        with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered in matmul"):
            matmul(big, big)
    with np.errstate(all="raise"):
        matmul(np.ones((2, 2), served.name), np.ones((2, 2), served.name))
