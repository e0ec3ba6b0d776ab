"""``python -m tvmgemm emit``: what it shows is what is built, and what it refuses it explains. (``test_outline``: its loops.)"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emitting import needs_tvm, refused, shown  # noqa: F401

from tvmgemm.cli import emit
from tvmgemm.family.arithmetic import WAYS
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.isa import EMITTED_ISAS, ISAS, isa_of
from tvmgemm.family.members import default_members, member
from tvmgemm.family.targets import TARGETS
from tvmgemm.host import Host
from tvmgemm.store.key import INSTALL

ROOT = Path(__file__).resolve().parent.parent


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
