"""Machines that are not here, and any machine, problem and options: for tests of the planner."""

from __future__ import annotations

from dataclasses import replace

from equivalence import FLOATS
from hypothesis import strategies as st

from tvmgemm.family.isa import ISAS
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import Cache, Host
from tvmgemm.problem import LAYOUT_NAMES, OPS, Problem
from tvmgemm.settings import Options

ROW, COL, GAPS = LAYOUT_NAMES
KIB, MIB = 1 << 10, 1 << 20


def caches(l1, l2, l3=None):
    """(bytes, ways) of each level."""
    return tuple(Cache(level, *size) for level, size in enumerate((l1, l2, l3), 1) if size)


def with_isa(name, *levels, cores):
    return Host(ISAS[name].arch, ISAS[name].requires, caches(*levels) if levels else (), cores)


# fmt: off
HOSTS = {
    "server":     with_isa("x86-64-v4", (48 * KIB, 12), (2 * MIB, 16), (105 * MIB, 15), cores=56),
    "desktop":    with_isa("x86-64-v4", (32 * KIB, 8), (1 * MIB, 8), (32 * MIB, 16), cores=8),
    "laptop":     with_isa("x86-64-v3", (32 * KIB, 8), (256 * KIB, 4), (8 * MIB, 16), cores=4),
    "old":        with_isa("x86-64-v2", (32 * KIB, 8), (256 * KIB, 8), (4 * MIB, 16), cores=2),
    "one core":   with_isa("x86-64-v3", (32 * KIB, 8), (1 * MIB, 16), (16 * MIB, 16), cores=1),
    "secretive":  with_isa("x86-64-v3", cores=2),
    "board":      with_isa("armv8-neon", (64 * KIB, 4), (1 * MIB, 8), cores=4),
    "too old":    Host("x86_64", frozenset({"sse2"}), (), 2),
    "unknown":    Host("riscv64", frozenset(), (), 4),
}
# fmt: on

# -- for hypothesis

sizes = st.one_of(
    st.integers(0, 40), st.integers(0, 3000), st.integers(0, 2**40), st.sampled_from([2**31, 2**62])
)


def of_blas(problem: Problem) -> Problem:
    """The problem as the inner loop can give it out: BLAS takes no operand with gaps."""
    return replace(problem, small_gemm=problem.small_gemm and GAPS not in (problem.a_layout, problem.b_layout))


problems = st.builds(
    Problem,
    dtype=st.sampled_from(FLOATS),
    m=sizes,
    n=sizes,
    k=sizes,
    batch=st.one_of(st.integers(1, 9), st.integers(1, 2**40)),
    op=st.sampled_from(OPS),
    a_layout=st.sampled_from(LAYOUT_NAMES),
    b_layout=st.sampled_from(LAYOUT_NAMES),
    c_layout=st.sampled_from([ROW, GAPS]),
    transposed=st.booleans(),
    symmetric=st.booleans(),
    gemv=st.booleans(),
    small_gemm=st.booleans(),
).map(of_blas)
hosts = st.one_of(
    st.sampled_from(list(HOSTS.values())),
    st.builds(
        lambda isa, levels, cores: with_isa(isa, *levels, cores=cores),
        st.sampled_from(sorted(ISAS)),
        st.tuples(*[st.tuples(st.integers(0, 1 << 33), st.integers(1, 64))] * 3),
        st.integers(1, 500),
    ),
)
options = st.builds(
    Options,
    variant=st.sampled_from(["auto", "auto", "numpy", *VARIANTS]),
    max_isa=st.sampled_from([None, *ISAS]),
    num_threads=st.integers(1, 300),
)
