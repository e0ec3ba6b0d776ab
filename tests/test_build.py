"""Builds in a child process: results as they come, and everything that can go wrong becomes the text of an
error."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tvmgemm import log
from tvmgemm.build import link as link_module
from tvmgemm.build import parent, process
from tvmgemm.build.link import Linker, LinkError, find_linker, link
from tvmgemm.build.parent import build
from tvmgemm.spec import KernelSpec
from tvmgemm.store import Store, kernel_key
from tvmgemm.store import folder as folder_module

ROOT = str(Path(parent.__file__).parents[2])
SPEC = KernelSpec("float32", "x86-64-v2", "B3A2C0", 4, 8)
OTHER, THIRD = replace(SPEC, nr=12), replace(SPEC, nr=16)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="these builds start from C")


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(folder_module, "_private", None)
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture(scope="module")
def object_file(tmp_path_factory):
    """An object file with one function, ``int answer(void)``."""
    folder = tmp_path_factory.mktemp("object")
    (folder / "answer.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-c", "-fPIC", "-o", folder / "answer.o", folder / "answer.c"], check=True)
    return folder / "answer.o"


@pytest.fixture
def store(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o700)
    return Store(str(tmp_path / "kernels"))


@pytest.fixture
def compiler(tmp_path, object_file, monkeypatch):
    """Makes a compile function out of statements that run before the object is written; returns its name."""
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(statements="pass"):
        (folder / "fake_compiler.py").write_text(
            "import os, shutil, signal, sys, time\n"
            f"HERE = {str(tmp_path)!r}\n"
            "def compile_object(spec, object_path):\n"
            f"    {statements}\n"
            f"    shutil.copy({str(object_file)!r}, object_path)\n"
        )
        return "fake_compiler:compile_object"

    return make


def build_all(specs, store, compile, timeout=30.0, pins=None):
    return list(build(specs, store, timeout, compile, pins or {}))


def only(results):
    (result,) = results
    return result


def leftovers(store):
    return [
        name
        for name in os.listdir(store.folder)
        if not name.endswith(".so") and not name.startswith(".lock-")
    ]


# --- what goes well ---


def test_a_built_library_is_stored_and_loads(store, compiler):
    result = only(build_all([SPEC], store, compiler()))
    assert result.error is None and result.built and result.seconds > 0
    assert result.path == store.find(SPEC, kernel_key(SPEC))
    assert ctypes.CDLL(result.path).answer() == 42
    assert leftovers(store) == []


@pytest.mark.parametrize("name", ["with space", "with 'quotes\"", "ünïcödé", os.fsdecode(b"not utf-8 \xff")])
def test_any_folder_name_will_do(tmp_path, compiler, name):
    (tmp_path / name).mkdir(mode=0o700)
    result = only(build_all([SPEC], Store(str(tmp_path / name)), compiler()))
    assert result.error is None and os.path.dirname(result.path) == str(tmp_path / name)


def test_tvm_really_builds(store):
    pytest.importorskip("tvm")
    result = only(build([SPEC], store))
    assert result.error is None
    assert getattr(ctypes.CDLL(result.path), SPEC.symbol)
    assert result.path == store.find(SPEC, kernel_key(SPEC))


def test_what_is_in_the_store_is_not_built_again(store, compiler):
    first = only(build_all([SPEC], store, compiler()))
    again = only(build_all([SPEC], store, compiler("raise AssertionError")))
    assert (again.path, again.built) == (first.path, False)


def test_results_come_one_by_one(store, compiler):
    """The first result is there while the child is still at the second."""
    name = compiler(f"(spec.nr == {OTHER.nr}) and time.sleep(60)")
    results = build([SPEC, OTHER], store, 30.0, name, {})
    start = time.monotonic()
    assert next(results).spec == SPEC
    assert time.monotonic() - start < 15
    results.close()
    assert not process.running
    assert kernel_lock_is_free(store, OTHER)


def kernel_lock_is_free(store, spec):
    with store.lock(kernel_key(spec)) as lock:
        return lock.held


def test_the_rest_may_be_taken_in_another_thread(store, compiler):
    results = build([SPEC, OTHER, THIRD], store, 30.0, compiler(), {})
    taken = [next(results)]
    thread = threading.Thread(target=lambda: taken.extend(results))
    thread.start()
    thread.join(30)
    assert [result.spec for result in taken] == [SPEC, OTHER, THIRD]
    assert all(result.error is None for result in taken)


def test_what_another_process_builds_is_left_to_it(store, compiler):
    with store.lock(kernel_key(OTHER)):
        assert [result.spec for result in build_all([SPEC, OTHER], store, compiler())] == [SPEC]


def test_only_the_first_is_waited_for(store, compiler):
    """Nobody holds the lock for longer than the build, and who waited takes the library that came of it."""
    made = only(build_all([SPEC], store, compiler()))
    os.rename(made.path, made.path + ".later")
    lock = store.lock(kernel_key(SPEC))
    threading.Timer(0.2, lambda: (os.rename(made.path + ".later", made.path), lock.release())).start()
    assert only(build_all([SPEC], store, compiler("raise AssertionError"))).built is False


RACER = """
import sys, types
package = types.ModuleType("tvmgemm"); package.__path__ = [sys.argv[1]]; sys.modules["tvmgemm"] = package
sys.path.append(sys.argv[3])
from tvmgemm.build.parent import build
from tvmgemm.spec import KernelSpec
from tvmgemm.store import Store
spec = KernelSpec("float32", "x86-64-v2", "B3A2C0", 4, 8)
if sys.argv[4] == "no locks":
    import fcntl
    def flock(*arguments):
        raise OSError(37, "No locks available")
    fcntl.flock = flock
