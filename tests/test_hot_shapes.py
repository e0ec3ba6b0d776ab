"""Kernels for one small shape: when they are built, and which plans they have."""

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
from arrays import stacks
from equivalence import RUNNABLE, assert_same_bits, forget_plans

import tvmgemm
from tvmgemm import dispatch, kernels, planner
from tvmgemm.boxes import Box
from tvmgemm.family.members import shape_member
from tvmgemm.family.validity import check
from tvmgemm.host import host
from tvmgemm.planner import plan, shape_spec
from tvmgemm.problem import Problem
from tvmgemm.settings import Options
from tvmgemm.spec import KernelSpec


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


def test_nothing_to_add_up_is_not_a_small_shape(asked):
    for shape in ((4, 4, 0), (0, 4, 4), (4, 0, 4)):
        a, b = stacks(5000, shape)
        assert not tvmgemm.matmul(a, b).any()
    assert not asked


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
     ({"m": 16, "n": 16, "k": 16}, {}), ({"m": 16, "n": 1, "k": 16}, {}), ({"k": 0}, {}), ({"dtype": "float16"}, {}),
     ({"dtype": "int64", "m": 16, "n": 4, "k": 16}, {}),
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
