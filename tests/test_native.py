"""The native part: canonicalisation, dispatch table, kernels, misses. The thread pool is in test_pool.py."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import threading

import numpy as np
import pytest
from plain_kernels import compiler, native  # noqa: F401

import tvmgemm._native
from tvmgemm import frontend, problem
from tvmgemm.frontend import matmul

NATIVE = pathlib.Path(frontend.__file__).parent / "native"
#: Those of one element type that NumPy has a loop for.
DTYPES = {d.native_id: name for name, d in problem.DTYPES.items() if d.a == d.b == d.c and name != "bfloat16"}
ROW, COL, STRIDED = 0, 1, 2


def whole_numbers(shape, dtype="float32", seed=0):
    """Small integers: their products and sums are exact in every order, or wrap around."""
    numbers = np.random.default_rng(seed).integers(-4, 5, shape)
    if np.dtype(dtype).kind == "c":
        numbers = numbers + 1j * numbers[..., ::-1]
    return numbers.astype(dtype)


def arranged(x: np.ndarray, layout: str) -> np.ndarray:
    """The same values in memory of another layout; only the last two axes change."""
    *batch, m, n = x.shape
    if layout == "row":
        return np.ascontiguousarray(x)
    if layout == "col":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "padded":
        room = np.full((*batch, m, n + 3), 99, x.dtype)[..., :n]
    elif layout == "strided":
        room = np.full((*batch, 2 * m, 3 * n), 99, x.dtype)[..., ::2, ::3]
    elif layout == "negative":
        room = np.full((*batch, m, n), 99, x.dtype)[..., ::-1, ::-1]
    else:
        raise ValueError(layout)
    room[...] = x
    return room


LAYOUTS = ("row", "col", "padded", "strided", "negative")


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


# -- what the loop tells the planner


def layouts(p):
    return p.a_layout, p.b_layout, p.c_layout


@pytest.mark.parametrize(
    "a_layout, b_layout, expected",
    [("row", "row", (ROW, ROW, ROW)), ("col", "padded", (COL, ROW, ROW)),
     ("strided", "col", (STRIDED, COL, ROW)), ("negative", "row", (STRIDED, ROW, ROW))],
)
def test_probe_reports_layouts(native, a_layout, b_layout, expected):
    a, b = arranged(np.ones((5, 7), "f"), a_layout), arranged(np.ones((7, 6), "f"), b_layout)
    count, p = native.probe(lambda: matmul(a, b))
    assert (count, p.dtype, p.op, p.m, p.n, p.k, p.batch) == (1, 0, 0, 5, 6, 7, 1)
    assert layouts(p) == expected and not p.transposed and not p.symmetric


def test_probe_computes_nothing_and_ends(native):
    out = np.full((2, 2), 5.0)
    one = np.ones((2, 2))
    native.lib.tg_reset_counters()
    count, p = native.probe(lambda: (matmul(one, one, out=out), matmul(one, np.ones((2, 3)))))
    assert count == 2 and p.n == 2 and p.dtype == 1 and (out == 5).all()
    assert native.lib.tg_served(1) == native.lib.tg_declined(1) == 0
    assert native.probe(lambda: None)[0] == 0
    matmul(one, one, out=out)
    assert (out == 2).all()


def test_probe_belongs_to_its_thread(native):
    result = []
    native.lib.tg_probe_begin()
    thread = threading.Thread(target=lambda: result.append(matmul(np.ones((2, 2)), np.ones((2, 2)))))
    thread.start()
    thread.join()
    assert native.lib.tg_probe_end(native.ffi.NULL) == 0
    assert (result[0] == 2).all()


def test_column_major_output_is_computed_transposed(native):
    a, b = arranged(np.ones((5, 7), "f"), "row"), arranged(np.ones((7, 6), "f"), "col")
    _, p = native.probe(lambda: matmul(a, b, order="F"))
    assert p.transposed and (p.m, p.n, p.k) == (6, 5, 7)
    assert layouts(p) == (ROW, COL, ROW)  # A' = B^T is row-major, B' = A^T column-major


@pytest.mark.parametrize("m, n, k, transposed", [(2, 64, 256, True), (16, 100, 300, True), (17, 100, 300, False), (16, 63, 300, False),
                                                  (16, 100, 255, False)])
@pytest.mark.parametrize("dtype", ["f", "d", "F", "i"])
def test_few_rows_of_a_large_column_major_b_are_computed_transposed(native, m, n, k, transposed, dtype):
    a, b = np.ones((m, k), dtype), arranged(np.ones((k, n), dtype), "col")
    _, p = native.probe(lambda: matmul(a, b))
    if transposed and dtype in "fd":
        assert p.transposed and (p.m, p.n, p.k) == (n, m, k) and layouts(p) == (ROW, COL, STRIDED)
    else:
        assert not p.transposed and layouts(p) == (ROW, COL, ROW)
    _, p = native.probe(lambda: matmul(a, np.ascontiguousarray(b)))
    assert not p.transposed


@pytest.mark.parametrize("m, n, k", [(1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 7), (1, 1, 1)])
def test_unit_dimensions_count_as_contiguous(native, m, n, k):
    a, b = np.ones((m, k), "f"), np.ones((k, n), "f")
    _, p = native.probe(lambda: matmul(a, b))
    assert layouts(p) == (ROW, ROW, ROW) and not p.transposed


def test_strided_output_row_is_computed_as_a_column(native):
    out = np.zeros((1, 12), "f")[:, ::2]
    _, p = native.probe(lambda: matmul(np.ones((1, 7), "f"), np.ones((7, 6), "f"), out=out))
    assert p.transposed and (p.m, p.n) == (6, 1) and p.c_layout == ROW


@pytest.mark.parametrize("order", "CF")
def test_symmetric(native, order):
    a = np.ones((3, 5, 7), "f")
    cases = {True: [(a[0], a[0].T), (a[0].T, a[0]), (a, a.swapaxes(1, 2))],
             False: [(a[0], a[1].T), (a[0], a[0].T.copy()), (a[0, :, :5], a[0, :, :5]),
                     (a[0], a.swapaxes(1, 2))]}
    for expected, pairs in cases.items():
        for x, y in pairs:
            _, p = native.probe(lambda: matmul(x, y, order=order))
            assert bool(p.symmetric) == expected, (x.shape, x.strides, y.strides)


def test_a_stack_that_meets_one_matrix_is_one_product(native):
    def seen(a, b, **keywords):
        count, p = native.probe(lambda: matmul(a, b, **keywords))
        return count, p.batch, p.m, p.n, p.k, layouts(p)

    a, b = np.ones((4, 5, 7), "f"), np.ones((4, 7, 6), "f")
    assert seen(a, b[0]) == (1, 1, 20, 6, 7, (ROW, ROW, ROW))
    assert seen(a[:, :, ::2], b[0, ::2]) == (1, 1, 20, 6, 4, (STRIDED, ROW, ROW))
    assert seen(a[:, :1], b[0]) == (1, 1, 4, 6, 7, (ROW, ROW, ROW))  # rows far apart, but evenly
    assert seen(a[::2, ::5], b[0]) == (1, 1, 2, 6, 7, (ROW, ROW, ROW))
    assert seen(a[0], np.ones((4, 7, 1), "f")) == (1, 1, 4, 5, 7, (ROW, COL, ROW))  # columns, of C^T = B^T.A^T
    # Uneven steps from the last row of a matrix to the first of the next:
    assert seen(a[:, :4], b[0]) == seen(a[::-1], b[0])[:1] + (4, 4, 6, 7, (ROW, ROW, ROW))
    assert seen(a, b[0], out=np.ones((4, 8, 6), "f")[:, :5])[1] == 4
    assert seen(a, b)[1] == seen(a[0], b)[1] == 4


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


def test_kernel_sees_the_canonical_problem(native):
    seen = []
    frontend.on_miss = lambda p: seen.append((p.m, p.n, p.k, p.batch, layouts(p), p.transposed)) or 0
    a, b = np.ones((4, 5, 7)), np.ones((4, 7, 6))
    matmul(a, b)
    matmul(a[0], b[0], order="F")
    assert seen == [(5, 6, 7, 4, (ROW, ROW, ROW), 0), (6, 5, 7, 1, (COL, COL, ROW), 1)]


# -- the dispatch table


def test_exact_plans_come_first(native):
    """Two of one shape, for short and long stacks; other shapes and layouts are not theirs."""
    general = native.publish(native.kernel("plain_float32"))
    here = {"m_lo": 4, "m_hi": 4, "n_lo": 5, "n_hi": 5, "k_lo": 6, "k_hi": 6, "exact": 1, "b_layout": ROW}
    short = native.publish(native.kernel("packing_float32"), batch_hi=9, **here)
    assert native.publish(native.kernel("packing_float32"), batch_hi=9, id=short, **here) == short  # takes no second place
    long = native.publish(native.kernel("packing_float32"), batch_lo=10, **here)

    def serving(m, n, k, **more):
        return native.lib.tg_lookup(native.problem(m=m, n=n, k=k, **more))

    assert [serving(4, 5, 6, batch=b) for b in (1, 9, 10)] == [short, short, long]
    assert {serving(4, 5, 7), serving(4, 5, 0), serving(20, 5, 6), serving(4, 5, 6, b_layout=COL)} == {general}
    assert serving(4, 5, 6, dtype=1) == serving(4, 5, 6, op=1) == -1
    native.lib.tg_clear_plans()
    assert serving(4, 5, 6) == -1
    for wrong in ({"m_lo": 17}, {"k_lo": 0}, {"op": 1}):
        made = native.plan(native.kernel("plain_float32"), **{**here, "m_lo": 4, **wrong})
        assert native.lib.tg_publish(made) == -1
    assert native.lib.tg_set_served(0, 17, 1, 1, 5) == native.lib.tg_set_served(99, 1, 1, 1, 5) == -1


def test_products_of_a_small_shape_are_counted(native, monkeypatch):
    asked = []
    monkeypatch.setattr(frontend, "on_hot", lambda p: asked.append((p.m, p.n, p.k)) or False)
    native.publish(native.kernel("plain_float32"), hot_at=100)
    a = np.ones((30, 4, 4), "f")
    for calls in range(1, 7):
        assert (matmul(a, a) == 4).all() and (matmul(a[:, :3], a) == 4).all()
        matmul(np.ones((99, 17, 4), "f"), np.ones((99, 4, 4), "f"))  # too large to be counted
        assert asked == ([(4, 4, 4), (3, 4, 4)] if calls >= 4 else [])
    assert native.lib.tg_set_served(0, 4, 4, 4, 99) == 0
    matmul(a[0], a[0])
    assert asked[2:] == [(4, 4, 4)]


def test_no_plan_and_declining_plan_run_numpy(native):
    a, b = whole_numbers((5, 7), "f", 1), whole_numbers((7, 6), "f", 2)
    native.lib.tg_reset_counters()
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    native.publish(None, dtype=0)
    frontend.on_miss = None  # must not be reached: the plan says what to do
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (0, 2)


BOX = dict(a_layout=0, b_layout=0, c_layout=0, symmetric=0, m_lo=4, m_hi=8, n_lo=5, n_hi=9, k_lo=6, k_hi=10,
           batch_lo=2, batch_hi=3, work_lo=200.0, work_hi=500.0)
INSIDE = dict(m=6, n=7, k=8, batch=2)


@pytest.mark.parametrize(
    "change, inside",
    [({}, True), (dict(m=4), True), (dict(m=3), False), (dict(m=9), False), (dict(n=9, m=4), True),
     (dict(n=10), False), (dict(n=4), False), (dict(k=10), True), (dict(k=11), False), (dict(k=5), False),
     (dict(batch=3), True),
     (dict(batch=1), False), (dict(batch=4), False), (dict(m=8, n=9), False), (dict(m=4, n=5, k=6), False),
     (dict(a_layout=1), False), (dict(b_layout=2), False), (dict(c_layout=2), False),
     (dict(symmetric=1), False), (dict(dtype=1), False), (dict(op=1), False), (dict(transposed=1), True)],
)
def test_plan_serves_what_is_inside_its_box(native, change, inside):
    identity = native.publish(None, **BOX)
    assert native.lib.tg_lookup(native.problem(**{**INSIDE, **change})) == (identity if inside else -1)


def test_any_layout(native):
    identity = native.publish(None, **{**BOX, "b_layout": -1, "symmetric": -1})
    assert native.lib.tg_lookup(native.problem(**INSIDE, b_layout=2, symmetric=1)) == identity
    assert native.lib.tg_lookup(native.problem(**INSIDE, a_layout=1)) == -1


def test_work_bounds_do_not_overflow(native):
    identity = native.publish(None, work_lo=1e30)
    assert native.lib.tg_lookup(native.problem(m=2**40, n=2**40, k=2**40)) == identity
    assert native.lib.tg_lookup(native.problem(m=2**10, n=2**10, k=2**10)) == -1


def test_bad_plans_and_problems_are_refused(native):
    assert native.lib.tg_publish(native.plan(None, dtype=native.lib.TG_NDTYPES)) == -1
    assert native.lib.tg_publish(native.plan(None, op=-1)) == -1
    assert native.lib.tg_lookup(native.problem(dtype=native.lib.TG_NDTYPES)) == -1
    assert native.lib.tg_served(99) == native.lib.tg_declined(99) == 0


def test_unpublish_and_clear(native):
    ids = [native.publish(None, m_lo=m, m_hi=m) for m in range(5)]
    find = [lambda m=m: native.lib.tg_lookup(native.problem(m=m)) for m in range(5)]
    native.lib.tg_unpublish(ids[1])
    native.lib.tg_unpublish(12345)
    assert [f() for f in find] == [ids[0], -1, *ids[2:]]
    again = native.publish(None, m_lo=1, m_hi=1)
    assert find[1]() == again and find[4]() == ids[4]
    native.lib.tg_clear_plans()
    assert [f() for f in find] == [-1] * 5


def test_full_table_forgets_the_oldest(native):
    ids = [native.publish(None, m_lo=m, m_hi=m) for m in range(262)]
    found = [native.lib.tg_lookup(native.problem(m=m)) for m in range(262)]
    assert found == [-1] * 6 + ids[6:]
    again = native.publish(None, m_lo=0, m_hi=0)
    assert native.lib.tg_lookup(native.problem(m=0)) == again
    assert native.lib.tg_lookup(native.problem(m=6)) == -1


def test_publishing_again_takes_no_second_slot(native):
    for _ in range(100):
        native.publish(None, m_lo=1, m_hi=1, id=7)
    others = [native.publish(None, m_lo=m, m_hi=m) for m in range(2, 257)]
    assert native.lib.tg_lookup(native.problem(m=1)) == 7
    assert [native.lib.tg_lookup(native.problem(m=m)) for m in range(2, 257)] == others


# -- misses


def test_miss_publishes_and_is_looked_up_again(native):
    calls = []

    def on_miss(p):
        calls.append(p.m)
        native.publish(native.kernel("plain_float32"), m_hi=p.m)
        return 1

    frontend.on_miss = on_miss
    native.lib.tg_reset_counters()
    a = whole_numbers((5, 5), "f")
    for _ in range(3):
        np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert calls == [5]
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (3, 0)


def test_miss_that_publishes_nothing_declines(native):
    frontend.on_miss = lambda p: 1
    a = whole_numbers((5, 5), "f")
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))


def test_products_inside_a_miss_decline(native):
    depth = []

    def on_miss(p):
        depth.append(p.m)
        a = np.ones((3, 3), "f")
        np.testing.assert_array_equal(matmul(a, a), np.full((3, 3), 3))
        return 0

    frontend.on_miss = on_miss
    matmul(np.ones((2, 2), "f"), np.ones((2, 2), "f"))
    assert depth == [2]


def test_miss_without_the_gil(native):
    frontend.on_miss = lambda p: native.publish(native.kernel("plain_float32")) > 0
    a = whole_numbers((100, 100), "f")  # more than 500 results: NumPy releases the GIL
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert native.lib.tg_lookup(native.problem()) != -1


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(3)])
def test_exception_in_a_miss_is_logged(native, caplog, capfd, error):
    def on_miss(p):
        raise error

    frontend.on_miss = on_miss
    a = whole_numbers((5, 5), "f")
    with caplog.at_level("WARNING", "tvmgemm"):
        np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert len(caplog.records) == 1
    assert "NumPy computes it" in caplog.text and type(error).__name__ in caplog.text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ignored", [False, True], ids=["as it is", "SIGINT ignored"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), TimeoutError("too late")], ids=repr)
def test_what_a_signal_raises_in_a_miss_is_not_lost(native, error, ignored):
    """Ctrl-C, a handler of SIGTERM that exits, a time limit of the program's."""

    def handler(number, frame):
        raise error

    def on_miss(p):
        signal.raise_signal(signal.SIGALRM)

    frontend.on_miss = on_miss
    a, result = whole_numbers((5, 5), "f"), None
    before = signal.signal(signal.SIGALRM, handler), signal.getsignal(signal.SIGINT)
    try:
        if ignored:  # as in a shell's background job
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(type(error)) as raised:
            result = matmul(a, a)
            for _ in range(1000):
                pass
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert raised.value is error
    assert result is None or (result == np.matmul(a, a)).all()
    np.testing.assert_array_equal(np.matmul(a, a), a @ a)  # nothing is raised again


