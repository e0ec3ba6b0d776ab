"""How the benchmarks measure: the machine and its peak, the peers, and a real run of small cases."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tvmgemm
from benchmarks import dtypes, elements, machine, peak, peers, report, runner, startup, stream
from benchmarks.suite import Case, Conditions, Suite, product
from benchmarks.suites import SUITES
from tvmgemm import settings

# -- the machine and the peers


def test_the_machine_is_described():
    description = machine.describe()
    assert json.loads(json.dumps(description)) == description
    assert description["cores"] >= 1 and len(description["load_average"]) == 3


def test_missing_peers_are_told_apart_from_usable_ones(monkeypatch):
    class Absent(peers.Peer):
        def __init__(self):
            raise ImportError("not on this machine")

    Absent.__abstractmethods__ = frozenset()
    monkeypatch.setitem(peers.PEERS, "mkl", Absent)
    usable, missing = peers.available(("numpy", "mkl"))
    assert list(usable) == ["numpy"] and missing == {"mkl": "not on this machine"}


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("layouts", ["CC", "CF", "FC", "FF"])
def test_every_usable_peer_computes_the_product(name, dtype, layouts):
    usable, missing = peers.available((name,))
    if missing:
        assert name != "numpy" and missing[name]  # an optional peer that isn't installed says why
        return
    a, b = Case((3, 5), (5, 4), *layouts).operands(dtype)
    out = np.full((3, 4), np.nan, dtype)
    function = usable[name].function(a, b, out)
    usable[name].set_threads(1)
    function()
    np.testing.assert_allclose(out, np.matmul(a, b), rtol=1e-4)
    assert usable[name].function(a, b, None)() is not None or name == "mkl"
    assert usable[name].version() and usable[name].kernels()


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize("dtype", ["int8", "int8-int32", "float16", "bfloat16", "bfloat16-float32", "bool"])
def test_peers_compute_other_elements_or_say_that_they_cannot(name, dtype):
    usable, missing = peers.available((name,))
    if missing or elements.missing(dtype):
        pytest.skip(missing.get(name) or elements.missing(dtype))
    a, b = Case((32, 40), (40, 24)).operands(dtype)
    expected = elements.reference(a, b, dtype)
    function = usable[name].function(a, b, None, elements.keywords(dtype).get("dtype"))
    if function is None:
        assert name != "numpy"
        return
    result = np.asarray(function() if name == "numpy" else function().float())
    assert not elements.wrong(result.astype(expected.dtype), expected, a, b).any()


@pytest.mark.parametrize(
    "x, operand",
    [
        (np.zeros((3, 4)), (False, 4)),
        (np.zeros((3, 4), order="F"), (True, 3)),
        (np.zeros((3, 8))[:, :4], (False, 8)),
        (np.zeros((3, 8))[:, ::2], None),
        (np.zeros((3, 4))[::-1], None),
        (np.zeros((2, 3, 4)), None),
    ],
)
def test_what_blas_can_read(x, operand):
    assert peers._blas_operand(x) == operand


def test_the_peak_of_one_core_and_of_two_at_once_is_measured():
    from tvmgemm.host import host

    meter = peak.build(host().isa().name, ("float32", "float64"))
    assert meter.dtypes == ("float32", "float64")
    for dtype in meter.dtypes:
        assert meter.gflops(dtype) > 0 and meter.gflops(dtype, 2) > 0
        assert meter.highest(dtype, 1, samples=3) > 0


def test_a_peak_that_cannot_be_measured_says_why():
    with pytest.raises(RuntimeError, match="the peak could not be measured: KeyError: 'no-such-isa'"):
        peak.build("no-such-isa", ("float32",))


def test_loops_count_that_ran_while_all_threads_did():
    early, late = [(0.0, 0.5), (1.0, 2.0), (2.0, 4.0)], [(1.0, 4.0), (4.0, 6.0)]
    assert peak.fastest([early, late]) == [1.0, 3.0], "the first loop had a machine of its own, the last one too"
    assert peak.fastest([[(0.0, 1.0)], [(2.0, 4.0)]]) == [1.0, 2.0], "none did"


def test_each_sample_is_judged_by_the_peak_of_its_round():
    peaks = iter((1.0, 100.0, 50.0, 50.0))  # the first is that of the calibration
    beside = peak.Beside(lambda: next(peaks))
    for _ in range(4):
        beside.take("ours")
    assert beside.fraction("ours", [1.0, 2.0, 1.0], 50e9) == pytest.approx(0.5)
    assert peak.Beside(None).fraction("ours", [1.0], 1.0) is None


# -- measuring


BRIEFLY = Conditions(threads=1, seconds=0.01, peak=lambda: 100.0)


def test_one_case_is_measured_against_numpy():
    suite = Suite("test", "a test", lambda dtype, extent: [], entries=("matmul", "patched"))
    usable, _ = peers.available(("numpy",))
    rows = list(runner.measure(suite, product(24, 24, 24), "float32", BRIEFLY, usable))
    assert [(row.entry, row.peer) for row in rows] == [("matmul", "numpy"), ("patched", "numpy")]
    assert all(row.served for row in rows)
    for row in rows:
        assert row.ratio.rounds >= 5 and row.seconds > 0 and row.plan
        assert row.peak == pytest.approx(row.gflops / 100.0, rel=0.2)
        assert row.target == 1.0


def test_a_case_has_its_own_targets_layouts_and_cap(monkeypatch):
    seen = []

    def watched(a, b, out):
        seen.append((settings.current().max_isa, a.strides[0] < 0, b.flags.f_contiguous, out.flags.f_contiguous))
        return tvmgemm.matmul(a, b, out)

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(watched, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    case = Case((40, 50), (50, 60), "[::-1]", "F", "F", targets={"numpy": 3.0}, max_isa="x86-64-v3")
    (row,) = runner.measure(suite, case, "float64", BRIEFLY, peers.available(("numpy",))[0])
    assert row.target == 3.0 and row.served
    assert set(seen) == {("x86-64-v3", True, True, True)} and settings.current().max_isa is None


def test_a_slow_peer_is_sampled_a_few_times(monkeypatch):
    class Slow(peers.NumPy):
        def function(self, a, b, out, dtype=None):
            return lambda: (time.sleep(0.12), np.matmul(a, b, out))

    suite = Suite("test", "a test", lambda dtype, extent: [])
    (row,) = runner.measure(suite, product(24, 24, 24), "float32", BRIEFLY, {"numpy": Slow()})
    assert row.ratio.rounds == runner.SLOW_ROUNDS and row.ratio.median > 100 and row.peer_seconds >= 0.12


def test_elements_that_are_not_taken_are_reported(monkeypatch):
    def refuse(a, b, out):
        raise TypeError("no such loop")

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(refuse, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    (row,) = runner.measure(suite, product(4, 4, 4), "float64", BRIEFLY, peers.available(("numpy",))[0])
    assert (row.served, row.ratio, row.plan) == (False, None, "not offered: no such loop")
    assert report.cells(row, "us")[4:8] == ["nan", "numpy", "-", "-"]


def test_a_stream_of_new_shapes_is_measured(monkeypatch):
    monkeypatch.setattr(stream, "PRODUCTS", 30)
    monkeypatch.setattr(stream, "ROUNDS", (2, 2))
    operands = stream.draw(np.random.default_rng(1), "float32")
    assert len({(a.shape, b.shape) for a, b in operands}) == 30
    (row,) = stream.measure(SUITES["stream"], next(stream.cases("float32", "quick")), "float32", BRIEFLY)
    assert row.ratio.rounds == 2 and row.target == 1.0 and row.plan.endswith("% by kernels of ours")


def test_what_the_dtypes_have_to_reach(monkeypatch):
    cases = {case.label: case for case in dtypes.cases("int8", "usual")}
    assert cases["512x512x512"].targets == {"numpy": dtypes.Goal(100, 500).here}
    assert cases["512x512x512 (capped to x86-64-v3)"].targets == {"numpy": 10}
    assert cases["512x512x512 (capped to x86-64-v3)"].max_isa == "x86-64-v3"
    assert [case.density for case in dtypes.cases("bool", "usual")][:2] == [0.01, 0.5]
    for features, wanted in ((frozenset(), 100), (frozenset({"amx_tile"}), 500)):
        monkeypatch.setattr(dtypes, "host", lambda: SimpleNamespace(features=features))
        assert dtypes.Goal(100, 500).here == wanted
    monkeypatch.setattr(dtypes, "host", lambda: SimpleNamespace(features=frozenset()))
    assert dtypes.Goal(None, 500).here == 0.0


def test_measuring_leaves_numpy_as_it_was():
    assert not tvmgemm.is_patched()


def test_a_wrong_result_is_never_reported_as_a_speed(monkeypatch):
    def off_by_one(a, b, out):
        np.matmul(a, b, out)
        out[1, 2] += 1
        return out

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(off_by_one, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    with pytest.raises(runner.WrongResult, match=r"1 elements of 16 are wrong, the first at \(1, 2\)"):
        next(runner.measure(suite, product(4, 4, 4), "float64", BRIEFLY, {}))


def test_integers_have_to_be_exact():
    a = np.arange(4, dtype=np.int8).reshape(2, 2)
    runner.check(a @ a, a @ a, a, a, "2x2x2")
    with pytest.raises(runner.WrongResult):
        runner.check(a @ a + np.int8(1), a @ a, a, a, "2x2x2")


def test_not_a_number_is_wrong():
    a = np.ones((2, 2))
    with pytest.raises(runner.WrongResult):
        runner.check(np.full((2, 2), np.nan), a @ a, a, a, "2x2x2")


def test_startup_rows_come_from_processes(monkeypatch):
    started = []

    def fake(library, dtype, m, n, k, environment):
        folder = Path(environment["TVMGEMM_CACHE_DIR"])
        started.append((library, folder, folder.is_dir()))
        ours = library == "tvmgemm"
        return {
            "import_numpy": 0.1, "import": 0.02, "first_call": 0.004 if ours else 0.003, "second_call": 0.001,
            "builds": int(ours and len(started) <= 2), "served": ours, "tvm": False,
        }  # fmt: skip

    monkeypatch.setattr(startup.first_call, "measure", fake)
    conditions = Conditions(extent="quick")
    ever, second, imported = startup.measure(SUITES["startup"], product(8, 8, 8), "float32", conditions)
    assert len({folder for _, folder, _ in started}) == 2 and all(exists for _, _, exists in started)
    pair = ["numpy", "tvmgemm"]
    assert [library for library, _, _ in started[2:]] == [*pair, *pair[::-1], *pair]
    assert ever.case == "first call ever (8x8x8)"
    assert (ever.peer, ever.plan, ever.served) == (None, "1 built", True)
    assert (second.ratio.median, second.plan) == (0.75, "0 built, tvm not imported")
    assert (imported.seconds, imported.missed) == (0.02, False)
