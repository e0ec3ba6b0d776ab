"""The command line but for ``run`` and ``emit``, each test in processes of its own."""

import json
import sys
from pathlib import Path

import pytest
from commands import ROOT, program, python, tvmgemm

from tvmgemm.host import host

# -- info, demo, the example


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A kernel cache that the tests of this module share: a kernel is built once."""
    return str(tmp_path_factory.mktemp("cache"))


def test_info_as_json(tmp_path, cache):
    result = tvmgemm("info", "--json", cwd=tmp_path, TVMGEMM_CACHE_DIR=cache, TVMGEMM_NUM_THREADS="3")
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    names = ["versions", "numpy_blas", "compiler", "host", "threads", "cache", "dtypes", "settings"]
    assert list(facts) == names
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(facts["versions"]) == {"tvmgemm", "python", "numpy"}
    assert set(facts["compiler"]) == {"tvm", "tvm_ffi", "linker"}
    assert set(facts["host"]) == {"arch", "model", "isa", "isas", "features", "caches", "cores"}
    assert facts["host"]["isa"] == host().isa().name and facts["host"]["isa"] in facts["host"]["isas"]
    assert [cache["level"] for cache in facts["host"]["caches"]] == [1, 2, 3]
    assert facts["threads"] == 3
    assert facts["cache"]["folder"] == cache
    assert {"float32", "float64"} <= set(facts["dtypes"])
    assert facts["settings"]["num_threads"] == {"value": 3, "source": "TVMGEMM_NUM_THREADS"}
    assert facts["settings"]["variant"] == {"value": "auto", "source": "default"}


def test_info_as_text(tmp_path, cache):
    (Path(cache) / f"a-kernel-{16 * '0'}-{16 * 'f'}.so").write_bytes(b"x" * 3000)
    result = tvmgemm("info", cwd=tmp_path, TVMGEMM_CACHE_DIR=cache, TVMGEMM_MAX_ISA="x86-64-v2")
    (Path(cache) / f"a-kernel-{16 * '0'}-{16 * 'f'}.so").unlink()
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert {"tvmgemm", "Python", "NumPy", "TVM", "CPU", "ISA", "threads", "dtypes"} <= set(lines)
    assert f"kernel cache  {cache}: 1 kernels, 0.0 MiB" in result.stdout
    assert "x86-64-v2" in lines["max_isa"] and lines["max_isa"].endswith("TVMGEMM_MAX_ISA")


def test_info_imports_no_tvm(tmp_path, cache):
    code = "import sys, tvmgemm.cli as cli; cli.main(['info']); sys.exit('tvm' in sys.modules)"
    assert python("-c", code, cwd=tmp_path, TVMGEMM_CACHE_DIR=cache).returncode == 0


@pytest.mark.parametrize("missing", ["rich", "threadpoolctl"])
def test_the_demo_without_its_extra(tmp_path, missing):
    program(tmp_path, f"raise ModuleNotFoundError(name={missing!r})", f"{missing}.py")
    result = tvmgemm("demo", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f'tvmgemm demo needs {missing}: pip install "tvmgemm[cli]"\n'


def test_the_demo(tmp_path, cache):
    from tvmgemm.cli.demo import DTYPES, SHAPES

    settings = {"TVMGEMM_CACHE_DIR": cache, "TVMGEMM_NUM_THREADS": "1", "COLUMNS": "100"}
    result = tvmgemm("demo", "--seconds", "0.1", cwd=tmp_path, **settings)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    cases = len(DTYPES) * len(SHAPES)
    assert f"{cases} of {cases} results are within their error bound" in result.stdout
    words = result.stdout.split()
    assert all(words.count(f"{m}x{n}x{k}") >= len(DTYPES) for m, n, k in SHAPES)
    assert "kernels built" in result.stdout
    ending = " ".join(result.stdout.split("A second process:")[1].split())
    assert "TVM was not imported, no kernels were compiled." in ending


def test_the_error_bound_of_the_demo_tells_right_from_wrong():
    import numpy as np

    from tvmgemm.cli.demo import error_over_bound

    a, b = np.random.default_rng(0).standard_normal((2, 50, 50))
    for dtype in ("float32", "float64"):
        x, y = a.astype(dtype), b.astype(dtype)
        assert error_over_bound(x @ y, x, y) < 1
        assert error_over_bound(x @ y + 100 * np.finfo(dtype).eps * 50, x, y) > 1
        assert not error_over_bound(x @ y * np.nan, x, y) <= 1


def test_the_example_prints_the_same_with_and_without(tmp_path, cache):
    example = ROOT / "examples" / "digits.py"
    assert "tvmgemm" not in example.read_text()
    plain = python(example, cwd=tmp_path)
    ours = tvmgemm("run", "--stats", example, cwd=tmp_path, TVMGEMM_CACHE_DIR=cache)
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)
    served = int(ours.stderr.split("float64: ")[1].split()[0])
    assert served > 1000


# -- the rest of the command line


@pytest.mark.parametrize("arguments", [["--help"], ["info"], ["info", "--json"], ["emit"]], ids=" ".join)
def test_nobody_reads_the_output(tmp_path, arguments):
    """As in a pipe to ``head``, and where standard output is closed."""
    code = """
import os, subprocess, sys
read, write = os.pipe()
os.close(read)
for closed in (False, True):
    done = subprocess.run([sys.executable, "-m", "tvmgemm", *sys.argv[1:]], stdout=None if closed else write,
                          stderr=subprocess.PIPE, preexec_fn=(lambda: os.close(1)) if closed else None)
    assert (done.returncode, done.stderr) == (0, b""), done
"""
    result = python("-c", code, *arguments, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse to remove it")
def test_the_current_folder_is_gone(tmp_path):
    script = program(tmp_path, "import sys; print(sys.argv)")
    for arguments, status, output in [
        ((script, "x"), 0, f"[{str(script)!r}, 'x']\n"),
        (("program.py",), 2, "tvmgemm run: can't open file 'program.py': [Errno 2] No such file or directory\n"),
        (("-m", "this"), 0, None),
    ]:
        (tmp_path / "gone").mkdir()
        code = "import os, runpy, sys; os.rmdir(os.getcwd()); sys.argv[0] = 'tvmgemm'; runpy.run_module('tvmgemm')"
        result = python("-c", code, "run", *arguments, cwd=tmp_path / "gone")
        assert result.returncode == status, result.stderr
        assert output is None or result.stdout + result.stderr == output


def test_help_and_wrong_commands(tmp_path):
    helped = tvmgemm("--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert all(name in helped.stdout for name in ("run", "info", "demo"))
    for arguments in (["run", "--help"], ["info", "--help"], ["demo", "--help"]):
        result = tvmgemm(*arguments, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert "usage: python -m tvmgemm " + arguments[0] in result.stdout
    for arguments in ([], ["frobnicate"]):
        result = tvmgemm(*arguments, cwd=tmp_path)
        assert result.returncode == 2 and "run, info, demo" in result.stderr
