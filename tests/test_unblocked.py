"""Kernels without loops over cache blocks: every width and height of tile, at every edge, on every instruction set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from direct_kernels import Kernels
from equivalence import (
    FLOATS,
    FORCED,
    Layout,
    assert_close,
    assert_same_bits,
    col_major,
    fill,
    lay_out,
    multiply,
    newer_isas,
    planned,
    row_major,
    served_by_us,
)

import tvmgemm
from tvmgemm.family.arithmetic import arithmetic_of
from tvmgemm.family.isa import ISAS
from tvmgemm.family.members import member, unblocked_member
from tvmgemm.family.tiles import UNBLOCKED_TILES, heights, registers_needed
from tvmgemm.family.unblocked import WAY, WAYS
from tvmgemm.family.validity import check
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

every_dtype = pytest.mark.parametrize("dtype", FLOATS)

#: A kc that cuts most of the k below into blocks.
BLOCKS = (1, 1, 32)


def lanes_of(isa: str, dtype: str) -> int:
    return ISAS[isa].lanes(DTYPES[dtype].c_size)


def operands(m: int, n: int, k: int, dtype: str, a_layout: Layout, seed: int = 0):
    """A in that layout; B and C with contiguous rows that lie apart; C's buffer holds noise."""
    rng = np.random.default_rng(seed)
    apart = Layout((0, 1), (1, 1), (0, 3), start=5)
    a, b, c = (lay_out(s, dtype, x) for s, x in (((m, k), a_layout), ((k, n), apart), ((m, n), apart)))
    fill(a.view, rng)
    fill(b.view, rng)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    return a, b, c


def assert_bits_of_a_packed_kernel(a, b, c, isa: str | None) -> None:
    """C is what a kernel that packs both operands makes of A and B, with one thread."""
    with planned(BLOCKS, max_isa=isa, num_threads=1, variant=FORCED, packing="ab"), served_by_us(c.view.dtype.name):
        assert_same_bits(c.view, tvmgemm.matmul(a.view, b.view))


