"""TVM behind one door: a KernelSpec in, an object file (or IR, or assembly) out.

Imported only where kernels are built; a user's process never does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tvm
from tvm import tirx

from ..spec import KernelSpec
from .generator import generate
from .isa import ISAS


#: What follows the architecture in a target triple. (TVM's own default names another vendor's toolchain.)
_SYSTEMS = {"darwin": "apple-darwin"}


def target_of(isa_name: str) -> tvm.target.Target:
    """TVM's target for an instruction set of ``isa.ISAS`` on this operating system."""
    isa = ISAS[isa_name]
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in isa.target}
    triple = f"{isa.arch}-{_SYSTEMS.get(sys.platform, 'unknown-linux-gnu')}"
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, **options})
    return target.with_host(target)


def compile_module(spec: KernelSpec):
    """The compiled module of ``spec`` for its instruction set.

    Not ``tvm.compile``: the generator writes what the end of TVM's pipeline looks like (flat buffers, native vectors,
    no intrinsics to lower), so one pass is left to run. The standard pipeline takes ten times as long on a kernel and
    rewrites its vector indices into forms that become scalar code.
    """
    target = target_of(spec.isa)
    passes = [tirx.transform.BindTarget(target), tirx.transform.LowerTVMBuiltin()]
    return tvm.get_global_func("target.build.llvm")(tvm.ir.transform.Sequential(passes)(generate(spec)), target)


def compile_object(spec: KernelSpec, object_path: str | Path) -> None:
    """Compile ``spec`` and write a position-independent object file."""
    compile_module(spec).write_to_file(str(object_path), "o")


def assembly(spec: KernelSpec) -> str:
    """The assembly of ``spec`` as LLVM emits it."""
    return compile_module(spec).inspect_source("s")
