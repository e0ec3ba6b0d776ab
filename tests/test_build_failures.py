"""Everything that can go wrong with a build becomes the text of an error."""

import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from builds import (  # noqa: F401
    OTHER,
    RACER,
    ROOT,
    SPEC,
    STARTS_FROM_C,
    THIRD,
    build_all,
    compiler,
    kernel_lock_is_free,
    leftovers,
    no_compiler_chosen,
    object_file,
    only,
)
from stores import store, untouched  # noqa: F401

from tvmgemm.build import parent, process
from tvmgemm.build.parent import build
from tvmgemm.store import Store, kernel_key

pytestmark = STARTS_FROM_C


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
    """The warning is for whoever asked for the kernel to give, once (test_processes_build)."""
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


def test_an_answer_is_read_though_the_wait_for_it_was_interrupted(store, compiler, monkeypatch):
    """A stopped program that goes on finds nothing to read where it waited, and the process ended: its answer is in the pipe."""
    select = selectors.DefaultSelector.select

    def interrupted(self, timeout=None):
        (child,) = process.running - others
        if child not in seen:
            seen.add(child)
            child._process.wait(30)
            return []
        return select(self, timeout)

    seen, others = set(), set(process.running)
    monkeypatch.setattr(selectors.DefaultSelector, "select", interrupted)
    assert only(build_all([SPEC], store, compiler())).error is None
    assert len(seen) == 1


def test_a_failed_link_is_told_by_the_build(tmp_path, store, compiler, monkeypatch):
    driver = tmp_path / "bad-cc"
    driver.write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
    driver.chmod(0o755)
    monkeypatch.setenv("CC", str(driver))
    error = only(build_all([SPEC], store, compiler())).error
    assert "linking failed" in error and "no space left" in error
    assert leftovers(store) == []