def test_miss_leaves_no_floating_point_flags(native):
    def on_miss(p):
        with np.errstate(all="ignore"):
            np.float64(1e308) * np.float64(1e308) + np.float64(0) / np.float64(0)
        return 0

    frontend.on_miss = on_miss
    with np.errstate(all="raise"):
        matmul(np.ones((2, 2)), np.ones((2, 2)))
        native.publish(native.kernel("plain_float64"), dtype=1)
        matmul(np.ones((2, 2)), np.ones((2, 2)))


def test_kernel_flags_reach_errstate(served):
    if np.dtype(served.name).kind in "fc":
        big = np.full((2, 2), np.finfo(served.name).max, served.name)
        with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered in matmul"):
            matmul(big, big)
    with np.errstate(all="raise"):
        matmul(np.ones((2, 2), served.name), np.ones((2, 2), served.name))


def test_no_callback_while_the_interpreter_ends(native):
    program = """if True:
        import numpy as np
        from tvmgemm import frontend, problem
        frontend.on_miss = lambda p: print("asked") or 0
        class Last:
            def __del__(self, matmul=frontend.matmul, a=np.ones((2, 2))):
                print(matmul(a, a)[0, 0])
        import sys
        sys.last_of_all = Last()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split() in (["2.0"], [])


# -- kernels


def load(native, path, symbol):
    error = native.ffi.new("char[400]")
    kernel = native.lib.tg_kernel_load(str(path).encode(), symbol.encode(), b"a name", error, 400)
    return kernel, native.ffi.string(error).decode()


def test_load_errors_say_what_is_wrong(native, tmp_path):
    kernel, error = load(native, tmp_path / "absent.so", "f")
    assert not kernel and "absent.so" in error
    (tmp_path / "text.so").write_text("not a library")
    kernel, error = load(native, tmp_path / "text.so", "f")
    assert not kernel and "text.so" in error
    kernel, error = load(native, tvmgemm._native.__file__, "no_such_kernel")
    assert not kernel and "no_such_kernel" in error
    kernel, error = load(native, tvmgemm._native.__file__, "x" * 600)
    assert not kernel and len(error) < 400


def test_same_function_is_one_kernel_and_has_a_name(native):
    kernel = native.kernel("plain_float32")
    native.kernel.cache_clear()
    assert native.kernel("plain_float32") == kernel
    assert native.ffi.string(native.lib.tg_kernel_name(kernel)) == b"plain_float32"


def test_counters(native):
    kernels = [native.kernel(name) for name in ("plain_float32", "packing_float32", "plain_float64")]
    native.publish(kernels[0], m_hi=4)
    native.publish(kernels[0], m_lo=5, m_hi=6)
    native.publish(kernels[1], m_lo=7)
    native.publish(kernels[2], dtype=1)
    native.lib.tg_reset_counters()
    for m in (3, 5, 5, 8):
        matmul(np.ones((m, 3), "f"), np.ones((3, 2), "f"))
    matmul(np.ones((6, 3, 3)), np.ones((3, 2)))
    count = [native.lib.tg_kernel_calls(kernel) for kernel in kernels]
    assert count == [3, 1, 1]  # a batch is one inner-loop call
    assert [native.lib.tg_served(d) for d in (0, 1)] == [4, 1]
    native.lib.tg_clear_plans()  # counts survive: they tell what happened
    assert [native.lib.tg_kernel_calls(kernel) for kernel in kernels] == count
    native.lib.tg_reset_counters()
    assert [native.lib.tg_served(d) for d in (0, 1)] == [0, 0]


def test_workspace_is_aligned_kept_and_released(native):
    native.publish(native.kernel("packing_float32"))
    native.lib.tg_release_scratch()
    assert native.lib.tg_scratch_bytes() == 0
    for m, k in ((3, 5), (40, 50), (300, 200), (3, 5)):
        a, b = whole_numbers((2, m, k), "f", 1), whole_numbers((2, k, 4), "f", 2)
        np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    assert 300 * 200 * 4 <= native.lib.tg_scratch_bytes() < 2 * 300 * 200 * 4
    native.lib.tg_release_scratch()
    assert native.lib.tg_scratch_bytes() == 0
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))


def test_scratch_belongs_to_its_thread_and_very_large_is_not_kept(native):
    native.publish(native.kernel("packing_float32"))
    native.lib.tg_release_scratch()
    sizes = []

    def work():
        matmul(np.ones((100, 100), "f"), np.ones((100, 2), "f"))
        sizes.append(native.lib.tg_scratch_bytes())
        matmul(np.ones((1000, 20000), "f"), np.ones((20000, 1), "f"))
        sizes.append(native.lib.tg_scratch_bytes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sizes[0] >= 40000 and sizes[1] == 0
    assert native.lib.tg_scratch_bytes() == 0


@pytest.mark.parametrize("kernel, mc", [("failing", 0), ("empty", 1), ("empty", 2)])
def test_failures_fall_back_to_numpy(native, kernel, mc):
    """The kernel fails, there is no memory for its work space, or the work space function fails."""
    native.publish(native.kernel(f"{kernel}_float32"), mc=mc)
    native.lib.tg_reset_counters()
    a = whole_numbers((3, 5, 5), "f")
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (0, 1)


# -- host and build


def test_cpu_features(native):
    out = native.ffi.new("char[4000]")
    length = native.lib.tg_cpu_features(out, 4000)
    names = native.ffi.string(out).decode().split()
    assert len(" ".join(names)) == length and len(set(names)) == len(names)
    assert native.lib.tg_cpu_features(native.ffi.NULL, 0) == length
    short = native.ffi.new("char[5]")
    assert native.lib.tg_cpu_features(short, 5) == length and len(native.ffi.string(short)) == min(4, length)
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith(("flags", "Features")):
            assert names and set(names) <= set(line.split(":")[1].split())


@pytest.mark.parametrize("file", sorted(path.name for path in NATIVE.glob("*.c")))
def test_c_compiles_without_warnings(file):
    include = [sysconfig.get_paths()["include"], np.get_include()]
    if not os.path.exists(os.path.join(include[0], "Python.h")):
        pytest.skip("needs Python's headers")
    subprocess.run(
        [compiler(), "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror",
         "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION", "-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION",
         "-c", "-o", os.devnull, *(f"-isystem{folder}" for folder in include), str(NATIVE / file)],
        check=True, timeout=60,
    )
