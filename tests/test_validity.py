"""Micro-tiles and specs that make no kernel are refused, with the reason; those of the tables do."""

from __future__ import annotations

import itertools

import pytest
from equivalence import FLOAT_TILES, FLOATS, FORCED

from tvmgemm.family.arithmetic import ARITHMETICS, arithmetic_of
from tvmgemm.family.isa import ISAS
from tvmgemm.family.members import member
from tvmgemm.family.tiles import check_tile, registers_needed
from tvmgemm.spec import KernelSpec


@pytest.mark.parametrize(
    "mr, nr, isa, itemsize, registers",
    [
        (8, 16, "x86-64-v3", 4, 19),
        (8, 32, "x86-64-v3", 4, 37),
        (14, 48, "x86-64-v4", 4, 46),
        (16, 32, "x86-64-v4", 4, 35),
        (7, 8, "x86-64-v2", 4, 18),
        (6, 24, "x86-64-v3", 8, 43),
        (8, 16, "armv8-neon", 4, 37),
    ],
)
def test_too_large_a_tile_is_refused(mr, nr, isa, itemsize, registers):
    has = ISAS[isa].vector_registers
    how = ARITHMETICS[f"fma{8 * itemsize}"]
    assert registers_needed(mr, nr, ISAS[isa], how) == registers > has
    with pytest.raises(ValueError, match=rf"{mr}x{nr} with resident C needs {registers} vector registers, {isa} has {has}"):
        check_tile(mr, nr, isa, how)
    generate = pytest.importorskip("tvmgemm.family.generator", reason="needs the compiler").generate
    with pytest.raises(ValueError, match=rf"needs {registers} vector registers"):
        generate(KernelSpec("float32" if itemsize == 4 else "float64", isa, FORCED, mr, nr))


@pytest.mark.parametrize("mr, nr", [(0, 16), (-1, 16), (4, 0), (4, 12), (4, -8)])
def test_impossible_tiles_are_refused(mr, nr):
    with pytest.raises(ValueError, match=f"micro-kernel {mr}x{nr} with resident C: .*multiple of 8"):
        check_tile(mr, nr, "x86-64-v3", ARITHMETICS["fma32"])


def test_tiles_of_the_table_are_possible():
    for (isa, dtype), tiles in FLOAT_TILES.items():
        for resident, sizes in tiles.items():
            for rows, columns in sizes:
                check_tile(rows, columns, isa, arithmetic_of(isa, dtype, "ab"), resident)
    assert set(FLOAT_TILES) == set(itertools.product((isa for isa, _ in FLOAT_TILES), FLOATS))


def test_a_loop_that_cannot_be_parallel_is_refused():
    generate = pytest.importorskip("tvmgemm.family.generator", reason="needs the compiler").generate
    for loop in ("ir", "nonsense"):
        with pytest.raises(ValueError, match=f"parallel loop '{loop}': {FORCED} can share out jc, pc, ic"):
            generate(member(FORCED, "float32", "x86-64-v4", parallel=loop))
