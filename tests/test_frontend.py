"""tvmgemm.matmul as a ufunc, and gemm."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
from plain_kernels import native  # noqa: F401

import tvmgemm
from tvmgemm import frontend, problem
from tvmgemm.frontend import gemm, matmul

#: Those of one element type that NumPy has a loop for; gemm's.
DTYPES = {name: d.native_id for name, d in problem.DTYPES.items() if d.a == d.b == d.c and name != "bfloat16"}
GEMM_DTYPES = [name for name in DTYPES if name != "bool"]

test_multiarray = pytest.importorskip("numpy._core.tests.test_multiarray", reason="needs NumPy's own tests")


@pytest.fixture
def served(native):
    """Plain kernels for everything."""
    for name, dtype in DTYPES.items():
        native.publish(native.kernel(f"plain_{name}"), dtype)
    for name in GEMM_DTYPES:
        native.publish(native.kernel(f"gemm_{name}"), DTYPES[name], op=native.lib.TG_GEMM)
    native.lib.tg_reset_counters()
    return native


@pytest.mark.usefixtures("served")
class TestNumPysMatmul(test_multiarray.TestMatmul):
    """NumPy's own tests, with our ufunc, served by plain kernels."""

    matmul = matmul


def test_matmul_is_a_ufunc_like_numpys():
    assert isinstance(matmul, np.ufunc) and matmul is not np.matmul
    for attribute in ("signature", "nin", "nout", "nargs", "identity", "__name__"):
        assert getattr(matmul, attribute) == getattr(np.matmul, attribute), attribute
    assert getattr(matmul, "__qualname__", None) == getattr(np.matmul, "__qualname__", None)  # None before NumPy 2.2
    assert matmul.types[: np.matmul.ntypes] == np.matmul.types  # and after them the mixed ones
    assert "np.matmul" in matmul.__doc__ and matmul.__doc__.startswith("matmul(x1, x2, /, out=None, *")


@pytest.mark.parametrize("x", "?bBhHiIlLqQefdgFDGO")
@pytest.mark.parametrize("y", "?bhilefdgFDO")
def test_promotion_is_numpys(x, y):
    dtypes = (np.dtype(x), np.dtype(y), None)
    assert matmul.resolve_dtypes(dtypes) == np.matmul.resolve_dtypes(dtypes)


def test_errors_are_numpys():
    for operands, keywords in [((np.ones((2, 3)), np.ones((2, 3))), {}), ((np.ones(3), 2.0), {}),
                               ((np.ones((2, 2)), np.ones((2, 2))), {"out": np.ones((2, 2), "i8")}),
                               ((np.ones((2, 2), "V4"), np.ones((2, 2), "V4")), {}),
                               ((np.ones((2, 2)), np.ones((2, 2))), {"order": "Z"})]:
        with pytest.raises(Exception) as numpys:
            np.matmul(*operands, **keywords)
        with pytest.raises(type(numpys.value)) as ours:
            matmul(*operands, **keywords)
        assert str(ours.value) == str(numpys.value)


def test_pickle_and_copy(monkeypatch):
    monkeypatch.setattr(tvmgemm, "matmul", matmul, raising=False)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(matmul, protocol)) is matmul
    assert copy.deepcopy(matmul) is copy.copy(matmul) is matmul


def test_array_ufunc_is_honoured():
    class Other:
        def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
            return ufunc, method

    assert matmul(np.ones((2, 2)), Other()) == (matmul, "__call__")


def test_dispatcher_is_imported_at_the_first_miss(native, monkeypatch):
    asked = []
    dispatch = types.ModuleType("tvmgemm.dispatch")
    dispatch.on_miss = lambda p: asked.append((p.m, p.n, p.k)) or False
    monkeypatch.setitem(sys.modules, "tvmgemm.dispatch", dispatch)
    monkeypatch.setattr(tvmgemm, "dispatch", dispatch, raising=False)
    monkeypatch.setattr(frontend, "on_miss", None)
    for _ in range(2):
        assert (matmul(np.ones((2, 3)), np.ones((3, 4))) == 3).all()
    assert asked == [(2, 4, 3)] * 2 and frontend.on_miss is dispatch.on_miss


