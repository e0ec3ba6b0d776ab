"""Whole processes, as users run them: warm and cold stores, machines that lack something, threads, forks,
Ctrl-C.

Whatever happens, products are right; where something is wrong, exactly one warning says so. Each program runs
in an interpreter of its own and prints what it saw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from equivalence import FORCED, RUNNABLE

pytestmark = [
    pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's /proc"),
]

ROOT = Path(__file__).resolve().parent.parent

#: What every program starts with. ``product(seed)`` is right or the program fails; its value is its bytes'
#: digest.
BEGINNING = """
import os, sys, threading, time, warnings, zlib
import numpy as np
import tvmgemm

def operands(seed=0, m=120, n=110, k=130, dtype="float32"):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)

def product(seed=0, **shape):
    a, b = operands(seed, **shape)
    c = tvmgemm.matmul(a, b)
    assert np.allclose(c, np.dot(a.astype("f8"), b.astype("f8")), atol=1e-3), "a wrong product"
    return zlib.crc32(c.tobytes())

def seen(**more):
    s = tvmgemm.stats()
    import json
    print(json.dumps(dict(
        served=s.served, declined=s.declined, builds=s.builds, failed=s.failed_builds, hits=s.store_hits,
        kernels=s.kernels, tvm="tvm" in sys.modules, **more)), flush=True)

caught = []
def remember(message, category, *rest):
    caught.append(f"{category.__name__}: {message}")
warnings.simplefilter("always")
warnings.showwarning = remember
"""


#: The companions of the first kernel follow in a thread: wait until it has ended.
WAIT = "[t.join(60) for t in threading.enumerate() if t.name.startswith('tvmgemm')]"


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with a narrow ISA (its kernels compile fastest), a forced variant and
    ``changes``.
    """
    base = {"TVMGEMM_MAX_ISA": RUNNABLE[0], "TVMGEMM_VARIANT": FORCED, "TVMGEMM_NUM_THREADS": "1"}
    merged = {**os.environ, **base, **changes}
    return {name: str(value) for name, value in merged.items() if value is not None}


def start(program: str, *flags: str, **changes: str | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *flags, "-c", BEGINNING + textwrap.dedent(program)],
        env=environment(**changes), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(process: subprocess.Popen, timeout: float = 120) -> dict:
    """What the program printed last; it must have ended well and written nothing to stderr."""
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, error
    assert error == "", error
    return json.loads(out.splitlines()[-1])


