"""The ``startup`` suite: what a program pays before its first product, in processes of their own."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
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

    first = []
    for _ in range(FIRST_RUNS[extent]):
        folder = tempfile.TemporaryDirectory()
        with folder as name:
            first.append(run("tvmgemm", environment={**limits, "TVMGEMM_CACHE_DIR": name}))
    yield row(
        case=f"first call ever ({case.label})",
        entry="matmul",
        peer=None,
        seconds=statistics.median(facts["first_call"] for facts in first),
        served=all(facts["served"] for facts in first),
        plan=f"{first[0]['builds']} built",
    )

    with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryDirectory() as bytecode:
        written = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        environment = {**limits, **written, "TVMGEMM_CACHE_DIR": kernels}
        run("tvmgemm", environment=environment)  # fills the folders
        ours, theirs = [], []
        for turn in range(RUNS[extent]):
            pair = [("tvmgemm", ours), ("numpy", theirs)]
            for library, results in pair if turn % 2 else pair[::-1]:
                results.append(run(library, environment=environment))

    def medians(name: str, peer_name: str) -> dict:
        seconds, peer_seconds = [facts[name] for facts in ours], [facts[peer_name] for facts in theirs]
        return {
            "seconds": statistics.median(seconds),
            "peer_seconds": statistics.median(peer_seconds),
            "ratio": ratio(peer_seconds, seconds),
        }

    compiled = sum(facts["builds"] for facts in ours)
    imported = "tvm imported" if any(facts["tvm"] for facts in ours) else "tvm not imported"
    yield row(
        case=f"second process ({case.label})",
        entry="matmul",
        peer="numpy",
        served=all(facts["served"] for facts in ours),
        plan=f"{compiled} built, {imported}",
        **medians("first_call", "first_call"),
    )
    yield row(
        case="import tvmgemm, over import numpy",
        entry="import",
        peer="numpy",
        limit=IMPORT_LIMIT,
        plan=imported,
        **medians("import", "import_numpy"),
    )


#: A mean over an import and a first call says nothing.
VIEW = replace(report.PAIRED, summary=lambda rows: [])