sys.stdin.readline()
(result,) = build([spec], Store(sys.argv[2]), 30.0, "fake_compiler:compile_object", {})
print(result.path, result.error)
"""


@pytest.mark.parametrize("locks, processes", [("locks", 8), ("no locks", 3)])
def test_processes_on_one_cold_key_build_it_once_where_locks_work(
    tmp_path, store, compiler, locks, processes
):
    compiler("time.sleep(0.2); open(HERE + '/count', 'a').write('x')")
    arguments = [os.path.join(ROOT, "tvmgemm"), store.folder, str(tmp_path / "compilers"), locks]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(processes)
    ]
    for racer in racers:
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    told = {racer.communicate(timeout=60)[0].decode().strip() for racer in racers}
    path = store.find(SPEC, kernel_key(SPEC))
    assert told == {f"{path} None"}
    assert len((tmp_path / "count").read_text()) == (1 if locks == "locks" else processes)
    assert len(store.entries()) == 1 and leftovers(store) == []


# --- what the child is exposed to ---


def test_the_users_folder_cannot_stand_in_for_modules(tmp_path, store, compiler):
    """A program in a folder that has a json.py and a random.py builds, and loads neither of them anywhere."""
    compiler(
        "import json, random, tempfile; open(HERE + '/loaded', 'w').write(json.__file__ + random.__file__)"
    )
    program = tmp_path / "program"
    program.mkdir()
    for module in ("json", "random", "tempfile", "numpy", "psutil", "tvmgemm", "link"):
        (program / f"{module}.py").write_text(
            f"open({str(tmp_path / 'hostile')!r}, 'a').write({module!r} + ' ')\n"
        )
    (program / "main.py").write_text(RACER)
    for command in (["main.py"], ["-c", RACER]):
        arguments = [os.path.join(ROOT, "tvmgemm"), store.folder, str(tmp_path / "compilers"), "locks"]
        done = subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=program,
            input="go\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.startswith(store.folder), done.stderr
        assert not (tmp_path / "hostile").exists(), (tmp_path / "hostile").read_text()
        assert str(program) not in (tmp_path / "loaded").read_text()
        store.clear()


def test_the_environment_is_clean(tmp_path, store, compiler, monkeypatch):
    for name in ("LD_PRELOAD", "PYTHONSTARTUP", "TVM_LOG_DEBUG", "TVMGEMM_JIT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "nonsense" if name != "LD_PRELOAD" else "")
    name = compiler("open(HERE + '/environment', 'w').write(repr(sorted(os.environ.items())))")
    assert only(build_all([SPEC], store, name)).error is None
    seen = dict(eval((tmp_path / "environment").read_text()))
    assert "nonsense" not in seen.values() and "LD_PRELOAD" not in seen
    assert seen["OMP_NUM_THREADS"] == seen["TVM_NUM_THREADS"] == "1" and seen["PATH"] == os.environ["PATH"]


def test_the_package_is_the_parents_own(tmp_path, store, compiler):
    name = compiler("import tvmgemm.store.key as key; open(HERE + '/package', 'w').write(key.__file__)")
    assert only(build_all([SPEC], store, name)).error is None
    assert (tmp_path / "package").read_text() == os.path.join(ROOT, "tvmgemm", "store", "key.py")


def test_a_chatty_compiler_does_not_disturb_the_answers(store, compiler):
    name = compiler("print('{\"name\": 1}'); os.write(1, b'[1, 2]\\n' * 20000); os.write(2, b'x' * 200000)")
    assert only(build_all([SPEC], store, name)).error is None


# --- what goes wrong ---


def test_a_compile_error_is_told(store, compiler):
    result = only(
        build_all([SPEC], store, compiler("raise ValueError('long trace' + chr(10) + 'no such intrinsic')"))
    )
    assert result.path is None
    assert (
        f"{SPEC.name} was not built, NumPy computes in its place: compiling failed: ValueError"
        in result.error
    )
    assert "no such intrinsic" in result.error
    assert leftovers(store) == [] and kernel_lock_is_free(store, SPEC)


def test_a_crash_costs_one_kernel(store, compiler):
    name = compiler(f"(spec.nr == {SPEC.nr}) and os.kill(os.getpid(), signal.SIGSEGV)")
    crashed, *others = build_all([SPEC, OTHER, THIRD], store, name)
    assert (
        "was killed by signal 11 (Segmentation fault)" in crashed.error and "TVMGEMM_MAX_ISA" in crashed.error
    )
    assert [(result.spec, result.error) for result in others] == [(OTHER, None), (THIRD, None)]


def test_an_exit_is_told_with_what_was_printed(store, compiler):
    result = only(
        build_all(
            [SPEC], store, compiler("sys.stderr.write('LLVM ERROR: out of registers' + chr(10)); os._exit(3)")
        )
    )
    assert "exit status 3" in result.error and "LLVM ERROR: out of registers" in result.error


def test_a_timeout_kills_all_that_was_started(tmp_path, store, compiler):
    statements = (
        "import subprocess; sleeper = subprocess.Popen(['sleep', '60']);"
        " open(HERE + '/pid', 'w').write(str(sleeper.pid)); sleeper.wait()"
    )
    start = time.monotonic()
    done, slow = build_all(
        [SPEC, OTHER], store, compiler(f"if spec.nr == {OTHER.nr}: {statements}"), timeout=1.5
    )
    assert time.monotonic() - start < 10
    assert done.error is None
    assert "had not finished within 1.5 s" in slow.error
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if (
            not os.path.exists(f"/proc/{pid}")
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
        ):
            break
        time.sleep(0.02)
    else:
        pytest.fail("what the child had started is still running")


def fake_python(tmp_path, monkeypatch, text):
    """Put a shell script in the place of the child's interpreter."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(
    "prints, told",
    [
        (
            "echo garbage; echo '[]'; echo '{\"name\": [], \"path\": 3}'; echo '{'; echo '{[]: 1}'",
            "exit status 0 and no answer",
        ),
        ("exit 7", "exit status 7"),
        ("kill -9 $$", "killed by signal 9"),
        ("head -c 300000 /dev/zero; echo said >&2", "it printed: said"),
        (f'echo \'{{"name": "{SPEC.name}", "path": "\'$0\'"}}\'', "not a sound library"),
        (f'echo \'{{"name": "{SPEC.name}", "path": 1, "seconds": "x"}}\'', "not a sound library"),
        ("exec 1>&- 2>&-; sleep 60", "had not finished within 1.5 s"),
        ("sleep 60 & exit 4", "exit status 4"),
    ],
)
def test_a_child_that_is_not_ours_to_trust(tmp_path, store, monkeypatch, prints, told):
    fake_python(tmp_path, monkeypatch, prints)
    assert told in only(build_all([SPEC], store, "a:b", timeout=1.5)).error
    assert (tmp_path / "python").exists()  # the path that it reported: what is not the store's is not touched