def run(program: str, *flags: str, **changes: str | None) -> dict:
    return result(start(program, *flags, **changes))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store that one process has filled, and what that process saw."""
    folder = tmp_path_factory.mktemp("built") / "kernels"
    return folder, run(f"first = product(); {WAIT}; seen(value=first)", TVMGEMM_CACHE_DIR=folder)


@pytest.fixture
def store(built, tmp_path):
    """A copy of the filled store."""
    folder = tmp_path / "kernels"
    shutil.copytree(built[0], folder)
    folder.chmod(0o700)
    return folder


# -- the store between processes


def test_a_cold_process_builds(built):
    folder, first = built
    assert first["builds"] >= 1 and first["failed"] == 0 and first["hits"] == 0 and not first["tvm"]
    assert first["served"]["float32"] == 1 and first["declined"]["float32"] == 0
    assert len(entries(folder)) == first["builds"]
    assert not list(folder.glob(".tmp-*")) and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_second_process_finds_it(built):
    folder, first = built
    again = run(
        "seen(value=product(), warned=caught, threads=threading.active_count())", TVMGEMM_CACHE_DIR=folder
    )
    assert again["value"] == first["value"], "not the same bits"
    assert again["builds"] == 0 and again["hits"] > 0 and not again["tvm"]
    assert again["served"]["float32"] == 1 and again["kernels"].keys() == first["kernels"].keys()
    assert again["warned"] == [] and again["threads"] == 1


def test_a_second_process_needs_no_compiler_and_no_writing(store):
    """No TVM, no linker, no permission to write: a hit needs none of them."""
    store.chmod(0o500)
    again = run(
        WITHOUT_TVM + "seen(value=product(), warned=caught)",
        TVMGEMM_CACHE_DIR=store,
        PATH="/nonexistent",
        CC=None,
    )
    assert again["served"]["float32"] == 1 and again["builds"] == 0 and again["warned"] == []


def test_touched_sources_and_moved_stores_still_hit(store, tmp_path):
    """Neither paths nor time stamps are in the key (numba/numba#10776)."""
    moved = tmp_path / "elsewhere"
    store.rename(moved)
    for entry in entries(moved):
        os.utime(entry, (1, 1))
    again = run("seen(value=product())", TVMGEMM_CACHE_DIR=moved)
    assert again["builds"] == 0 and again["hits"] > 0


def test_another_instruction_set_is_another_kernel(store):
    """A store that machines share never gives one the code of another (SIGILL:
    adoptium/adoptium-support#1507).
    """
    if len(RUNNABLE) < 2:
        pytest.skip("this CPU runs one instruction set only")
    again = run(
        "seen(value=product())", TVMGEMM_CACHE_DIR=store, TVMGEMM_MAX_ISA=RUNNABLE[1], TVMGEMM_JIT="off"
    )
    assert again["hits"] == 0 and again["declined"]["float32"] == 1


# -- something is missing or broken

WITHOUT_TVM = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""

SAY = """
values = [product(seed) for seed in (0, 1)] + [product(2, dtype="float64"), product(3, m=9, n=8, k=7)]
seen(warned=caught)
"""


def assert_numpy_served_with_one_warning(said: dict, *words: str) -> None:
    assert not any(said["served"].values()) and sum(said["declined"].values()) == 4
    assert said["builds"] == 0 and len(said["warned"]) == 1
    assert said["warned"][0].startswith("RuntimeWarning")
    for word in words:
        assert word in said["warned"][0], said["warned"][0]


def test_no_linker(tmp_path):
    said = run(SAY, TVMGEMM_CACHE_DIR=tmp_path / "k", PATH=str(tmp_path), CC=None)
    assert_numpy_served_with_one_warning(said, "linker", "CC")


def test_linker_that_fails(tmp_path):
    (tmp_path / "cc").write_text("#!/bin/sh\necho this linker is out of order >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    said = run(SAY, TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(tmp_path / "cc"))
    assert_numpy_served_with_one_warning(said, "linking failed", "out of order")
    assert not entries(tmp_path / "k")


def test_no_tvm(tmp_path):
    said = run(WITHOUT_TVM + SAY, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert_numpy_served_with_one_warning(said, "TVM is not installed", "pip install")


def test_wrong_tvm(tmp_path):
    """Another version than the pinned one would generate other code: it is refused by the build process."""
    pin = 'from tvmgemm.store import key; key.PINS["apache-tvm"] = "0.1"\n'
    said = run(pin + SAY, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert_numpy_served_with_one_warning(said, "apache-tvm", "instead of 0.1", "pip install")


def test_warnings_as_errors(tmp_path):
    """``-W error`` makes an exception of the warning: it must not end a product that NumPy computes."""
    quiet = "warnings.resetwarnings(); warnings.simplefilter('error')\n"
    said = run(quiet + SAY, "-W", "error", TVMGEMM_CACHE_DIR=tmp_path / "k", PATH=str(tmp_path), CC=None)
    assert sum(said["declined"].values()) == 4 and said["builds"] == 0


def test_warnings_as_errors_where_nothing_is_wrong(store):
    said = run("seen(value=product())", "-W", "error", TVMGEMM_CACHE_DIR=store)
    assert said["served"]["float32"] == 1


def unusable(kind: str, folder: Path) -> Path:
    """A cache folder that cannot be used, or must not be."""
    if kind == "a file":
        folder.write_text("")
    elif kind == "below a file":
        folder.write_text("")
        return folder / "kernels"
    elif kind == "everybody's":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (folder.parent / "real").mkdir()
        folder.symlink_to(folder.parent / "real")
    return folder


@pytest.mark.parametrize("kind", ["a file", "below a file", "everybody's", "a link"])
def test_unusable_cache_folder(tmp_path, kind):
    """Reported once; kernels are built for this process alone, in a folder that goes with it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    folder = unusable(kind, tmp_path / "kernels")
    said = run(
        "values = [product(), product(1)]; seen(warned=caught)", TVMGEMM_CACHE_DIR=folder, TMPDIR=temporary
    )
    assert said["served"]["float32"] == 2 and said["builds"] >= 1
    assert (
        len(said["warned"]) == 1
        and str(folder) in said["warned"][0]
        and "TVMGEMM_CACHE_DIR" in said["warned"][0]
    )
    assert list(temporary.iterdir()) == [] and not entries(tmp_path / "real")


@pytest.mark.parametrize("how", ["by its mode", "by its file system"])
def test_read_only_cache_folder(tmp_path, how):
    """An empty store that cannot be written: one warning, a private folder, right results."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o500)
    read_only = ""
    if how == "by its mode":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
    else:
        read_only = (
            "import errno; from tvmgemm.store import files\n"
            "def refuse(folder): raise OSError(errno.EROFS, os.strerror(errno.EROFS))\n"
            "files.try_writing = refuse\n"
        )
    said = run(
        read_only + "product(); product(1); seen(warned=caught)", TVMGEMM_CACHE_DIR=folder, TMPDIR=tmp_path
    )
    assert said["served"]["float32"] == 2 and said["builds"] >= 1
    assert len(said["warned"]) == 1 and str(folder) in said["warned"][0] and "written" in said["warned"][0]
    assert list(folder.iterdir()) == []


def test_no_home(tmp_path):
    """No cache folder is named and HOME is nonsense (numba/numba#1771)."""
    said = run(
        "product(); seen(warned=caught)",
        TVMGEMM_CACHE_DIR=None,
        XDG_CACHE_HOME=None,
        HOME="/proc/nothing",
        TMPDIR=tmp_path,
    )
    assert (
        said["served"]["float32"] == 1 and len(said["warned"]) == 1 and "/proc/nothing" in said["warned"][0]
    )


def corrupt(entry: Path, how: str) -> None:
    entry.chmod(0o700)
    content = entry.read_bytes()
    if how == "truncated":
        entry.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        entry.write_bytes(b"")
    elif how == "one byte changed":
        middle = len(content) // 2
        entry.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "others may write it":
        entry.chmod(0o777)
    elif how == "a link":
        (entry.parent / "target").write_bytes(content)
        entry.unlink()
        entry.symlink_to(entry.parent / "target")
    elif how == "a folder":
        entry.unlink()
        entry.mkdir()


HOW_CORRUPT = ["truncated", "empty", "one byte changed", "others may write it", "a link", "a folder"]


@pytest.mark.parametrize("how", HOW_CORRUPT)
def test_corrupted_entry_is_rebuilt(built, store, how):
    """A miss, logged once; it is rebuilt, and the same bits come out (numba/numba#10434)."""
    for entry in entries(store):
        corrupt(entry, how)
    program = f"first = product(); {WAIT}; product(1); seen(value=first)"
    process = start(program, TVMGEMM_CACHE_DIR=store, TVMGEMM_LOG="warning")
    printed, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    said = json.loads(printed.splitlines()[-1])
    assert said["value"] == built[1]["value"] and said["served"]["float32"] == 2
    assert said["builds"] >= 1 and said["hits"] == 0 and said["failed"] == 0
    lines = [line for line in log.splitlines() if "set aside" in line]
    assert lines and len(lines) == len(set(lines)) and all(".so" in line for line in lines)
    again = run("seen(value=product(), warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert again["builds"] == 0 and again["hits"] > 0 and again["warned"] == [], (
        "the bad entry is still in the way"
    )


def test_entry_that_cannot_be_loaded(built, store):
    """Sound as a file, but no library of ours: it goes, and is built again."""
    for entry in entries(store):
        junk = b"this is no library"
        name = entry.name.rsplit("-", 1)[0] + f"-{hashlib.sha256(junk).hexdigest()[:16]}.so"
        entry.unlink()
        (store / name).write_bytes(junk)
        (store / name).chmod(0o700)
    said = run("seen(value=product(), warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert said["value"] == built[1]["value"] and said["served"]["float32"] == 1 and said["builds"] == 1
    again = run("product(); seen(warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert again["hits"] == 1 and again["builds"] == 0 and again["warned"] == []


# -- builds that end badly


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_build_process_is_killed(tmp_path):
    """The linker kills the process that started it, as the kernel's out-of-memory killer might."""
    killer = script(tmp_path / "cc", "kill -9 $PPID\n")
    said = run(SAY, TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(killer))
    assert_numpy_served_with_one_warning(said, "killed by signal 9")
    assert not entries(tmp_path / "k")


def test_after_a_killed_build_the_next_process_builds(tmp_path):
    """A lock that a dead process left stops nobody (Theano/Theano#3723)."""
    killer = script(tmp_path / "cc", "kill -9 $PPID\n")
    run("product(); seen()", TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(killer))
    said = run("product(); seen(warned=caught)", TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert said["served"]["float32"] == 1 and said["builds"] >= 1 and said["warned"] == []


def processes_that_mention(marker: str) -> list[str]:
    """Command lines of processes that mention ``marker``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if marker in line and int(folder.name) != os.getpid():
                found.append(line)
    return found


def test_keyboard_interrupt_during_a_build(tmp_path):
    """Ctrl-C ends the wait as KeyboardInterrupt, the build with it; the next product is right."""
    marker = f"slow-{tmp_path.name}-{os.getpid()}"
    slow = script(tmp_path / marker, f"touch {tmp_path}/started\nsleep 100\n")
    program = f"""
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore it
    def interrupt():
        while not os.path.exists({str(tmp_path / "started")!r}):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        product()
    except KeyboardInterrupt:
        interrupted = True
    else:
        interrupted = False
    os.environ["CC"] = "cc"
    product()
    {WAIT}
    seen(interrupted=interrupted, warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(slow))
    assert said["interrupted"], "the product went on as if nothing had been pressed"
    assert said["served"]["float32"] == 1, "the interrupted build was not begun again"
    assert processes_that_mention(marker) == [], "the build outlived the interrupt"


def test_keyboard_interrupt_at_any_moment(tmp_path):
    """It is raised or comes too late; nothing stays locked, and the next products are right."""
    program = """
    import signal
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    raised, cases = 0, [(seconds, isa, dtype) for seconds, (isa, dtype) in zip(DELAYS, KERNELS)]
    for seconds, isa, dtype in cases:
        tvmgemm.options(max_isa=isa)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            product(dtype=dtype)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            raised += 1
        product(dtype=dtype)
        product(1, dtype=dtype)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (product(2, m=500), done.set()))
    thread.start()
    thread.join(60)
    seen(raised=raised, other_thread=done.is_set(), warned=caught)
    """
    kernels = [(isa, dtype) for isa in RUNNABLE for dtype in ("float32", "float64")]
    delays = [0.003, 0.3, 0.8, 1.1]
    program = f"DELAYS, KERNELS = {delays}, {kernels}\n" + textwrap.dedent(program)
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", TVMGEMM_MAX_ISA=None)
    assert said["raised"] >= 1 and said["other_thread"] and said["warned"] == []
    assert said["served"]["float32"] + said["served"]["float64"] >= 1


def test_ending_during_a_build_leaves_no_process(tmp_path):
    """A program that ends while kernels are built in the background takes the build with it."""
    marker = f"slow-{tmp_path.name}-{os.getpid()}"
    slow = script(tmp_path / marker, f"touch {tmp_path}/started\nsleep 100\n")
    program = f"""
    product()
    while not os.path.exists({str(tmp_path / "started")!r}):
        time.sleep(0.02)
    seen(warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(slow), TVMGEMM_JIT="background")
    assert said["declined"]["float32"] == 1 and said["warned"] == []
    assert processes_that_mention(marker) == []


def test_linker_that_writes_junk(tmp_path):
    """It says that it succeeded: the library cannot be loaded, NumPy serves; a good linker puts it right."""
    junk = script(tmp_path / "cc", 'while [ "$1" != -o ]; do shift; done; echo junk >"$2"\n')
    said = run(SAY, TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(junk))
    assert_numpy_served_with_one_warning(said, "cannot be loaded")
    again = run("product(); seen(warned=caught)", TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert again["served"]["float32"] == 1 and again["builds"] >= 1
    assert len(again["warned"]) == 1 and "set aside" in again["warned"][0]


NEXT = """
    tvmgemm.options(num_threads=2)
    product(m=9, n=8, k=7)
    product(m=400, n=400, k=400)  # its kernel is a companion of the first one, and still being built
    """


def test_a_kernel_that_is_being_built_is_waited_for(tmp_path):
    """It is built once, and counted as built by this process and not as found."""
    said = run(f"{NEXT}{WAIT}; seen(warned=caught)", TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert said["served"]["float32"] == 2 and said["warned"] == []
    assert (said["builds"], said["hits"]) == (len(entries(tmp_path / "k")), 0)


def test_a_kernel_that_is_being_built_and_fails(tmp_path):
    """Whoever waits for it hears of the failure; nobody waits for a lock that this process itself holds, and
    so nothing is tried twice.
    """
    fails = 'echo >>"$0.count"; [ $(wc -l <"$0.count") -le 2 ] || { sleep 0.5; exit 1; }; exec cc "$@"\n'
    script(tmp_path / "linker", fails)
    said = run(
        f"{NEXT}{WAIT}; seen(warned=caught)", TVMGEMM_CACHE_DIR=tmp_path / "k", CC=str(tmp_path / "linker")
    )
    assert said["served"]["float32"] == 1 and said["declined"]["float32"] == 1 and len(said["warned"]) == 1
    assert (said["builds"], said["failed"]) == (2, 2), "a kernel was built, or counted, twice"


# -- modes of building


def test_jit_off(tmp_path):
    said = run(SAY, TVMGEMM_CACHE_DIR=tmp_path / "k", TVMGEMM_JIT="off")
    assert not any(said["served"].values()) and sum(said["declined"].values()) == 4
    assert said["builds"] == 0 and said["warned"] == [] and not entries(tmp_path / "k")


def test_jit_off_uses_the_store(store):
    said = run("product(); seen(warned=caught)", TVMGEMM_CACHE_DIR=store, TVMGEMM_JIT="off")
    assert said["served"]["float32"] == 1 and said["hits"] == 1 and said["warned"] == []


def test_jit_in_the_background(tmp_path):
    """NumPy serves until the kernel is there; then ours does, with nobody asking again."""
    program = """
    product()
    first = tvmgemm.stats()
    reason = tvmgemm.explain(*operands()).reason
    deadline = time.monotonic() + 90
    while not tvmgemm.stats().served["float32"] and time.monotonic() < deadline:
        product()
        time.sleep(0.02)
    product()
    at_first = [first.served["float32"], first.declined["float32"]]
    seen(warned=caught, at_first=at_first, reason=reason)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", TVMGEMM_JIT="background")
    assert said["at_first"] == [0, 1] and "background" in said["reason"]
    assert said["served"]["float32"] >= 2 and said["builds"] >= 1 and said["warned"] == []


def test_background_build_that_fails(tmp_path):
    broken = script(tmp_path / "cc", "exit 1\n")
    program = f"product(); {WAIT}; product(); product(); seen(warned=caught)"
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", TVMGEMM_JIT="background", CC=str(broken))
    assert said["served"]["float32"] == 0 and said["declined"]["float32"] == 3 and len(said["warned"]) == 1


# -- many at once


def test_many_threads_miss_at_once(tmp_path):
    """Every thread gets a right product; each kernel is built once."""
    program = f"""
    start, values, errors = threading.Barrier(8), [], []
    a, b = operands()
    right = np.dot(a.astype("f8"), b.astype("f8"))
    def work(number):
        try:
            start.wait(30)
            for _ in range(3):
                values.append(tvmgemm.matmul(a, b).tobytes())
                product(number, m=8 + number, n=16 + number, k=40)
        except BaseException as error:
            errors.append(repr(error))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    {WAIT}
    expected = bool(np.allclose(tvmgemm.matmul(a, b), right, atol=1e-3))
    seen(values=len(set(values)), errors=errors, warned=caught, expected=expected)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert said["errors"] == [] and said["values"] == 1 and said["expected"] and said["warned"] == []
    assert said["served"]["float32"] == 49 and said["declined"]["float32"] == 0
    names = [entry.name.rsplit("-", 2)[0] for entry in entries(tmp_path / "k")]
    assert len(names) == len(set(names)) >= 2 and said["failed"] == 0


def test_many_processes_miss_at_once(tmp_path):
    """Where files can be locked one of them builds a kernel, the others wait for it: one file per kernel."""
    program = f"value = product(); {WAIT}; seen(value=value, warned=caught)"
    said = [result(p) for p in [start(program, TVMGEMM_CACHE_DIR=tmp_path / "k") for _ in range(3)]]
    assert len({one["value"] for one in said}) == 1 and all(one["served"]["float32"] == 1 for one in said)
    assert all(one["warned"] == [] for one in said)
    names = [entry.name.rsplit("-", 2)[0] for entry in entries(tmp_path / "k")]
    assert sum(one["builds"] for one in said) == len(names) == len(set(names))


BIG = """
def big(seed):  # large enough to be shared out to threads
    return product(seed, m=200, n=170, k=180)
"""


def test_fork_after_use(store):
    """The child starts without worker threads and makes its own; parent and child go on computing."""
    program = """
    tvmgemm.options(num_threads=2, jit="sync")
    big(0)
    def ours(seed):  # products of ours alone
        a, b = operands(seed, m=300, n=300, k=300)
        return tvmgemm.matmul(a, b).tobytes()
    parent = [ours(0), ours(1)]
    def child_is_right():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, b"1" if [ours(0), ours(1)] == parent else b"0")
            finally:
                os._exit(0)
        os.close(write)
        answer = os.read(read, 1)
        os.close(read)
        return answer == b"1" and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    warnings.simplefilter("ignore", DeprecationWarning)
    results = [child_is_right(), [ours(0), ours(1)] == parent]
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            ours(2)
    threads = [threading.Thread(target=busy) for _ in range(2)]
    [t.start() for t in threads]
    results += [child_is_right() for _ in range(10)]
    stop.set()
    [t.join() for t in threads]
    results.append([ours(0), ours(1)] == parent)
    seen(results=results)
    """
    said = run(BIG + textwrap.dedent(program), TVMGEMM_CACHE_DIR=store)
    assert said["results"] == [True] * 13 and said["declined"]["float32"] == 0


def test_multiprocessing_by_fork(store):
    """apache/tvm#4355: a pool of forked workers after the parent has used threads."""
    program = """
    import multiprocessing
    tvmgemm.options(num_threads=2)
    here = [big(i) for i in range(6)]
    warnings.simplefilter("ignore", DeprecationWarning)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        there = pool.map_async(big, range(6)).get(60)
    seen(same=here == there)
    """
    assert run(BIG + textwrap.dedent(program), TVMGEMM_CACHE_DIR=store)["same"]


def test_threads_that_compute_in_parallel_share_one_pool(store):
    """More callers than cores, each with 2 threads: results are those of one thread, to the bit."""
    program = """
    alone = [big(i) for i in range(4)]
    tvmgemm.options(num_threads=2)
    wrong = []
    def work(i):
        for _ in range(10):
            if big(i) != alone[i]:
                wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    seen(wrong=wrong)
    """
    said = run(BIG + textwrap.dedent(program), TVMGEMM_CACHE_DIR=store)
    assert said["wrong"] == [] and said["declined"]["float32"] == 0


def test_product_while_python_ends(store):
    """Daemon threads and atexit functions still get right products or an ordinary end."""
    program = """
    import atexit
    atexit.register(lambda: product(1))
    def forever():
        while True:
            product(2, m=60, n=60, k=60)
    threading.Thread(target=forever, daemon=True).start()
    product()
    seen()
    """
    assert run(program, TVMGEMM_CACHE_DIR=store)["served"]["float32"] >= 1


# -- odd surroundings


def test_options_change_while_others_compute(store):
    """Settings, patching and scratch memory change under running products; every one is right."""
    program = """
    isas, stop, errors = ISAS, threading.Event(), []
    def work(seed):
        try:
            while not stop.is_set():
                product(seed, m=70, n=60, k=50)
                a, b = operands(seed, m=200, n=90, k=80)
                assert np.allclose(a @ b, np.dot(a, b), atol=1e-3)
        except BaseException as error:
            errors.append(repr(error))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    for i in range(50):
        tvmgemm.options(variant=("auto", "numpy", "B3A2C0")[i % 3], num_threads=1 + i % 2)
        with tvmgemm.options(max_isa=isas[i % len(isas)]), tvmgemm.patched():
            product(9, m=33, n=44, k=55)
            tvmgemm.release_scratch()
    stop.set()
    [t.join() for t in threads]
    seen(errors=errors, patched=tvmgemm.is_patched())
    """
    said = run(
        f"ISAS = {RUNNABLE}\n" + textwrap.dedent(program), TVMGEMM_CACHE_DIR=store, TVMGEMM_VARIANT=None
    )
    assert said["errors"] == [] and not said["patched"]
    assert said["served"]["float32"] > 0 and said["declined"]["float32"] > 0


def test_fork_during_a_build(tmp_path):
    """The child of a process that is building computes, and does not wait for ever for a lock that it
    inherited.
    """
    program = f"""
    thread = threading.Thread(target=product)
    thread.start()
    time.sleep(0.4)
    warnings.simplefilter("ignore", DeprecationWarning)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            product(1)
            product(2, m=9, n=9, k=9)
            os.write(write, b"right")
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 5).decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    thread.join()
    {WAIT}
    product(3)
    seen(answer=answer, status=status, warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert (said["answer"], said["status"]) == ("right", 0)
    assert said["served"]["float32"] == 2 and said["warned"] == []


def test_signals_of_children_are_ignored(tmp_path):
    """Where SIGCHLD is ignored, nobody learns how a child ended; a build is still a build."""
    program = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); product(); seen(warned=caught)"
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert said["served"]["float32"] == 1 and said["builds"] >= 1 and said["warned"] == []


def test_closed_standard_streams(tmp_path):
    """A daemon has none: pipes to the build process must not be taken for them."""
    report = tmp_path / "report"
    program = f"""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    product()
    sys.stdout = open({str(report)!r}, "w")
    seen(warned=caught)
    sys.stdout.flush()
    """
    process = start(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    process.communicate(timeout=120)
    said = json.loads(report.read_text())
    assert said["served"]["float32"] == 1 and said["builds"] >= 1 and said["warned"] == []


def test_products_inside_the_warning(tmp_path):
    """A program's own code runs while we warn or log, and may multiply: that must not wait for itself."""
    program = """
    tvmgemm.patch_numpy()
    inner = []
    def show(message, *rest):
        caught.append(str(message))
        x = np.ones((5, 5), "f")
        inner.append(bool(((x @ x) == 5).all()) and bool(((x.astype("f8") @ x.astype("f8")) == 5).all()))
    warnings.showwarning = show
    product()
    product(1, dtype="float64")
    seen(inner=inner, warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", PATH=str(tmp_path), CC=None)
    assert said["inner"] and all(said["inner"]) and not any(said["served"].values())


def test_the_users_files_are_not_imported(tmp_path):
    """Files beside the program that are called like modules which the compiler imports do not get into a
    build.
    """
    for name in ("typing_extensions", "ml_dtypes", "difflib", "decimal", "psutil", "tvm_ffi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    (tmp_path / "main.py").write_text(BEGINNING + "product(); seen(warned=caught)")
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment(TVMGEMM_CACHE_DIR=tmp_path / "k"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["served"]["float32"] == 1 and said["failed"] == 0 and said["warned"] == []
