"""The generator: every kernel of the family compiles for every instruction set, into code that keeps its
promises.

Kernels of all instruction sets are compiled here, those that this machine can run are run: without the native
part, with exactly the work space that they ask for.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import re
import struct
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
from equivalence import FLOAT_TILES, FORCED, RUNNABLE, assert_close, fill, lay_out, row_major

from tvmgemm.build.link import find_linker, link
from tvmgemm.family.inspection import InnerLoop, inner_loops
from tvmgemm.family.isa import ISAS
from tvmgemm.family.variants import VARIANTS
from tvmgemm.problem import DTYPES, OPS
from tvmgemm.spec import KernelSpec

pytest.importorskip("tvm", reason="needs the compiler")


def spec_of(isa: str, dtype: str, op: str, packing: str, parallel: str) -> KernelSpec:
    mr, nr = FLOAT_TILES[isa, dtype]["C"][packing == "none"]
    return KernelSpec(dtype, isa, FORCED, mr, nr, op=op, packing=packing, parallel=parallel)


#: What planners choose from, for every instruction set; and the other packings, one loop order of each.
SPECS = [
    spec_of(isa, dtype, *rest)
    for isa, dtype in FLOAT_TILES
    for rest in itertools.product(OPS, ["ab", "none"], ["", "ic", "jc", "pc"])
]
SPECS += [spec_of(isa, dtype, "matmul", packing, "") for isa, dtype in FLOAT_TILES for packing in ("a", "b")]


def marked(specs: list[KernelSpec]) -> list:
    """Slow: gemm in place by tasks, which has the loops of matmul and the writing of one task's gemm, and the rarer tasks of the
    oldest instruction set."""

    def is_slow(s: KernelSpec) -> bool:
        return bool(s.parallel) and ((s.op, s.packing) == ("gemm", "none") or (s.isa == "x86-64-v2" and s.parallel != "ic"))

    return [pytest.param(s, marks=pytest.mark.slow if is_slow(s) else (), id=s.name) for s in specs]


@dataclass(frozen=True)
class Compiled:
    """An object file's bytes, and its assembly for matmul kernels."""

    object: bytes
    assembly: str


def compiled(spec: KernelSpec, path: str) -> Compiled:
    """Runs in a worker process."""
    from tvmgemm.family import codegen

    module = codegen.compile_module(spec)
    module.write_to_file(path, "o")
    with open(path, "rb") as file:
        return Compiled(file.read(), module.inspect_source("s") if spec.op == "matmul" else "")


@pytest.fixture(scope="module")
def compile_of(request, tmp_path_factory):
    """``compile_of(spec)``: its Compiled. Those that are parameters of this file's tests are compiled in two processes from the
    first use on."""
    folder = tmp_path_factory.mktemp("objects")
    parameters = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        @functools.cache
        def submit(spec: KernelSpec):
            return pool.submit(compiled, spec, str(folder / f"{spec.name}.o"))

        for spec in [each["spec"] for each in parameters if "spec" in each]:
            submit(spec)
        yield lambda spec: submit(spec).result(timeout=300)


every_spec = pytest.mark.parametrize("spec", marked(SPECS))