def test_import_is_light():
    program = """if True:
        import sys, numpy
        before = set(sys.modules)
        import tvmgemm.frontend
        print(*set(sys.modules) - before)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    heavy = {"tvm", "tvm_ffi", "subprocess", "hashlib", "json", "platformdirs", "tvmgemm.dispatch"}
    assert done.returncode == 0 and not heavy & set(done.stdout.split())


def test_another_matmul_is_refused(monkeypatch):
    for impostor in (lambda a, b: a, np.add):
        monkeypatch.setattr(np, "matmul", impostor)
        with pytest.raises(RuntimeError, match="np.matmul"):
            frontend._numpys_matmul()
    assert frontend.lib.tg_make_ufunc(id(np.add)) == 0
    assert frontend.lib.tg_make_ufunc(id(object)) == 0


# -- gemm


def numbers(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def strided(x):
    room = np.full((2 * x.shape[0], 3 * x.shape[1]), 7, x.dtype)
    room[::-2, ::3] = x
    return room[::-2, ::3]


@pytest.mark.parametrize("by", ["kernel", "numpy"])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
@pytest.mark.parametrize("alpha, beta", [(1, 1), (1, 0), (2, 0), (-1, 1), (3, 2), (0, 3), (0, 0), (0, 1)])
@pytest.mark.parametrize("arrange", [np.ascontiguousarray, np.asfortranarray, strided])
def test_gemm(native, request, by, dtype, alpha, beta, arrange):
    if by == "kernel":
        native = request.getfixturevalue("served")
    a, b, c = (arrange(numbers(shape, dtype, seed)) for seed, shape in enumerate([(5, 7), (7, 6), (5, 6)]))
    if dtype == "float16":
        expected = (alpha * np.matmul(a, b, dtype="f4") + beta * c.astype("f4")).astype(dtype)
    else:
        one = np.ones((), dtype)  # of the dtype's own arithmetic, which wraps around
        expected = (np.array(alpha) * one).astype(dtype) * (a @ b) + (np.array(beta) * one).astype(dtype) * c
    native.lib.tg_reset_counters()
    assert gemm(a, b, c, alpha=alpha, beta=beta) is c
    np.testing.assert_array_equal(c, expected)
    assert native.lib.tg_served(DTYPES[dtype]) == (by == "kernel" and alpha != 0)


@pytest.mark.parametrize("by", ["kernel", "numpy"])
def test_gemm_reads_only_what_it_needs(native, request, by):
    if by == "kernel":
        request.getfixturevalue("served")
    one, nan = np.ones((2, 2)), np.full((2, 2), np.nan)
    assert (gemm(one, one, nan.copy(), beta=0) == 2).all()
    assert (gemm(nan, nan, one.copy(), alpha=0, beta=3) == 3).all()
    assert (gemm(nan, nan, nan.copy(), alpha=0, beta=0) == 0).all()
    assert np.isnan(gemm(one, one, nan.copy())).all()


@pytest.mark.parametrize("m, n, k", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1), (1, 5, 3), (5, 1, 3)])
def test_gemm_degenerate_shapes(served, m, n, k):
    a, b, c = numbers((m, k)), numbers((k, n), seed=1), numbers((m, n), seed=2)
    expected = a @ b + 2 * c
    np.testing.assert_array_equal(gemm(a, b, c, beta=2), expected)


def test_gemm_defaults_and_signature(native):
    assert [p.default for p in list(inspect.signature(gemm).parameters.values())[3:]] == [1, 1]
    c = np.ones((2, 2))
    gemm(np.eye(2), np.eye(2), c)
    assert (c == np.eye(2) + 1).all()


def test_gemm_zero_strides_and_shared_inputs(served):
    a = np.broadcast_to(numbers((1, 4)), (4, 4))
    np.testing.assert_array_equal(gemm(a, a, np.zeros((4, 4), "f")), a @ a)


def test_gemm_tells_the_planner_the_operation(native):
    seen = []
    frontend.on_miss = lambda p: seen.append((p.op, p.dtype, p.m, p.n, p.k, p.batch, p.transposed)) or 0
    gemm(np.ones((2, 3)), np.ones((3, 4)), np.ones((2, 4)))
    gemm(np.ones((2, 3), "f"), np.ones((3, 4), "f"), np.ones((4, 2), "f").T)
    asked = [problem for problem in seen if problem[0] == 1]  # what is declined asks for a matmul next
    assert asked == [(1, 1, 2, 4, 3, 1, 0), (1, 0, 4, 2, 3, 1, 1)]


def test_gemm_failures(native):
    a = numbers((3, 3))
    native.publish(native.kernel("failing_float32"), op=1)
    with pytest.raises(RuntimeError, match="3x3 by 3x3 product failed"):
        gemm(a, a, np.zeros_like(a))
    native.lib.tg_clear_plans()
    native.publish(native.kernel("empty_float32"), op=1, mc=1)  # no memory for packing
    np.testing.assert_array_equal(gemm(a, a, np.ones_like(a), beta=2), a @ a + 2)


def test_gemm_reports_no_floating_point_errors(native):
    big = np.full((2, 2), 1e38, "f")
    with np.errstate(all="raise"):
        assert np.isinf(gemm(big, big, big.copy(), alpha=2, beta=3)).all()


def read_only(shape):
    x = np.ones(shape, "f")
    x.flags.writeable = False
    return x


def unaligned(shape):
    return np.ones(np.prod(shape) * 4 + 1, "i1")[1:].view("f").reshape(shape)


ONE, FLAT = np.ones((2, 2), "f"), np.ones(12, "f")
FOREIGN = ONE.astype(ONE.dtype.newbyteorder())
SHARING = [np.lib.stride_tricks.as_strided(FLAT, (2, 2), strides) for strides in ((4, 4), (0, 4))]


@pytest.mark.parametrize(
    "a, b, c, error, words",
    [
        ([[1.0]], ONE, ONE, TypeError, "a is a list"),
        (ONE, ONE, None, TypeError, "c is a NoneType"),
        (ONE, np.ma.array(ONE, mask=ONE > 0), ONE, TypeError, "b is a masked array"),
        (ONE, ONE[0], ONE, ValueError, r"b has 1 dimensions \(shape \(2,\)\), 2 are needed"),
        (ONE[None], ONE, ONE, ValueError, "a has 3 dimensions"),
        (ONE.astype("?"), ONE, ONE, TypeError, "a has dtype bool, one of float32, float64, int8, .* is needed"),
        (ONE.astype("i4"), ONE, ONE, TypeError, "a is int32, b is float32, c is float32"),
        (ONE, FOREIGN, ONE, TypeError, "b has dtype .* in foreign byte order"),
        (ONE, ONE.astype("d"), ONE, TypeError, "a is float32, b is float64, c is float32"),
        (ONE, np.ones((3, 2), "f"), ONE, ValueError, r"a has shape \(2, 2\), b \(3, 2\), c \(2, 2\)"),
        (ONE, ONE, np.ones((2, 3), "f"), ValueError, r"c \(2, 3\): \(m, k\), \(k, n\) and \(m, n\)"),
        (ONE, ONE, read_only((2, 2)), ValueError, "c is read-only"),
        (unaligned((2, 2)), ONE, ONE, ValueError, "a is not aligned"),
        (ONE, ONE, ONE, ValueError, "c overlaps a"),
        (ONE.copy(), FLAT[:4].reshape(2, 2), FLAT[3:7].reshape(2, 2), ValueError, "c overlaps b"),
        (ONE.copy(), ONE.copy(), SHARING[0], ValueError, "c has elements that share memory"),
        (ONE.copy(), ONE.copy(), SHARING[1], ValueError, "c has elements that share memory"),
    ],
)
def test_gemm_rejects(a, b, c, error, words):
    with pytest.raises(error, match=words):
        gemm(a, b, c)


@pytest.mark.parametrize("scalars", [{"alpha": 1j}, {"beta": None}, {"alpha": np.ones(2)}])
def test_gemm_rejects_scalars(scalars):
    with pytest.raises(TypeError, match=f"{next(iter(scalars))}=.* is not a real number"):
        gemm(ONE.copy(), ONE.copy(), ONE.copy(), **scalars)


@pytest.mark.parametrize("by", ["kernel", "numpy"])
@pytest.mark.parametrize("alpha, beta", [(0.5, 2), (0.1, -0.3), (1j, 1), (0.5 - 2j, 1 + 0.25j), (2, 1j), (1, 0)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_gemm_with_fractions(native, request, by, alpha, beta, dtype):
    if by == "kernel":
        request.getfixturevalue("served")
    a, b, c = (numbers(shape, dtype, seed) for seed, shape in enumerate([(5, 7), (7, 6), (5, 6)]))
    if np.dtype(dtype).kind == "f" and isinstance(alpha + beta, complex):
        with pytest.raises(TypeError, match="is not a real number"):
            gemm(a, b, c, alpha, beta)
        return
    expected = alpha * a.astype("D") @ b + beta * c.astype("D")
    gemm(a, b, c, alpha, beta)
    eps = np.finfo("f4" if dtype == "float16" else dtype).eps
    bound = 16 * eps * 300 + (dtype == "float16") * 2**-11 * abs(expected)
    assert (abs(c - expected) <= bound).all()


@pytest.mark.parametrize("by", ["kernel", "numpy"])
@pytest.mark.parametrize("letter", "bBhHiIlLqQ")
def test_gemm_of_integers_wraps_around(native, request, by, letter):
    """Operands, alpha and beta of any size, all C types, against Python's integers."""
    if by == "kernel":
        request.getfixturevalue("served")
    info, rng = np.iinfo(letter), np.random.default_rng(0)
    full = [rng.integers(info.min, info.max, s, letter, endpoint=True) for s in [(5, 7), (7, 6), (5, 6)]]
    for alpha, beta in [(1, 1), (-3, 7), (2**70 + 5, -(2**65) - 3), (2**64, 1), (np.int8(-1), np.uint64(2**63 + 1)), (1, 0)]:
        a, b, c = (x.copy() for x in full)
        exact = int(alpha) * (a.astype(object) @ b.astype(object)) + int(beta) * c.astype(object)
        with np.errstate(all="raise"):
            gemm(a, b, c, alpha, beta)
        np.testing.assert_array_equal((c.astype(object) - exact) % 2**info.bits, 0)


