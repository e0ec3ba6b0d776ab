"""From a product to an entry to the call: what tuning finds decides the call that it was found for, whoever wins."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import RUNNABLE
from tuning import own_cache, use

import tvmgemm
from tvmgemm import dispatch, trial, tuned, tuner
from tvmgemm.product import Product

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

# fmt: off
PRODUCTS = [
    # One of BLAS's small products, one that is none, one with exchanged operands (float64) and one without.
    *((Product(dtype, *size, layouts=layouts), 1) for dtype, size, layouts in [
        ("float32", (60, 60, 60), "rr"), ("float32", (60, 60, 60), "rc"), ("float32", (20, 20, 20), "cr"),
        ("float32", (150, 150, 150), "rc"), ("float64", (4, 700, 100), "rc"), ("float32", (4, 700, 100), "rc"),
        ("float32", (2, 90, 60), "rc"),
    ]),
    # Vectors, whichever way round they are computed.
    *((Product("float32", *size, layouts=layouts), 1) for size, layouts in [
        ((1, 500, 300), "rr"), ((1, 500, 300), "rc"), ((500, 1, 300), "cr"), ((1, 1, 300), "rr"), ((300, 40, 1), "rr"),
    ]),
    # Stacks, which are shared out or not, or one product; a small shape that no kernel is for alone.
    (Product("float32", 12, 16, 8, layouts="rc"), 1),
    (Product("float32", 20, 20, 20, batch=300), 2), (Product("float32", 20, 20, 20, batch=3, layouts="rc"), 1),
    (Product("float32", 300, 300, 300), 2), (Product("float32", 1, 40, 30, batch=50), 1),
    # Other operations and dtypes.
    (Product("float32", 60, 60, 60, op="gemm"), 1), (Product("float64", 4, 700, 100, op="gemm", layouts="rc"), 1),
    (Product("int8", 70, 70, 70), 1), (Product("int8-int32", 70, 70, 70, layouts="rc"), 1), (Product("float16", 60, 60, 60), 1),
    (Product("bfloat16-float32", 100, 100, 100), 1), (Product("bfloat16", 100, 100, 100, batch=3), 1), (Product("complex64", 60, 60, 60), 1),
]
# fmt: on


def last_wins(kernels, ours, numpys, seconds, threads):
    """Times by which the last member wins, and the planner's choice comes last."""
    planned = kernels.get(tuner.TWIN)
    samples = {name: [2.0 if kernel is planned else 1.0 / (1 + i)] * 9 for i, (name, kernel) in enumerate(kernels.items())}
    return samples | ({} if numpys is None else {trial.NUMPY: [3.0] * 9})


def numpy_wins(kernels, ours, numpys, seconds, threads):
    return dict.fromkeys(kernels, [2.0] * 9) | ({} if numpys is None else {trial.NUMPY: [1.0] * 9})


@pytest.mark.parametrize("wins", [last_wins, numpy_wins])
@pytest.mark.parametrize("product, threads", PRODUCTS, ids=str)
def test_an_entry_decides_its_own_call(product, threads, wins, tmp_path, monkeypatch):
    if "bfloat16" in product.dtype:
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(trial, "interleaved", wins)
    monkeypatch.setattr(tuner, "MEMBERS", 2)
    monkeypatch.setattr(tuner, "_HOPELESS", np.inf)
    entry = tuner.tune(product, threads, 10.0)
    if wins is last_wins:
        assert entry.winner == tuned.MEMBER
    with own_cache(tmp_path) as store, tvmgemm.options(num_threads=threads):
        use(store, entry)
        decided, kernel = dispatch.decide(product.problem())
        assert decided.tuned == (entry.winner != tuned.PLANNER)
        if decided.tuned:
            assert decided.reason == entry.reason and (kernel is None) == (entry.winner == tuned.NUMPY)
            assert (decided.spec, decided.tasks, decided.shares_stack) == (entry.spec, entry.tasks, entry.shares_stack)
        else:
            assert entry.over == said_of(decided)
        calls_are_served_so(product, decided)


def said_of(decided):
    return trial.name_of(decided.spec, decided.blocks, decided.shares_stack) if decided.served else trial.NUMPY


def calls_are_served_so(product, decided):
    a, b, c = product.operands()
    if product.op == "matmul":
        alike = product.elements.a == product.elements.c != "bfloat16"
        told = tvmgemm.explain(a, b) if alike else tvmgemm.explain(a, b, c.dtype)
        assert (told.tuned, told.reason) == (decided.tuned, decided.reason)
    if decided.served:
        before = tvmgemm.stats().kernels.get(decided.spec.name, 0)
        product.call(a, b, c)()
        assert tvmgemm.stats().kernels[decided.spec.name] == before + 1


def test_a_small_shape_gets_its_own_kernel(tmp_path):
    """It serves before all entries, so there is nothing to measure."""
    with own_cache(tmp_path) as store:
        for batch in (1, 1000):
            product = Product("float32", 6, 5, 4, batch=batch)
            entry = tuner.tune(product, 1, 10.0)
            use(store, entry)
            assert (entry.winner, entry.over) == (tuned.PLANNER, "specialised for 6x5x4")
            decided, _ = dispatch.decide(product.problem())
            assert decided.spec.shape == (6, 5, 4) and said_of(decided) == entry.over
            calls_are_served_so(product, decided)


@pytest.mark.parametrize("dtype, many", [("float32", True), ("complex128", True), ("int32", False), ("int8-int32", False)])
def test_numpy_takes_part_where_it_has_blas(dtype, many, monkeypatch):
    asked = []
    monkeypatch.setattr(trial, "interleaved", lambda kernels, ours, numpys, *rest: asked.append(numpys) or numpy_wins(kernels, ours, numpys, *rest))
    monkeypatch.setattr(tuner, "_HOPELESS", np.inf)
    monkeypatch.setattr(tuner, "MEMBERS", 2)
    for op in ("matmul", "gemm"):
        product = Product(dtype, 60, 60, 60, op=op)
        if product.objection is None:
            tuner.tune(product, 1, 1.0)
            assert all((numpys is not None) == (many and op == "matmul") for numpys in asked) and asked
            asked.clear()
