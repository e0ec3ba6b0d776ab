"""The part of an outline that is about tiles: the product of the current blocks, by micro-kernels or without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..problem import DTYPES
from . import placement
from .arithmetic import MATRIX_ROWS, rounds_once
from .figure import INDEX, Figure
from .tiles import heights
from .variants import OPERAND_DIMENSIONS, PANELS


def triple_loop(f: Figure, blocks: dict[str, tuple[str, str]]) -> None:
    """Three loops over single elements; ``blocks`` gives the start and the size of each dimension."""
    rows, columns = (f"{start}:+{size}" for start, size in (blocks["m"], blocks["n"]))
    f.begin(f"C[{rows}, {columns}]", in_block=blocks["k"][0] != "0")
    with f.nest(*((INDEX[d], blocks[d]) for d in "mnk")):
        f.line(f"C[i, j] += {f.alpha}A[i, p]*B[p, j]", "one element at a time")


def packed_loops(f: Figure, in_tile: bool) -> None:
    """The product of packed blocks before there is a micro-kernel in registers; ``in_tile``: by tiles on the stack."""
    mr, nr = f.tile["m"], f.tile["n"]
    f.begin(f.block("C"), in_block=True)
    with f.tiles():
        if in_tile:
            f.line("T = 0", f"{mr} x {nr}, on the stack")
        with f.nest(("p", ("0", "kc")), ("it", ("0", str(mr))), ("jt", ("0", str(nr)))):
            product = "Ac[ir+it, p]*Bc[p, jr+jt]"
            if in_tile:
                f.line(f"T[it, jt] += {product}", "micro-kernel, by vectors; LLVM decides what stays in registers")
            else:
                f.line(f"C[ic+ir+it, jc+jr+jt] += {f.alpha}{product}", "one element at a time")
        if in_tile:
            f.line(f"C[ic+ir:+{mr}, jc+jr:+{nr}] += {f.alpha}T")


def resident_c(f: Figure) -> None:
    """The product of the current blocks by tiles of C in registers."""
    mr, nr = f.tile["m"], f.tile["n"]
    prefetch = "prefetch" not in f.spec.without
    group = f.how.group
    p = "p" if group == 1 else f"p:+{group}"
    a = f"Ac[ir:+{mr}, {p}]" if "A" in f.packed else f"A[ic+ir:+{mr}, pc+p]"
    b = f"Bc[{p}, jr:+{nr}]" if "B" in f.packed else f"B[pc+p, jc+jr:+{nr}]"
    c = f"C[ic+ir:+{mr}, jc+jr:+{nr}]"
    vectors = nr // f.lanes
    f.buffer("Cs", f"{mr} x {nr}, for a C without unit column stride only", bool(f.spec.parallel))
    if f.how.matrix:
        _matrix(f, c, prefetch)
        return
    with _triangle(f) if f.spec.symmetric else f.tiles():
        if f.packed and prefetch:
            last = [operand for operand, at in f.packed.items() if at == f.variant.outer[-1] and not f.spec.symmetric]
            f.line(f"prefetch {c}", "in the course of p" + "".join(f"; and some of the next {operand}c" for operand in last))
        own = "" if f.how.sum == f.spec.dtype else f", {f.how.sum}"
        f.line("T = 0", f"{mr} x {nr} of C, in registers{own}")
        ahead = "; prefetches Bc ahead" if "B" in f.packed and prefetch else ""
        with f.loop("p", "kc", group, comment="micro-kernel" + f", {f.how.name}" * bool(own)):
            loads = vectors if "register-loads" not in f.spec.without else mr * vectors
            each = 2 if f.how.halves else 1  # a pair of parts by a pair, and by the same in exchanged order
            f.line(f"T += {a}*{b}", f.work(loads, mr, each * mr * vectors) + ahead)
        _compute_again(f)
        _finish(f, c)


@contextmanager
def _triangle(f: Figure) -> Iterator[None]:
    """The two loops over those micro-tiles that are not above the diagonal, and the copy of what is below."""
    mr, nr = f.tile["m"], f.tile["n"]
    with f.loop("jr", "min(nc, ic+mc-jc)", nr):
        with f.loop("ir", "mc", mr, start="max(0, jc+jr-ic)"):
            yield
        f.line(f"C[jc+jr:+{nr}, below] = C[below, jc+jr:+{nr}]^T", f"in the last block of k: rows from jc+jr+{nr} on")


def _matrix(f: Figure, c: str, prefetch: bool) -> None:
    """The same on a matrix unit, where a step of the micro-kernel is a chunk of k."""
    mr, nr = f.tile["m"], f.tile["n"]
    high, wide, span = mr // MATRIX_ROWS, nr // MATRIX_ROWS, MATRIX_ROWS * f.how.group
    f.buffer("T", f"{mr} x {nr}, on the way from the unit to C", bool(f.spec.parallel))
    if f.how.planes > 1 and not f.how.halves:
        f.buffer("U", f"{mr} x {nr}, the sums of one weight", bool(f.spec.parallel))
    f.line("configure the unit")
    with f.tiles():
        if prefetch:
            f.line(f"prefetch {c}")
        planes, sums = f.how.planes, "float32" if f.how.floating else "int32"
        sizes = DTYPES[f.spec.dtype]
        split, widened = planes > 1 and not f.how.halves, planes < sizes.c_size  # products of upper bytes count too
        with f.loop("w", str(2 * planes - 1 if widened else planes), comment="weights of bytes") if split else nullcontext():
            f.line("tiles = 0", f"{mr} x {nr} of C, {sums}, in {high * wide} registers of the unit")
            with f.loop("p", "kc", span, comment=f"micro-kernel, {f.how.name}"):
                last = f"min(w+1, {planes})" if widened else "w+1"
                first = f"max(0, w-{planes - 1}), " if widened else ""
                products = f"{high * wide} products of {MATRIX_ROWS} x {span} by {span} x {MATRIX_ROWS}"
                with _planes(f, first + last if split else ""):
                    a, b = ("q, ", "w-q, ") if split else ("q, ", "r, ") if f.how.halves else ("", "")
                    work = f"{high + wide} loads, {products}"
                    if f.how.halves:
                        work = f"{products}; {2 * high + 3 * wide} loads for all four"
                    f.line(f"tiles += Ac[{a}ir:+{mr}, p:+{span}]*Bc[{b}p:+{span}, jr:+{nr}]", work)
            f.line("T = tiles" if not split else "T += tiles << 8*w", "" if not split else f"from 0, {f.how.sum}, by way of U")
        _compute_again(f)
        _finish(f, c)
    f.line("release the unit")


@contextmanager
def _planes(f: Figure, of_bytes: str) -> Iterator[None]:
    """The loop over pairs of planes, if elements are split: ``of_bytes`` are the bounds of that over planes of one
    weight."""
    if of_bytes:
        with f.loop("q", of_bytes, comment="planes of bytes"):
            yield
    elif f.how.halves:
        with f.under("for q, r in (0, 0), (0, 1), (1, 1), (1, 0):", "planes of parts of a number"):
            yield
    else:
        yield


def _compute_again(f: Figure) -> None:
    """What sums of parts cannot be, by the numbers themselves."""
    if f.how.halves:
        if not f.how.matrix:
            f.buffer("Tc", f"{f.tile['m']} x {f.tile['n']}, for sums that are not finite", bool(f.spec.parallel))
        f.line("T[not finite] = A*B", "once more from A and B as they are, in float32")


def _finish(f: Figure, c: str) -> None:
    """From the sums of a tile over a block of k to C."""
    if not rounds_once(f.spec.dtype):
        f.bring(c, "T")
        return
    f.buffer("Sc", "a piece of C, for k > kc only, at most 4 MiB or a block for each task", placement.private(f.spec, "pc"))
    f.line(f"if pc > 0: T += Sc[{c[2:-1]}]")
    f.line(f"Sc[{c[2:-1]}] = T", "before the last block of k; then:")
    f.bring(c, "T", every=True)


def resident_operand(f: Figure) -> None:
    """The product of the current blocks by tiles of A or B in registers, which C and the other operand stream past."""
    resident, stream = f.variant.resident, f.variant.stream
    across, _ = PANELS[resident][resident]
    other = "B" if resident == "A" else "A"
    width, kr, s = f.tile[across], f.tile["k"], INDEX[stream]
    sums = "S" if f.collects else "Cc"

    def indices(dimensions: tuple[str, ...], block: bool) -> str:
        """Of the micro-tile along its own dimensions, of one step along the other; from the block or from 0."""
        found = []
        for d in dimensions:
            start = f"{INDEX[d]}c+" if block else ""
            found.append(start + (s if d == stream else f"{INDEX[d]}r:+{f.tile[d]}"))
        return ", ".join(found)

    c_packed = "C" in f.packed
    to = f"{sums if c_packed else 'C'}[{indices(OPERAND_DIMENSIONS['C'], not c_packed)}]"
    y_packed = other in f.packed
    y = f"{other}{'c' if y_packed else ''}[{indices(OPERAND_DIMENSIONS[other], not y_packed)}]"
    scaled = "" if c_packed else f.alpha
    vectors = width // f.lanes
    f.buffer("X", f"{kr} x {width}, for the tile on its way to registers", bool(f.spec.parallel))
    with f.tiles():
        tile = f"{scaled}{resident}[{indices(OPERAND_DIMENSIONS[resident], True)}]"
        f.line(f"T = {tile}", "in registers, by way of X")
        product = f"T*{y}" if resident == "A" else f"{y}*T"
        with f.loop(s, f"{stream}c", comment="micro-kernel"):
            begins = "" if c_packed else f"; from {'0' if f.spec.op == 'matmul' else 'beta*C'} at the start of k"
            f.line(f"{to} += {product}", f.work(vectors, kr, kr * vectors, vectors) + begins)


def unblocked(f: Figure) -> None:
    """Tiles as wide as they need to be, and as tall as the registers then allow."""
    vectors = f.tile["n"] // f.lanes
    sizes = [f"{rows}x{width * f.lanes}" for width, rows in heights(f.tile["m"], vectors).items()]
    what = {"ic": "m", "jc": "n"}.get(f.spec.parallel)
    b = "B"
    if what:
        f.line(f"{what} = this task's share of {what}", "parallel")
    if f.spec.packing != "none":
        b = "Bc"
        f.buffer("Bc", "k x n, in rows that an odd number of vectors lies apart", private=what == "m")
        f.line("Bc = B", "packed" + (": this task's columns" if what == "n" else ""))
    with f.loop("pc", "k", "kc"):
        wide = f.under("for jr, nr in tiles of n:", f"of equal width; tiles are at most {', '.join(sizes)}")
        high = f.under("for ir, mr in tiles of m:", "of equal height; code for every mr and nr")
        with wide, high:
            f.line("T = 0", "mr x nr of C, in registers")
            with f.loop("p", "kc", comment="micro-kernel"):
                f.line(f"T += A[ir:+mr, pc+p]*{b}[pc+p, jr:+nr]", f"nr/{f.lanes} loads, mr broadcasts, the last load masked")
            f.bring("C[ir:+mr, jr:+nr]", "T")