@every_dtype
@newer_isas
def test_every_tile(dtype, isa):
    """Each width, with a full and with a masked vector at its end, meets each height; the bits are those of a packed
    kernel."""
    lanes, (mr, nr) = lanes_of(isa, dtype), UNBLOCKED_TILES[isa, dtype]
    columns = [1, lanes // 2, lanes // 2 + 1, lanes - 1, *range(lanes, 2 * nr + lanes, max(1, lanes // 2)), 2 * nr + 1]
    rows = [*range(1, max(heights(mr, nr // lanes).values()) + 2), 33]
    layouts = itertools.cycle([row_major(), col_major(), Layout((0, 1), (-1, 2), (0, 1)), Layout((0, 1), (0, 1), (0, 0))])
    for n, m in itertools.product(columns, rows):
        if m == 1 or n == 1:
            continue
        a, b, c = operands(m, n, (7, 40, 65, 1)[m % 4], dtype, next(layouts), seed=m)
        with planned(BLOCKS, max_isa=isa, num_threads=1):
            assert ".unblocked" in plan_of(a, b)
            multiply(a, b, c, dtype)
        assert_bits_of_a_packed_kernel(a, b, c, isa)
        assert_close(c.view, a.view, b.view)


@every_dtype
@newer_isas
def test_rows_of_a_that_meet_in_a_set_of_l1(dtype, isa):
    """Rows a multiple of 4 KiB apart: tiles have fewer of them, and the bits are those of rows that lie side by side."""
    apart, lanes = WAY // DTYPES[dtype].itemsize, lanes_of(isa, dtype)
    rows = np.random.default_rng(1).standard_normal((50, apart)).astype(dtype)
    for n, m in itertools.product((lanes // 2, lanes, 2 * lanes), (WAYS, WAYS + 1, 16, 17, 32, 33, 50)):
        if n < 2:
            continue
        a, b = rows[:m, :70], np.random.default_rng(n).standard_normal((70, n)).astype(dtype)
        assert a.strides[0] == WAY
        with planned(BLOCKS, max_isa=isa, num_threads=1), served_by_us(dtype):
            assert "-unblocked-" in tvmgemm.explain(a, b).kernel
            c = tvmgemm.matmul(a, b)
            assert_same_bits(c, tvmgemm.matmul(np.ascontiguousarray(a), b))
        assert_close(c, a, b)


@every_dtype
@newer_isas
def test_blocks_of_k_side_by_side(dtype, isa):
    """Few rows no wider than a vector: as many blocks of k at once as there are, the last of them whole or not; the bits are
    those of one after the other."""
    lanes, kc = lanes_of(isa, dtype), BLOCKS[2]
    layouts = itertools.cycle([row_major(), col_major(), Layout((0, 1), (-1, 2), (0, 1)), Layout((0, 1), (0, 1), (0, 0))])
    columns = sorted({2, max(2, lanes // 2), lanes // 2 + 1, lanes - 1, lanes, lanes + 1} - {1})
    for k, m, n in itertools.product((kc, kc + 1, 2 * kc, 4 * kc - 1, 4 * kc, 4 * kc + 1, 7 * kc + 5), range(2, 6), columns):
        a, b, c = operands(m, n, k, dtype, next(layouts), seed=k)
        with planned(BLOCKS, max_isa=isa, num_threads=1):
            assert ".unblocked" in plan_of(a, b)
            multiply(a, b, c, dtype)
        assert_bits_of_a_packed_kernel(a, b, c, isa)


@every_dtype
@newer_isas
def test_rows_in_pairs(dtype, isa):
    """C of few columns, by itself and beside whole vectors; the bits are those of a packed kernel, and nothing is written or
    multiplied that is not there."""
    lanes = lanes_of(isa, dtype)
    width = max(lanes // 4, 2)  # 128 bits on AVX-512
    columns = sorted({2, width - 1, width, width + 1, lanes + width, 2 * lanes + 2} - {1})
    layouts = itertools.cycle([row_major(), Layout((0, 1), (2, 1), (0, 3), start=1), col_major(), Layout((0, 1), (-1, 1), (0, 0))])
    for m, n, k in itertools.product((7, 8, 9, 16, 31), columns, (1, width, width + 1, 13, 32, 75)):
        a, b, c = operands(m, n, k, dtype, next(layouts), seed=m + k)
        with planned(BLOCKS, max_isa=isa, num_threads=1), np.errstate(all="raise"):
            assert ".unblocked" in plan_of(a, b)
            multiply(a, b, c, dtype)
        assert_bits_of_a_packed_kernel(a, b, c, isa)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")
    built = Kernels(tmp_path_factory.mktemp("unblocked"))
    yield built
    built.close()


def plan_of(a, b) -> str:
    """Which kind of kernel serves A.B, and its parallel loop."""
    kernel = tvmgemm.explain(a.view, b.view).kernel
    return f"{'ic' if '-ic-' in kernel else 'jc' if '-jc-' in kernel else 'serial'}.{'un' * ('-unblocked-' in kernel)}blocked"


@every_dtype
@pytest.mark.parametrize("m, n, loop", [(70, 40, "ic"), (3, 301, "jc"), (1000, 17, "ic"), (5, 300, "jc")])
def test_shared_out(dtype, m, n, loop):
    a, b, c = operands(m, n, 50, dtype, row_major())
    with planned(BLOCKS, parallel_work=1, num_threads=2):
        assert plan_of(a, b) == f"{loop}.unblocked"
        multiply(a, b, c, dtype)
    assert_bits_of_a_packed_kernel(a, b, c, None)


@every_dtype
def test_scaled(dtype):
    """gemm: C is read where beta asks for it, and only once."""
    sizes = [(5, 3, 70), (3, 3, 141), (17, 2, 41), (17, 40, 9), (50, 90, 33)]
    for (m, n, k), (alpha, beta) in itertools.product(sizes, [(2.0, 0.0), (-0.5, 1.5)]):
        a, b, c = operands(m, n, k, dtype, row_major())
        if beta:
            fill(c.view, np.random.default_rng(5))
        old = c.view.copy()
        with planned(BLOCKS, num_threads=1):
            with served_by_us(dtype):
                tvmgemm.gemm(a.view, b.view, c.view, alpha=alpha, beta=beta)
        expected = alpha * (a.view.astype("f8") @ b.view.astype("f8")) + (beta * old.astype("f8") if beta else 0.0)
        bound = abs(a.view).astype("f8") @ abs(b.view).astype("f8") + (abs(old) if beta else 0)
        assert (abs(c.view - expected) <= 4 * (k + 2) * np.finfo(dtype).eps * bound).all()


@every_dtype
@newer_isas
def test_infinities_and_nans_stay_where_they_are(dtype, isa):
    """What lies beside the edges is never multiplied by them: no warning, no NaN of our making."""
    for m, n in [(3, 3), (9, 2), (9, 3), (9, 5), (7, 21), (13, 70)]:
        a, b = np.ones((m, 6), dtype), np.ones((6, n), dtype)
        a[-1, :] = np.inf
        b[:, -1] = np.inf
        with planned(max_isa=isa, num_threads=1), np.errstate(all="raise"), served_by_us(dtype):
            c = tvmgemm.matmul(a, b)
        expected = np.full((m, n), 6.0)
        expected[-1], expected[:, -1] = np.inf, np.inf
        np.testing.assert_array_equal(c, expected)
        a[0, 0] = np.nan
        with planned(max_isa=isa, num_threads=1), np.errstate(all="raise"), served_by_us(dtype):
            c = tvmgemm.matmul(a, b)
        expected[0] = np.nan
        np.testing.assert_array_equal(c, expected)


@every_dtype
def test_no_terms_are_zeros(dtype):
    a, b, c = operands(20, 30, 0, dtype, row_major())
    with planned(num_threads=1):
        multiply(a, b, c, dtype)
    assert (c.view == 0).all() and not np.signbit(c.view).any()


def test_tiles_fit_the_registers():
    for (isa, dtype), (mr, nr) in UNBLOCKED_TILES.items():
        how = arithmetic_of(isa, dtype, "none")
        columns = how.columns(ISAS[isa])
        for width, most in heights(mr, nr // columns).items():
            needed = registers_needed(most, width * columns, ISAS[isa], how)
            # One register holds the NaNs of a masked load.
            assert needed + ISAS[isa].masks <= ISAS[isa].vector_registers


def test_other_members_have_their_loops():
    members = [member(name, "float32", "x86-64-v4", blocked=False) for name in ("C3A2B0", FORCED)]
    for spec in [*members, unblocked_member("float32", "x86-64-v4", parallel="pc")]:
        with pytest.raises(ValueError, match="without loops over cache blocks"):
            check(spec)


@pytest.mark.parametrize("isa", ["x86-64-v4", "x86-64-v3", "armv8-neon"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_each_tile_has_a_lean_loop(isa, dtype):
    """Every height and width has a loop of its own, which does the multiply-adds of that tile and uses no stack. Tiles of two
    vectors and more prefetch the next product of a stack."""
    codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")
    from tvmgemm.family import unblocked
    from tvmgemm.family.inspection import inner_loops

    spec = unblocked_member(dtype, isa)
    masks, lanes = ISAS[isa].masks, lanes_of(isa, dtype)
    found = set()
    for loop in inner_loops(codegen.assembly(spec), ISAS[isa].arch):
        if not masks and (loop.masked or loop.branches):
            continue  # at the edge
        if masks and not loop.masked:  # rows in pairs, as wide as C
            assert not loop.stack, loop.text
            continue
        for steps in [loop.masked] if masks else [1, 2, 4]:
            height, width = loop.broadcasts // steps, loop.loads // steps
            if (height * width * steps, height * steps, width * steps) == (loop.fmas, loop.broadcasts, loop.loads):
                found.add((height, width))
                assert not loop.stack, loop.text
                assert loop.prefetches == (unblocked.LINES if width >= unblocked.WIDE else 0) * steps, loop.text
    for width, most in heights(spec.mr, spec.nr // lanes).items():
        assert {(height, width) for height in range(1, most + 1)} <= found, f"{width} vectors wide"


OTHER_LAYOUTS = {
    "col": col_major(), "gaps": Layout((0, 1), (1, 2), (3, 1), start=2), "backwards": Layout((0, 1), (1, -1), (0, 0)),
    "one column": Layout((0, 1), (1, 0), (0, 2)), "col backwards": Layout((1, 0), (-1, 1), (5, 0)),
}  # fmt: skip


@every_dtype
@newer_isas
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_b_without_contiguous_rows_is_copied(dtype, isa, layout):
    """One after the other and shared out; the bits are those of a packed kernel."""
    lanes, (_, nr) = lanes_of(isa, dtype), UNBLOCKED_TILES[isa, dtype]
    columns = [2, lanes // 2 + 1, lanes, lanes + 1, nr, nr + lanes // 2, nr + lanes]  # a B within any L2's sixteenth
    for (n, m), threads in itertools.product(itertools.product(columns, (2, 7, 33)), (1, 2)):
        a, b, c = operands(m, n, (7, 40, 50, 2)[(m + n) % 4], dtype, row_major(), seed=m)
        b = lay_out(b.view.shape, dtype, OTHER_LAYOUTS[layout])
        fill(b.view, np.random.default_rng(n))
        with planned(BLOCKS, parallel_work=1, max_isa=isa, num_threads=threads):
            kernel = tvmgemm.explain(a.view, b.view).kernel
            assert f"-{UNBLOCKED_TILES[isa, dtype][0]}x{nr}-b-" in kernel and "-unblocked-" in kernel
            multiply(a, b, c, dtype)
        assert_bits_of_a_packed_kernel(a, b, c, isa)
        assert_close(c.view, a.view, b.view)


@every_dtype
@newer_isas
@pytest.mark.parametrize("parallel", ["", "ic", "jc"])
def test_the_copy_stays_within_its_memory(kernels, dtype, isa, parallel):
    spec = unblocked_member(dtype, isa, "b", parallel=parallel)
    lanes = lanes_of(isa, dtype)
    for n, k in [(1, 1), (lanes, 9), (lanes + 1, lanes), (2 * lanes, 40), (5 * lanes - 1, 3 * lanes + 1), (3, 0)]:
        a, b, c = (np.zeros(shape, dtype) for shape in ((4, k), (n, k), (4, n)))
        for x in (a, b):
            fill(x, np.random.default_rng(n))
        kernels.multiply(spec, a, b.T, c, BLOCKS, tasks=2 if parallel else 1)
        assert_close(c, a, b.T)


@every_dtype
@newer_isas
@pytest.mark.parametrize("layout", ["dense", "gaps", "backwards", "one B", "one row"])
def test_stacks_whose_next_product_is_prefetched(dtype, isa, layout):
    """Of the sizes for which that is done, whatever lies where a dense matrix would go on: each product has the bits that it
    has alone."""
    unblocked = pytest.importorskip("tvmgemm.family.unblocked", reason="needs the compiler")
    m, n, k = 43, 70, 61
    size = DTYPES[dtype].c_size * (m * k + k * n + m * n)
    assert unblocked.PREFETCHED[0] < size < unblocked.PREFETCHED[1] and size < unblocked.DENSE * m * n * k
    rng = np.random.default_rng(0)
    how = {
        "gaps": Layout((0, 1, 2), (2, 1, 1), (2, 3, 0), start=1), "backwards": Layout((0, 1, 2), (-1, -1, 1), (0, 0, 0)),
        "one B": Layout((0, 1, 2), (0, 1, 1), (0, 0, 0)), "one row": Layout((0, 1, 2), (1, 0, 1), (0, 0, 0)),
    }.get(layout, Layout((0, 1, 2), (1, 1, 1), (0, 0, 0)))  # fmt: skip
    a, b = lay_out((4, m, k), dtype, Layout((0, 1, 2), (1, 1, 1), (0, 1, 0))), lay_out((4, k, n), dtype, how)
    c = lay_out((4, m, n), dtype, Layout((0, 1, 2), (1, 1, 1), (0, 1, 0)))
    for x in (a, b):
        fill(x.view, rng)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    with planned(BLOCKS, max_isa=isa, num_threads=1):
        assert "-unblocked-" in tvmgemm.explain(a.view, b.view).kernel
        multiply(a, b, c, dtype)
        for product, *operands in zip(c.view, a.view, b.view):
            assert_same_bits(product, tvmgemm.matmul(*operands))
    assert_close(c.view, a.view, b.view)


def test_spec_round_trip():
    spec = unblocked_member("float32", "x86-64-v4")
    assert KernelSpec.from_dict(spec.to_dict()) == spec and "unblocked" in spec.name
