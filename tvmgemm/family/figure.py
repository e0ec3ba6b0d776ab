"""What an outline is written on: lines of code with comments, the buffers that they name, and the notation of
operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..spec import STEPS, KernelSpec
from . import placement
from .arithmetic import MATRIX_REGISTERS, MATRIX_ROWS, arithmetic_of
from .isa import isa_of
from .tiles import registers_needed
from .variants import LOOP_DIMENSION, OPERAND_DIMENSIONS, PANELS, VARIANTS

#: The index that runs through a dimension.
INDEX = {"m": "i", "n": "j", "k": "p"}


class Figure:
    """The figure of one kernel, written line by line on the way through its loops; ``spec`` has passed
    ``validity.check``."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.variant = VARIANTS[spec.variant]
        self.isa = isa_of(spec.isa)
        self.tile = {"m": spec.mr, "n": spec.nr, "k": spec.kr}
        self.how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
        self.lanes = self.how.columns(self.isa)
        self.packed, self.collects = placement.packed(spec), placement.collects(spec)
        self._lines: list[tuple[str, str]] = []
        self._buffers: list[tuple[str, str, str]] = []
        self._indent = 0

    def text(self) -> str:
        """The whole figure: a title, the lines, the buffers, the registers."""
        spec = self.spec
        product = "C = A.B" if spec.op == "matmul" else "C = alpha.A.B + beta.C"
        title = f"{spec.variant} {spec.tile}: {product} in {spec.dtype}, A m x k, B k x n, C m x n, on {spec.isa}"
        notes = [f"step {spec.step}"] if spec.step != STEPS[-1] else []
        notes += [] if spec.blocked else ["no loops over cache blocks"]
        notes += [f"without {', '.join(spec.without)}"] if spec.without else []
        head = [title + "".join(f"; {note}" for note in notes), ""]
        width = max(len(code) for code, comment in self._lines if comment)
        body = [f"{code:<{width}}  # {comment}" if comment else code for code, comment in self._lines]
        return "\n".join([*head, *body, *self._buffer_table(), *self._registers(), ""])

    def _buffer_table(self) -> list[str]:
        if not self._buffers:
            return []
        width = max(len(size) for _, size, _ in self._buffers)
        rows = [f"  {name:<3} {size:<{width}}  {owner}".rstrip() for name, size, owner in self._buffers]
        return ["", "buffers, in elements, before they are rounded up to whole vectors and cache lines", *rows]

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

    # ---- lines, loops, buffers -------------------------------------------------------------------------------------

    def line(self, code: str, comment: str = "") -> None:
        """A line of code in the loops that are open."""
        self._lines.append((" " * (2 * self._indent) + code, comment))

    @contextmanager
    def loop(self, name: str, limit: str, step: object = 1, comment: str = "", start: str = "0") -> Iterator[None]:
        """A loop from ``start`` to ``limit`` by ``step``; what is written under it is its body."""
        bounds = limit if step == 1 else f"{start}, {limit}, {step}"
        with self.under(f"for {name} in range({bounds}):", comment):
            yield

    @contextmanager
    def under(self, code: str, comment: str = "") -> Iterator[None]:
        """A line, and under it what is written meanwhile."""
        self.line(code, comment)
        self._indent += 1
        yield
        self._indent -= 1

    @contextmanager
    def nest(self, *loops: tuple[str, tuple[str, str]]) -> Iterator[None]:
        """Loops over single elements, each (index, (start, size)), outermost first."""
        with ExitStack() as open_loops:
            for name, (start, size) in loops:
                over = f"range({size})" if start == "0" else f"{start}:+{size}"
                open_loops.enter_context(self.under(f"for {name} in {over}:"))
            yield

    @contextmanager
    def tiles(self) -> Iterator[None]:
        """The two loops over micro-tiles."""
        (first, d1), (second, d2) = ((name, LOOP_DIMENSION[name]) for name in self.variant.inner)
        with self.loop(first, d1 + "c", self.tile[d1]), self.loop(second, d2 + "c", self.tile[d2]):
            yield

    def buffer(self, name: str, size: str, private: bool, owner: str = "") -> None:
        """A row of the table of buffers, once."""
        if self.spec.parallel and not owner:
            owner = "one per task" if private else "shared"
        if (row := (name, size, owner)) not in self._buffers:
            self._buffers.append(row)

    # ---- what the lines say ----------------------------------------------------------------------------------------

    def block(self, operand: str) -> str:
        """The current block of an operand: ``A[ic:+mc, pc:+kc]``."""
        return f"{operand}[{', '.join(f'{INDEX[d]}c:+{d}c' for d in OPERAND_DIMENSIONS[operand])}]"

    def panels(self, operand: str) -> str:
        """The packed block of an operand: ``ceil(mc/8) panels of kc x 8``."""
        across, along = PANELS[self.variant.resident][operand]
        planes = f" in {self.how.planes} planes" if self.how.planes > 1 else ""
        return f"ceil({across}c/{self.tile[across]}) panels of {along}c x {self.tile[across]}{planes}"

    @property
    def alpha(self) -> str:
        """The factor of a product that goes to C directly."""
        return "" if self.spec.op == "matmul" else "alpha*"

    def begin(self, place: str, in_block: bool) -> None:
        """C before anything is added to it; ``in_block``: within the loop over blocks of k."""
        value = "0" if self.spec.op == "matmul" else f"beta*{place}"
        self.line(f"{'if pc == 0: ' if in_block else ''}{place} = {value}")

    def bring(self, place: str, sums: str, every: bool = False, slot: bool = True) -> None:
        """C from finished sums of one block of k; ``every``: of all blocks of k. ``slot``: they wait for other blocks
        if tasks share those out."""
        if slot and not every and self.spec.parallel == "pc":
            self.line(f"Sc[pc]{place[1:]} = {sums}")
            return
        matmul = self.spec.op == "matmul"
        scaled = sums if matmul else f"alpha*{sums}"
        start = f"{place} = {scaled}" + ("" if matmul else f" + beta*{place}")
        if every:
            self.line(start, "" if matmul else "beta = 0: C is not read")
        else:
            self.line(start, f"in the first block of k; in later ones += {scaled}")

    def work(self, loads: int, broadcasts: int, fmas: int, stores: int = 0) -> str:
        """What one step of the micro-kernel does."""
        products = "FMAs" if self.how.is_fused(self.isa) else "multiplies and adds"
        what = f"{loads} loads, {broadcasts} broadcasts, {fmas} {products}"
        return what + (f", {stores} stores" if stores else "")
