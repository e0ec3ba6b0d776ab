"""The kernels for single small shapes that a store holds: which those are, read from the names of its entries."""

from __future__ import annotations

import re

from .family.isa import ISAS
from .family.members import shape_member
from .family.validity import check
from .spec import KernelSpec
from .store.files import Store
from .store.key import kernel_key

_NAME = re.compile(r"matmul-(?P<dtype>.+)-shape-(?P<shape>\d+x\d+x\d+)-(?P<isa>.+)")


def stored(store: Store, arch: str) -> set[KernelSpec]:
    """The specs of the entries that this package would build the same today, on an instruction set of ``arch``."""
    found = set()
    for name, key in store.names("-shape-"):
        parsed = _NAME.fullmatch(name)
        if parsed is None or parsed["isa"] not in ISAS or ISAS[parsed["isa"]].arch != arch:
            continue
        m, n, k = map(int, parsed["shape"].split("x"))
        spec = shape_member(parsed["dtype"], parsed["isa"], (m, n, k))
        try:
            check(spec)
        except ValueError:
            continue
        if kernel_key(spec).digest == key:
            found.add(spec)
    return found
