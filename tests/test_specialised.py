"""Kernels for one small shape: their results, and how the store has them. (When they are built: ``test_hot_shapes``.)"""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from arrays import stacks
from equivalence import FLOATS, RUNNABLE, Layout, assert_close, assert_same_bits, fill, lay_out, planned

import tvmgemm
from tvmgemm import dispatch, kernels, planner, settings, sharing, trial
from tvmgemm.family.members import shape_member
from tvmgemm.family.tiles import SHAPED_DTYPES
from tvmgemm.host import host
from tvmgemm.problem import DTYPES

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
@pytest.mark.parametrize("cap", [None, *(pytest.param(cap, marks=pytest.mark.slow) for cap in ("x86-64-v3", "x86-64-v2"))])
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


def test_a_product_that_is_left_to_numpy_gets_the_stored_kernel_once_it_is_hot(folder):
    """Dot products are BLAS's. Their first one does not open the store; one that comes a million times is worth a look."""
    a, b = stacks(100, (1, 1, 1))
    with planned(cache_dir=folder):
        assert not dispatch._announced and not tvmgemm.explain(a, b).served
        dispatch.lib.tg_set_served(DTYPES["float32"].native_id, 1, 1, 1, planner.HOT_PRODUCTS - 50)
        tvmgemm.matmul(a, b)
        assert tvmgemm.explain(a, b).shape == (1, 1, 1) and dispatch._announced


def test_store_entries_of_another_generator_are_not_used(folder, tmp_path):
    from tvmgemm.shapes import stored

    store = kernels.store_in(folder)
    found = stored(store, host().arch)
    assert {spec.shape for spec in found} == set(SHAPES) and {spec.dtype for spec in found} == set(FLOATS)
    with mock.patch.object(store, "names", lambda part: [(name, "0" * 16) for name in (next(iter(found)).name, "nonsense")]):
        assert stored(store, host().arch) == set()
    assert not stored(store, "another machine") and {DTYPES[spec.dtype].c_size for spec in found} == {4, 8}
