"""The tables of the family fit together: instruction sets, tiles, members, targets."""

from __future__ import annotations

from equivalence import FLOATS

from tvmgemm.family.arithmetic import WAYS, arithmetic_of, lanes_of
from tvmgemm.family.isa import EMITTED_ISAS, ISAS, isa_of
from tvmgemm.family.members import default_members, member
from tvmgemm.family.targets import TARGETS
from tvmgemm.family.tiles import EMITTED_TILES, TILES, check_tile, tiles_of
from tvmgemm.host import Host


def test_instruction_sets_that_are_only_emitted_are_nobodys():
    assert not set(EMITTED_ISAS) & set(ISAS)
    for isa in EMITTED_ISAS.values():
        everything = frozenset().union(*(other.requires for other in ISAS.values()))
        assert Host(isa.arch, everything, (), 1).isa() is None
        assert {(isa.name, dtype) for dtype in FLOATS} <= set(EMITTED_TILES)


def test_targets_have_tiles_that_fit():
    assert set(ISAS) | set(EMITTED_ISAS) <= set(TARGETS)
    for target in TARGETS.values():
        isa = isa_of(target.isa)
        for dtype in WAYS[isa.name]:
            tiles = tiles_of(isa.name, dtype)
            assert len(tiles["C"]) >= 3 and tiles["C"][2][1] == lanes_of(isa.name, dtype, "none")
            for resident, shapes in tiles.items():
                for shape in shapes:
                    in_place = shape != shapes[0] and resident == "C"
                    check_tile(*shape, isa.name, arithmetic_of(isa.name, dtype, "none" if in_place else "ab"), resident)


def test_members_have_default_tiles():
    packed, in_place, _, *_ = TILES["x86-64-v4", "float32"]["C"]
    assert member("B3A2C0", "float32", "x86-64-v4").tile_sizes == packed
    assert member("B3A2C0", "float32", "x86-64-v4", packing="b").tile_sizes == packed
    assert member("B3A2C0", "float32", "x86-64-v4", packing="none").tile_sizes == in_place
    assert member("C3B2A0", "float64", "x86-64-v4").tile_sizes == TILES["x86-64-v4", "float64"]["A"][0]
    spec = member("A3C2B0", "float32", "x86-64-v3", (3, 32), "c", op="gemm", parallel="ic")
    assert (spec.mr, spec.nr, spec.kr, spec.op, spec.parallel) == (0, 32, 3, "gemm", "ic")
    assert [spec.variant for spec in default_members("float32", "armv8-neon")] == [
        *["B3A2C0"] * 3, *["A3B2C0"] * 3, "B3C2A0", "A3C2B0", "C3B2A0", "C3A2B0",
    ]  # fmt: skip
