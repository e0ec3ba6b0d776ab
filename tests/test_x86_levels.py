"""A kernel of an x86-64 level uses nothing above it: run in an emulator of the oldest CPU of that level.

An instruction that such a CPU does not have ends the emulated process. (QEMU does not emulate AVX-512.)
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from emulation import Kernels, spec_of, x86_64
from emulation_cases import cases, check, suitable

CPUS = {"x86-64-v2": x86_64("Nehalem"), "x86-64-v3": x86_64("Haswell-noTSX")}

#: One variant for each resident operand.
VARIANTS = ("B3A2C0", "B3C2A0", "C3A2B0")

SPECS = [spec_of(isa, "float32", variant, parallel="jc") for isa in CPUS for variant in VARIANTS]
SPECS += [spec_of(isa, "float64", VARIANTS[0]) for isa in CPUS]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    for machine in CPUS.values():
        machine.skip_if_missing()
    built = Kernels(tmp_path_factory.mktemp("x86"))
    built.announce(SPECS)
    yield built
    built.close()


def cases_of(spec):
    """Every third case, and no buffer at the end of its page: QEMU's masked loads read all lanes."""
    return [replace(case, at_end=False) for case in suitable(spec, cases(spec.isa, spec.dtype, spec.op))[::3]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_keeps_to_its_level(kernels, spec):
    taken = cases_of(spec)
    check(kernels.run(CPUS[spec.isa], spec, taken), taken)


def test_a_kernel_above_the_level_dies(kernels):
    """Otherwise the other tests would prove nothing."""
    spec = spec_of("x86-64-v3", "float32", VARIANTS[0], parallel="jc")
    run = kernels.run(CPUS["x86-64-v2"], spec, cases_of(spec))
    assert run.status == -signal.SIGILL, run.errors