def symbols(elf: bytes) -> tuple[set[str], set[str]]:
    """(defined, undefined) global symbols of a 64-bit little-endian ELF object."""
    assert elf[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (offset,), (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    defined, undefined = set(), set()
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        names = sections[section[6]][4]
        for at in range(section[4] + 24, section[4] + section[5], 24):  # the first symbol is a placeholder
            name, info, _, index = struct.unpack_from("<IBBH", elf, at)
            text = elf[names + name : elf.index(b"\0", names + name)].decode()
            if info >> 4:  # not local
                (undefined if index == 0 else defined).add(text)
    return defined, undefined


@every_spec
def test_object_needs_nothing(compile_of, spec):
    """No TVM, no C library: what a kernel calls is inside it, or a pointer that is filled at load."""
    machine = {"x86_64": 62, "aarch64": 183}[ISAS[spec.isa].arch]
    elf = compile_of(spec).object
    assert struct.unpack_from("<HH", elf, 16) == (1, machine)  # a relocatable object of that architecture
    defined, undefined = symbols(elf)
    assert undefined == set()
    assert {spec.symbol, f"{spec.symbol}_workspace"} <= defined
    assert ("__TVMBackendParallelLaunch" in defined) == bool(spec.parallel)


# -- the micro-kernel's inner loop


def full_tile_loops(assembly: str, spec: KernelSpec) -> list[InnerLoop]:
    """The micro-kernel's loops over k that run for whole tiles: those at an edge have masks, or the branches into which
    LLVM expands them."""
    loops = inner_loops(assembly, ISAS[spec.isa].arch)
    return [loop for loop in loops if loop.fmas >= vectors_of(spec) and not loop.masked and not loop.branches]


def vectors_of(spec: KernelSpec) -> int:
    """Vectors in the tile: multiply-adds in a step of the micro-kernel."""
    return spec.mr * spec.nr // ISAS[spec.isa].lanes(DTYPES[spec.dtype].itemsize)


@pytest.mark.parametrize(
    "spec",
    marked([spec for spec in SPECS if spec.op == "matmul" and spec.packing == "ab"]),
)
def test_the_inner_loop_stays_in_registers(compile_of, spec):
    """Between two multiply-adds nothing goes to the stack: no accumulator, no pointer, no stride. (Kernels that read in
    place have several inner loops; test_inner_loops holds the hot one to the same.)
    """
    loops = full_tile_loops(compile_of(spec).assembly, spec)
    assert loops, "no loop with the multiply-adds of a tile was found"
    for loop in loops:
        assert loop.stack == 0, loop.text


@pytest.mark.parametrize("isa, dtype", FLOAT_TILES)
def test_the_inner_loop_is_lean(compile_of, isa, dtype):
    """Per step of k: a load per vector of B, at most a load and a broadcast per element of A, the
    multiply-adds, and a few instructions to go on.
    """
    spec = spec_of(isa, dtype, "matmul", "ab", "")
    multiplies, lanes = vectors_of(spec), ISAS[isa].lanes(DTYPES[dtype].itemsize)
    for loop in full_tile_loops(compile_of(spec).assembly, spec):
        steps = loop.fmas // multiplies
        per_step = multiplies * (1 if ISAS[isa].fma else 3) + spec.nr // lanes + 2 * spec.mr
        assert loop.instructions <= steps * (per_step + 8) + 4, loop.text


# -- running them alone

ARGUMENTS = "m n k rsa csa rsb csb rsc csc mc nc kc tasks batch sa sb sc".split()
TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, TASK, ctypes.c_void_p, ctypes.c_int)


class Environment(ctypes.Structure):
    """What a task gets: TVM's TVMParallelGroupEnv."""

    _fields_ = [("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32)]


def launcher(tasks: int):
    """A launcher that runs its tasks one by one, the last first: no task may need what another did."""

    def launch(task, closure, _):
        environment = Environment(None, tasks)
        return max(task(i, ctypes.addressof(environment), closure) for i in reversed(range(tasks)))

    return LAUNCH(launch)


def load(compiled: Compiled, spec: KernelSpec, folder) -> ctypes.CDLL:
    """The kernel as a library of this process, linked as builds do it."""
    linker = find_linker()
    if linker is None:
        pytest.skip("needs a linker")
    (folder / "kernel.o").write_bytes(compiled.object)
    link(linker, str(folder / "kernel.o"), str(folder / f"{spec.name}.so"))
    return ctypes.CDLL(str(folder / f"{spec.name}.so"))


class Guarded:
    """``size`` bytes that start on a multiple of 64, full of signalling NaNs, between two zones that must not
    change.
    """

    ZONE = 4096

    def __init__(self, size: int):
        room = np.full(size + 2 * self.ZONE + 64, 0xF5, "u1")
        start = self.ZONE + -(room.__array_interface__["data"][0] + self.ZONE) % 64
        self.address = room.__array_interface__["data"][0] + start
        self.before, self.after = room[:start], room[start + size :]
        room[start : start + size // 8 * 8].view("u8")[...] = 0x7FF0_0000_7FA0_0001

    def untouched(self) -> bool:
        return bool((self.before == 0xF5).all() and (self.after == 0xF5).all())


RUN = [spec for spec in SPECS if spec.isa in RUNNABLE and (spec.op == "matmul" or spec.packing == "ab")]


@pytest.mark.parametrize("spec", marked(RUN))
def test_kernels_keep_to_their_workspace(compile_of, spec, tmp_path):
    """Right results for a stack of two, with work space of exactly the size that is asked for, whatever blocks
    and number of tasks.
    """
    library = load(compile_of(spec), spec, tmp_path)
    kernel, workspace = library[spec.symbol], library[spec.symbol + "_workspace"]
    rng = np.random.default_rng(11)
    mr, nr = spec.mr, spec.nr
    shapes = [
        (1, 1, 1),
        (mr, nr, 8),
        (2 * mr + 1, 3 * nr - 1, 21),
        (5 * mr - 1, nr + 1, 0),
        (3, 4 * nr + 1, 40),
        (7 * mr + 2, 1, 9),
    ]
    blocks = [(mr, nr, 3), (2 * mr, 2 * nr, 16), (1 << 20, 1 << 20, 1 << 20)]
    for (m, n, k), (mc, nc, kc), tasks in itertools.product(
        shapes, blocks, (1, 3) if spec.parallel else (1,)
    ):
        a, b = (lay_out((2, *rest), spec.dtype, row_major(3)).view for rest in ((m, k), (k, n)))
        fill(a, rng)
        fill(b, rng)
        gaps = lay_out((2, m, n), spec.dtype, replace(row_major(3), steps=(-1, 1, 2)))
        for c in (lay_out((2, m, n), spec.dtype, row_major(3)), gaps):
            before = c.outside()
            steps, *strides = zip(*([s // a.itemsize for s in x.strides] for x in (a, b, c.view)))
            strides = [s for both in zip(*strides) for s in both]
            args = (ctypes.c_int64 * 17)(m, n, k, *strides, mc, nc, kc, tasks, 2, *steps)
            size = ctypes.c_int64(-1)
            assert workspace(args, ctypes.byref(size)) == 0 and 0 <= size.value < 1 << 30
            work = Guarded(size.value)
            launch = launcher(tasks)
            if spec.parallel:
                pointer = ctypes.c_void_p.in_dll(library, "__TVMBackendParallelLaunch")
                pointer.value = ctypes.cast(launch, ctypes.c_void_p).value
            scale = np.array([1, 0], spec.dtype)
            addresses = [ctypes.c_void_p(x.__array_interface__["data"][0]) for x in (a, b, c.view)]
            status = kernel(
                *addresses, ctypes.c_void_p(work.address), ctypes.c_void_p(scale.ctypes.data), args
            )
            assert status == 0
            assert work.untouched(), (m, n, k, mc, nc, kc, tasks)
            np.testing.assert_array_equal(c.outside(), before)
            assert_close(c.view, a, b)


@pytest.mark.parametrize("variant, packing, mc, nc", [("A3B2C0", "b", 6 * 64, 16 * 5), ("B3A2C0", "a", 6 * 5, 16 * 64)])
def test_tasks_have_as_many_tiles_each(variant, packing, mc, nc, tmp_path):
    """Counted by what each has written, when the last block is narrower than the others."""
    if "x86-64-v3" not in RUNNABLE:
        pytest.skip("x86-64-v3 does not run here")
    spec = KernelSpec("float32", "x86-64-v3", variant, 6, 16, packing=packing, parallel=VARIANTS[variant].outer[-1])
    library = load(compiled(spec, str(tmp_path / "own.o")), spec, tmp_path)
    m, n, k, tasks = 6 * 31, 16 * 31, 8, 3
    a, b = np.ones((m, k), "float32"), np.ones((k, n), "float32")
    args = (ctypes.c_int64 * 17)(m, n, k, k, 1, n, 1, n, 1, mc, nc, 512, tasks, 1, 0, 0, 0)
    size = ctypes.c_int64(-1)
    assert library[spec.symbol + "_workspace"](args, ctypes.byref(size)) == 0
    work, shares = Guarded(size.value), []
    for only in range(tasks):

        def launch(task, closure, _, only=only):
            environment = Environment(None, tasks)
            return task(only, ctypes.addressof(environment), closure)

        kept = LAUNCH(launch)
        ctypes.c_void_p.in_dll(library, "__TVMBackendParallelLaunch").value = ctypes.cast(kept, ctypes.c_void_p).value
        c = np.zeros((m, n), "float32")
        addresses = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, c)]
        assert library[spec.symbol](*addresses, ctypes.c_void_p(work.address), None, args) == 0
        assert set(np.unique(c)) == {0, k}
        shares.append(np.count_nonzero(c) // (6 * 16))
    assert sum(shares) == 31 * 31 and max(shares) - min(shares) <= 5  # a panel of the block


@pytest.mark.parametrize(
    "variant, packing, more, asked",
    [
        ("B3A2C0", "ab", {}, {"A_next", "C_rows"}),
        ("A3B2C0", "ab", {}, {"B_next", "C_rows"}),
        ("A3B2C0", "a", {}, {"C_rows"}),
        ("B3A2C0", "none", {}, set()),
        ("B3A2C0", "ab", {"symmetric": True, "mr": 8, "nr": 16}, {"C_rows"}),
        ("B3A2C0", "ab", {"without": ("prefetch",)}, set()),
    ],
)
def test_what_is_needed_soon_is_asked_for(variant, packing, more, asked):
    """Of the rows of C and what is packed next; besides the packed B, which the micro-kernel asks for itself."""
    from tvmgemm.family import codegen

    spec = KernelSpec(**{"dtype": "float32", "isa": "x86-64-v4", "variant": variant, "mr": 8, "nr": 48, "packing": packing} | more)
    found = set(re.findall(r"prefetch[^\n]*?address_of\((\w+)", codegen.script(spec)))
    assert {name for name in found if name.endswith(("_next", "_rows"))} == asked


@pytest.mark.parametrize("variant, packing, inside, part", [
    ("A3B2C0", "none", "nc", 1), ("B3A2C0", "none", "mc", 1), ("A3B2C0", "a", "nc", 4), ("B3A2C0", "ab", "mc", 4),
    ("C3A2B0", "none", None, 1),
])  # fmt: skip
def test_blocks_of_a_short_k_are_longer(variant, packing, inside, part):
    """The innermost loop over blocks keeps their bytes, or a part of them where something is packed."""
    from tvmgemm.family import codegen

    tile = {"mr": 0, "nr": 64, "kr": 6} if variant == "C3A2B0" else {"mr": 8, "nr": 48}
    spec = KernelSpec(**{"dtype": "float32", "isa": "x86-64-v4", "variant": variant, "packing": packing} | tile)
    found = re.findall(r"longer_value\w*\[T\.int64\(0\)\] = (\w+) \* T\.max\(T\.Div\(kc, (.*?)\), T\.int64\(1\)\)\n", codegen.script(spec))
    steps = "T.max(k, T.int64(1))" + (f" * T.int64({part})" if part > 1 else "")
    assert set(found) == ({(inside, steps)} if inside else set())


def test_packings_are_known():
    assert {spec.packing for spec in SPECS} == set(VARIANTS[FORCED].packings)
