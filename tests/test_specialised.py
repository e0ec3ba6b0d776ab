"""Kernels for one small shape: their results, and when they are built, found and used."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
from equivalence import FLOATS, RUNNABLE, Layout, assert_close, assert_same_bits, fill, forget_plans, lay_out, planned

import tvmgemm
from tvmgemm import dispatch, kernels, planner, settings, sharing, trial
from tvmgemm.family.members import shape_member
from tvmgemm.family.tiles import SHAPED_DTYPES
from tvmgemm.family.validity import check
from tvmgemm.host import host
from tvmgemm.planner import Box, plan, shape_spec
from tvmgemm.problem import DTYPES, Problem
from tvmgemm.settings import Options
from tvmgemm.spec import KernelSpec

#: Whole vectors and parts of all kinds, one row, one column, one step, several tiles, the largest of each size.
SHAPES = [
    (4, 4, 4), (3, 3, 3), (3, 1, 3), (8, 1, 8), (1, 4, 5), (1, 1, 1), (2, 7, 16), (8, 8, 8), (16, 9, 5), (5, 16, 2),
    (11, 13, 12), (7, 15, 1), (16, 1, 4), (6, 5, 7),
]  # fmt: skip

every_dtype = pytest.mark.parametrize("dtype", FLOATS)

A_LAYOUTS = {
    "row": Layout((0, 1, 2), (1, 1, 1), (0, 0, 0)),
    "col": Layout((0, 2, 1), (1, 1, 1), (0, 0, 0)),
    "gaps": Layout((0, 1, 2), (-1, 2, 3), (1, 5, 0), start=3),
    "backwards": Layout((2, 0, 1), (1, -1, -1), (0, 0, 2)),
    "repeated": Layout((0, 1, 2), (1, 0, 1), (0, 0, 0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with the kernels of all SHAPES, and others as they are needed."""
    path = str(tmp_path_factory.mktemp("kernels"))
    with tvmgemm.options(cache_dir=path):
        trial.load([shape_member(dtype, isa, s) for dtype in FLOATS for isa in RUNNABLE for s in SHAPES])
        dispatch._shapes.cache_clear()
    return path


@pytest.fixture
def asked(tmp_path):
    """An empty store, shapes that are hot after 1000 products, and the builds that were asked for instead of begun."""
    begun = []
    with (
        mock.patch.object(planner, "HOT_PRODUCTS", 1000),
        mock.patch.object(dispatch, "HOT_PRODUCTS", 1000),
        mock.patch.object(dispatch, "_shapes_built", 0),
        mock.patch.object(dispatch, "_shapes", lambda cache_dir: set()),
        tvmgemm.options(num_threads=1),
    ):
        forget_plans()
        tvmgemm.matmul(np.ones((2, 5, 5), "f"), np.ones((2, 5, 5), "f"))  # what serves until then is built
        build = kernels.start_build
        record = lambda specs: begun.append(specs) if specs[0].shape else build(specs)  # noqa: E731
        with mock.patch.object(kernels, "start_build", record):
            yield begun
    dispatch._hot.clear()
    forget_plans()


def test_a_product_that_is_left_to_numpy_gets_the_stored_kernel_once_it_is_hot(folder):
    """Dot products are BLAS's. Their first one does not open the store; one that comes a million times is worth a look."""
    a, b = stacks(100, (1, 1, 1))
    with planned(cache_dir=folder):
        assert not dispatch._announced and not tvmgemm.explain(a, b).served
        dispatch.lib.tg_set_served(DTYPES["float32"].native_id, 1, 1, 1, planner.HOT_PRODUCTS - 50)
        tvmgemm.matmul(a, b)
        assert tvmgemm.explain(a, b).shape == (1, 1, 1) and dispatch._announced


def stacks(n: int, shape, dtype="float32"):
    m, columns, k = shape
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, m, k)).astype(dtype), rng.standard_normal((n, k, columns)).astype(dtype)


# -- results


