"""From a product to an entry to the call: what tuning finds decides the call that it was found for, whoever wins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import RUNNABLE
from tuning import own_cache, use

import tvmgemm
from tvmgemm import dispatch, trial, tuned, tuner
from tvmgemm.blocking import blocks_of
from tvmgemm.host import host
from tvmgemm.planner import shape_spec
from tvmgemm.probe import problem_of
from tvmgemm.product import Product
from tvmgemm.settings import Options

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

#: One of BLAS's small products, one with exchanged operands, a vector that is turned round, a stack that is shared out, another
#: operation, other dtypes.
PRODUCTS = [
    (Product("float32", 60, 60, 60), 1), (Product("float64", 4, 700, 100, layouts="rc"), 1),
    (Product("float32", 1, 500, 300, layouts="rc"), 1), (Product("float32", 20, 20, 20, batch=300), 2),
    (Product("float32", 60, 60, 60, op="gemm"), 1), (Product("int8", 70, 70, 70), 1), (Product("bfloat16-float32", 100, 100, 100), 1),
]  # fmt: skip

SIZES = [
    (4, 700, 100), (2, 90, 60), (16, 100, 300), (60, 60, 60), (20, 20, 20), (150, 150, 150), (100, 100, 100), (12, 16, 8), (1, 500, 300),
    (500, 1, 300), (1, 1, 300), (300, 40, 1), (1, 40, 30), (700, 3, 60), (1000, 6, 5),
]  # fmt: skip


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


@pytest.mark.parametrize("layouts", ["rr", "rc", "cr", "cc"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "uint8-int8-int32"])
def test_an_entry_of_whatever_product_decides_its_own_call(dtype, layouts, tmp_path, monkeypatch):
    """As above for many more, with kernels that nobody builds: who would serve is known without them."""
    monkeypatch.setattr(trial, "interleaved", last_wins)
    monkeypatch.setattr(trial, "load", unbuilt)
    monkeypatch.setattr(trial.Kernel, "run", lambda kernel, call: np.zeros(1))
    monkeypatch.setattr(tuner, "_HOPELESS", np.inf)
    won = 0
    with own_cache(tmp_path) as store:
        for size, (batch, threads) in itertools.product(SIZES, [(1, 1), (3, 1), (600, 2)]):
            product = Product(dtype, *size, batch=batch, layouts=layouts)
            if product.bytes > 1 << 24 or shape_spec(product.problem(), host(), Options(num_threads=threads)):
                continue
            entry = tuner.tune(product, threads, 10.0)
            won += entry.winner == tuned.MEMBER
            use(store, entry)
            with tvmgemm.options(num_threads=threads, jit="off"):
                decided, _ = dispatch.decide(problem_of(product.call(*product.operands()))[0])
            assert decided.tuned == (entry.winner != tuned.PLANNER), product
            assert not decided.tuned or (decided.spec, decided.reason) == (entry.spec, entry.reason), product
    assert won > 15


def unbuilt(specs, tasks=1, progress=None):
    return {spec: trial.Kernel(spec, blocks_of(spec, host()), tasks if spec.parallel else 1, None) for spec in specs}


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


@pytest.mark.parametrize(
    "product, asked",
    [(Product("float32", 60, 60, 60), True), (Product("complex64", 60, 60, 60), True), (Product("int8", 70, 70, 70), False),
     (Product("float32", 60, 60, 60, op="gemm"), False)],
    ids=str,
)  # fmt: skip
def test_numpy_takes_part_where_it_has_blas(product, asked, monkeypatch):
    peers = []

    def noted(kernels, ours, numpys, seconds, threads):
        peers.append(numpys is not None)
        return numpy_wins(kernels, ours, numpys, seconds, threads)

    monkeypatch.setattr(trial, "interleaved", noted)
    monkeypatch.setattr(tuner, "_HOPELESS", np.inf)
    monkeypatch.setattr(tuner, "MEMBERS", 2)
    tuner.tune(product, 1, 1.0)
    assert peers == [asked, asked]
