"""``python -m tvmgemm run``: the program finds what it finds under plain Python, but for a patched NumPy."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from commands import ROOT, program, python, tvmgemm

#: A program that says everything it can see of how it was started.
WITNESS = '''
"""The witness."""
import json, os, pickle, sys, threading, atexit
class Thing: pass
here = sys.modules["__main__"]
spec = __spec__
facts = {
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__,
    "package": __package__, "cached": __cached__, "spec": spec and [spec.name, spec.origin, spec.parent],
    "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
    "is main": here.__dict__ is globals(), "pickles": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    "source": __loader__.get_source(spec.name if spec else "__main__")[:8],
    "cwd": os.getcwd(), "names": sorted(n for n in globals() if n not in ("__annotations__", "__annotate__")),
}
print(json.dumps(facts))
def late():
    copy = pickle.loads(pickle.dumps(Thing()))
    print("late:", sys.modules["__main__"].__dict__ is globals(), type(copy) is Thing)
atexit.register(late)
'''


# -- as plain python


@pytest.fixture
def witnesses(tmp_path):
    """A script, a package, a folder and a zip file with the witness in them; the folder they are in."""
    program(tmp_path, WITNESS, "witness.py")
    program(tmp_path, WITNESS, "scripts/witness.py")
    (tmp_path / "link.py").symlink_to("scripts/witness.py")
    program(tmp_path, "", "package/__init__.py")
    program(tmp_path, WITNESS, "package/__main__.py")
    program(tmp_path, WITNESS, "package/part.py")
    program(tmp_path, WITNESS, "folder/__main__.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", WITNESS)
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        ["witness.py"],
        ["scripts/witness.py"],
        ["./scripts/../witness.py"],
        ["link.py"],
        ["folder"],
        ["archive.zip"],
        ["-m", "witness"],
        ["-mwitness"],
        ["-m", "package"],
        ["-m", "package.part"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_sees_under_plain_python(witnesses, target):
    arguments = [*target, "-x", "--help", "--", "a b", "--stats", "-m", ""]
    plain = python(*arguments, cwd=witnesses)
    ours = tvmgemm("run", *arguments, cwd=witnesses)
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout.splitlines()[0]) == json.loads(plain.stdout.splitlines()[0])
    assert ours.stdout == plain.stdout
    assert ours.stdout.endswith("late: True True\n")


def test_an_absolute_path_from_elsewhere(witnesses, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = witnesses / "scripts" / "witness.py"
    assert tvmgemm("run", script, cwd=elsewhere).stdout == python(script, cwd=elsewhere).stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_the_safe_path_flag_is_respected(tmp_path):
    script = program(tmp_path, "import sys; print(sys.path)")
    plain = python("-P", script, cwd=tmp_path)
    ours = python("-P", "-m", "tvmgemm", "run", script, cwd=tmp_path)
    assert ours.stdout == plain.stdout


def test_a_compiled_script(tmp_path):
    import py_compile

    compiled = tmp_path / "program.pyc"
    py_compile.compile(str(program(tmp_path, "print(__name__)")), cfile=str(compiled))
    assert tvmgemm("run", "program.pyc", cwd=tmp_path).stdout == "__main__\n"


def test_a_coding_cookie_and_a_byte_order_mark(tmp_path):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nprint(len('é'), ascii('é'))\n".encode("latin-1"))
    (tmp_path / "mark.py").write_bytes("\ufeffprint(ascii('é'))\n".encode())
    assert tvmgemm("run", "latin.py", cwd=tmp_path).stdout == "1 '\\xe9'\n"
    assert tvmgemm("run", "mark.py", cwd=tmp_path).stdout == "'\\xe9'\n"


@pytest.mark.parametrize(
    "line",
    [
        "raise SystemExit",
        "raise SystemExit(7)",
        "sys.exit('a message')",
        "sys.exit(None)",
        "os._exit(9)",
        "raise ValueError('boom')",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "sys.excepthook = lambda *e: print('hook', e[1]); raise ValueError('boom')",
    ],
)
def test_exit_status_and_output(tmp_path, line):
    script = program(tmp_path, f"import os, signal, sys, threading, time\n{line}\n")
    plain, ours = python(script, cwd=tmp_path), tvmgemm("run", script, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    # A traceback has our frames on top of the program's; its end is the same, source lines included.
    assert ours.stderr.splitlines()[-2:] == plain.stderr.splitlines()[-2:]


def test_a_traceback_hides_nothing(tmp_path):
    lines = ["def inner():", "    raise ValueError('boom')", "", "def outer():", "    inner()", "", "outer()"]
    script = program(tmp_path, "\n".join(lines))
    error = tvmgemm("run", script, cwd=tmp_path).stderr
    assert [f"line {n}" in error for n in (7, 5, 2)] == [True] * 3
    assert "raise ValueError('boom')" in error and error.endswith("ValueError: boom\n")


def test_a_syntax_error_names_the_program(tmp_path):
    script = program(tmp_path, "x = (\n")
    result = tvmgemm("run", script, cwd=tmp_path)
    assert result.returncode == 1
    assert str(script) in result.stderr and "SyntaxError" in result.stderr


def test_standard_input_belongs_to_the_program(tmp_path):
    script = program(tmp_path, "import sys; print(sys.stdin.read().upper())")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tvmgemm", "run", str(script)]
    result = subprocess.run(command, env=env, input="abc", capture_output=True, text=True, timeout=60)
    assert result.stdout == "ABC\n"


def test_nothing_is_written_beside_the_program(tmp_path):
    script = program(tmp_path, "print('ran')")
    tvmgemm("run", script, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


# -- with NumPy patched


PRODUCT = """
import numpy as np
a, b = np.arange(6.0).reshape(2, 3), np.ones((3, 4))
print((a @ b).tolist())
import sys
tvmgemm = sys.modules["tvmgemm"]
print(tvmgemm.is_patched(), "tvm" in sys.modules)
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_numpy_is_patched(tmp_path, as_module):
    program(tmp_path, PRODUCT)
    result = tvmgemm("run", *(["-m", "program"] if as_module else ["program.py"]), cwd=tmp_path)
    assert result.stdout.splitlines() == ["[[3.0, 3.0, 3.0, 3.0], [12.0, 12.0, 12.0, 12.0]]", "True False"]
    assert (result.returncode, result.stderr) == (0, "")


