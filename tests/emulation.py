"""Kernels for CPUs that this machine does not have: cross-built here, run in QEMU by ``emulation_harness.c``.

A test compiles a spec with the package's own generator and linker and sends a list of cases
(``emulation_cases``) through one process of the emulator. The harness looks after the memory around the
operands and the workspace, and reports the floating-point flags.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
from emulation_cases import Case, Run, answers

from tvmgemm.build.link import Linker, link
from tvmgemm.family.tiles import TILES
from tvmgemm.family.variants import VARIANTS
from tvmgemm.spec import KernelSpec

HARNESS = Path(__file__).with_name("emulation_harness.c")


# -- machines


@dataclass(frozen=True)
class Machine:
    """An emulated CPU: the emulator's command, the compiler that builds for it, Debian's packages of both."""

    emulator: tuple[str, ...]
    compiler: str
    packages: str

    def skip_if_missing(self) -> None:
        """Skip the test, saying what to install."""
        missing = [program for program in (self.emulator[0], self.compiler) if not shutil.which(program)]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not found; on Debian, install {self.packages}")

    def command(self) -> list[str]:
        """The emulator, told where the libraries of its architecture are."""
        ask = [self.compiler, "-print-file-name=libc.so.6"]
        said = subprocess.run(ask, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        return [*self.emulator, "-L", str(Path(said.stdout.strip()).resolve().parent.parent)]

    def build_harness(self, folder: Path) -> Path:
        """The harness, compiled for this CPU's architecture."""
        program = folder / f"harness-{self.emulator[0]}"
        options = ["-std=gnu11", "-O2", "-Wall", "-Werror", "-frounding-math", "-pthread"]
        command = [self.compiler, *options, "-o", str(program), str(HARNESS), "-ldl", "-lm"]
        subprocess.run(command, check=True, timeout=120)
        return program


def aarch64(cpu: str) -> Machine:
    """A 64-bit Arm core of QEMU's list."""
    packages = "qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
    return Machine(("qemu-aarch64", "-cpu", cpu), "aarch64-linux-gnu-gcc", packages)


#: One of the plain architecture, without extensions.
AARCH64 = aarch64("cortex-a57")


def x86_64(cpu: str) -> Machine:
    """An x86-64 CPU of QEMU's list."""
    packages = "qemu-user and gcc (on another architecture than amd64: gcc-x86-64-linux-gnu)"
    return Machine(("qemu-x86_64", "-cpu", cpu), "x86_64-linux-gnu-gcc", packages)


# -- kernels


def spec_of(
    isa: str, dtype: str, variant: str, op: str = "matmul", packing: str = "", parallel: str = "",
    tile: tuple[int, int] | None = None, **fields,
) -> KernelSpec:  # fmt: skip
    """A spec with the default tile and packing where none is given."""
    row = VARIANTS[variant]
    rows, columns = tile or TILES[isa, dtype][row.resident][0]
    sizes = {
        "C": {"mr": rows, "nr": columns},
        "A": {"mr": rows, "nr": 0, "kr": columns},
        "B": {"mr": 0, "nr": columns, "kr": rows},
    }[row.resident]
    return KernelSpec(
        dtype, isa, variant, op=op, packing=packing or row.packable, parallel=parallel, **sizes, **fields
    )


def _compile(spec: KernelSpec, path: str) -> str:
    """Runs in a worker process, so that the tests' own process never loads TVM."""
    from tvmgemm.family import codegen

    codegen.compile_object(spec, path)
    return path


class Kernels:
    """Libraries of kernels, compiled two at a time from the moment on when they are announced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ProcessPoolExecutor(2, get_context("spawn"))
        self._objects = {}
        self._harness = functools.cache(lambda machine: machine.build_harness(folder))
        self._command = functools.cache(lambda machine: machine.command())

    def announce(self, specs: list[KernelSpec]) -> None:
        """Start compiling what will be asked for."""
        for spec in specs:
            if spec not in self._objects:
                path = str(self._folder / f"{spec.name}.o")
                self._objects[spec] = self._pool.submit(_compile, spec, path)

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, machine: Machine, spec: KernelSpec, cases: list[Case]) -> Run:
        """Every case through one process of the emulator; a kernel that dies there gives fewer answers."""
        self.announce([spec])
        object_path = self._objects[spec].result(timeout=300)
        library = str(self._folder / f"{spec.name}.so")
        link(Linker((machine.compiler,), driver=True), object_path, library)
        command = [*self._command(machine), str(self._harness(machine)), library, spec.symbol]
        problems = b"".join(case.message for case in cases)
        done = subprocess.run(command, input=problems, capture_output=True, timeout=300)
        return Run(done.returncode, done.stderr.decode("utf-8", "replace"), answers(done.stdout, cases))
