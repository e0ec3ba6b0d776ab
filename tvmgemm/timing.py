"""Paired, interleaved timing: the one way in which this project compares two implementations.

A machine that others use changes its speed by tens of percent from one second to the next, so two times taken
one after the other say little, and a ratio of two best times says less. Here every *round* takes one sample
of each function, in an order that rotates from round to round, and a comparison is the ratio within a round.
The median of those ratios and their quartiles are what the demo, the benchmarks and the tuner report.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

import numpy as np

#: A sample lasts at least this long (seconds): a thousand times the resolution of the clock, and long enough
#: that one interrupt doesn't decide it.
MIN_SECONDS = 200e-6

#: The same where several threads take part: it has to outweigh waking them up.
MIN_SECONDS_THREADED = 2e-3

#: A time budget never cuts the number of rounds below this: quartiles of fewer ratios mean nothing.
MIN_ROUNDS = 5

#: Seconds over which a process has to be idle. The kernel books the time of a running thread at its clock
#: ticks, which are up to 10 ms apart: over a shorter time, a spinning thread looks idle.
_SETTLE_STEP = 20e-3
_SETTLE_LIMIT = 0.5

#: Seconds of untimed calls after that. Threads that wake up share a core until the scheduler parts them.
_WARM_UP = 20e-3


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a peer: ``median`` and the quartiles ``low`` and ``high`` over the rounds.

    Above 1: ours is faster. ``rounds`` is the number of ratios behind it.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}..{self.high:.2f}]"


def ratio(peer: Sequence[float], ours: Sequence[float]) -> Ratio:
    """The ratio peer/ours of two lists of seconds from the same rounds.

    ValueError if the lists are empty or of different lengths: then they are not pairs.
    """
    if len(peer) != len(ours) or not peer:
        raise ValueError(
            f"{len(peer)} samples of the peer and {len(ours)} of ours are not pairs: take both from one run"
        )
    low, middle, high = np.percentile(np.divide(peer, ours), (25, 50, 75))
    return Ratio(float(middle), float(low), float(high), len(peer))


def median(samples: Sequence[float]) -> float:
    """The median of seconds per call."""
    return float(np.median(samples))


def paired(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 25,
    min_seconds: float = MIN_SECONDS,
    *,
    budget: float | None = None,
    before: Callable[[str], object] | None = None,
    settle: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of every function, one sample per function and round.

    Each function is called once untimed, then its calls per sample are calibrated so that a sample lasts at
    least ``min_seconds``. ``budget`` (seconds) ends the run after the round in which it is used up, but not
    before ``MIN_ROUNDS`` rounds or ``rounds``, whichever is less. ``before(name)`` runs untimed before each
    sample of ``name``: that is where one and the same function is patched and unpatched.

    ``settle`` is for functions that keep threads of their own: worker threads of a BLAS go on spinning for up
    to 0.1 s after a call and would take a core away from whoever is measured next. Each sample then waits
    until the process is idle and makes untimed calls for a while, which wake the function's own workers.

    The garbage collector is off meanwhile. ValueError for no function or fewer than one round.
    """
    if not functions or rounds < 1:
        raise ValueError(f"{len(functions)} functions, rounds={rounds}: pass at least one of each")
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}

    def prepare(name: str) -> None:
        if before is not None:
            before(name)
        if settle:
            wait_until_idle()
            warm_up(functions[name], clock)

    with _no_garbage_collection():
        calls = {}
        for name in names:
            prepare(name)
            functions[name]()
            calls[name] = calls_per_sample(functions[name], min_seconds, clock)
        started = clock()
        for turn in range(rounds):
            if budget is not None and turn >= MIN_ROUNDS and clock() - started >= budget:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                prepare(name)
                samples[name].append(sample(functions[name], calls[name], clock))
    return samples


def sample(
    function: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per call over ``calls`` calls in a row, the loop's own cost (about 30 ns a call) included."""
    turns = repeat(None, calls)
    start = clock()
    for _ in turns:
        function()
    return (clock() - start) / calls


def calls_per_sample(
    function: Callable[[], object], min_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> int:
    """The number of calls in a row that last at least ``min_seconds``, found by running them."""
    calls = 1
    while True:
        seconds = sample(function, calls, clock) * calls
        if seconds >= min_seconds:
            return calls
        # Aim a little beyond. A clock that saw nothing, or one slow call, must not end the search.
        wanted = math.ceil(1.2 * calls * min_seconds / seconds) if seconds > 0 else 10 * calls
        calls = min(max(wanted, calls + 1), 10 * calls)


def warm_up(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
    """Call ``function`` untimed until its threads have found their cores."""
    start = clock()
    function()
    while clock() - start < _WARM_UP:
        function()


def wait_until_idle() -> None:
    """Return once no thread of this process uses a core, or after half a second."""
    deadline = time.perf_counter() + _SETTLE_LIMIT
    while time.perf_counter() < deadline:
        start, used = time.perf_counter(), time.process_time()
        time.sleep(_SETTLE_STEP)
        if time.process_time() - used < 0.1 * (time.perf_counter() - start):
            return


def wait_for_builds() -> None:
    """Return once no kernel is being built in the background: a compiler would be measured too."""
    for thread in threading.enumerate():
        if thread.name == "tvmgemm-build":
            thread.join()


@contextmanager
def thread_limit(threads: int) -> Iterator[bool]:
    """Run the block with ``threads`` threads in our pool and in the BLAS libraries of this process.

    Yields whether the peers are limited too, for which threadpoolctl must be importable: without it their
    number of threads is what they were started with.
    """
    import tvmgemm

    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        threadpool_limits = None
    with tvmgemm.options(num_threads=threads):
        if threadpool_limits is None:
            yield False
        else:
            with threadpool_limits(limits=threads):
                yield True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
