"""The loops that ``python -m tvmgemm emit`` shows, and that they are those that the generator emits."""

from __future__ import annotations

import re

import pytest
from emitting import needs_tvm, shown  # noqa: F401

from tvmgemm.family.members import member
from tvmgemm.family.outline import outline
from tvmgemm.family.variants import VARIANTS
from tvmgemm.spec import STEPS


def test_the_loops_of_goto_s_algorithm(shown):
    assert (
        shown("--target x86-64-v4 --microkernel 14x32 --parallel-loop ic")
        == """\
B3A2C0 14x32: C = A.B in float32, A m x k, B k x n, C m x n, on x86-64-v4

for jc in range(0, n, nc):
  for pc in range(0, k, kc):
    Bc = pack B[pc:+kc, jc:+nc]               # panels of kc x 32; all tasks pack their shares
    for ic in range(0, m, mc):                # parallel: each task has a contiguous share of ic x jr
      Ac = pack A[ic:+mc, pc:+kc]             # panels of kc x 14
      for jr in range(0, nc, 32):
        for ir in range(0, mc, 14):
          prefetch C[ic+ir:+14, jc+jr:+32]    # in the course of p; and some of the next Ac
          T = 0                               # 14 x 32 of C, in registers
          for p in range(kc):                 # micro-kernel
            T += Ac[ir:+14, p]*Bc[p, jr:+32]  # 2 loads, 14 broadcasts, 28 FMAs; prefetches Bc ahead
          C[ic+ir:+14, jc+jr:+32] = T         # in the first block of k; in later ones += T

buffers, in elements, before they are rounded up to whole vectors and cache lines
  Bc  ceil(nc/32) panels of kc x 32                     shared
  Ac  ceil(mc/14) panels of kc x 14                     one per task
  Cs  14 x 32, for a C without unit column stride only  one per task

registers: 28 hold the tile of C, 3 what streams past: 31 of 32, 16 elements each
"""
    )


def test_the_loops_of_a_resident_operand(shown):
    assert (
        shown("--variant C3A2B0 --microkernel 12x4 --op gemm --dtype float64 --target armv8-neon")
        == """\
C3A2B0 12x4: C = alpha.A.B + beta.C in float64, A m x k, B k x n, C m x n, on armv8-neon

for ic in range(0, m, mc):
  for jc in range(0, n, nc):
    for pc in range(0, k, kc):
      Ac = pack A[ic:+mc, pc:+kc]                          # panels of mc x 12
      S = Cc if pc == 0 else Pc
      S = 0
      for pr in range(0, kc, 12):
        for jr in range(0, nc, 4):
          T = B[pc+pr:+12, jc+jr:+4]                       # in registers, by way of X
          for i in range(mc):                              # micro-kernel
            S[i, jr:+4] += Ac[i, pr:+12]*T                 # 2 loads, 12 broadcasts, 24 FMAs, 2 stores
      if pc > 0: Cc += Pc
    C[ic:+mc, jc:+nc] = alpha*Cc + beta*C[ic:+mc, jc:+nc]  # beta = 0: C is not read

buffers, in elements, before they are rounded up to whole vectors and cache lines
  Cc  ceil(nc/4) panels of mc x 4
  Ac  ceil(kc/12) panels of mc x 12
  Pc  ceil(nc/4) panels of mc x 4
  X   12 x 4, for the tile on its way to registers

registers: 24 hold the tile of B, 3 what streams past: 27 of 32, 2 elements each
"""
    )


