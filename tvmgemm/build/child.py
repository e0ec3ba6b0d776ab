"""The build process: compile, link and store kernels, one event per line on stdout.

Run by ``parent`` as ``python -I child.py`` with a request on stdin, one line that is a Python literal:

    {"package": folder of tvmgemm, "sys_path": [...], "compile": "module:function", "pins": {name: version} or
    {},
     "linker": (command, is a compiler driver), "store": folder, "limit": bytes, "specs": [{...}, ...],
     "timeout": seconds}

Answers, per spec and in order: ``{"begin": name}``, then ``{"name": name, "path": path, "seconds": s}`` or
``{"name": name, "error": text, "seconds": s}``, literals too. Everything else that is printed here or by the
compiler goes to stderr.
"""

from __future__ import annotations

import ast
import importlib
import os
import resource
import signal
import sys
import time
import traceback
import types
from typing import TextIO


def main() -> int:
    """Serve one request; returns the exit status."""
    answers = _take_stdout()
    request = ast.literal_eval(sys.stdin.readline())
    # The parent kills a build that takes too long. If the parent is gone, nobody does: end by ourselves.
    signal.alarm(int(request["timeout"]) + 5)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash of the compiler is reported, not dumped
    sys.path += [entry for entry in request["sys_path"] if entry not in sys.path]
    enter_package(request["package"])
    serve(request, answers)
    return 0


def enter_package(folder: str) -> None:
    """Make the ``tvmgemm`` in ``folder`` importable, that one and no other that may be installed.

    Its ``__init__`` is the user's front door: it would load the native part and read the settings. Here only
    modules below it are needed, so the package is made without running it.
    """
    package = types.ModuleType("tvmgemm")
    package.__path__ = [folder]
    sys.modules["tvmgemm"] = package


def serve(request: dict, answers: TextIO) -> None:
    """Build every spec of ``request``; a failure is an answer, never an exception."""
    from tvmgemm.spec import KernelSpec
    from tvmgemm.store.key import kernel_key

    def answer(**event: object) -> None:
        print(repr(event), file=answers, flush=True)

    specs = [KernelSpec.from_dict(fields) for fields in request["specs"]]
    keys = [kernel_key(spec) for spec in specs]  # before the generator loads: no key may be newer than it
    compile_object, problem = None, None
    start = time.monotonic()
    try:
        compile_object = _compiler(request["compile"], request["pins"])
    except BuildRefused as refusal:
        problem = str(refusal)
    except Exception as error:
        problem = f"loading the generator failed: {_described(error)}"
    for spec, key in zip(specs, keys):
        answer(begin=spec.name)
        try:
            if problem is not None:
                raise BuildRefused(problem)
            path = _build(spec, key, compile_object, request)
        except BuildRefused as refusal:
            answer(name=spec.name, error=str(refusal), seconds=time.monotonic() - start)
        except Exception as error:
            traceback.print_exc()
            answer(
                name=spec.name,
                error=f"compiling failed: {_described(error)}",
                seconds=time.monotonic() - start,
            )
        else:
            answer(name=spec.name, path=path, seconds=time.monotonic() - start)
        start = time.monotonic()


class BuildRefused(Exception):
    """A failure that is understood; its text is complete."""


def _compiler(name: str, pins: dict[str, str]):
    """The function that compiles a spec into an object file, once the versions are those of ``pins``."""
    if pins:
        check_versions(pins)
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def check_versions(pins: dict[str, str]) -> None:
    """BuildRefused, saying what to install, unless TVM can be imported and is what ``pins`` say."""
    from tvmgemm.store.key import INSTALL

    try:
        found = loaded_versions()
    except Exception as error:  # what a broken installation raises is anybody's guess
        raise BuildRefused(f"TVM cannot be imported by {sys.executable} ({_described(error)}); {INSTALL}") from error
    wrong = [f"{name} {found[name]} instead of {pin}" for name, pin in pins.items() if found[name] != pin]
    if wrong:
        raise BuildRefused(f"{sys.executable} has {', '.join(wrong)}; {INSTALL}")


def loaded_versions() -> dict[str, str]:
    """Versions of what was really loaded; a package's metadata may tell of another."""
    import tvm
    import tvm_ffi
    from tvm.target import codegen

    return {
        "apache-tvm": tvm.__version__,
        "apache-tvm-ffi": tvm_ffi.__version__,
        "llvm": str(codegen.llvm_version_major()),
    }


def _build(spec, key, compile_object, request: dict) -> str:
    """Compile, link and store one spec; returns the entry's path."""
    from tvmgemm.build.link import Linker, LinkError, link
    from tvmgemm.store.content import temporary_path
    from tvmgemm.store.files import Store

    linker = Linker(*request["linker"])
    library = temporary_path(request["store"])
    try:
        os.chdir(request["store"])  # TVM takes names of files in UTF-8 only, and the folder's may be of any bytes
        compile_object(spec, os.path.basename(library) + ".o")
        try:
            link(linker, library + ".o", library)
        except LinkError as error:
            raise BuildRefused(f"linking failed: {error}") from error
        try:
            return Store(request["store"], request["limit"]).put(spec, key, library)
        except OSError as error:
            told = f"the kernel cannot be written to {request['store']}: {error.strerror}"
            raise BuildRefused(told) from error
    finally:
        for path in (library, library + ".o"):
            if os.path.exists(path):
                os.unlink(path)


def _described(error: Exception) -> str:
    """The type and the last lines of an exception's text: TVM's texts begin with a long trace."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[-3:])}" if lines else type(error).__name__


def _take_stdout() -> TextIO:
    """A private copy of stdout for the answers; what anybody else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.exit(main())
