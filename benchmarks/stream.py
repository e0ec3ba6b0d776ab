"""The ``stream`` suite: products of shapes that the process has never seen, as a program without a pattern makes them.

Every round draws new shapes, and begins with an empty table of plans: what a miss costs is part of our time. Kernels
stay loaded; what loading and building them costs is the subject of ``startup``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

import tvmgemm
from tvmgemm import timing
from tvmgemm.trial import restore

from . import elements, runner
from .runner import Row
from .suite import Case, Conditions, Suite, product

#: Products per round, and the largest of m, n and k.
PRODUCTS, LARGEST = 1000, 200

#: Rounds at least and at most.
ROUNDS = (5, 15)


def cases(dtype: str, extent: str) -> Iterator[Case]:
    """One: sizes are drawn while it runs."""
    yield product(LARGEST, LARGEST, LARGEST, f"{PRODUCTS} random shapes up to this")


def draw(random: np.random.Generator, dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Operands of ``PRODUCTS`` products, no two of one shape."""
    shapes: dict[tuple[int, int, int], None] = {}
    while len(shapes) < PRODUCTS:
        shapes[tuple(int(size) for size in random.integers(1, LARGEST + 1, 3))] = None
    a, b, _ = elements.of(dtype)
    return [(elements.random(random, (m, k), a), elements.random(random, (k, n), b)) for m, n, k in shapes]


def total(multiply: Callable[[np.ndarray, np.ndarray], object], operands: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Seconds that all the products take."""
    start = time.perf_counter()
    for a, b in operands:
        multiply(a, b)
    return time.perf_counter() - start


def measure(suite: Suite, case: Case, dtype: str, conditions: Conditions) -> Iterator[Row]:
    """One row: our total over NumPy's, in rounds of new shapes."""
    random = np.random.default_rng(0)
    ours, theirs, flops = [], [], []
    with timing.thread_limit(conditions.threads):
        for _ in range(2):  # build and load the kernels, check the products
            for a, b in draw(random, dtype):
                runner.check(tvmgemm.matmul(a, b), elements.reference(a, b, dtype), a, b, f"{a.shape} by {b.shape}")
        timing.wait_for_builds()
        before, started = tvmgemm.stats(), time.perf_counter()
        for turn in range(ROUNDS[1]):
            if turn >= ROUNDS[0] and time.perf_counter() - started > 10 * conditions.seconds:
                break
            operands = draw(random, dtype)
            both = [(tvmgemm.matmul, ours), (np.matmul, theirs)]
            for multiply, samples in both if turn % 2 else both[::-1]:
                restore()
                if conditions.threads > 1:
                    timing.wait_until_idle()
                samples.append(total(multiply, operands))
            flops.append(sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in operands))
        after = tvmgemm.stats()
    calls = PRODUCTS * len(ours)
    declined = sum(after.declined.values()) - sum(before.declined.values())
    seconds = timing.median(ours)
    yield Row(
        suite=suite.name,
        case=case.label,
        dtype=dtype,
        threads=conditions.threads,
        entry="matmul",
        peer="numpy",
        seconds=seconds,
        peer_seconds=timing.median(theirs),
        ratio=timing.ratio(theirs, ours),
        flops=float(np.median(flops)),
        served=declined < calls / 2,
        plan=f"{100 * (1 - declined / calls):.0f} % by kernels of ours",
        target=suite.targets["numpy"],
    )
