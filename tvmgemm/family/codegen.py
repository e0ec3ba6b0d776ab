"""TVM behind one door: a KernelSpec in, an object file (or IR, or assembly) out.

Imported only where kernels are built; a user's process never does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import tvm
from tvm import tirx

from ..spec import KernelSpec
from .generator import generate
from .targets import TARGETS, Target

#: What follows the architecture in the triple of kernels that are built to run here, where it is not Linux's.
_SYSTEMS = {"darwin": "apple-darwin"}


#: No vectors but ours: LLVM would make one of two or three single elements and calculate with the zeros beside them,
#: which raises *invalid* against a user's infinity.
_NO_SLP = ("cl-opt", ("-vectorize-slp:bool=false",))


def _own_target(spec: KernelSpec) -> Target:
    """The level that ``spec`` is for, on this operating system."""
    target = TARGETS[spec.isa]
    return replace(target, system=_SYSTEMS.get(sys.platform, target.system))


def _llvm(target: Target) -> tvm.target.Target:
    """TVM's object for ``target``. (TVM's own default triple names another vendor's toolchain.)"""
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in target.options}
    llvm = tvm.target.Target({"kind": "llvm", "mtriple": target.triple, **options})
    return llvm.with_host(llvm)


def compile_module(spec: KernelSpec, target: Target | None = None):
    """The compiled module of ``spec`` for its instruction set, or for a ``target`` that has it.

    Not ``tvm.compile``: the generator writes what the end of TVM's pipeline looks like (flat buffers, native vectors,
    no intrinsics to lower), so one pass is left to run. The standard pipeline takes ten times as long on a kernel and
    rewrites its vector indices into forms that become scalar code.
    """
    target = target or _own_target(spec)
    if spec.shape is not None:
        target = replace(target, options=(*target.options, _NO_SLP))
    llvm = _llvm(target)
    passes = [tirx.transform.BindTarget(llvm), tirx.transform.LowerTVMBuiltin()]
    return tvm.get_global_func("target.build.llvm")(tvm.ir.transform.Sequential(passes)(generate(spec)), llvm)


def compile_object(spec: KernelSpec, object_path: str | Path) -> None:
    """Compile ``spec`` and write a position-independent object file."""
    compile_module(spec).write_to_file(str(object_path), "o")


def assembly(spec: KernelSpec, target: Target | None = None) -> str:
    """The assembly of ``spec`` as LLVM emits it."""
    return compile_module(spec, target).inspect_source("s")


def llvm_ir(spec: KernelSpec, target: Target | None = None) -> str:
    """LLVM's intermediate code of ``spec``, optimised."""
    return compile_module(spec, target).inspect_source("ll")


def script(spec: KernelSpec) -> str:
    """What the generator wrote, as TVMScript."""
    return generate(spec).script()