@pytest.mark.parametrize("executable", ["", "/nonexistent/python", __file__])
def test_no_interpreter_to_start(store, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert (
        "interpreter" in (error := only(build_all([SPEC], store, "a:b")).error)
        or "cannot be started" in error
    )


def test_no_linker_is_an_error_that_says_what_to_install(tmp_path, store, compiler, monkeypatch):
    """The warning is for whoever asked for the kernel to give, once (test_processes)."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            error = only(build_all([SPEC], store, compiler())).error
            assert "no linker was found: neither $CC nor cc, gcc, clang, ld, ld.lld" in error


def test_the_wrong_version_is_refused(store, compiler):
    pytest.importorskip("tvm")
    pins = {"apache-tvm": "0.0.1"}
    result = only(build_all([SPEC], store, compiler(), pins=pins))
    assert "apache-tvm 0.27.0.post1 instead of 0.0.1; pip install 'apache-tvm==" in result.error


def test_a_missing_tvm_starts_no_process(store, compiler, monkeypatch):
    monkeypatch.setattr(parent, "_is_installed", lambda module: False)
    monkeypatch.setattr(subprocess, "Popen", None)
    result = only(build_all([SPEC], store, compiler(), pins=parent.PINS))
    assert "TVM is not installed" in result.error and "pip install 'apache-tvm==" in result.error


def test_a_generator_that_cannot_be_loaded_fails_every_spec(store):
    errors = [result.error for result in build_all([SPEC, OTHER], store, "no_such_module:compile_object")]
    assert len(errors) == 2 and all("No module named 'no_such_module'" in error for error in errors)


def test_nowhere_to_write_is_told(store, compiler, monkeypatch):
    def no_folder(self):
        raise OSError("no private folder can be made")

    monkeypatch.setattr(Store, "build_folder", no_folder)
    assert "no private folder" in only(build_all([SPEC], store, compiler())).error


def test_a_store_that_vanishes_is_told(tmp_path, store, compiler):
    name = compiler("shutil.rmtree(HERE + '/kernels')")
    assert "No such file" in only(build_all([SPEC], store, name)).error


def test_a_private_folder_serves_when_the_store_cannot_be_written(store, compiler, monkeypatch):
    from tvmgemm.store import files

    def read_only(folder):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files, "try_writing", read_only)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        result = only(build_all([SPEC], store, compiler()))
    assert result.error is None and not result.path.startswith(store.folder)
    assert store.find(SPEC, kernel_key(SPEC)) == result.path


def test_the_programs_end_ends_its_builds(tmp_path, store, compiler):
    compiler("open(HERE + '/pid', 'w').write(str(os.getpid())); time.sleep(60)")
    code = RACER.replace("(result,) = build(", "import threading, time, os\nresults = build(").split(
        "print("
    )[0] + (
        "threading.Thread(target=lambda: list(results), daemon=True).start()\n"
        "while not os.path.exists(sys.argv[5]) or not open(sys.argv[5]).read(): time.sleep(0.02)\n"
    )
    arguments = [
        os.path.join(ROOT, "tvmgemm"),
        store.folder,
        str(tmp_path / "compilers"),
        "locks",
        str(tmp_path / "pid"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], input=b"\n", capture_output=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_forked_child_leaves_its_parents_build_alone(store, compiler):
    results = build([SPEC, OTHER], store, 30.0, compiler("time.sleep(0.2)"), {})
    first = next(results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        results.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert first.error is None and [result.error for result in results] == [None]


def test_ignoring_the_end_of_children_does_not_matter(store, compiler):
    """A program that ignores SIGCHLD takes the exit status away."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert only(build_all([SPEC], store, compiler())).error is None
        assert "no answer" in only(build_all([OTHER], store, compiler("os._exit(3)"))).error
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- linking ---


def tools(folder, *names):
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    "present, chosen, found",
    [
        (["cc", "gcc", "ld"], None, ("cc", True)),
        (["gcc", "clang"], None, ("gcc", True)),
        (["clang", "ld"], None, ("clang", True)),
        (["ld", "ld.lld"], None, ("ld", False)),
        (["ld.lld"], None, ("ld.lld", False)),
        (["cc", "other"], "other -m64", ("other", True)),
        (["cc", "ld"], "ld", ("ld", False)),
        (["cc"], "missing", ("cc", True)),
        (["cc"], "unbalanced '", ("cc", True)),
        ([], None, None),
    ],
)
def test_find_linker(tmp_path, present, chosen, found):
    environ = {"PATH": tools(tmp_path, *present), **({"CC": chosen} if chosen else {})}
    linker = find_linker(environ)
    assert (linker and (os.path.basename(linker.command[0]), linker.driver)) == found
    if chosen == "other -m64":
        assert linker.command[1:] == ("-m64",)