def nest(text: str) -> list[tuple[int, str]]:
    """(depth, loop or packing) in the order of the text."""
    found = re.findall(r"^( *)(?:for (\w+) |(\w)c = (?:pack|0))", text, re.M)
    return [(len(indent) // 2, loop or f"pack {operand}") for indent, loop, operand in found]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_packings_stand_in_the_loops_that_the_variant_says(variant):
    stream = {"m": "i", "n": "j", "k": "p"}[variant.stream]
    loops = [*variant.outer, *variant.inner, stream]
    text = outline(member(variant.name, "float32", "x86-64-v4"))
    assert [(depth, name) for depth, name in nest(text) if "pack" not in name] == list(enumerate(loops))
    for operand, at in variant.packed:
        if operand == "C" and variant.outer.index(at) < variant.outer.index("pc"):
            assert (
                "S = Cc if pc == 0 else Pc" in text
            )  # what collects all blocks of k is not cleared by itself
        else:
            assert (variant.outer.index(at) + 1, f"pack {operand}") in nest(text)
    unpacked = outline(member(variant.name, "float32", "x86-64-v4", packing=variant.packings[-1]))
    assert "pack" not in unpacked or variant.resident == "A"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_buffer_is_shared_if_it_is_packed_outside_of_the_parallel_loop(variant):
    for parallel in variant.outer:
        text = outline(member(variant.name, "float64", "armv8-neon", parallel=parallel))
        (line,) = re.findall(r"for (\w+) .*# parallel", text)
        assert line == parallel
        owners = dict(re.findall(r"^  (\w)c  .*(shared|one per task)$", text, re.M))
        for operand, at in variant.packed:
            outside = variant.outer.index(at) < variant.outer.index(parallel)
            assert owners[operand] == ("shared" if outside else "one per task")


def test_the_loops_of_half_a_product(shown):
    text = shown("--target x86-64-v4 --symmetric --parallel-loop ic")
    assert "for ic in range(jc, m, mc):" in text and "# parallel: each task has rows, with equal areas" in text
    assert "for ir in range(max(0, jc+jr-ic), mc, 8):" in text
    assert "C[jc+jr:+48, below] = C[below, jc+jr:+48]^T" in text


def test_switches_and_steps_show(shown):
    assert "prefetch" not in shown("--target x86-64-v4 --without prefetch").split("\n", 1)[1]
    assert shown("--target x86-64-v4 --without vector-packing").count("element by element") == 2
    assert "24 loads, 8 broadcasts, 24 FMAs" in shown("--target x86-64-v4 --microkernel 8x48 --without register-loads")
    assert "Bc[p, jr:+8]" in shown("--target x86-64-v3 --microkernel 4x8")
    assert "A[ic+ir:+8, pc+p]*B[pc+p, jc+jr:+32]" in shown(
        "--target x86-64-v4 --packing none --microkernel 8x32"
    )
    loops = {step: [name for _, name in nest(shown(f"--target x86-64-v3 --step {step}"))] for step in STEPS}
    blocks, packed = ["jc", "pc", "ic"], ["jc", "pc", "pack B", "ic", "pack A", "jr", "ir"]
    assert loops["basic"] == ["i", "j", "p"]
    assert loops["blocked"] == [*blocks, "i", "j", "p"]
    assert loops["packed"] == loops["microkernel"] == [*packed, "p", "it", "jt"]
    assert loops["optimised"] == [*packed, "p"]


@needs_tvm
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_loops_are_those_that_the_generator_emits(variant, packed):
    """The loops over blocks, tiles and steps occur in the generated code in the order of the outline."""
    from tvmgemm.family import codegen

    packing = variant.packable if packed else variant.packings[-1]
    spec = member(variant.name, "float32", "x86-64-v3", packing=packing)
    kernel = codegen.script(spec).split("_workspace(")[0]
    names = {*variant.outer, *variant.inner, {"m": "s", "n": "s", "k": "p"}[variant.stream]}
    # "p" is also the step of packings, which have finished where the loops over tiles begin.
    loops = re.findall(r"for ([\w, ]+) in", kernel)  # two with nothing between them are written as one, of two names
    emitted = [name for each in loops for name in each.split(", ") if name in names]
    first = {name: emitted.index(name) for name in (*variant.outer, *variant.inner)}
    assert sorted(first, key=first.__getitem__) == [*variant.outer, *variant.inner]
    assert set(emitted[first[variant.inner[1]] :]) & {"s", "p"}
