"""The algorithm of a kernel as its figure in a paper would show it: loops, packings, buffers, the
micro-kernel.

Written from the spec alone, without TVM, in the order in which ``generator`` emits it. ``x:+s`` are the s
elements from x on; what lies past the edge of the matrix is left out, as the code leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..problem import DTYPES
from ..spec import STEPS, KernelSpec
from .arithmetic import MATRIX_REGISTERS, MATRIX_ROWS, arithmetic_of, rounds_once
from .isa import isa_of
from .tiles import heights, registers_needed
from .validity import check
from .variants import LOOP_DIMENSION, OPERAND_DIMENSIONS, PANELS, VARIANTS

_INDEX = {"m": "i", "n": "j", "k": "p"}


def outline(spec: KernelSpec) -> str:
    """The text for ``spec``; ValueError for a spec that describes no kernel."""
    check(spec)
    return _Outline(spec).text()


class _Outline:
    """Lines of code with comments, collected on the way through the loops."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.variant = VARIANTS[spec.variant]
        self.isa = isa_of(spec.isa)
        self.tile = {"m": spec.mr, "n": spec.nr, "k": spec.kr}
        self.how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
        self.lanes = self.how.columns(self.isa)
        packing = "" if spec.packing == "none" or spec.step in ("basic", "blocked") else spec.packing
        self.packed = {operand: loop for operand, loop in self.variant.packed if operand.lower() in packing}
        self.lines: list[tuple[str, str]] = []
        self.buffers: list[tuple[str, str, str]] = []
        self.indent = 0

    def text(self) -> str:
        spec = self.spec
        if spec.step == "basic":
            self._triple_loop({d: ("0", d) for d in "mnk"})
        elif not spec.blocked:
            self._unblocked()
        else:
            self._outer(list(self.variant.outer))
        product = "C = A.B" if spec.op == "matmul" else "C = alpha.A.B + beta.C"
        title = (
            f"{spec.variant} {spec.tile}: {product} in {spec.dtype}, A m x k, B k x n, C m x n, on {spec.isa}"
        )
        notes = [f"step {spec.step}"] if spec.step != STEPS[-1] else []
        notes += [] if spec.blocked else ["no loops over cache blocks"]
        notes += [f"without {', '.join(spec.without)}"] if spec.without else []
        head = [title + "".join(f"; {note}" for note in notes), ""]
        width = max(len(code) for code, comment in self.lines if comment)
        body = [f"{code:<{width}}  # {comment}" if comment else code for code, comment in self.lines]
        return "\n".join([*head, *body, *self._buffer_table(), *self._registers(), ""])

    # ---- lines ---------------------------------------------------------------------------------------------

    def _line(self, code: str, comment: str = "") -> None:
        self.lines.append((" " * (2 * self.indent) + code, comment))

    @contextmanager
    def _loop(self, name: str, limit: str, step: object = 1, comment: str = "", start: str = "0") -> Iterator[None]:
        self._line(
            f"for {name} in range({limit}):" if step == 1 else f"for {name} in range({start}, {limit}, {step}):",
            comment,
        )
        self.indent += 1
        yield
        self.indent -= 1

    def _buffer(self, name: str, size: str, private: bool, owner: str = "") -> None:
        if self.spec.parallel and not owner:
            owner = "one per task" if private else "shared"
        if (row := (name, size, owner)) not in self.buffers:
            self.buffers.append(row)

    def _buffer_table(self) -> list[str]:
        if not self.buffers:
            return []
        width = max(len(size) for _, size, _ in self.buffers)
        rows = [f"  {name:<3} {size:<{width}}  {owner}".rstrip() for name, size, owner in self.buffers]
        return [
            "",
            "buffers, in elements, before they are rounded up to whole vectors and cache lines",
            *rows,
        ]

    def _registers(self) -> list[str]:
        if self.spec.step != STEPS[-1]:
            return []
        spec, isa, resident = self.spec, self.isa, self.variant.resident
        needed = registers_needed(*spec.tile_sizes, isa, self.how, resident)
        held = spec.tile_sizes[0] * spec.tile_sizes[1] // self.how.at_once(isa)
        tile = f"{held} hold the tile of {resident}, {needed - held} what streams past"
        if self.how.matrix:
            return ["", f"registers: {tile}: {needed} of {MATRIX_REGISTERS} of the matrix unit, {MATRIX_ROWS} x {MATRIX_ROWS} sums each"]
        return ["", f"registers: {tile}: {needed} of {isa.vector_registers}, {self.lanes} elements each"]

    # ---- the loops over cache blocks -----------------------------------------------------------------------

    def _private(self, at: str) -> bool:
        """Whether what is packed in loop ``at`` belongs to one task."""
        outer = self.variant.outer
        return bool(self.spec.parallel) and outer.index(at) >= outer.index(self.spec.parallel)

    def _outer(self, loops: list[str]) -> None:
        if not loops:
            self._block_product()
            return
        name, rest = loops[0], loops[1:]
        dimension = LOOP_DIMENSION[name]
        shared = f"parallel: each task has {self._share(name)}" if self.spec.parallel == name else ""
        start = "jc" if self.spec.symmetric and name == "ic" else "0"
        with self._loop(name, dimension, dimension + "c", shared, start):
            for operand in (operand for operand, at in self.packed.items() if at == name and operand != "C"):
                self._pack(operand, name)
            with self._sums(name):
                self._outer(rest)
        if shared and name == "pc":
            self._add_slots()

    def _share(self, name: str) -> str:
        """What of a shared loop falls to a task (``partition``, ``triangle``)."""
        if self.spec.symmetric:
            return "rows, with equal areas below the diagonal"
        if self.variant.resident == "C" and self.spec.step == STEPS[-1] and name == self.variant.outer[-1] != "pc":
            return f"a contiguous share of {name} x {self.variant.inner[0]}"
        return "a contiguous share of the iterations"

    @property
    def _collects(self) -> bool:
        """Whether C is packed outside of the loop over blocks of k."""
        at = self.packed.get("C")
        return at is not None and self.variant.outer.index(at) < self.variant.outer.index("pc")

    def _add_slots(self) -> None:
        """What follows a loop over blocks of k whose iterations have sums of their own."""
        outer = self.variant.outer
        outside = [LOOP_DIMENSION[loop] for loop in outer[: outer.index("pc")]]
        what = self._panels("C") if self._collects else " x ".join(d + "c" * (d in outside) for d in "mn")
        self._buffer("Sc", what, False, "one per block of k, as many as 4 MiB hold, but one per task")
        with self._loop("pc", "k", "kc", "tasks share out C and keep to the order of k"):
            if self._collects:
                self._line("Cc = Sc[pc]", "in the first block of k; in later ones += Sc[pc]")
            else:
                self._bring(f"C[{', '.join(f'{_INDEX[d]}c:+{d}c' if d in outside else ':' for d in 'mn')}]", "Sc[pc]", slot=False)

    def _block(self, operand: str) -> str:
        """The current block of an operand: ``A[ic:+mc, pc:+kc]``."""
        return f"{operand}[{', '.join(f'{_INDEX[d]}c:+{d}c' for d in OPERAND_DIMENSIONS[operand])}]"

    def _panels(self, operand: str) -> str:
        across, along = PANELS[self.variant.resident][operand]
        planes = f" in {self.how.planes} planes" if self.how.planes > 1 else ""
        return f"ceil({across}c/{self.tile[across]}) panels of {along}c x {self.tile[across]}{planes}"

    def _pack(self, operand: str, at: str) -> None:
        private = self._private(at)
        how = (
            ""
            if self.spec.step == STEPS[-1] and "vector-packing" not in self.spec.without
            else "element by element"
        )
        who = "all tasks pack their shares" if self.spec.parallel and not private else ""
        comment = "; ".join(filter(None, (f"panels of {self._panels(operand).split(' of ')[1]}", who, how)))
        self._line(f"{operand}c = pack {self._block(operand)}", comment)
        self._buffer(operand + "c", self._panels(operand), private)

    @contextmanager
    def _sums(self, name: str) -> Iterator[None]:
        """What happens to a packed C around the inner loops of outer loop ``name``."""
        at, collects = self.packed.get("C"), self._collects
        if name == "pc" and collects and self.spec.parallel == "pc":
            self._line("S = Sc[pc]")
            self._line("S = 0")
            yield
        elif name == "pc" and collects:
            self._buffer("Pc", self._panels("C"), self._private(at))
            self._line("S = Cc if pc == 0 else Pc")
            self._line("S = 0")
            yield
            self._line("if pc > 0: Cc += Pc")
        elif name == at:
            self._buffer("Cc", self._panels("C"), self._private(at))
            if not collects:
                self._line("Cc = 0")
            yield
            self._bring(self._block("C"), "Cc", every=collects)
        else:
            yield

    def _bring(self, place: str, sums: str, every: bool = False, slot: bool = True) -> None:
        """C from finished sums of one block of k; ``every``: of all blocks of k. ``slot``: they wait for other blocks if
        tasks share those out."""
        if slot and not every and self.spec.parallel == "pc":
            self._line(f"Sc[pc]{place[1:]} = {sums}")
            return
        matmul = self.spec.op == "matmul"
        scaled = sums if matmul else f"alpha*{sums}"
        start = f"{place} = {scaled}" + ("" if matmul else f" + beta*{place}")
        if every:
            self._line(start, "" if matmul else "beta = 0: C is not read")
        else:
            self._line(start, f"in the first block of k; in later ones += {scaled}")

    # ---- the product of the current blocks -----------------------------------------------------------------

    def _block_product(self) -> None:
        step = self.spec.step
        if step == "blocked":
            self._triple_loop({d: (f"{_INDEX[d]}c", f"{d}c") for d in "mnk"})
        elif step in ("packed", "microkernel"):
            self._packed_loops(in_tile=step == "microkernel")
        elif self.variant.resident == "C":
            self._resident_c()
        else:
            self._resident_operand()

    def _begin(self, place: str, in_block: bool) -> None:
        value = "0" if self.spec.op == "matmul" else f"beta*{place}"
        self._line(f"{'if pc == 0: ' if in_block else ''}{place} = {value}")

    def _triple_loop(self, blocks: dict[str, tuple[str, str]]) -> None:
        rows, columns = (f"{start}:+{size}" for start, size in (blocks["m"], blocks["n"]))
        self._begin(f"C[{rows}, {columns}]", in_block=blocks["k"][0] != "0")
        with self._nest(*((_INDEX[d], blocks[d]) for d in "mnk")):
            self._line(f"C[i, j] += {self._alpha}A[i, p]*B[p, j]", "one element at a time")

    @contextmanager
    def _nest(self, *loops: tuple[str, tuple[str, str]]) -> Iterator[None]:
        for name, (start, size) in loops:
            self._line(f"for {name} in {f'range({size})' if start == '0' else f'{start}:+{size}'}:")
            self.indent += 1
        yield
        self.indent -= len(loops)

    @property
    def _alpha(self) -> str:
        return "" if self.spec.op == "matmul" else "alpha*"

    @contextmanager
    def _tiles(self) -> Iterator[None]:
        """The two loops over micro-tiles."""
        (first, d1), (second, d2) = ((name, LOOP_DIMENSION[name]) for name in self.variant.inner)
        with self._loop(first, d1 + "c", self.tile[d1]), self._loop(second, d2 + "c", self.tile[d2]):
            yield

    @contextmanager
    def _triangle(self, tile: str) -> Iterator[None]:
        """The two loops over those micro-tiles that are not above the diagonal, and the copy of what is below."""
        mr, nr = self.tile["m"], self.tile["n"]
        with self._loop("jr", "min(nc, ic+mc-jc)", nr):
            with self._loop("ir", "mc", mr, start="max(0, jc+jr-ic)"):
                yield
            self._line(f"C[jc+jr:+{nr}, below] = C[below, jc+jr:+{nr}]^T", f"in the last block of k: rows from jc+jr+{nr} on")

    def _packed_loops(self, in_tile: bool) -> None:
        mr, nr = self.tile["m"], self.tile["n"]
        self._begin(self._block("C"), in_block=True)
        with self._tiles():
            if in_tile:
                self._line("T = 0", f"{mr} x {nr}, on the stack")
            with self._nest(("p", ("0", "kc")), ("it", ("0", str(mr))), ("jt", ("0", str(nr)))):
                product = "Ac[ir+it, p]*Bc[p, jr+jt]"
                if in_tile:
                    self._line(
                        f"T[it, jt] += {product}", "micro-kernel, by vectors; LLVM decides what stays in registers"
                    )
                else:
                    self._line(f"C[ic+ir+it, jc+jr+jt] += {self._alpha}{product}", "one element at a time")
            if in_tile:
                self._line(f"C[ic+ir:+{mr}, jc+jr:+{nr}] += {self._alpha}T")

    def _resident_c(self) -> None:
        mr, nr = self.tile["m"], self.tile["n"]
        prefetch = "prefetch" not in self.spec.without
        group = self.how.group
        p = "p" if group == 1 else f"p:+{group}"
        a = f"Ac[ir:+{mr}, {p}]" if "A" in self.packed else f"A[ic+ir:+{mr}, pc+p]"
        b = f"Bc[{p}, jr:+{nr}]" if "B" in self.packed else f"B[pc+p, jc+jr:+{nr}]"
        c = f"C[ic+ir:+{mr}, jc+jr:+{nr}]"
        vectors = nr // self.lanes
        self._buffer("Cs", f"{mr} x {nr}, for a C without unit column stride only", bool(self.spec.parallel))
        if self.how.matrix:
            self._matrix(c, prefetch)
            return
        with self._triangle(c) if self.spec.symmetric else self._tiles():
            if self.packed and prefetch:
                last = [operand for operand, at in self.packed.items() if at == self.variant.outer[-1] and not self.spec.symmetric]
                self._line(f"prefetch {c}", "in the course of p" + "".join(f"; and some of the next {operand}c" for operand in last))
            own = "" if self.how.sum == self.spec.dtype else f", {self.how.sum}"
            self._line("T = 0", f"{mr} x {nr} of C, in registers{own}")
            ahead = "; prefetches Bc ahead" if "B" in self.packed and prefetch else ""
            with self._loop("p", "kc", group, comment="micro-kernel" + f", {self.how.name}" * bool(own)):
                loads = vectors if "register-loads" not in self.spec.without else mr * vectors
                self._line(f"T += {a}*{b}", self._work(loads, mr, mr * vectors) + ahead)
            self._finish(c)

    def _matrix(self, c: str, prefetch: bool) -> None:
        """The same on a matrix unit, where a step of the micro-kernel is a chunk of k."""
        mr, nr = self.tile["m"], self.tile["n"]
        high, wide, span = mr // MATRIX_ROWS, nr // MATRIX_ROWS, MATRIX_ROWS * self.how.group
        self._buffer("T", f"{mr} x {nr}, on the way from the unit to C", bool(self.spec.parallel))
        if self.how.planes > 1:
            self._buffer("U", f"{mr} x {nr}, the sums of one weight", bool(self.spec.parallel))
        self._line("configure the unit")
        with self._tiles():
            if prefetch:
                self._line(f"prefetch {c}")
            planes, sums = self.how.planes, "float32" if self.how.floating else "int32"
            sizes = DTYPES[self.spec.dtype]
            split, widened = planes > 1, planes < sizes.c_size  # products of upper bytes count too
            with self._loop("w", str(2 * planes - 1 if widened else planes), comment="weights of bytes") if split else nullcontext():
                self._line("tiles = 0", f"{mr} x {nr} of C, {sums}, in {high * wide} registers of the unit")
                with self._loop("p", "kc", span, comment=f"micro-kernel, {self.how.name}"):
                    last = f"min(w+1, {planes})" if widened else "w+1"
                    first = f"max(0, w-{planes - 1}), " if widened else ""
                    with self._loop("q", first + last, comment="planes of bytes") if split else nullcontext():
                        a, b = ("q, ", "w-q, ") if split else ("", "")
                        work = f"{high + wide} loads, {high * wide} products of {MATRIX_ROWS} x {span} by {span} x {MATRIX_ROWS}"
                        self._line(f"tiles += Ac[{a}ir:+{mr}, p:+{span}]*Bc[{b}p:+{span}, jr:+{nr}]", work)
                self._line("T = tiles" if not split else "T += tiles << 8*w", "" if not split else f"from 0, {self.how.sum}, by way of U")
            self._finish(c)
        self._line("release the unit")

    def _finish(self, c: str) -> None:
        """From the sums of a tile over a block of k to C."""
        if not rounds_once(self.spec.dtype):
            self._bring(c, "T")
            return
        self._buffer("Sc", "a piece of C, for k > kc only, at most 4 MiB or a block for each task", self._private("pc"))
        self._line(f"if pc > 0: T += Sc[{c[2:-1]}]")
        self._line(f"Sc[{c[2:-1]}] = T", "before the last block of k; then:")
        self._bring(c, "T", every=True)

    def _unblocked(self) -> None:
        """Tiles as wide as they need to be, and as tall as the registers then allow."""
        vectors = self.tile["n"] // self.lanes
        sizes = [f"{rows}x{width * self.lanes}" for width, rows in heights(self.tile["m"], vectors).items()]
        what = {"ic": "m", "jc": "n"}.get(self.spec.parallel)
        b = "B"
        if self.spec.packing != "none":
            b = "Bc"
            self._buffer("Bc", "k x n, in rows that an odd number of vectors lies apart", False)
            self._line("Bc = B", "packed" + (", by all tasks together" if what else ""))
        if what:
            self._line(f"{what} = this task's share of {what}", "parallel")
        with self._loop("pc", "k", "kc"):
            self._line("for jr, nr in tiles of n:", f"of equal width; tiles are at most {', '.join(sizes)}")
            self.indent += 1
            self._line("for ir, mr in tiles of m:", "of equal height; code for every mr and nr")
            self.indent += 1
            self._line("T = 0", "mr x nr of C, in registers")
            with self._loop("p", "kc", comment="micro-kernel"):
                self._line(f"T += A[ir:+mr, pc+p]*{b}[pc+p, jr:+nr]", f"nr/{self.lanes} loads, mr broadcasts, the last load masked")
            self._bring("C[ir:+mr, jr:+nr]", "T")
            self.indent -= 2

    def _resident_operand(self) -> None:
        resident, stream = self.variant.resident, self.variant.stream
        across, _ = PANELS[resident][resident]
        other = "B" if resident == "A" else "A"
        width, kr, s = self.tile[across], self.tile["k"], _INDEX[stream]
        sums = "S" if self._collects else "Cc"

        def indices(dimensions: tuple[str, ...], block: bool) -> str:
            """Of the micro-tile along its own dimensions, of one step along the other; from the block or from
            0."""
            found = []
            for d in dimensions:
                start = f"{_INDEX[d]}c+" if block else ""
                found.append(start + (s if d == stream else f"{_INDEX[d]}r:+{self.tile[d]}"))
            return ", ".join(found)

        c_packed = "C" in self.packed
        to = f"{sums if c_packed else 'C'}[{indices(OPERAND_DIMENSIONS['C'], not c_packed)}]"
        y_packed = other in self.packed
        y = f"{other}{'c' if y_packed else ''}[{indices(OPERAND_DIMENSIONS[other], not y_packed)}]"
        scaled = "" if c_packed else self._alpha
        vectors = width // self.lanes
        self._buffer("X", f"{kr} x {width}, for the tile on its way to registers", bool(self.spec.parallel))
        with self._tiles():
            tile = f"{scaled}{resident}[{indices(OPERAND_DIMENSIONS[resident], True)}]"
            self._line(f"T = {tile}", "in registers, by way of X")
            product = f"T*{y}" if resident == "A" else f"{y}*T"
            with self._loop(s, f"{stream}c", comment="micro-kernel"):
                begins = (
                    ""
                    if c_packed
                    else f"; from {'0' if self.spec.op == 'matmul' else 'beta*C'} at the start of k"
                )
                self._line(f"{to} += {product}", self._work(vectors, kr, kr * vectors, vectors) + begins)

    def _work(self, loads: int, broadcasts: int, fmas: int, stores: int = 0) -> str:
        """What one step of the micro-kernel does."""
        products = "FMAs" if self.how.is_fused(self.isa) else "multiplies and adds"
        what = f"{loads} loads, {broadcasts} broadcasts, {fmas} {products}"
        return what + (f", {stores} stores" if stores else "")
