"""The machine and the state it is in: what a reader needs before believing a number."""

from __future__ import annotations

import os
import platform

#: Above this load average per core, somebody else is using the machine.
BUSY = 0.5


def describe() -> dict[str, object]:
    """CPU, instruction set, caches, cores, operating system and load average, ready for JSON."""
    from tvmgemm.host import host
    from tvmgemm.settings import current

    machine = host()
    isa = machine.isa(current().max_isa)
    return {
        "cpu": machine.model or machine.arch,
        "isa": isa.name if isa else None,
        "cores": machine.cores,
        "caches": [
            {"level": c.level, "bytes": c.bytes, "ways": c.ways, "line": c.line, "shared_by": c.shared_by}
            for c in machine.caches
        ],
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def busy(description: dict) -> bool:
    """Whether the machine was in use by others when it was described."""
    return description["load_average"][0] > BUSY * description["cores"]
