"""What the first product of a fresh process costs, measured in a process of its own.

``measure`` starts this file as a script; as a script it imports NumPy, then tvmgemm, multiplies twice, and
prints what it saw as JSON. The demo and the startup benchmark use it.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def measure(
    library: str, dtype: str, m: int, n: int, k: int, environment: Mapping[str, str] | None = None
) -> dict:
    """Seconds that a new process took: ``import_numpy``, ``import``, ``first_call``, ``second_call``.

    ``library`` is ``"tvmgemm"`` or ``"numpy"``: whose matmul multiplies (m x k) by (k x n). ``import`` is
    what importing it took after NumPy. Beside the seconds there are ``builds``: kernels compiled; ``tvm``:
    whether TVM was imported; ``served``: whether our kernel computed. ``environment`` is added to ours.
    RuntimeError if the process fails.
    """
    import json
    import os
    import subprocess

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    child = subprocess.run(
        [sys.executable, os.path.abspath(__file__), library, dtype, str(m), str(n), str(k)],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        raise RuntimeError(f"a second process failed with status {child.returncode}:\n{child.stderr}")
    return json.loads(child.stdout)


def main(argv: list[str]) -> None:
    """``argv`` = library, dtype, m, n, k; prints one JSON object."""
    library, dtype, m, n, k = argv[0], argv[1], *map(int, argv[2:])
    start = perf_counter()
    import numpy as np

    import_numpy = perf_counter() - start
    start = perf_counter()
    if library == "tvmgemm":
        import tvmgemm

        matmul = tvmgemm.matmul
    else:
        matmul = np.matmul
    import_library = perf_counter() - start
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    calls = []
    for _ in range(2):
        start = perf_counter()
        matmul(a, b)
        calls.append(perf_counter() - start)

    import json

    statistics = tvmgemm.stats() if library == "tvmgemm" else None
    facts = {
        "import_numpy": import_numpy,
        "import": import_library,
        "first_call": calls[0],
        "second_call": calls[1],
        "builds": statistics.builds if statistics else 0,
        "served": statistics is not None and sum(statistics.served.values()) == len(calls),
        "tvm": "tvm" in sys.modules,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are not what the measured program imports
    main(sys.argv[1:])