@pytest.mark.parametrize("name", ["cc", "ld", "ld.lld"])
def test_link_with_what_is_here(tmp_path, object_file, name):
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    library = str(tmp_path / "answer.so")
    link(Linker((shutil.which(name),), driver=name == "cc"), str(object_file), library)
    assert ctypes.CDLL(library).answer() == 42


def test_a_driver_that_refuses_nostdlib_is_asked_again(tmp_path, object_file):
    driver = tmp_path / "fussy"
    driver.write_text('#!/bin/sh\ncase "$*" in *nostdlib*) echo no >&2; exit 1;; esac\nexec cc "$@"\n')
    driver.chmod(0o755)
    link(Linker((str(driver),), driver=True), str(object_file), str(tmp_path / "answer.so"))
    assert ctypes.CDLL(str(tmp_path / "answer.so")).answer() == 42


@pytest.mark.parametrize(
    "text, told",
    [
        (
            "echo first; echo 'cannot find crt1.o' >&2; exit 1",
            "failed with exit status 1: first\ncannot find crt1.o",
        ),
        ("exit 0", "wrote no library"),
        ("exit 5", "it printed nothing"),
        ("touch \"$(echo $* | sed 's/.*-o //; s/ .*//')\"", "wrote no library"),
    ],
)
def test_a_linker_that_fails_is_quoted(tmp_path, object_file, text, told):
    linker = tmp_path / "bad-ld"
    linker.write_text(f"#!/bin/sh\n{text}\n")
    linker.chmod(0o755)
    library = tmp_path / "answer.so"
    with pytest.raises(LinkError) as caught:
        link(Linker((str(linker),), driver=False), str(object_file), str(library))
    assert told in str(caught.value) and "bad-ld" in str(caught.value)
    assert not library.exists()


def test_a_linker_that_hangs_is_stopped(tmp_path, object_file, monkeypatch):
    linker = tmp_path / "slow-ld"
    linker.write_text("#!/bin/sh\nexec sleep 60\n")
    linker.chmod(0o755)
    monkeypatch.setattr(link_module, "_TIMEOUT", 0.2)
    with pytest.raises(LinkError, match="did not finish"):
        link(Linker((str(linker),), driver=False), str(object_file), str(tmp_path / "answer.so"))


def test_a_failed_link_is_told_by_the_build(tmp_path, store, compiler, monkeypatch):
    driver = tmp_path / "bad-cc"
    driver.write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
    driver.chmod(0o755)
    monkeypatch.setenv("CC", str(driver))
    error = only(build_all([SPEC], store, compiler())).error
    assert "linking failed" in error and "no space left" in error
    assert leftovers(store) == []


def test_macos_links_a_dylib():
    assert link_module._attempts(True, "darwin") == [["-dynamiclib", "-Wl,-undefined,dynamic_lookup"]]
    assert link_module._attempts(False, "darwin")[0][0] == "-dylib"
