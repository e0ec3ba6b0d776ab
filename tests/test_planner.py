"""The planner: tables of decisions for machines that are not here. (``test_boxes``: what must hold for every problem.)"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
from equivalence import FLOATS
from planning import COL, GAPS, HOSTS, KIB, MIB, ROW, with_isa

from tvmgemm.boxes import Box
from tvmgemm.family import tiles
from tvmgemm.family.arithmetic import WAYS
from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import TILES, UNBLOCKED_TILES
from tvmgemm.family.validity import check
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import Host
from tvmgemm.planner import DEFAULT_VARIANT as FORCED
from tvmgemm.planner import Plan, companions, plan
from tvmgemm.problem import DTYPES, OPS, Problem
from tvmgemm.settings import Options

# fmt: off
NUMPY = None
SYMMETRIC = {"b_layout": COL, "symmetric": True}
GEMV = {"gemv": True}
SMALL = {"small_gemm": True}
GOTO = FORCED
V2, V3, V4, NEON = "x86-64-v2", "x86-64-v3", "x86-64-v4", "armv8-neon"

#    host         options               m      n     k     more of the problem     ISA, variant, packing, loop, tasks
DECISIONS = [
    ("server",    {},                   4,     4,    4,    {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {},                   64,    64,   64,   {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {"num_threads": 1},   1000,  1000, 1000, {},                     (V4, "A3B2C0", "ab", "", 1)),
    ("server",    {"num_threads": 8},   2000,  2000, 2000, {},                     (V4, "A3B2C0", "ab", "ic", 8)),
    ("server",    {"num_threads": 8},   30,    9000, 2000, {},                     (V4, "C3A2B0", "ac", "jc", 8)),
    ("server",    {"num_threads": 8},   12544, 64,   147,  {},                     (V4, GOTO, "none", "ic", 8)),
    ("server",    {"num_threads": 8},   20,    20,   9000, {},                     (V4, GOTO, "none", "pc", 8)),
    ("server",    {"num_threads": 8},   8,     8,    999,  {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {"num_threads": 8},   8,     8,    99999, {},                    (V4, GOTO, "none", "pc", 8)),
    ("server",    {"num_threads": 8},   1000,  1000, 30,   {},                     (V4, GOTO, "none", "ic", 8)),
    ("server",    {"num_threads": 8},   4000,  1000, 30,   {},                     (V4, "A3B2C0", "ab", "ic", 8)),
    ("server",    {"num_threads": 8},   60,    100,  100,  {},                     (V4, GOTO, "none", "jc", 2)),
    ("server",    {},                   200,   300,  5000, {},                     (V4, GOTO, "none", "ic", 14)),
    ("server",    {},                   64,    64,   64,   {"b_layout": COL},      (V4, GOTO, "b", "", 1)),
    ("server",    {},                   64,    64,   64,   {"b_layout": GAPS},     (V4, GOTO, "b", "", 1)),
    ("server",    {},                   64,    64,   64,   {"a_layout": COL},      (V4, GOTO, "none", "", 1)),
    ("server",    {},                   1,     100,  500,  GEMV,                   NUMPY),
    ("server",    {},                   1,     500,  500,  GEMV,                   (V4, GOTO, "none", "", 1)),
    ("server",    {},                   1,     500,  500,  GEMV | {"b_layout": GAPS}, NUMPY),
    ("server",    {"num_threads": 2},   1,     600,  600,  GEMV,                   (V4, GOTO, "none", "", 1)),
    ("server",    {"num_threads": 2},   1,     1024, 512,  GEMV,                   (V4, GOTO, "none", "jc", 2)),
    ("server",    {"num_threads": 2},   1,     1024, 513,  GEMV,                   NUMPY),  # L3 holds B
    ("server",    {"num_threads": 2},   1,     4000, 917,  GEMV,                   NUMPY),
    ("server",    {"num_threads": 2},   1,     4000, 918,  GEMV,                   (V4, GOTO, "none", "jc", 2)),
    ("server",    {},                   500,   1,    500,  GEMV,                   NUMPY),
    ("server",    {},                   1,     1,    500,  GEMV,                   NUMPY),
    ("server",    {},                   1,     500,  500,  {"op": "gemm"},         (V4, GOTO, "none", "", 1)),
    ("server",    {"variant": FORCED},  1,     500,  500,  {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {"variant": FORCED},  500,   1,    500,  {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {},                   500,   500,  300,  SYMMETRIC,              (V4, GOTO, "b", "ic", 14)),
    ("server",    {"num_threads": 1},   500,   500,  300,  SYMMETRIC,              (V4, GOTO, "b", "", 1)),
    ("server",    {"num_threads": 8},   500,   500,  300,  SYMMETRIC,              (V4, GOTO, "b", "ic", 8)),
    ("server",    {"num_threads": 8},   5000,  5000, 300,  SYMMETRIC,              (V4, GOTO, "b", "ic", 8)),
    ("server",    {"num_threads": 8},   5000,  5000, 300,  SYMMETRIC | {"a_layout": COL, "b_layout": ROW},
                                                                                   (V4, GOTO, "ab", "ic", 8)),
    ("server",    {},                   8,     8,    8,    SYMMETRIC,              (V4, GOTO, "b", "", 1)),
    ("server",    {"variant": FORCED, "num_threads": 1},
                                        500,   500,  300,  SYMMETRIC,              (V4, GOTO, "b", "", 1)),
    ("server",    {"max_isa": V3},      64,    64,   64,   {},                     (V3, GOTO, "none", "", 1)),
    ("server",    {"max_isa": V2},      64,    64,   64,   {},                     (V2, GOTO, "none", "", 1)),
    ("server",    {"max_isa": NEON},    64,    64,   64,   {},                     (V4, GOTO, "none", "", 1)),
    ("server",    {"variant": "numpy"}, 64,    64,   64,   {},                     NUMPY),
    ("server",    {"variant": "numpy"}, 64,    64,   64,   {"op": "gemm"},         NUMPY),
    ("laptop",    {},                   32,    32,   32,   {},                     (V3, GOTO, "none", "", 1)),
    ("laptop",    {"max_isa": V4},      32,    32,   32,   {},                     (V3, GOTO, "none", "", 1)),
    ("laptop",    {"num_threads": 4},   2000,  2000, 2000, {},                     (V3, "A3B2C0", "ab", "ic", 4)),
    ("old",       {"num_threads": 2},   2000,  2000, 2000, {"dtype": "float64"},   (V2, "A3B2C0", "ab", "ic", 2)),
    ("secretive", {"num_threads": 2},   2000,  2000, 2000, {},                     (V3, "A3B2C0", "ab", "ic", 2)),
    ("board",     {"num_threads": 4},   2000,  2000, 2000, {},                     (NEON, "A3B2C0", "ab", "ic", 4)),
    # Members of the family by shape, on a CPU whose L2 holds 512 x 512 floats.
    ("desktop",   {"num_threads": 1},   2000,  2000, 16,   {},                     (V4, "A3B2C0", "none", "", 1)),
    ("desktop",   {"num_threads": 2},   2000,  2000, 16,   {},                     (V4, "A3B2C0", "none", "ic", 2)),
    ("desktop",   {"num_threads": 1},   2000,  2000, 17,   {},                     (V4, "A3B2C0", "ab", "", 1)),
    ("desktop",   {"num_threads": 1},   2000,  4000, 8,    {"b_layout": COL},      (V4, "A3B2C0", "ab", "", 1)),
    ("desktop",   {"num_threads": 1},   300,   1000,  2,   {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   100,   20000, 4,   {},                     (V4, "A3B2C0", "none", "", 1)),
    ("desktop",   {"num_threads": 1},   40,    100000, 3,  {},                     (V4, "A3B2C0", "none", "", 1)),
    ("desktop",   {"num_threads": 1},   40,    10000, 3,   {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   16,    100000, 16, {},                     (V4, "A3B2C0", "ab", "", 1)),
    ("desktop",   {"num_threads": 2},   16,    100000, 16, {},                     (V4, GOTO, "none", "jc", 2)),
    ("desktop",   {"num_threads": 2},   16,    200000, 16, {},                     (V4, "A3B2C0", "b", "jc", 2)),
    ("desktop",   {"num_threads": 1},   8,     100000, 16, {},                     (V4, "A3B2C0", "a", "", 1)),
    ("desktop",   {"num_threads": 1},   8,     2000, 2000, {},                     (V4, "C3A2B0", "ac", "", 1)),
    ("desktop",   {"num_threads": 1},   32,    4096, 256,  {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   32,    4096, 256,  {"b_layout": COL},      (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 1},   64,    512,  2048, {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   10000, 64,   64,   {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   10000, 8,    500,  {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  90,   4,    {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  256,  512,  {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  256,  128,  {"a_layout": COL},      (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  256,  129,  {"a_layout": COL},      (V4, "A3B2C0", "ab", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  90,   513,  {},                     (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  257,  512,  {},                     (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 1},   640,   1024, 128,  {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   641,   1024, 128,  {},                     (V4, "A3B2C0", "ab", "", 1)),
    ("desktop",   {"num_threads": 1},   100,   1024, 129,  {},                     (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 1},   9000,  90,   4,    {"b_layout": COL},      (V4, GOTO, "b", "", 1)),
    ("desktop",   {"num_threads": 1},   200,   2000, 2000, {},                     (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 4},   200,   2000, 2000, {},                     (V4, "A3B2C0", "b", "jc", 4)),
    # Few columns, or a B that would have to be transposed, with a long k: small products for which BLAS has kernels of its own.
    ("desktop",   {"num_threads": 1},   400,   2,    64,   SMALL,                  NUMPY),
    ("desktop",   {"num_threads": 1},   400,   2,    64,   {},                     (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   400,   2,    64,   SMALL | {"op": "gemm"}, (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1, "variant": FORCED},
                                        400,   2,    64,   SMALL,                  (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   64,    4,    128,  SMALL,                  (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   10000, 2,    16,   SMALL,                  (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   300,   3,    64,   SMALL,                  (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   900,   3,    64,   SMALL,                  NUMPY),
    ("desktop",   {"num_threads": 1},   64,    4,    256,  SMALL,                  NUMPY),
    ("desktop",   {"num_threads": 1},   64,    4,    256,  SMALL | {"dtype": "float64"}, (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   64,    8,    800,  SMALL,                  (V4, GOTO, "none", "", 1)),
    ("desktop",   {"num_threads": 1},   8,     64,   400,  SMALL | {"b_layout": COL}, NUMPY),
    ("desktop",   {"num_threads": 1},   400,   2,    800,  SMALL | {"b_layout": COL, "c_layout": GAPS}, NUMPY),
    ("desktop",   {"num_threads": 1},   16,    80,   400,  SMALL | {"b_layout": COL}, (V4, GOTO, "b", "", 1)),
    # Of two column-major operands, BLAS is ahead where its tiles of 16 rows fit (float64: from 4 rows on).
    ("desktop",   {"num_threads": 1},   6,     2441, 12,   SMALL | {"a_layout": COL, "b_layout": COL}, (V4, GOTO, "b", "", 1)),
    ("desktop",   {"num_threads": 1},   16,    900,  24,   SMALL | {"a_layout": COL, "b_layout": COL}, NUMPY),
    ("desktop",   {"num_threads": 1},   24,    900,  24,   SMALL | {"a_layout": COL, "b_layout": COL}, (V4, GOTO, "b", "", 1)),
    ("desktop",   {"num_threads": 1},   2,     900,  24,   SMALL | {"a_layout": COL, "b_layout": COL, "dtype": "float64"}, (V4, GOTO, "b", "", 1)),
    ("desktop",   {"num_threads": 1},   6,     900,  24,   SMALL | {"a_layout": COL, "b_layout": COL, "dtype": "float64"}, NUMPY),
    # A B of up to 1.5 times L2 is copied for few rows; with gaps, if its rows are short.
    ("desktop",   {"num_threads": 1},   12,    700,  480,  {"b_layout": COL},      (V4, GOTO, "b", "", 1)),
    ("desktop",   {"num_threads": 1},   90,    700,  480,  {"b_layout": COL},      (V4, "A3B2C0", "b", "", 1)),
    ("desktop",   {"num_threads": 1},   2,     78,   2411, {"b_layout": GAPS, "dtype": "float64"}, (V4, GOTO, "b", "", 1)),
    ("laptop",    {"num_threads": 1},   400,   2,    64,   SMALL,                  (V3, GOTO, "none", "", 1)),
    # Stacks: each task has enough products, or the stack stays whole.
    ("desktop",   {},                   8,     8,    8,    {"batch": 511},         (V4, GOTO, "none", "", 1)),
    ("desktop",   {},                   8,     8,    8,    {"batch": 512},         (V4, GOTO, "none", "stack", 8)),
    ("desktop",   {},                   32,    32,   32,   {"batch": 31},          (V4, GOTO, "none", "", 1)),
    ("desktop",   {},                   32,    32,   32,   {"batch": 32},          (V4, GOTO, "none", "stack", 8)),
    ("desktop",   {"num_threads": 2},   500,   500,  500,  {"batch": 7},           (V4, "A3B2C0", "b", "ic", 2)),
    ("desktop",   {"num_threads": 2},   500,   500,  500,  {"batch": 8},           (V4, "A3B2C0", "b", "stack", 2)),
    ("desktop",   {},                   500,   500,  500,  {"batch": 31},          (V4, "A3B2C0", "b", "jc", 8)),
    ("desktop",   {"num_threads": 1},   32,    32,   32,   {"batch": 9000},        (V4, GOTO, "none", "", 1)),
    ("desktop",   {"parallel_loop": "stack"},
                                        32,    32,   32,   {"batch": 2},           (V4, GOTO, "none", "stack", 8)),
    ("desktop",   {"parallel_loop": "none"},
                                        32,    32,   32,   {"batch": 9000},        (V4, GOTO, "none", "", 1)),
    ("too old",   {},                   64,    64,   64,   {},                     NUMPY),
    ("unknown",   {},                   64,    64,   64,   {},                     NUMPY),
    ("unknown",   {"variant": FORCED},  64,    64,   64,   {},                     NUMPY),
    # Without num_threads the cores of the host that is planned for count, not those of the one that plans.
    ("server",    {},                   9000,  9000, 9000, {},                     (V4, "A3B2C0", "ab", "ic", 56)),
    ("desktop",   {},                   9000,  9000, 9000, {},                     (V4, "A3B2C0", "ab", "ic", 8)),
    ("one core",  {},                   9000,  9000, 9000, {},                     (V3, "A3B2C0", "ab", "", 1)),
]
# fmt: on


@pytest.mark.parametrize("host, options, m, n, k, more, expected", DECISIONS)
def test_decisions(host, options, m, n, k, more, expected):
    problem = Problem(**{"dtype": "float32", "m": m, "n": n, "k": k, **more})
    planned = plan(problem, HOSTS[host], Options(**options))
    assert planned.reason and planned.box.holds(problem)
    if expected is NUMPY:
        assert not planned.served and planned.spec is planned.blocks is None and planned.tasks == 1
        return
    spec = planned.spec
    assert (spec.isa, spec.variant, spec.packing, planned.parallel_loop or "", planned.tasks) == expected
    assert spec.parallel == ("" if planned.shares_stack else expected[3])
    assert (spec.dtype, spec.op) == (problem.dtype, problem.op)
    tiles = TILES[spec.isa, spec.dtype][VARIANTS[spec.variant].resident]
    assert spec.tile_sizes in (tiles if spec.blocked else [UNBLOCKED_TILES[spec.isa, spec.dtype]])


@pytest.mark.parametrize("k, rows", [(511, 14), (512, 8), (4096, 8)])
def test_long_rows_of_a_are_few_side_by_side(k, rows):
    planned = plan(Problem("float32", 4096, 16, k, b_layout="col", c_layout="strided"), HOSTS["desktop"], Options(num_threads=1))
    assert (planned.spec.mr, planned.spec.nr) == (rows, 16)


@pytest.mark.parametrize(
    "host, options, words",
    [
        ("server", {"variant": "numpy"}, "TVMGEMM_VARIANT=numpy"),
        ("unknown", {}, "riscv64"),
        ("too old", {"max_isa": "x86-64-v3"}, "x86-64-v3"),
    ],
)
def test_reasons_say_which_setting_or_machine(host, options, words):
    assert words in plan(Problem("float32", 9, 9, 9), HOSTS[host], Options(**options)).reason


def test_companions_are_the_kernels_that_plans_need_next():
    host = HOSTS["server"]
    for threads in (1, 4):
        settings = Options(num_threads=threads)
        wanted = {plan(Problem("float32", m, m, m), host, settings).spec for m in (16, 64, 200, 1000, 4000)}
        for spec in wanted:
            following = companions(spec, host, settings)
            assert len(wanted - {spec, *following}) <= 2, "most of what squares need comes in one build"
            assert spec not in following and len(following) == len(set(following))
            assert {(s.dtype, s.isa, s.op) for s in following} == {(spec.dtype, spec.isa, spec.op)}


def test_names_of_kernels_are_unique():
    specs = {
        plan(Problem(dtype, m, n, k, op=op, b_layout=b), host, Options(num_threads=threads, max_isa=isa)).spec
        for dtype in FLOATS
        for op in OPS
        for b in (ROW, COL)
        for isa in (None, *ISAS)
        for m, n, k in [(8, 8, 8), (1000, 1000, 1000), (20, 9000, 1000)]
        for threads in (1, 4)
        for host in HOSTS.values()
    } - {None}
    assert len({spec.name for spec in specs}) == len({spec.symbol for spec in specs}) == len(specs) > 40
    for spec in specs:
        assert type(spec).from_dict(spec.to_dict()) == spec and list(spec.to_dict()) == [
            f.name for f in fields(spec)
        ]


def test_planning_touches_no_machine_and_no_compiler():
    """plan() of another machine's host reads nothing of this one, and the planner imports no TVM."""
    program = """if True:
        import sys
        from tvmgemm import planner, settings
        from tvmgemm import host as host_module
        def forbidden(*args): raise AssertionError("the planner asked for this machine")
        host_module.host = host_module.read_features = host_module.read_caches = forbidden
        from tvmgemm.problem import Problem
        host = host_module.Host("aarch64", frozenset({"asimd"}), (), 6)
        print(planner.plan(Problem("float32", 9000, 9000, 9000), host, settings.Options()).tasks)
        assert "tvm" not in sys.modules and "tvmgemm.family.codegen" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["6"], done.stderr


def test_default_variant_exists():
    assert FORCED in VARIANTS


def test_a_dtype_without_kernels_is_declined_everywhere_at_once(monkeypatch):
    monkeypatch.setattr(tiles, "TILES", {key: found for key, found in TILES.items() if key[1] in FLOATS})
    for dtype in set(DTYPES) - set(FLOATS):
        decided = plan(Problem(dtype, 9, 8, 7), HOSTS["server"], Options())
        assert not decided.served and not decided.refused and decided.box == Box()
        assert decided.reason == f"no kernels for {dtype} on x86-64-v4"


def test_few_rows_of_several_blocks_of_k_are_read_in_place():
    """Packing for one row of tiles costs more than it saves, but what is rounded once needs memory for its sums."""
    for m, n, tile in ((1, 1, (1, 48)), (2, 9, (8, 16)), (4, 30, (8, 32)), (8, 500, (8, 48))):
        spec = plan(Problem("float16", m, n, 1000), HOSTS["server"], Options(num_threads=1)).spec
        assert (spec.packing, spec.blocked, (spec.mr, spec.nr)) == ("none", True, tile)
    assert plan(Problem("float16", 9, 500, 1000), HOSTS["server"], Options(num_threads=1)).spec.packing == "ab"
    assert not plan(Problem("int32", 1, 30, 1000), HOSTS["server"], Options(num_threads=1)).spec.blocked


def test_short_sums_of_bfloat16_are_read_in_place():
    host = with_isa("x86-64-v4-bf16", (32 * KIB, 8), (1 * MIB, 8), (32 * MIB, 16), cores=8)
    for k, packing in ((2, "none"), (16, "none"), (17, "ab")):
        assert plan(Problem("bfloat16-float32", 300, 800, k), host, Options(num_threads=1)).spec.packing == packing


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8-int32"])
def test_one_column_is_dot_products_where_the_order_of_sums_is_free(dtype):
    for m, k in ((1, 1000), (4, 17), (500, 500)):
        found = plan(Problem(dtype, m, 1, k), HOSTS["server"], Options(num_threads=1))
        assert found.spec.packing == "ab" and "dot products" in found.reason
    assert "dot products" not in plan(Problem("float16", 500, 1, 500), HOSTS["server"], Options(num_threads=1)).reason
    assert "dot products" not in plan(Problem("int8", 500, 2, 500), HOSTS["server"], Options(num_threads=1)).reason


def test_a_brief_sum_is_not_packed_for():
    for dtype in ("int64", "int32", "float16"):
        for (m, n, k), bare in (((100_000, 8, 16), True), ((500, 8, 17), False), ((500, 400, 16), False)):
            spec = plan(Problem(dtype, m, n, k), HOSTS["server"], Options(num_threads=1)).spec
            assert (spec.packing == "none") == (not spec.blocked) == bare


def test_a_forced_arithmetic_is_honoured_or_refused():
    everything = Host("x86_64", frozenset().union(*(isa.requires for isa in ISAS.values())), (), 2)

    def decided(dtype: str, arithmetic: str, **rest) -> Plan:
        found = plan(Problem(dtype, 100, 200, 300), everything, Options(num_threads=1, arithmetic=arithmetic, **rest))
        if found.served:
            check(found.spec)
        return found

    for dtype, ways in WAYS["x86-64-v4-amx"].items():
        for arithmetic in ways:
            assert decided(dtype, arithmetic).spec.arithmetic == arithmetic
    # By the widest level that has it.
    assert decided("int8", "dot8").spec.isa == "x86-64-v4-vnni"
    assert decided("bfloat16", "dot16").spec.isa == "x86-64-v4-bf16"
    assert decided("int16", "madd16", max_isa="x86-64-v3").spec.isa == "x86-64-v3"
    assert decided("float32", "fma32") == plan(Problem("float32", 100, 200, 300), everything, Options(num_threads=1))
    for dtype, arithmetic, packing in (("float32", "dot8", None), ("int8", "dot16", None), ("int8", "dot8", "none")):
        refused = decided(dtype, arithmetic, packing=packing)
        assert refused.refused and arithmetic in refused.reason
