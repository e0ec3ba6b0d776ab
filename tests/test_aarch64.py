"""Kernels for Arm, run in an emulator on whatever machine this is: all six variants, to exact references.

By default every variant with its default packing, serial and with one parallel loop, and one variant without
packing. ``-m slow`` runs every packing, every parallel loop, every tile, and the steps and switches that are
there for study.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from emulation import AARCH64, Kernels, spec_of
from emulation_cases import Case, Run, cases, check, suitable
from equivalence import FLOATS

from tvmgemm.family.tiles import TILES
from tvmgemm.family.variants import VARIANTS
from tvmgemm.problem import OPS
from tvmgemm.spec import STEPS, SWITCHES, KernelSpec

ISA = "armv8-neon"

make = functools.partial(spec_of, ISA)

#: Every variant, dtype and operation, serial, and the innermost outer loop shared out; and what reads
#: operands in place.
DEFAULTS = [
    make(dtype, name, op, parallel=loop)
    for name, dtype, op in itertools.product(VARIANTS, FLOATS, OPS)
    for loop in ("", VARIANTS[name].outer[-1])
]
DEFAULTS += [make(dtype, "B3A2C0", packing="none") for dtype in FLOATS]
DEFAULTS += [
    make(dtype, "B3A2C0", packing=packing, parallel=loop, tile=tile, symmetric=True)
    for dtype, tile in {"float32": (8, 8), "float64": (4, 8)}.items()
    for packing, loop in (("b", ""), ("ab", "ic"))
]

#: Every packing and parallel loop; every tile, step and switch by itself.
EVERYTHING = [
    make(dtype, name, op, packing, loop)
    for name, dtype, op in itertools.product(VARIANTS, FLOATS, OPS)
    for packing in VARIANTS[name].packings
    for loop in ("", *VARIANTS[name].parallel_loops(packing))
]
for name, dtype in itertools.product(VARIANTS, FLOATS):
    row = VARIANTS[name]
    EVERYTHING += [
        make(dtype, name, packing=packing, tile=tile)
        for tile in TILES[ISA, dtype][row.resident][1:]
        for packing in row.packings
    ]
    EVERYTHING += [
        make(dtype, name, without=(switch,)) for switch in SWITCHES if row.resident == "C" or switch != "register-loads"
    ]
    EVERYTHING += [
        make(dtype, name, op, parallel=loop, step=step)
        for step in STEPS[:-1]
        if row.resident == "C" or step in ("basic", "blocked")
        for op, loop in itertools.product(OPS, ("", row.outer[0]))
        if not (step == "basic" and loop)  # it has no loop to share out
    ]

SPECS = [pytest.param(spec, id=spec.name) for spec in DEFAULTS]
SPECS += [
    pytest.param(spec, id=spec.name, marks=pytest.mark.slow)
    for spec in dict.fromkeys(EVERYTHING)
    if spec not in DEFAULTS
]


def reference_spec(dtype: str, op: str) -> KernelSpec:
    """The kernel whose bits the others are compared with."""
    return make(dtype, next(iter(VARIANTS)), op)


@pytest.fixture(scope="module")
def kernels(request, tmp_path_factory):
    """Compiles the kernels of all tests that were asked for."""
    AARCH64.skip_if_missing()
    built = Kernels(tmp_path_factory.mktemp("aarch64"))
    built.announce([reference_spec(dtype, op) for dtype, op in itertools.product(FLOATS, OPS)])
    built.announce(
        [item.callspec.params["spec"] for item in request.session.items if item.fspath == request.fspath]
    )
    yield built
    built.close()


@pytest.fixture(scope="module")
def reference(kernels):
    """``reference(dtype, op, symmetric)``: what the first variant answers to all cases."""

    @functools.cache
    def run(dtype: str, op: str, symmetric: bool) -> Run:
        return kernels.run(AARCH64, reference_spec(dtype, op), cases(ISA, dtype, op, symmetric))

    return run


@pytest.mark.parametrize("spec", SPECS)
def test_kernel(kernels, reference, spec):
    """Results within bounds, nothing read or written outside, no flag that the numbers do not raise; and the
    same bits from every member of the family.
    """
    every_case = cases(ISA, spec.dtype, spec.op, spec.symmetric)
    taken = suitable(spec, every_case)
    run = kernels.run(AARCH64, spec, taken)
    check(run, taken)
    theirs = dict(zip(map(id, every_case), reference(spec.dtype, spec.op, spec.symmetric).answers))
    for case, answer in zip(taken, run.answers):
        if one_order(spec, case):
            same = answer.buffer.tobytes() == theirs[id(case)].buffer.tobytes()
            assert same, f"not the bits of the other variants, at {case}"


def one_order(spec: KernelSpec, case: Case) -> bool:
    """Whether an element must be the same chain of operations as in every other kernel.

    What adds products straight to C does not keep the blocks of k apart, and multiplies by alpha before it
    adds. A C that is packed for all of k is scaled at the end, and not once per block. The scalar loops of
    earlier steps are LLVM's to transform.
    """
    if spec.step != STEPS[-1]:
        return False
    variant, one_block = VARIANTS[spec.variant], case.problem.k <= case.blocks[2]
    if variant.resident != "C" and "c" not in spec.packing:
        return one_block and spec.op == "matmul"
    scaled_once = "pc" not in variant.outer[: variant.outer.index(dict(variant.packed).get("C", "pc")) + 1]
    return one_block or spec.op == "matmul" or not scaled_once