def test_gemm_of_integers_takes_no_fractions():
    one = np.ones((2, 2), "i4")
    for scalars in ({"alpha": 1.0}, {"beta": 0.5}, {"alpha": None}):
        with pytest.raises(TypeError, match="is not an integer, and c is int32"):
            gemm(one, one, one.copy(), **scalars)


def test_gemm_of_float16_rounds_once(served):
    a, b = np.full((1, 2), 255, "e"), np.full((2, 1), 255, "e")
    c = np.full((1, 1), -65504, "e")  # the product alone is beyond float16
    assert gemm(a, b, c, beta=1.5)[0, 0] == np.float16(2 * 255.0 * 255 - 65504 * 1.5)
    served.lib.tg_clear_plans()
    c[...] = -65504
    assert gemm(a, b, c, beta=1.5)[0, 0] == np.float16(2 * 255.0 * 255 - 65504 * 1.5)


def test_gemm_accepts_interleaved_memory(served):
    room = np.ones((4, 8), "f")
    a, c = room[:, ::2], room[:, 1::2]  # bounds overlap, elements do not
    np.testing.assert_array_equal(gemm(a, a, c, beta=0), np.full((4, 4), 4))
    assert gemm(np.eye(2), np.eye(2), np.ones((2, 2)).view(np.matrix)).sum() == 6


@pytest.mark.parametrize(
    "shape, strides",
    [((3, 4), (16, 4)), ((3, 4), (4, 12)), ((3, 4), (8, 4)), ((3, 4), (-16, 4)), ((1, 4), (0, 4)),
     ((1, 1), (0, 0)), ((3, 4), (12, 8)), ((2, 3), (12, 8)), ((3, 1), (0, 0)), ((2, 4), (12, 8)),
     ((3, 4), (20, -8)), ((3, 5), (8, 4))],
)
def test_elements_share_memory(shape, strides):
    x = np.lib.stride_tricks.as_strided(np.zeros(200, "f")[100:], shape, strides)
    addresses = {i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])}
    assert frontend._elements_share_memory(x) == (len(addresses) < shape[0] * shape[1])
