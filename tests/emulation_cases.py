"""Calls of a kernel with every kind of edge, and what each must do: for kernels that run in an emulator.

Operands lie in the smallest buffer that holds them, because the harness puts forbidden memory next to it.
Between their elements, in the workspace and in a C that is not read there are signalling NaNs: arithmetic on
one cannot go unnoticed.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace

import numpy as np

from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import TILES
from tvmgemm.family.validity import unsuitable
from tvmgemm.problem import DTYPES, Problem
from tvmgemm.spec import KernelSpec

#: What the harness reports, by bit: as in its enumerations.
FLAGS = {1: "invalid", 2: "divide by zero", 4: "overflow"}
INVALID, OVERFLOW = 1, 4
FAULTS = {
    1: "wrote outside its workspace",
    2: "wrote outside C",
    4: "changed A",
    8: "changed B",
    16: "its workspace function failed or gave a size that is negative or no multiple of 64",
}
ASCENDING, DESCENDING, THREADS = range(3)


# -- operands

#: Strides, in elements, of a matrix with ``rows`` and ``columns``; by class of layout as the planner sees it.
LAYOUTS = {
    "row": {
        "contiguous": lambda rows, columns: (columns, 1),
        "padded": lambda rows, columns: (columns + 3, 1),
        "upside down": lambda rows, columns: (-columns - 2, 1),
    },
    "col": {
        "contiguous": lambda rows, columns: (1, rows),
        "padded": lambda rows, columns: (1, rows + 5),
        "backwards": lambda rows, columns: (1, -rows),
    },
    "strided": {
        "every other": lambda rows, columns: (2 * columns + 1, 2),
        "transposed, every third": lambda rows, columns: (3, 3 * rows),
        "negative": lambda rows, columns: (-columns, -1),
    },
}

#: With those that only an operand that is read can have.
_INPUT_LAYOUTS = {
    "row": LAYOUTS["row"] | {"one row": lambda rows, columns: (0, 1)},
    "col": LAYOUTS["col"] | {"one column": lambda rows, columns: (1, 0)},
    "strided": LAYOUTS["strided"] | {"one element": lambda rows, columns: (0, 0)},
}


@functools.cache
def noise(dtype: str) -> np.ndarray:
    """A signalling NaN, in an array, because as a scalar it could be quietened."""
    bits = {"float32": (np.uint32, 0x7FA00001), "float64": (np.uint64, 0x7FF4000000000001)}[dtype]
    return np.array([bits[1]], bits[0]).view(dtype)


@dataclass(frozen=True)
class Operand:
    """A matrix in the smallest buffer that holds it: its elements where ``index`` says, noise around them."""

    buffer: np.ndarray
    index: np.ndarray
    offset: int
    strides: tuple[int, int]

    @property
    def values(self) -> np.ndarray:
        """The matrix, as a copy."""
        return self.buffer[self.index]


def lay_out(values: np.ndarray, strides: tuple[int, int]) -> Operand:
    """``values`` with these strides. Where elements share a place the last one stays."""
    rows, columns = values.shape
    index = np.arange(rows)[:, None] * strides[0] + np.arange(columns) * strides[1]
    offset = -int(index.min()) if index.size else 0
    index = index + offset
    buffer = np.repeat(noise(values.dtype.name), int(index.max()) + 1 if index.size else 0)
    buffer[index] = values
    return Operand(buffer, index, offset, strides)


# -- cases


@dataclass(frozen=True)
class Case:
    """One call of a kernel, and what it must do.

    ``blocks``: mc, nc, kc. ``flags``: what must be raised, bits of ``FLAGS``. ``launch`` and ``at_end``: see
    the harness.
    """

    problem: Problem
    a: Operand
    b: Operand
    c: Operand
    blocks: tuple[int, int, int]
    tasks: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    flags: int = 0
    launch: int = ASCENDING
    at_end: bool = True

    def __str__(self) -> str:
        p = self.problem
        told = f"{p.m}x{p.n}x{p.k}, strides of A {self.a.strides}, B {self.b.strides}, C {self.c.strides}"
        scale = f", alpha {self.alpha}, beta {self.beta}" if p.op == "gemm" else ""
        return f"{told}, mc, nc, kc {self.blocks}, {self.tasks} tasks{scale}"

    @functools.cached_property
    def message(self) -> bytes:
        """The harness's ``struct problem`` and the operands."""
        p, operands = self.problem, (self.a, self.b, self.c)
        itemsize = DTYPES[p.dtype].itemsize
        strides = [stride for operand in operands for stride in operand.strides]
        sizes, offsets = [x.buffer.nbytes for x in operands], [x.offset * itemsize for x in operands]
        arguments = [p.m, p.n, p.k, *strides, *self.blocks, self.tasks, 1, 0, 0, 0]
        head = np.array([self.launch, self.at_end, *sizes, *offsets, *arguments], np.int64).tobytes()
        scale = np.array([self.alpha, self.beta], p.dtype).tobytes().ljust(16, b"\0")
        around = np.repeat(noise(p.dtype), 8 // itemsize).tobytes()
        return b"".join([head, scale, around, *(x.buffer.tobytes() for x in operands)])

    @functools.cached_property
    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The result, and how far off any order of summation can be; in a wider dtype than the operands'.

        k eps |A|.|B| for matmul; gemm has a term more in its sums, and rounds products with alpha and beta.
        """
        p = self.problem
        wide = np.float64 if p.dtype == "float32" else np.longdouble
        info = np.finfo(p.dtype)
        eps, least = wide(info.eps), wide(info.smallest_subnormal)
        with np.errstate(all="ignore"):
            a, b, c = (x.values.astype(wide) for x in (self.a, self.b, self.c))
            product, magnitude = np.dot(a, b), np.dot(abs(a), abs(b))
            product[abs(product) > info.max] *= np.inf
            if p.op == "matmul":
                return product, p.k * (eps * magnitude + least)
            kept = self.beta * c if self.beta else np.zeros_like(c)
            steps = p.k + 2
            bound = steps * (
                eps * (abs(self.alpha) * magnitude + abs(kept)) + max(1, abs(self.alpha)) * least
            )
            return self.alpha * product + kept, bound


@dataclass(frozen=True)
class Answer:
    """What the harness said about one case: status, raised flags, faults, and the buffer of C afterwards."""

    status: int
    flags: int
    faults: int
    buffer: np.ndarray


@dataclass(frozen=True)
class Run:
    """The emulator's exit status (minus a signal's number), what it printed on stderr, and the answers."""

    status: int
    errors: str
    answers: list[Answer]


def answers(output: bytes, cases: list[Case]) -> list[Answer]:
    """What the harness wrote; shorter than ``cases`` if the kernel died."""
    found, at = [], 0
    for case in cases:
        size = case.c.buffer.nbytes
        if len(output) - at < 32 + size:
            break
        status, flags, faults, _ = np.frombuffer(output, np.int64, 4, at).tolist()
        buffer = np.frombuffer(output, case.problem.dtype, case.c.buffer.size, at + 32)
        found.append(Answer(status, flags, faults, buffer))
        at += 32 + size
    return found


def suitable(spec: KernelSpec, cases: list[Case]) -> list[Case]:
    """The cases whose layouts a kernel of ``spec`` can take."""
    return [case for case in cases if unsuitable(spec, case.problem) is None]


def check(run: Run, cases: list[Case]) -> None:
    """Every answer is there and right."""
    if len(run.answers) < len(cases):
        raise AssertionError(f"exit status {run.status} at {cases[len(run.answers)]}: {run.errors}")
    assert run.status == 0, run.errors
    for case, answer in zip(cases, run.answers):
        wrong = _complaint(case, answer)
        assert wrong is None, f"{wrong}, at {case}"


def _complaint(case: Case, answer: Answer) -> str | None:
    if answer.status or answer.faults:
        return f"status {answer.status}, {_named(answer.faults, FAULTS)}"
    if answer.flags != case.flags:
        return f"raised {_named(answer.flags, FLAGS)} instead of {_named(case.flags, FLAGS)}"
    outside = np.ones(answer.buffer.size, bool)
    outside[case.c.index] = False
    if answer.buffer[outside].tobytes() != case.c.buffer[outside].tobytes():
        return "wrote between the elements of C"
    result = answer.buffer[case.c.index]
    exact, bound = case.exact
    finite = np.isfinite(exact)
    with np.errstate(all="ignore"):
        same = (result == exact) | (np.isnan(result) & np.isnan(exact))
        right = np.where(finite, abs(result - exact) <= bound, same)
    if right.all():
        return None
    i, j = np.argwhere(~right)[0]
    return f"C[{i}, {j}] is {result[i, j]}, exact is {exact[i, j]} and {bound[i, j]} is allowed"


def _named(bits: int, names: dict[int, str]) -> str:
    return ", ".join(name for bit, name in names.items() if bits & bit) or "nothing"


# -- which cases

#: Blocks of one tile, of a few, and the whole matrix. A kc of 1 makes every step of k a block of its own.
_MC_NC = (1, 16, 24, 1 << 20)
_KC = (1, 5, 32, 1 << 20)


def edge_sizes(isa: str, dtype: str) -> list[int]:
    """Nothing, one, and one below, at and above the edges of every default tile and vector; a few more."""
    edges = {edge for tiles in TILES[isa, dtype].values() for edge in tiles[0]}
    edges.add(ISAS[isa].lanes(DTYPES[dtype].itemsize))
    return sorted({0, 1, 2, 33, 70, 2 * max(edges) + 1} | {edge + d for edge in edges for d in (-1, 0, 1)})


@functools.cache
def cases(isa: str, dtype: str, op: str, symmetric: bool = False) -> list[Case]:
    """Every pair of edges in m and n, with k, layouts, blocks and tasks drawn by a seeded generator; then
    numbers that are not finite, that vanish, and that raise flags, and threads with something to do.
    ``symmetric``: n is m, B is A^T, and no numbers raise flags.
    """
    draw = _Draw(dtype, op, np.random.default_rng(1), random.Random(1), symmetric)
    sizes = edge_sizes(isa, dtype)
    small = [size for size in sizes if 0 < size <= 33]
    found = [draw.normal(m, n, draw.choose.choice(sizes)) for m, n in itertools.product(sizes, repeat=2)]
    for kind in (draw.infinite, draw.vanishing):
        found += [kind(*draw.choose.choices(small, k=3)) for _ in range(20)]
    together = {"blocks": (24, 24, 32), "tasks": 3, "launch": THREADS}
    found += [replace(draw.normal(70, 70, 70), **together) for _ in range(8)]
    if symmetric:
        return found
    for shape, at in itertools.product([(1, 1, 1), (9, 13, 6), (30, 20, 40)], (0, -1)):
        found.append(draw.loud(*shape, at, np.inf, 0.0, INVALID))
        found.append(draw.loud(*shape, at, np.finfo(dtype).max, 4.0, OVERFLOW))
    return found


@dataclass(frozen=True)
class _Draw:
    """Draws cases of one dtype and operation."""

    dtype: str
    op: str
    rng: np.random.Generator
    choose: random.Random
    symmetric: bool = False

    def normal(self, m: int, n: int, k: int) -> Case:
        """Normal numbers of magnitudes 1/8 to 8, some of them zero of either sign."""

        def numbers(*shape: int) -> np.ndarray:
            values = self.rng.standard_normal(shape) * np.exp2(self.rng.integers(-3, 4, shape))
            values[self.rng.random(shape) < 0.05] = 0.0
            values[self.rng.random(shape) < 0.05] = -0.0
            return values

        return self._case(numbers(m, k), numbers(k, n), numbers(m, n))

    def infinite(self, m: int, n: int, k: int) -> Case:
        """Infinite and NaN rows and columns that meet positive numbers only: no flag may come of it."""
        a, b, c = (1 + self.rng.random(shape) for shape in ((m, k), (k, n), (m, n)))
        a[-1], b[:, 0] = np.inf, np.inf
        if m > 2:
            a[0] = np.nan
        return self._case(a, b, c)

    def vanishing(self, m: int, n: int, k: int) -> Case:
        """Products that round to a zero of either sign, or to a number next to it."""
        scale = float(np.finfo(self.dtype).smallest_subnormal) ** 0.5 / 2
        return self._case(*(scale * self.rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n))))

    def loud(self, m: int, n: int, k: int, at: int, left: float, right: float, flags: int) -> Case:
        """One product that raises a flag, in the first or last element: else silence would prove nothing."""
        a, b = np.ones((m, k)), np.ones((k, n))
        a[at, at], b[at, at] = left, right
        return self._case(a, b, np.ones((m, n)), flags)

    def _case(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, flags: int = 0) -> Case:
        choose = self.choose
        if self.symmetric:
            b, c = a.T, np.resize(c, (len(a), len(a)))
        (a_layout, a), (b_layout, b) = (
            self._operand(x, LAYOUTS if flags or self.symmetric else _INPUT_LAYOUTS) for x in (a, b)
        )
        c_layout, c = self._operand(c, LAYOUTS)
        alpha, beta = choose.choice([1.0, -1.0, 2.5]), choose.choice([0.0, 0.0, 1.0, -2.0, 0.3])
        if self.op == "matmul" or flags:
            alpha, beta = 1.0, 0.0
        if beta == 0.0:  # then C is not read, so anything may be there
            c.buffer[...] = noise(self.dtype)
        mc, nc, kc = choose.choice(_MC_NC), choose.choice(_MC_NC), choose.choice(_KC)
        # An emulator takes a millisecond to start a thread, and with small blocks there are many starts.
        launches = [ASCENDING, DESCENDING] + ([THREADS] if min(mc, nc, kc) > 16 else [])
        (m, k), n = a.index.shape, b.index.shape[1]
        return Case(
            Problem(self.dtype, m, n, k, op=self.op, a_layout=a_layout, b_layout=b_layout, c_layout=c_layout),
            a,
            b,
            c,
            blocks=(mc, nc, kc),
            tasks=choose.choice([1, 2, 3, 7]),
            alpha=alpha,
            beta=beta,
            flags=flags,
            launch=choose.choice(launches),
            at_end=choose.random() < 0.7,
        )

    def _operand(self, values: np.ndarray, layouts: dict) -> tuple[str, Operand]:
        """``values`` in some layout, with its class: half are row-major, for some kernels take no other."""
        kind = self.choose.choice(["row", "row", "col", "strided"])
        strides = self.choose.choice(list(layouts[kind].values()))(*values.shape)
        operand = lay_out(values.astype(self.dtype), strides)
        return ("row" if strides[1] == 1 else "col" if strides[0] == 1 else "strided"), operand
