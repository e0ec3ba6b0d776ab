"""Measuring the rows of a suite: ours and the peers in interleaved rounds, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import tvmgemm
from tvmgemm import timing
from tvmgemm.cli.info import plan_text
from tvmgemm.family.tiles import LARGEST_SHAPE
from tvmgemm.planner import HOT_PRODUCTS, SHAPE_WORK
from tvmgemm.timing import Ratio
from tvmgemm.trial import ROUNDS

from . import elements
from .peak import Beside
from .peers import Peer
from .suite import Case, Conditions, Suite

#: A peer that takes so many seconds per call, and so many times as long as we do, is sampled ``SLOW_ROUNDS`` times:
#: nobody waits for the quartiles of a ratio of hundreds.
SLOW_SECONDS, SLOW_RATIO, SLOW_ROUNDS = 0.1, 8.0, 3


@dataclass(frozen=True)
class Entry:
    """A way into tvmgemm: the function that a program calls, and whether NumPy is patched meanwhile."""

    function: Callable[..., object]
    patched: bool


#: Name -> way in. Looked up when a suite is run.
ENTRIES: dict[str, Callable[[], Entry]] = {
    "matmul": lambda: Entry(tvmgemm.matmul, patched=False),
    "patched": lambda: Entry(np.matmul, patched=True),
}


@dataclass(frozen=True)
class Row:
    """One line of a report: ours against one peer.

    ``seconds`` are medians per call. ``ratio`` is peer/ours per round; it and ``peer_seconds`` are None where the peer
    can't do the case or there is nothing to compare with. ``flops`` is None for what isn't a product, ``peak`` the
    fraction of the peak of the cores used, measured in turn with it. ``served``: our kernel computed it, by ``plan``.
    ``target`` is the ratio to reach, ``limit`` the seconds not to exceed, ``peak_target`` the fraction of the peak to
    reach.
    """

    suite: str
    case: str
    dtype: str
    threads: int
    entry: str
    peer: str | None
    seconds: float
    peer_seconds: float | None = None
    ratio: Ratio | None = None
    flops: float | None = None
    peak: float | None = None
    served: bool | None = None
    plan: str = ""
    target: float | None = None
    limit: float | None = None
    peak_target: float | None = None

    @property
    def below_peak(self) -> bool:
        """Whether it is under the fraction of the peak to reach, by the whole percent that a report shows."""
        return None not in (self.peak, self.peak_target) and round(100 * self.peak) < round(100 * self.peak_target)

    @property
    def missed(self) -> bool:
        """Whether it is under its target, by the two decimals that a report shows, or beyond its limit."""
        if self.limit is not None and self.seconds > self.limit:
            return True
        return None not in (self.target, self.ratio) and round(self.ratio.median, 2) < self.target

    @property
    def gflops(self) -> float | None:
        """Our GFLOP/s."""
        return None if self.flops is None else self.flops / self.seconds / 1e9

    @property
    def peer_gflops(self) -> float | None:
        """The peer's GFLOP/s."""
        return None if None in (self.flops, self.peer_seconds) else self.flops / self.peer_seconds / 1e9


class WrongResult(RuntimeError):
    """A kernel's result is outside the error bound of its dtype: its speed means nothing."""


def measure(
    suite: Suite, case: Case, dtype: str, conditions: Conditions, peers: Mapping[str, Peer]
) -> Iterator[Row]:
    """The rows of one case: every way in of the suite against every peer, about ``conditions.seconds`` of timing in all.

    Raises WrongResult.
    """
    threads, keywords, beside = conditions.threads, elements.keywords(dtype), Beside(conditions.peak)
    a, b = case.operands(dtype)
    with timing.thread_limit(threads), tvmgemm.options(max_isa=case.max_isa):
        for peer in peers.values():
            peer.set_threads(threads)
        patch(False)
        reference = elements.reference(a, b, dtype)
        # One array for everybody's result: how it lies to the lines of a cache can be worth a third of a vector product.
        out = case.result(reference) if suite.into_out else None
        entries, ours, served = {name: ENTRIES[name]() for name in suite.entries}, {}, {}
        for name, entry in entries.items():
            ours[name] = partial(entry.function, a, b, *([out] if suite.into_out else []), **keywords)
            patch(entry.patched)
            try:
                ours[name]()  # builds the kernel, if need be
            except TypeError as error:  # elements that it does not take here
                yield from _not_offered(suite, case, dtype, threads, name, peers, error)
                return
            if suite.hot:
                heat(case, ours[name])
            served[name] = was_served(ours[name])
            result = out if suite.into_out else ours[name]()
            check(np.asarray(result), reference, a, b, case.label)
        timing.wait_for_builds()
        patch(False)
        theirs = {name: peer.function(a, b, out, keywords.get("dtype")) for name, peer in peers.items()}
        theirs = {name: function for name, function in theirs.items() if function is not None}
        samples, peer_samples = _sampled(entries, ours, theirs, beside, conditions)
        plan = plan_text(tvmgemm.explain(a, b, **keywords))
    for entry in entries:
        for peer in peers:
            own, other = samples[entry], peer_samples.get(peer)
            yield Row(
                suite=suite.name,
                case=case.label,
                dtype=dtype,
                threads=threads,
                entry=entry,
                peer=peer,
                seconds=timing.median(own),
                peer_seconds=other and timing.median(other),
                ratio=other and timing.ratio(other, own[: len(other)]),
                flops=case.flops,
                peak=beside.fraction(entry, own, case.flops),
                served=served[entry],
                plan=plan,
                target=(case.targets or suite.targets).get(peer),
                peak_target=case.peak,
            )


