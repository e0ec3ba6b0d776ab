"""The inner loops of every default kernel, counted.

A kernel keeps its promise if its hot loop has the tile's multiply-adds, one load per vector and one broadcast
per element of what streams past, and nothing on the stack.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
from equivalence import FLOAT_TILES

from tvmgemm.family.inspection import InnerLoop, hottest, inner_loops
from tvmgemm.family.isa import ISAS, isa_of
from tvmgemm.family.members import default_members, member
from tvmgemm.family.targets import TARGETS
from tvmgemm.family.tiles import tiles_of
from tvmgemm.family.variants import VARIANTS
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

#: One dtype of each instruction set; the others are ``slow``.
EVERY_TIME = {
    ("x86-64-v2", "float64"),
    ("x86-64-v3", "float32"),
    ("x86-64-v4", "float32"),
    ("armv8-neon", "float64"),
}

#: What is checked for a CPU rather than a level, with every operand packed; the other targets are ``slow``.
EMITTED_EVERY_TIME = {"sapphirerapids", "apple-m1", "riscv64-v", "power9"}


def promised() -> list:
    """(spec, target) of every kernel whose counts are checked, as parameters."""
    found = []
    for isa, dtype in FLOAT_TILES:
        # What planners choose besides the defaults: A in place.
        in_place = [member("A3C2B0", dtype, isa, packing="c"), member("B3A2C0", dtype, isa, packing="b")]
        specs = [*default_members(dtype, isa), *in_place]
        marks = () if (isa, dtype) in EVERY_TIME else pytest.mark.slow
        found += [pytest.param(spec, None, marks=marks, id=spec.name) for spec in specs]
        for resident, variant in (("C", "B3A2C0"), ("A", "B3C2A0"), ("B", "A3C2B0")):
            others = [member(variant, dtype, isa, tile) for tile in tiles_of(isa, dtype)[resident][1:]]
            found += [pytest.param(spec, None, marks=pytest.mark.slow, id=spec.name) for spec in others]
    for target in TARGETS.values():
        if target.name in ISAS:
            continue
        for dtype, variant in (("float32", "B3A2C0"), ("float64", "B3C2A0"), ("float32", "C3A2B0")):
            spec = member(variant, dtype, target.isa)
            often = target.name in EMITTED_EVERY_TIME and variant == "B3A2C0"
            marks = () if often else pytest.mark.slow
            found.append(pytest.param(spec, target.name, marks=marks, id=f"{target.name}-{spec.name}"))
    return found


PROMISED = promised()


def compiled(spec: KernelSpec, target: str | None) -> str:
    """Runs in a worker process."""
    from tvmgemm.family import codegen

    return codegen.assembly(spec, TARGETS[target] if target else None)


HOT = "test_the_hot_loop_is_what_the_tile_promises"


@pytest.fixture(scope="module")
def assembly_of(request):
    """``assembly_of(spec, target)``. All that this run needs are compiled in two processes from the first use
    on."""
    pytest.importorskip("tvm", reason="needs the compiler")
    items = [item for item in request.session.items if item.originalname == HOT and item.path == request.path]
    chosen = {tuple(item.callspec.params[name] for name in ("spec", "target")) for item in items}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = {each: pool.submit(compiled, *each) for each in chosen}
        yield lambda spec, target=None: futures[spec, target].result(timeout=300)


def check_counts(spec: KernelSpec, loop: InnerLoop) -> int:
    """The hot loop is what the tile promises; returns its steps per iteration."""
    isa, resident = isa_of(spec.isa), VARIANTS[spec.variant].resident
    lanes = isa.lanes(DTYPES[spec.dtype].itemsize)
    rows, columns = spec.tile_sizes
    steps, rest = divmod(loop.fmas * lanes, rows * columns)
    assert steps >= 1 and rest == 0
    assert loop.stack == 0
    assert loop.registers <= isa.vector_registers
    assert (loop.masked, loop.branches, loop.scalar_fmas) == (0, 0, 0)
    width, elements = (rows, columns) if resident == "A" else (columns, rows)
    assert loop.loads == steps * width // lanes
    assert loop.stores == (0 if resident == "C" else loop.loads)
    assert loop.broadcasts == steps * elements
    return steps


@pytest.mark.parametrize("spec, target", PROMISED)
def test_the_hot_loop_is_what_the_tile_promises(assembly_of, spec, target):
    loop = hottest(inner_loops(assembly_of(spec, target), isa_of(spec.isa).arch))
    try:
        steps = check_counts(spec, loop)
        if spec.packing == VARIANTS[spec.variant].packable:
            # Besides: moves where an instruction overwrites its operand, a load per element where that is not
            # a part of the broadcast, and a few instructions to go on.
            products = loop.fmas * (1 if isa_of(spec.isa).fma else 3)
            needed = products + loop.loads + 2 * loop.broadcasts + loop.stores + loop.prefetches
            assert loop.instructions <= needed + 8 * steps + 4
    except AssertionError as error:
        raise AssertionError(f"{error}\n{loop!r}\n{loop.text}") from None


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ["matmul", "gemm"])
@pytest.mark.slow
def test_parallel_and_scaling_kernels_have_the_same_hot_loop(variant, op):
    codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")
    for isa in ("x86-64-v4", "armv8-neon"):
        plain = member(variant, "float32", isa)
        shared = replace(plain, op=op, parallel=VARIANTS[variant].outer[0])
        loops = [hottest(inner_loops(codegen.assembly(s), isa_of(isa).arch)) for s in (plain, shared)]
        assert [(x.fmas, x.loads, x.broadcasts, x.stores, x.stack) for x in loops[:1]] == [
            (x.fmas, x.loads, x.broadcasts, x.stores, x.stack) for x in loops[1:]
        ]


@pytest.mark.parametrize("isa", ["x86-64-v3", "x86-64-v4", "armv8-neon"])
def test_without_register_loads_every_multiply_add_reads_memory(isa):
    codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")
    full = member("B3A2C0", "float32", isa)
    loops = [hottest(inner_loops(codegen.assembly(s), isa_of(isa).arch)) for s in (full, replace(full, without=("register-loads",)))]
    assert loops[0].fmas == loops[1].fmas == loops[1].loads > 3 * loops[0].loads
    assert loops[0].broadcasts == loops[1].broadcasts and not loops[1].stack


def test_a_tile_that_does_not_fit_goes_to_the_stack():
    """The counter-example: with more accumulators than registers the counts say so."""
    pytest.importorskip("tvm", reason="needs the compiler")
    from tvmgemm.family import codegen, validity

    spec = replace(member("B3A2C0", "float32", "x86-64-v3"), mr=14, nr=16)
    with pytest.raises(ValueError, match="needs 31 vector registers, x86-64-v3 has 16"):
        validity.check(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity, "check_tile", lambda *_: None)
        loop = max(inner_loops(codegen.assembly(spec), "x86_64"), key=lambda loop: loop.fmas)
    assert loop.fmas == 28 and loop.stack > 20 and loop.registers == 16
