"""Builds that a process cannot do, that fail, are killed, interrupted or waited for, and the modes of building."""

from __future__ import annotations

import contextlib
import os
import textwrap
from pathlib import Path

import pytest
from equivalence import RUNNABLE
from processes import (  # noqa: F401
    LINUX_WITH_KERNELS,
    SAY,
    WAIT,
    WITHOUT_TVM,
    assert_numpy_served_with_one_warning,
    built,
    entries,
    run,
    script,
    store,
)

pytestmark = LINUX_WITH_KERNELS


# -- something is missing


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


@pytest.mark.parametrize("jit", ["sync", "background"])
def test_the_warning_names_the_line_of_who_waits(tmp_path, jit):
    program = f"""
    places = []
    warnings.showwarning = lambda message, category, file, *rest: places.append(file)
    product()
    {WAIT}
    seen(places=places, program=product.__code__.co_filename)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", TVMGEMM_JIT=jit, PATH=str(tmp_path), CC=None)
    assert len(said["places"]) == 1 and (said["places"][0] == said["program"] or jit == "background")


def test_warnings_as_errors(tmp_path):
    """``-W error`` makes an exception of the warning: it must not end a product that NumPy computes."""
    quiet = "warnings.resetwarnings(); warnings.simplefilter('error')\n"
    said = run(quiet + SAY, "-W", "error", TVMGEMM_CACHE_DIR=tmp_path / "k", PATH=str(tmp_path), CC=None)
    assert sum(said["declined"].values()) == 4 and said["builds"] == 0


def test_warnings_as_errors_where_nothing_is_wrong(store):
    said = run("seen(value=product())", "-W", "error", TVMGEMM_CACHE_DIR=store)
    assert said["served"]["float32"] == 1


# -- builds that end badly


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