def test_numpy_is_patched_before_anything_of_the_program_runs(tmp_path):
    program(tmp_path, "import sys; print(sys.modules['tvmgemm'].is_patched())", "package/__init__.py")
    program(tmp_path, "", "package/__main__.py")
    assert tvmgemm("run", "-m", "package", cwd=tmp_path).stdout == "True\n"


def test_forked_children_are_patched_too(tmp_path):
    text = """
import multiprocessing, sys
import numpy as np
def product(n):
    return float((np.ones((n, n)) @ np.ones((n, n))).sum()), sys.modules["tvmgemm"].is_patched()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(product, [2, 3]))
"""
    result = tvmgemm("run", program(tmp_path, text), cwd=tmp_path)
    assert result.stdout == "[(8.0, True), (27.0, True)]\n", result.stderr


def test_spawned_children_find_the_program(tmp_path):
    text = """
import multiprocessing
def square(n):
    return n * n
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]))
"""
    script = program(tmp_path, text)
    assert tvmgemm("run", script, cwd=tmp_path).stdout == "[4, 9]\n"
    assert tvmgemm("run", "-m", "program", cwd=tmp_path).stdout == "[4, 9]\n"


def test_statistics_at_the_end(tmp_path):
    script = program(tmp_path, PRODUCT + "\nraise SystemExit(3)")
    result = tvmgemm("run", "--stats", script, cwd=tmp_path)
    assert result.returncode == 3
    assert result.stderr.startswith("tvmgemm statistics\n")
    assert "float64: 1 calls served, 0 declined" in result.stderr


# -- what can't be run


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ([], 2, "the program is missing"),
        (["-m"], 2, "-m needs the name of a module"),
        (["--statistics", "x.py"], 2, "'--statistics' is not one of -m, --stats"),
        (["missing.py"], 2, "missing.py': [Errno 2] No such file or directory"),
        (["-m", "missing"], 1, "No module named missing"),
        (["-m", "missing.part"], 1, "No module named missing.part"),
        (["-m", "package"], 1, "No module named package.__main__; it is a package"),
        (["-m", "package.missing"], 1, "No module named package.missing"),
        (["package"], 1, "can't find '__main__' module in"),
    ],
    ids=str,
)
def test_what_cannot_be_run(tmp_path, arguments, status, message):
    program(tmp_path, "", "package/__init__.py")
    result = tvmgemm("run", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_missing_import_of_the_program_keeps_its_traceback(tmp_path):
    program(tmp_path, "import not_there", "package/__init__.py")
    result = tvmgemm("run", "-m", "package.part", cwd=tmp_path)
    assert result.returncode == 1
    assert "import not_there" in result.stderr and "No module named 'not_there'" in result.stderr
