"""``python -m tvmgemm run``: an unmodified program with NumPy patched, as plain ``python`` would run it.

The program becomes the process's ``__main__`` for good. ``runpy``'s public functions put the earlier
``__main__`` back when the program's code ends, but its threads, ``atexit`` functions and pickles outlive
that; so the code is found with importlib and executed here.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import os
import sys
import types
import zipfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import NoReturn

import tvmgemm

_USAGE = """\
usage: python -m tvmgemm run [--stats] script.py [args ...]
       python -m tvmgemm run [--stats] -m module [args ...]

Runs a Python program, unmodified, with np.matmul and the @ operator served by tvmgemm. The program may also
be a folder or a zip file that holds a __main__.py. Everything after its name belongs to the program.

  -m module  run a library module as a script, as python -m does
  --stats    when the program ends, say on standard error how many products were served

Variables that NumPy's BLAS reads when NumPy is imported, such as OPENBLAS_NUM_THREADS, have to be set in the
environment: NumPy is already imported when the program starts. Other Python processes that the program starts
are patched only if they are forked from it."""


@dataclass(frozen=True)
class Program:
    """What to execute: its code, ``sys.argv[0]``, ``sys.path[0]`` and the attributes of its ``__main__``."""

    code: types.CodeType
    argv0: str
    path0: str
    attributes: dict[str, object]


def main(argv: list[str]) -> int:
    """Run the program named in ``argv``. Its exceptions, SystemExit included, pass through."""
    as_module, stats, target, arguments = _parse(argv)
    if stats:
        atexit.register(_print_stats)
    tvmgemm.patch_numpy()

    sys.argv = ["-m" if as_module else target, *arguments]
    program = _module(target) if as_module else _script(target)
    sys.argv[0] = program.argv0
    _set_path0(program.path0)
    namespace = types.ModuleType("__main__")
    vars(namespace).update(__builtins__=builtins, **program.attributes)
    sys.modules["__main__"] = namespace
    exec(program.code, vars(namespace))
    return 0


def _parse(argv: list[str]) -> tuple[bool, bool, str, list[str]]:
    """(is it a module, print statistics, its name, its arguments): argparse would look into the arguments."""
    stats = False
    for position, argument in enumerate(argv):
        rest = argv[position + 1 :]
        if argument in ("-h", "--help"):
            print(_USAGE)
            raise SystemExit(0)
        if argument == "--stats":
            stats = True
        elif argument == "-m" and rest:
            return True, stats, rest[0], rest[1:]
        elif argument.startswith("-m") and len(argument) > 2:
            return True, stats, argument[2:], rest
        elif argument == "--" and rest:
            return False, stats, rest[0], rest[1:]
        elif argument.startswith("-"):
            unknown = f"{argument!r} is not one of -m, --stats"
            wrong = "-m needs the name of a module" if argument == "-m" else unknown
            _fail(f"{wrong}; options of the program come after its name", 2)
        else:
            return False, stats, argument, rest
    _fail("the program is missing: pass a script, or -m and a module", 2)


def _script(argument: str) -> Program:
    """The program of a source file, a compiled file, or a folder or zip file with a ``__main__`` module."""
    path = os.path.join(_current_folder(), argument)  # absolute, but with its dots and links, as python has it
    if os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path)):
        spec = PathFinder.find_spec("__main__", [path])
        if spec is None or spec.loader is None:
            _fail(f"can't find '__main__' module in {path!r}", 1)
        return Program(_code(spec, "__main__"), argument, path, _spec_attributes(spec))
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    try:
        # Not SourceFileLoader.get_code: that writes a __pycache__, which python doesn't do for a script.
        data = loader.get_data(path)
        code = loader.get_code("__main__") if path.endswith(".pyc") else loader.source_to_code(data, path)
    except OSError as error:
        _fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    if code is None:
        _fail(f"no code object available for {path!r}", 1)
    nothing = dict.fromkeys(("__package__", "__spec__", "__cached__"))
    attributes: dict[str, object] = {"__file__": path, "__loader__": loader, **nothing}
    return Program(code, argument, os.path.dirname(os.path.realpath(path)), attributes)


def _current_folder() -> str:
    """"" where it has been removed: python starts what it finds elsewhere all the same."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _module(name: str) -> Program:
    """The program of ``-m name``: the module itself, or the ``__main__`` of a package."""
    folder = _current_folder()
    _set_path0(folder)
    spec = _find_spec(name)
    if spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find_spec(name, "; it is a package and cannot be executed directly")
    return Program(_code(spec, name), spec.origin or name, folder, _spec_attributes(spec))


def _code(spec: ModuleSpec, name: str) -> types.CodeType:
    """The code of the module; the program ends where its loader has none."""
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        _fail(f"no code object available for {name}", 1)
    return code


def _find_spec(name: str, hint: str = "") -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package was found, and what it imports is missing: its traceback says where
        spec = None
    if spec is None or spec.loader is None and spec.submodule_search_locations is None:
        _fail(f"No module named {name}{hint}", 1)
    return spec


def _spec_attributes(spec: ModuleSpec) -> dict[str, object]:
    return {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
        "__cached__": spec.cached,
    }


def _set_path0(folder: str) -> None:
    """Put the program's folder where python puts it. With -I or -P nothing was put there to be replaced."""
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _print_stats() -> None:
    print("tvmgemm statistics", tvmgemm.stats(), sep="\n", file=sys.stderr)


def _fail(message: str, status: int) -> NoReturn:
    print(f"tvmgemm run: {message}", file=sys.stderr)
    raise SystemExit(status)