Samples = dict[str, list[float]]


def _sampled(
    entries: Mapping[str, Entry], ours: Mapping[str, Callable], theirs: Mapping[str, Callable], beside: Beside, conditions: Conditions
) -> tuple[Samples, Samples]:
    """Samples of every way in and of every peer, in turn; of peers that are slow only a few, by themselves."""
    first = next(iter(ours.values()))
    slow = {name for name, function in theirs.items() if _is_slow(function, first)}
    peers = {f"peer {name}": function for name, function in theirs.items() if name not in slow}

    def before(name: str) -> None:
        patch(name in entries and entries[name].patched)
        beside.take(name)  # before everybody's samples, so that it is the same for all

    samples = timing.paired(
        {**ours, **peers},
        rounds=ROUNDS,
        min_seconds=timing.MIN_SECONDS if conditions.threads == 1 else timing.MIN_SECONDS_THREADED,
        budget=conditions.seconds,
        before=before,
        settle=conditions.threads > 1,
    )
    patch(False)
    few = {name: [timing.sample(theirs[name], 1) for _ in range(SLOW_ROUNDS)] for name in slow}
    return samples, {name: samples[f"peer {name}"] for name in theirs if name not in slow} | few


def _not_offered(suite, case, dtype, threads, entry, peers, error) -> Iterator[Row]:
    for peer in peers:
        row = Row(suite.name, case.label, dtype, threads, entry, peer, seconds=math.nan, served=False)
        yield replace(row, plan=f"not offered: {error}", target=(case.targets or suite.targets).get(peer))


def _is_slow(function: Callable[[], object], ours: Callable[[], object]) -> bool:
    seconds = timing.sample(function, 1)
    return seconds > SLOW_SECONDS and seconds > SLOW_RATIO * timing.sample(ours, 1)


def heat(case: Case, function: Callable[[], object]) -> None:
    """Multiply matrices of a small shape until a kernel for it alone is built: what a program that has many of them
    comes to."""
    (m, k), n, products = case.a[-2:], case.b[-1], math.prod(case.batch)
    if max(m, n, k) <= LARGEST_SHAPE and m * n * k <= SHAPE_WORK:
        for _ in range(math.ceil(HOT_PRODUCTS / products) + 1):
            function()
        timing.wait_for_builds()


def patch(wanted: bool) -> None:
    """Have NumPy patched, or not."""
    if wanted != tvmgemm.is_patched():
        (tvmgemm.patch_numpy if wanted else tvmgemm.unpatch_numpy)()


def was_served(function: Callable[[], object]) -> bool:
    """Whether a call of ``function`` ran a kernel of ours and left nothing to NumPy."""
    before = tvmgemm.stats()
    function()
    after = tvmgemm.stats()
    served = sum(after.served.values()) - sum(before.served.values())
    declined = sum(after.declined.values()) - sum(before.declined.values())
    return served > 0 and declined == 0


def check(result: np.ndarray, reference: np.ndarray, a: np.ndarray, b: np.ndarray, label: str) -> None:
    """Raise WrongResult if the two differ by more than ``elements.wrong`` allows."""
    wrong = elements.wrong(result, reference, a, b)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongResult(
            f"{label} {reference.dtype}: {int(wrong.sum())} elements of {wrong.size} are wrong, the first at"
            f" {at}: {result[at]!r} instead of {reference[at]!r}"
        )
