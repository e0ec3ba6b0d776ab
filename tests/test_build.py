"""Builds in a child process: results as they come, of one process or of several, and what the child is exposed to."""

import ctypes
import os
import subprocess
import sys
import threading
import time

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

from tvmgemm.build import process
from tvmgemm.build.parent import build
from tvmgemm.store import Store, kernel_key

pytestmark = STARTS_FROM_C


# -- what goes well


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


def test_tvm_really_builds(tmp_path):
    pytest.importorskip("tvm")
    (tmp_path / os.fsdecode(b"not utf-8 \xff")).mkdir(mode=0o700)
    store = Store(str(tmp_path / os.fsdecode(b"not utf-8 \xff")))
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
    others = set(process.running)  # builds in the background that an earlier test has left
    results = build([SPEC, OTHER], store, 30.0, name, {})
    start = time.monotonic()
    assert next(results).spec == SPEC
    assert time.monotonic() - start < 15
    results.close()
    assert process.running <= others
    assert kernel_lock_is_free(store, OTHER)


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


# -- what the child is exposed to


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
