"""``python -m tvmgemm emit``: what it shows is what is built, and what it refuses it explains."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tvmgemm.cli import emit
from tvmgemm.family.arithmetic import WAYS
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.isa import EMITTED_ISAS, ISAS, isa_of
from tvmgemm.family.members import default_members, member
from tvmgemm.family.outline import outline
from tvmgemm.family.targets import TARGETS
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import Host
from tvmgemm.spec import STEPS
from tvmgemm.store.key import INSTALL

ROOT = Path(__file__).resolve().parent.parent
needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="needs the compiler")


@pytest.fixture
def shown(capsys):
    """``shown("--dtype float64 ...")``: what the command prints."""

    def run(arguments: str) -> str:
        assert emit.main(arguments.split()) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def refused(capsys):
    """``refused("--dtype int8 ...")``: (exit status, the message), which is one line."""

    def run(arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit:
            emit.main(arguments.split())
        captured = capsys.readouterr()
        assert captured.out == ""
        return exit.value.code, captured.err.splitlines()[-1]

    return run


# -- loops


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


# -- code


@needs_tvm
@pytest.mark.parametrize("target", ["x86-64-v3", "armv8-neon", "riscv64-v"])
def test_assembly_comes_with_its_counts(shown, target, tmp_path):
    from tvmgemm.family import codegen

    text = shown(f"--target {target} --show asm")
    arch = isa_of(target).arch
    loops = inner_loops(text, arch)
    spec = member("B3A2C0", "float32", target)
    assert loops == inner_loops(codegen.assembly(spec, TARGETS[target]), arch)
    assert "debug" not in text and ".Ltmp" not in text
    header = text[: text.index("\t")].splitlines()
    comment = "//" if target == "armv8-neon" else "#"
    assert all(line.split()[0] == comment for line in header)
    assert f"{comment} {spec.name}, for {target} (" in header[0]
    assert [line for line in header if "(full tiles) |" in line] == [
        line for line in header if f"| {hottest(loops).label} (" in line
    ]
    compiler = shutil.which({"x86_64": "cc", "aarch64": "aarch64-linux-gnu-gcc"}.get(arch, "-"))
    if compiler and (arch != "x86_64" or platform.machine() == "x86_64"):
        (tmp_path / "kernel.s").write_text(text)
        subprocess.run([compiler, "-c", "kernel.s"], cwd=tmp_path, check=True, timeout=60)


@needs_tvm
def test_intermediate_code(shown):
    from tvm.script import from_source

    module = from_source(shown("--target x86-64-v4 --show tir --packing none --parallel-loop jc"))
    symbol = member("B3A2C0", "float32", "x86-64-v4", packing="none", parallel="jc").symbol
    assert {variable.name_hint for variable in module.functions} == {symbol, symbol + "_workspace"}
    llvm = shown("--variant A3C2B0 --dtype float64 --target neoverse-n1 --show llvm")
    assert llvm.startswith(
        "; matmul-float64-A3C2B0-12x4-ac-serial-armv8-neon, for neoverse-n1 (mcpu=neoverse-n1)\n;\n"
    )
    assert 'target triple = "aarch64-unknown-linux-gnu"' in llvm and "@llvm.fmuladd.v2f64" in llvm
    assert 'triple = "aarch64-apple-darwin"' in shown("--target apple-m1 --show llvm")


@needs_tvm
def test_counts_of_one_kernel_and_of_all(shown):
    lines = shown(
        "--target x86-64-v4 --microkernel 8x32 --show counts --packing none --parallel-loop jc"
    ).splitlines()
    assert lines[0].startswith("matmul-float32-B3A2C0-8x32-none-jc-x86-64-v4, for x86-64-v4 (")
    assert sum("(full tiles)" in line for line in lines) == 1 and len(lines) > 5
    title, _, head, _, *rows = shown(
        "--target riscv64-v --show counts --variant B3A2C0 --dtype all"
    ).splitlines()
    assert "128 bits of each register" in title
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (head, *rows)]
    assert [(row[1], row[2], row[3]) for row in cells[1:]] == [
        ("float32", "8x12", "ab"), ("float32", "8x8", "none"), ("float32", "16x4", "none"),
        ("float64", "8x6", "ab"), ("float64", "8x4", "none"), ("float64", "16x2", "none"),
    ]  # fmt: skip
    assert {row[cells[0].index("stack")] for row in cells[1:]} == {"0"}
    assert "No inner loop has vector FMAs" in shown("--target x86-64-v3 --show counts --step basic")


def test_host_is_this_machine(shown, monkeypatch):
    monkeypatch.setattr(emit, "host", lambda: Host("aarch64", frozenset({"asimd"}), (), 1))
    assert "on armv8-neon" in shown("")


def test_output_goes_to_a_file(shown, tmp_path):
    path = tmp_path / "loops.txt"
    assert shown(f"--target x86-64-v3 --output {path}") == ""
    assert path.read_text() == shown("--target x86-64-v3")


def test_it_is_a_command():
    def run(arguments: list[str], **streams) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tvmgemm", *arguments]
        return subprocess.run(command, cwd=ROOT, text=True, timeout=120, **streams)

    helped = run(["emit", "--help"], capture_output=True)
    assert helped.returncode == 0 and all(target in helped.stdout for target in TARGETS)
    assert "emit" in run(["--help"], capture_output=True).stdout
    # A reader that stops reading, as ``| head`` does, is no error.
    shell = (
        f"{sys.executable} -m tvmgemm emit --help >/dev/null; {sys.executable} -m tvmgemm emit | head -n 1"
    )
    headed = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert headed.stderr == "" and headed.stdout.count("\n") == 1


# -- refusals


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--variant B3A2", r"--variant: invalid choice: 'B3A2' \(choose from .*B3A2C0"),
        ("--dtype int4", r"--dtype: invalid choice: 'int4' \(choose from .*float32"),
        ("--dtype float16 --target x86-64-v2", "--dtype: no kernels for float16 on x86-64-v2; there are some for float32"),
        ("--target pentium", r"--target: 'pentium' is not one of host, x86-64-v2, .*riscv64-v"),
        ("--microkernel 14", r"--microkernel: '14' is not rows x columns of a micro-tile, as in 14x32"),
        ("--microkernel 0x32", r"--microkernel: '0x32' is not rows x columns"),
        (
            "--microkernel 14x30 --target x86-64-v4",
            r"micro-kernel 14x30 .*columns a multiple of 16, the lanes of x86-64-v4",
        ),
        (
            "--microkernel 20x32 --target sapphirerapids",
            r"micro-kernel 20x32 .* needs 43 vector registers, x86-64-v4 has 32; choose a smaller tile",
        ),
        ("--packing bc", r"packing 'bc': B3A2C0 takes ab, a, b, none"),
        ("--variant B3C2A0 --packing none", r"packing 'none': B3C2A0 takes bc, c"),
        ("--parallel-loop ir", r"--parallel-loop: invalid choice: 'ir' \(choose from .*pc"),
        ("--parallel-loop ic --step basic", r"parallel loop 'ic': step 'basic' has no loops over blocks"),
        ("--parallel-loop pc --step packed", r"parallel loop 'pc': step 'packed' .* no sums of one block of k"),
        (
            "--variant A3C2B0 --packing a --parallel-loop pc",
            r"parallel loop 'pc': A3C2B0 can share out ic, jc with packing 'a', which adds to C in one chain",
        ),
        ("--variant C3B2A0 --without register-loads", r"without register-loads: C3B2A0 .* a tile of A there"),
        ("--variant C3B2A0 --step packed", r"step 'packed': C3B2A0 has basic, blocked, optimised"),
        ("--unblocked --target riscv64-v", r"no kernels without loops over cache blocks for float32 on riscv64-v"),
        ("--without prefetch,luck", r"--without: 'luck' is not one of vector-packing, register-loads, prefetch"),
        ("--show picture", r"--show: invalid choice: 'picture' \(choose from .*loops"),
        ("--variant all", r"'all' goes with --show counts only; for --show loops name one variant"),
        (
            "--dtype all --show counts --packing none",
            r"leave out --packing, or name one variant and one dtype",
        ),
    ],
)
def test_what_cannot_be_shown_is_explained(refused, arguments, message):
    status, said = refused(arguments)
    assert status == 2 and re.search(message, said), said


def test_a_file_that_cannot_be_written_is_named(refused, tmp_path):
    status, said = refused(f"--target x86-64-v3 --output {tmp_path}/missing/loops.txt")
    assert status == 1
    assert re.search(r"--output '.*missing/loops.txt': No such file or directory; pass the path", said)


def test_a_machine_without_kernels_is_told_of_others(refused, monkeypatch):
    monkeypatch.setattr(emit, "host", lambda: Host("sparc64", frozenset(), (), 1))
    status, said = refused("")
    assert status == 2
    assert re.search(r"--target: host has no kernels for float32 \(sparc64\); pass one of x86-64-v2, .*power9", said)


def test_without_tvm_the_loops_are_shown_and_the_rest_says_what_to_install(shown, refused, monkeypatch):
    for name in [name for name in sys.modules if name == "tvm" or name.startswith("tvm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tvm", None)
    assert "on x86-64-v3" in shown("--target x86-64-v3")
    for show in ("tir", "llvm", "asm", "counts"):
        status, said = refused(f"--target x86-64-v3 --show {show}")
        assert (
            status == 1
            and said.startswith("tvmgemm emit: TVM cannot be imported by ")
            and said.endswith(INSTALL)
        )


def test_another_arithmetic(shown, refused):
    assert "micro-kernel, madd16" in shown("--target x86-64-v4-vnni --dtype int8 --arithmetic madd16")
    status, said = refused("--target x86-64-v4-vnni --dtype float16 --arithmetic fma32")
    assert status == 2 and "no kernels for float16 on x86-64-v4-vnni" in said
    status, said = refused("--target x86-64-v4 --dtype int8 --arithmetic dot8")
    assert status == 2 and "int8 on x86-64-v4 has madd16, mul16" in said


def test_another_tvm_is_refused(refused, monkeypatch):
    from tvmgemm.build import child

    found = {"apache-tvm": "0.28.0", "apache-tvm-ffi": "0.1.14.post1", "llvm": "22"}
    monkeypatch.setattr(child, "loaded_versions", lambda: found)
    status, said = refused("--target x86-64-v3 --show asm")
    assert status == 1 and "has apache-tvm 0.28.0 instead of 0.27.0.post1" in said and said.endswith(INSTALL)


# -- docs/family.md


#: What the tables are of, by instruction set: float32, or the first dtype that the level adds something for.
COUNTED = [(isa, next(iter(WAYS[isa]))) for isa in (*ISAS, *EMITTED_ISAS)]


def counted_in_docs() -> dict[tuple[str, str], str]:
    """(target, dtype) -> its table of counts in docs/family.md."""
    page = (ROOT / "docs" / "family.md").read_text()
    found = re.findall(r"<!-- counts: ([\w-]+) ([\w-]+) -->\n(.*?)<!-- -->", page, re.DOTALL)
    return {(target, dtype): table for target, dtype, table in found}


def test_the_docs_count_the_default_kernels():
    tables = counted_in_docs()
    assert set(tables) >= set(COUNTED)
    for (target, dtype), table in tables.items():
        rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in table.splitlines()[2:]]
        expected = [[s.variant, s.dtype, s.tile, s.packing] for s in default_members(dtype, target)]
        assert rows == expected, "run docs/update_counts.py"


@needs_tvm
@pytest.mark.slow
@pytest.mark.parametrize("target, dtype", counted_in_docs())
def test_the_docs_are_what_the_command_says(shown, target, dtype):
    said = shown(f"--show counts --variant all --dtype {dtype} --target {target}")
    assert said.endswith("\n\n" + counted_in_docs()[target, dtype]), "run docs/update_counts.py"