@every_dtype
@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_as_the_kernels_for_all_shapes(folder, dtype, isa, shape):
    m, n, k = shape
    rng = np.random.default_rng(m)
    gaps = Layout((0, 1, 2), (1, 1, 1), (2, 3, 0), start=1)
    dense = A_LAYOUTS["row"]
    for (name, layout), rest, threads in itertools.product(A_LAYOUTS.items(), (dense, gaps), (1, 2)):
        if 1 in (m, n) and name != "row":
            continue  # the inner loop makes a row of a column, or a column of a row, where that suits the matrix
        a, b = lay_out((5, m, k), dtype, layout), lay_out((5, k, n), dtype, rest)
        c, d = lay_out((5, m, n), dtype, rest), lay_out((5, m, n), dtype, rest)
        fill(a.view, rng)
        fill(b.view, rng)
        outside = c.outside()
        keywords = {"max_isa": isa, "cache_dir": folder, "num_threads": threads}
        with planned(**keywords), mock.patch.object(sharing, "PARALLEL_WORK", 1):
            dispatch._announce(settings.current())
            told = tvmgemm.explain(a.view, b.view)
            assert told.shape == shape and told.isa == isa and told.kernel.startswith(f"matmul-{dtype}-shape-"), name
            before = tvmgemm.stats().kernels.get(told.kernel, 0)
            tvmgemm.matmul(a.view, b.view, out=c.view)
            tvmgemm.matmul(a.view[:1], b.view[:1], out=d.view[:1])
            assert tvmgemm.stats().kernels[told.kernel] == before + 2
        np.testing.assert_array_equal(c.outside(), outside)
        assert_same_bits(c.view[:1], d.view[:1])
        assert_close(c.view, a.view, b.view)
        with planned(variant="B3A2C0", **keywords):
            assert tvmgemm.explain(a.view, b.view).shape is None
            assert_same_bits(c.view, tvmgemm.matmul(a.view, b.view))


INTEGERS = [dtype for dtype in SHAPED_DTYPES if dtype not in FLOATS]
OFTEN = ("int8", "uint16", "int64")


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d in OFTEN else pytest.mark.slow) for d in INTEGERS])
@pytest.mark.parametrize("cap", [None, pytest.param("x86-64-v3", marks=pytest.mark.slow), pytest.param("x86-64-v2", marks=pytest.mark.slow)])
def test_integers_wrap(tmp_path, dtype, cap):
    """Over their whole range, in any layout of A, with nothing written beside C."""
    isa, rng = host().isa(cap, dtype).name, np.random.default_rng(7)
    shapes = [(4, 4, 4), (3, 1, 3), (1, 5, 7), (16, 9, 3), (2, 16, 16)]
    with tvmgemm.options(cache_dir=str(tmp_path)):
        trial.load([shape_member(dtype, isa, shape) for shape in shapes])
        dispatch._shapes.cache_clear()
    for (m, n, k), (name, layout) in itertools.product(shapes, A_LAYOUTS.items()):
        if 1 in (m, n) and name != "row":
            continue
        a, b = lay_out((5, m, k), dtype, layout, 77), lay_out((5, k, n), dtype, A_LAYOUTS["row"], 77)
        c = lay_out((5, m, n), dtype, Layout((0, 1, 2), (1, 1, 1), (2, 3, 0), start=1), 77)
        for x in (a, b):
            x.view[...] = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, x.view.shape, dtype, endpoint=True)
        outside = c.outside()
        with planned(max_isa=cap, cache_dir=str(tmp_path), num_threads=1):
            dispatch._announce(settings.current())
            told = tvmgemm.explain(a.view, b.view)
            assert told.shape == (m, n, k) and told.isa == isa, told
            before = tvmgemm.stats().kernels.get(told.kernel, 0)
            tvmgemm.matmul(a.view, b.view, out=c.view)
            assert tvmgemm.stats().kernels[told.kernel] == before + 1
        np.testing.assert_array_equal(c.outside(), outside)
        np.testing.assert_array_equal(c.view, np.matmul(a.view, b.view))


@every_dtype
@pytest.mark.parametrize("isa", RUNNABLE)
def test_no_flags_but_those_of_the_elements(folder, dtype, isa):
    """Masked lanes raise nothing; infinities are not invalid; sums of zeros are +0."""
    for shape in SHAPES:
        a, b = stacks(3, shape, dtype)
        a[1] = np.inf
        b[1] = 1
        a[2] = -0.0
        with planned(max_isa=isa, cache_dir=folder), np.errstate(all="raise"):
            dispatch._announce(settings.current())
            assert tvmgemm.explain(a, b).shape == shape
            c = tvmgemm.matmul(a, b)
        assert np.isposinf(c[1]).all() and not np.signbit(c[2]).any() and not c[2].any()


def test_out_that_is_an_input(folder):
    with planned(cache_dir=folder):
        a, b = stacks(50, (4, 4, 4))
        expected = tvmgemm.matmul(a, b)
        assert tvmgemm.explain(a, b).shape == (4, 4, 4)
        tvmgemm.matmul(a, b, out=a)
        assert_same_bits(a, expected)


