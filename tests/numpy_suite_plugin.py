"""A pytest plugin for NumPy's own tests: puts tvmgemm in their way and writes down what came of it.

``TVMGEMM_SUITE`` says how: ``numpy`` not at all, ``attribute`` in place of ``np.matmul`` as the attribute
``matmul`` of test classes, ``patched`` inside ``np.matmul`` itself. ``TVMGEMM_SUITE_REPORT`` is the JSON file
that is written.
"""

from __future__ import annotations

import json
import os

import numpy as np

HOW = os.environ["TVMGEMM_SUITE"]
assert HOW in ("numpy", "attribute", "patched"), HOW
if HOW != "numpy":
    import tvmgemm

_outcomes: dict[str, str] = {}
_names: dict[str, str] = {}  # of tests, by pytest's id, which depends on the folder that it was started in
_replaced: set[str] = set()


def pytest_sessionstart(session) -> None:
    if HOW == "patched":
        tvmgemm.patch_numpy()


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        _names[item.nodeid] = f"{item.module.__name__.rpartition('.')[2]}::{item.nodeid.partition('::')[2]}"
    if HOW != "attribute":
        return
    for item in items:
        # Through the item: pytest may have imported the module under another name than ours.
        if getattr(getattr(item, "cls", None), "matmul", None) is np.matmul:
            _replaced.add(item.cls.__name__)
            item.cls.matmul = tvmgemm.matmul


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[_names[report.nodeid]] = (
            "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        )


def pytest_sessionfinish(session) -> None:
    found = {"outcomes": _outcomes, "replaced": sorted(_replaced)}
    if HOW != "numpy":
        stats = tvmgemm.stats()
        found |= {"served": stats.served, "declined": stats.declined, "kernels": stats.kernels}
        found["failed_builds"] = stats.failed_builds
    if HOW == "patched":
        found["still_patched"] = tvmgemm.is_patched()
    with open(os.environ["TVMGEMM_SUITE_REPORT"], "w", encoding="utf-8") as file:
        json.dump(found, file)
