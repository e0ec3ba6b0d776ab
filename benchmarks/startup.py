"""The ``startup`` suite: what a program pays before its first product, in processes of their own."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tvmgemm.cli import first_call
from tvmgemm.timing import ratio

from . import report
from .runner import Row
from .suite import Case, Conditions, Suite, product

#: Importing tvmgemm may take so long (seconds) in a program that imports NumPy anyway.
IMPORT_LIMIT = 0.050

#: Processes per measurement; the first call ever builds a kernel each time, so fewer of those.
RUNS = {"quick": 3, "usual": 7, "full": 15}
FIRST_RUNS = {"quick": 1, "usual": 3, "full": 5}


def cases(dtype: str, extent: str) -> Iterator[Case]:
    """The product whose first call is measured."""
    yield product(512, 512, 512)


def measure(suite: Suite, case: Case, dtype: str, conditions: Conditions) -> Iterator[Row]:
    """Import and first calls of one case.

    The *first call ever* has an empty cache folder and builds its kernel. The *second process* finds it
    there; its partner in every round is a process that calls NumPy's matmul. Both find Python's bytecode on disk, as
    programs do that pip installed.
    """
    (m, k), n = case.a, case.b[1]
    threads, extent = conditions.threads, conditions.extent
    limits = dict.fromkeys(("TVMGEMM_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    run = partial(first_call.measure, dtype=dtype, m=m, n=n, k=k)
    row = partial(Row, suite=suite.name, dtype=dtype, threads=threads)

    first = _first_calls(run, limits, FIRST_RUNS[extent])
    yield row(
        case=f"first call ever ({case.label})",
        entry="matmul",
        peer=None,
        seconds=statistics.median(facts["first_call"] for facts in first),
        served=all(facts["served"] for facts in first),
        plan=f"{first[0]['builds']} built",
    )
    ours, theirs = _later_processes(run, limits, RUNS[extent])
    compiled = sum(facts["builds"] for facts in ours)
    imported = "tvm imported" if any(facts["tvm"] for facts in ours) else "tvm not imported"
    yield row(
        case=f"second process ({case.label})",
        entry="matmul",
        peer="numpy",
        served=all(facts["served"] for facts in ours),
        plan=f"{compiled} built, {imported}",
        **_medians([facts["first_call"] for facts in ours], [facts["first_call"] for facts in theirs]),
    )
    yield row(
        case="import tvmgemm, over import numpy",
        entry="import",
        peer="numpy",
        limit=IMPORT_LIMIT,
        plan=imported,
        **_medians([facts["import"] for facts in ours], [facts["import_numpy"] for facts in theirs]),
    )


def _first_calls(run: Callable, limits: dict[str, str], runs: int) -> list[dict]:
    """What processes say that find an empty cache folder."""
    said = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as kernels:
            said.append(run("tvmgemm", environment={**limits, "TVMGEMM_CACHE_DIR": kernels}))
    return said


def _later_processes(run: Callable, limits: dict[str, str], runs: int) -> tuple[list[dict], list[dict]]:
    """What processes say that find kernels and bytecode on disk, and NumPy's in turn with them."""
    with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryDirectory() as bytecode:
        written = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        environment = {**limits, **written, "TVMGEMM_CACHE_DIR": kernels}
        run("tvmgemm", environment=environment)  # fills the folders
        ours: list[dict] = []
        theirs: list[dict] = []
        for turn in range(runs):
            pair = [("tvmgemm", ours), ("numpy", theirs)]
            for library, results in pair if turn % 2 else pair[::-1]:
                results.append(run(library, environment=environment))
    return ours, theirs


def _medians(seconds: list[float], peer_seconds: list[float]) -> dict:
    """The fields of a row that say how long it took."""
    return {
        "seconds": statistics.median(seconds),
        "peer_seconds": statistics.median(peer_seconds),
        "ratio": ratio(peer_seconds, seconds),
    }


#: A mean over an import and a first call says nothing.
VIEW = replace(report.PAIRED, summary=lambda rows: [])
