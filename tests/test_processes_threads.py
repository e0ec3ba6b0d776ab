"""Many threads and processes at once, forks, and the end of the interpreter."""

from __future__ import annotations

import textwrap

import pytest
from equivalence import RUNNABLE
from processes import LINUX_WITH_KERNELS, WAIT, built, entries, result, run, start, store  # noqa: F401

pytestmark = LINUX_WITH_KERNELS


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


@pytest.mark.parametrize("module", ["dispatch", "kernels", "store", "build.parent"])
def test_fork_during_an_import(tmp_path, module):
    """The child needs a module that a thread of its parent, which it has not got, was importing. Nor do others meet half of
    the module."""
    program = f"""
    from importlib.machinery import PathFinder, SourceFileLoader
    importing = threading.Event()
    class Slowly(SourceFileLoader):
        def exec_module(self, module):
            importing.set()
            time.sleep(0.3)
            super().exec_module(module)
    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "tvmgemm.{module}":
                spec = PathFinder.find_spec(name, path)
                spec.loader = Slowly(name, spec.origin)
                return spec
    sys.meta_path.insert(0, Slow())
    thread = threading.Thread(target=product)
    thread.start()
    importing.wait(60)
    warnings.simplefilter("ignore", DeprecationWarning)
    tvmgemm.stats()
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(30)
        product(1)
        os._exit(tvmgemm.stats().served["float32"] - 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    thread.join()
    {WAIT}
    seen(status=status, warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert (said["status"], said["warned"], said["served"]["float32"]) == (0, [], 1)
