"""Kernels of the other dtypes for CPUs that this machine need not have, in an emulator: Arm, and the narrow x86 levels.

The harness puts operands next to forbidden memory and looks after what lies around C and the workspace.
"""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from direct_kernels import stored
from element_kernels import assert_right, lay_out, numbers
from emulation import AARCH64, Kernels, aarch64, x86_64

from tvmgemm.family.arithmetic import WAYS
from tvmgemm.family.dot_products import COLUMNS
from tvmgemm.family.members import member
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

CPUS = {"armv8-neon": AARCH64, "armv8-dotprod": aarch64("neoverse-n1"), "x86-64-v2": x86_64("Nehalem")}
CPUS["x86-64-v3"] = x86_64("Haswell-noTSX")

#: What differs in code: sums of every kind, conversions, results that are rounded once.
DTYPES_HERE = ("int8", "int16", "int32", "int64", "uint8-int32", "bool", "float16", "bfloat16")

#: And where bytes of one sign are multiplied, of every pair of signs.
BYTES = ("int8", "uint8", "int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32")


def specs(isa: str) -> list[KernelSpec]:
    found = []
    for dtype in BYTES if isa == "armv8-dotprod" else DTYPES_HERE:
        if dtype in WAYS[isa]:
            found.append(member("B3A2C0", dtype, isa, parallel="ic"))
            found.append(member("B3A2C0", dtype, isa, packing="none"))
    return found


SPECS = [pytest.param(spec, id=spec.name) for isa in ("armv8-neon", "armv8-dotprod") for spec in specs(isa)]
SPECS += [
    pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for isa in ("x86-64-v2", "x86-64-v3") for spec in specs(isa)
]


@dataclass(frozen=True)
class Call:
    """What ``emulation.Kernels.run`` needs of a case: the message to the harness, C's buffer and its type."""

    message: bytes
    c: SimpleNamespace
    problem: SimpleNamespace
    operands: tuple[np.ndarray, np.ndarray]
    view: np.ndarray

    def result(self, buffer: np.ndarray) -> np.ndarray:
        """C in a buffer that came back."""
        offset = self.view.__array_interface__["data"][0] - self.c.buffer.__array_interface__["data"][0]
        return np.ndarray(self.view.shape, self.view.dtype, buffer.tobytes(), offset, self.view.strides)


def call(spec: KernelSpec, m: int, n: int, k: int, layouts: tuple[str, str, str], blocks: tuple[int, int, int], tasks: int) -> Call:
    row, rng = DTYPES[spec.dtype], np.random.default_rng(m + n + k)
    kinds, shapes = (row.a, row.b, row.c), ((m, k), (k, n), (m, n))
    views, buffers = zip(*(lay_out(numbers(kind, shape, rng), layout) for kind, shape, layout in zip(kinds, shapes, layouts)))
    places = [v.__array_interface__["data"][0] - b.__array_interface__["data"][0] for v, b in zip(views, buffers)]
    strides = [s // v.itemsize for v in views for s in v.strides]
    arguments = [m, n, k, *strides, *blocks, tasks, 1, 0, 0, 0]
    head = np.array([0, 0, *(b.nbytes for b in buffers), *places, *arguments], np.int64).tobytes()
    noise = b"\x01\x7c\xa0\x7f\x00\x00\xf4\x7f"
    message = b"".join([head, bytes(16), noise, *(b.tobytes() for b in buffers)])
    c = SimpleNamespace(buffer=buffers[2])
    return Call(message, c, SimpleNamespace(dtype="uint8"), views[:2], views[2])


def calls(spec: KernelSpec) -> list[Call]:
    """Around a tile and a group, in each kind of layout that the kernel takes."""
    in_place = ("row",) if "b" not in spec.packing else ("row", "col", "strided")
    sizes = [(1, 1, 1), (spec.mr, spec.nr, 8), (2 * spec.mr + 1, spec.nr + 3, 21), (3, 5, 0), (spec.mr - 1, 2 * spec.nr - 1, 70)]
    found = []
    for (m, n, k), a, b, c in itertools.product(sizes, ("row", "col", "backwards"), in_place, ("row", "strided")):
        for blocks, tasks in (((spec.mr, spec.nr, 16), 3), ((1 << 20,) * 3, 1)):
            found.append(call(spec, m, n, k, (a, b, c), blocks, tasks if spec.parallel else 1))
    return found


@pytest.fixture(scope="module")
def kernels(request, tmp_path_factory):
    for machine in CPUS.values():
        machine.skip_if_missing()
    built = Kernels(tmp_path_factory.mktemp("elements"))
    items = [item for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    built.announce([item.callspec.params["spec"] for item in items])
    yield built
    built.close()


def test_dot_products_are_above_the_plain_architecture(kernels):
    """Otherwise the other tests would prove nothing of them."""
    spec = member("B3A2C0", "int8", "armv8-dotprod", parallel="ic")
    columns = max(spec.nr, COLUMNS + 1)  # fewer are not packed
    packed = call(spec, spec.mr, columns, 8, ("row",) * 3, (1 << 20,) * 3, 1)
    run = kernels.run(AARCH64, spec, [packed])
    assert run.status == -signal.SIGILL, run.errors


@pytest.mark.parametrize("spec", SPECS)
def test_kernel(kernels, spec):
    taken = calls(spec)
    run = kernels.run(CPUS[spec.isa], spec, taken)
    assert run.status == 0 and len(run.answers) == len(taken), run.errors
    for each, answer in zip(taken, run.answers):
        assert (answer.status, answer.flags, answer.faults) == (0, 0, 0)
        result = each.result(answer.buffer)
        assert result.dtype == stored(DTYPES[spec.dtype].c)
        assert_right(spec, *each.operands, result)