def test_nothing_to_add_up_is_not_a_small_shape(asked):
    for shape in ((4, 4, 0), (0, 4, 4), (4, 0, 4)):
        a, b = stacks(5000, shape)
        assert not tvmgemm.matmul(a, b).any()
    assert not asked


# -- when they are built


def test_a_hot_shape_is_built_once_and_serves(tmp_path):
    """In the background: no call waits, and none differs."""
    a, b = stacks(600, (5, 6, 7))
    with (
        mock.patch.object(planner, "HOT_PRODUCTS", 1000),
        mock.patch.object(dispatch, "HOT_PRODUCTS", 1000),
        mock.patch.object(dispatch, "_shapes_built", 0),
        tvmgemm.options(cache_dir=str(tmp_path), num_threads=1),
    ):
        forget_plans()
        first = tvmgemm.matmul(a, b)
        assert tvmgemm.explain(a, b).shape is None and not kernels._under_way.keys() & dispatch._hot
        start = time.monotonic()
        while tvmgemm.explain(a, b).shape is None:
            assert_same_bits(tvmgemm.matmul(a, b), first)
            assert time.monotonic() - start < 60
            time.sleep(0.02)
        told = tvmgemm.explain(a, b)
        assert told.shape == (5, 6, 7) and "specialised for 5x6x7" in str(told) and "this shape alone" in told.reason
        assert_same_bits(tvmgemm.matmul(a, b), first)
        assert_same_bits(tvmgemm.matmul(a[0], b[0]), first[0])  # single products take it too
        assert tvmgemm.stats().kernels[told.kernel] >= 2 and dispatch._shapes_built == 1
        with tvmgemm.options(specialise="off"):
            assert tvmgemm.explain(a, b).shape is None
        with tvmgemm.options(jit="off"):  # after a change of options, without a count and without a build
            tvmgemm.matmul(*stacks(3, (5, 6, 8)))  # another shape gets the box's plan first
            tvmgemm.matmul(a, b)
            before = tvmgemm.stats().kernels[told.kernel]
            tvmgemm.matmul(a, b)
            assert tvmgemm.stats().kernels[told.kernel] == before + 1

    program = """if True:
        import numpy as np, tvmgemm, sys
        a, b = np.ones((9, 5, 7), "f"), np.ones((9, 7, 6), "f")
        assert (tvmgemm.matmul(a, b) == 7).all()
        print(*tvmgemm.stats().kernels, tvmgemm.stats().builds, "tvm" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TVMGEMM_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [told.kernel, "0", "False"], done.stderr


def test_count_of_products_decides(asked):
    a, b = stacks(333, (5, 5, 5))
    for _ in range(3):  # 999, and the first call of all, which had no plan yet, is not counted
        tvmgemm.matmul(a, b)
    assert not asked
    for _ in range(3):
        tvmgemm.matmul(a, b)
    assert [[s.shape for s in specs] for specs in asked] == [[(5, 5, 5)]]
    assert [spec.dtype for specs in asked for spec in specs] == ["float32"]


def test_number_of_builds_is_bounded(asked):
    with mock.patch.object(dispatch, "MOST_SHAPES_BUILT", 2):
        for m in range(2, 9):
            tvmgemm.matmul(*stacks(3000, (m, 5, 5)))
            tvmgemm.matmul(*stacks(3000, (m, 5, 5)))
    assert len(asked) == 2


def test_shapes_that_do_not_come_again_build_nothing(asked):
    for shape in itertools.product(range(1, 17, 3), repeat=3):
        tvmgemm.matmul(*stacks(300, shape))
    assert not asked


@pytest.mark.parametrize("forbidden", [{"jit": "off"}, {"specialise": "off"}, {"variant": "B3A2C0"}])
def test_options_that_forbid_it(asked, forbidden):
    with tvmgemm.options(**forbidden):
        for _ in range(3):
            tvmgemm.matmul(*stacks(3000, (5, 5, 5)))
    assert not asked


def test_layouts_and_sizes_that_have_no_such_kernel(asked):
    a, b = stacks(3000, (5, 5, 5))
    large, other = stacks(300, (17, 5, 5))
    for _ in range(5):
        tvmgemm.matmul(a, b.swapaxes(1, 2))
        tvmgemm.matmul(large, other)
        tvmgemm.matmul(a.reshape(-1, 5), b[0])
    assert not asked


def test_threads_ask_once(asked):
    a, b = stacks(100, (5, 5, 5))

    def work():
        for _ in range(200):
            tvmgemm.matmul(a, b)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_counts_anew_what_its_parent_builds(asked):
    for _ in range(2):
        tvmgemm.matmul(*stacks(3000, (5, 5, 5)))
    assert len(asked) == 1
    child = os.fork()
    if not child:
        asked.clear()
        tvmgemm.matmul(*stacks(900, (5, 5, 5)))
        early = len(asked)
        tvmgemm.matmul(*stacks(900, (5, 5, 5)))
        os._exit(10 * early + len(asked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


# -- plans


def spec_of(isa=RUNNABLE[-1], shape=(4, 4, 4), dtype="float32"):
    return shape_member(dtype, isa, shape)


def test_planner_puts_the_exact_shape_first():
    spec = spec_of(host().isa(None, "float32").name)
    options = Options(num_threads=2)
    for batch, shared in ((1, False), (4095, False), (4096, True)):
        decided = plan(Problem("float32", 4, 4, 4, batch), host(), options, (), {spec})
        assert decided.spec == spec and decided.shares_stack == shared and decided.tasks == (2 if shared else 1)
        assert (decided.box.m, decided.box.n, decided.box.k) == ((4, 4),) * 3
        assert decided.box.holds(Problem("float32", 4, 4, 4, batch)) and decided.reason
    assert plan(Problem("float32", 4, 4, 5), host(), options, (), {spec}).spec != spec
    assert plan(Problem("float32", 4, 4, 4), host(), options).spec != spec


@pytest.mark.parametrize(
    "problem, options",
    [({"op": "gemm"}, {}), ({"b_layout": "col"}, {}), ({"c_layout": "strided"}, {}), ({"m": 17}, {}),
     ({"m": 16, "n": 16, "k": 16}, {}), ({"m": 16, "n": 1, "k": 16}, {}), ({"k": 0}, {}), ({"dtype": "float16"}, {}), ({"dtype": "int64", "m": 16, "n": 4, "k": 16}, {}),
     ({}, {"specialise": "off"}), ({}, {"packing": "none"}), ({}, {"variant": "B3A2C0"}), ({}, {"parallel_loop": "ic"})],
)  # fmt: skip
def test_no_kernel_for_the_shape_alone(problem, options):
    asked_for = Problem(**{"dtype": "float32", "m": 4, "n": 4, "k": 4, **problem})
    assert shape_spec(asked_for, host(), Options(num_threads=1, **options)) is None


def test_specs_that_describe_no_kernel():
    for wrong in ((0, 4, 4), (4, 17, 4), (16, 1, 16)):
        with pytest.raises(ValueError, match=f"shape {wrong[0]}x{wrong[1]}x{wrong[2]}"):
            check(spec_of(shape=wrong))
    with pytest.raises(ValueError, match="bool"):
        check(spec_of(dtype="bool"))
    from dataclasses import replace

    with pytest.raises(ValueError, match="no other choices"):
        check(replace(spec_of(), op="gemm"))
    spec = spec_of()
    assert KernelSpec.from_dict(spec.to_dict()) == spec and spec.name.startswith("matmul-float32-shape-4x4x4-")


def test_other_boxes_are_not_cut_around_shapes():
    """A stream of small shapes needs few plans, however many shapes have kernels."""
    isa = host().isa(None, "float32").name
    shapes = {shape_member("float32", isa, s) for s in itertools.product(range(1, 17, 2), range(2, 17, 2), range(1, 9))}
    seen: list[Box] = []
    for m, n, k in itertools.product(range(1, 17), repeat=3):
        problem = Problem("float32", m, n, k)
        if shape_spec(problem, host(), Options()) not in shapes and not any(box.holds(problem) for box in seen):
            seen.append(plan(problem, host(), Options(), (), shapes).box)
    assert len(seen) < 16


def test_store_entries_of_another_generator_are_not_used(folder, tmp_path):
    from tvmgemm.shapes import stored

    store = kernels.store_in(folder)
    found = stored(store, host().arch)
    assert {spec.shape for spec in found} == set(SHAPES) and {spec.dtype for spec in found} == set(FLOATS)
    with mock.patch.object(store, "names", lambda part: [(name, "0" * 16) for name in (spec_of().name, "nonsense")]):
        assert stored(store, host().arch) == set()
    assert not stored(store, "another machine") and {DTYPES[spec.dtype].c_size for spec in found} == {4, 8}
