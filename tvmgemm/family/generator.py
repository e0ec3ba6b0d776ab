"""The generator: one row of ``variants.VARIANTS`` and a KernelSpec in, the loops of a kernel out.

A kernel is a plain C function ``int32 f(A, B, C, work, scale, args)`` (see ``ARGUMENTS``), a second one says how many
bytes of ``work`` the same arguments need. Nothing about sizes is compiled in: m, n, k, strides and block sizes are
arguments, edges are masked, 64-bit throughout.

The parts of the paper's generator are: the spec (P0), ``_view_operands`` (P1), the packing layouts of
``variants.PANELS`` (P2), ``_read_arguments`` and ``workspace`` (P3, blocking), ``_outer_loops`` (P4, loop order; P5,
placement of the packings; P7, the parallel loop), ``macrokernel`` and ``packing`` (P6, fine grain), ``codegen`` (P8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx

from ..spec import STEPS, KernelSpec
from . import ahead, emit, macrokernel, matrix_unit, partition, plain, specialised, split_k, triangle, unblocked
from .arithmetic import MATRIX_ROWS
from .elements import Elements
from .emit import const, let, loop
from .isa import isa_of
from .packing import Operand, append_shift, pack_panels
from .validity import check
from .variants import LOOP_DIMENSION, OPERAND_DIMENSIONS, PANELS, VARIANTS
from .workspace import SUMS_LIMIT, Workspace

#: The int64 arguments of a kernel, in order; strides in elements. The same list stands in native/tvmgemm.h.
ARGUMENTS = (
    "m", "n", "k", "rsa", "csa", "rsb", "csb", "rsc", "csc", "mc", "nc", "kc", "tasks", "batch", "sa", "sb", "sc",
)  # fmt: skip

#: Strides of an operand's rows and columns among the arguments, and its step to the next product of a stack.
_STRIDES = {"A": ("rsa", "csa"), "B": ("rsb", "csb"), "C": ("rsc", "csc")}
_STEPS = {"A": "sa", "B": "sb", "C": "sc"}


def generate(spec: KernelSpec) -> tvm.IRModule:
    """The kernel of ``spec`` and its workspace function, as an IRModule. ValueError for a spec that cannot be built."""
    check(spec)
    generator = Generator(spec)
    functions = {spec.symbol: generator.kernel()}
    if spec.blocked or spec.packing != "none":
        functions[spec.symbol + "_workspace"] = generator.workspace()
    return tvm.IRModule(functions)


@dataclass
class Block:
    """The part of one dimension that the current iterations of the outer loops cover: start and size."""

    start: Any
    size: Any


@dataclass
class Generator:
    """The state of one generation: the spec, what it looks up to, and the values that the code has computed so far."""

    spec: KernelSpec
    values: dict[str, Any] = field(init=False, default_factory=dict)
    panels: dict[str, emit.View] = field(init=False, default_factory=dict)
    slot: Any = field(init=False, default=None)
    panels_here: tuple | None = field(init=False, default=None)
    rows_of_b: emit.View | None = field(init=False, default=None)
    following: unblocked.Following | None = field(init=False, default=None)
    packed_next: ahead.Lines | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        spec = self.spec
        self.isa = isa_of(spec.isa)
        self.variant = VARIANTS[spec.variant]
        self.elements = Elements(spec)
        self.vectors = self.elements.sums
        parts = self.elements.parts
        self.tile = {"m": (spec.mr or 1) * parts, "n": (spec.nr or 1) * parts, "k": spec.kr or 1}
        packing = "" if spec.packing == "none" or spec.step in ("basic", "blocked") else spec.packing
        self.packed = {operand: at for operand, at in self.variant.packed if operand.lower() in packing}

    # ---- P3: arguments, block sizes, workspace --------------------------------------------------------------------

    def _read_arguments(self, args) -> None:
        buffer = emit.View("args", args, emit.INDEX, (1,))
        v = self.values = {name: let(name, buffer.get(const(i))) for i, name in enumerate(ARGUMENTS)}
        if self.elements.parts > 1:  # from here on rows and columns are those of parts
            v |= {name: let(f"{name}_parts", v[name] * const(self.elements.parts)) for name in ("m", "n", "mc", "nc")}
        if not self.spec.blocked:  # no blocks but those of k, and no work space but for B
            return
        # The dimension whose loop is shared out last: how it is cut depends on the other.
        for loop_name, dimension in sorted((("ic", "m"), ("jc", "n")), key=lambda row: row[0] == self.spec.parallel):
            v[dimension + "c"] = emit.settled(f"{dimension}c_even", self._even_block(loop_name, dimension))
        # Never evened out: the order of summation must not depend on the shape.
        longest = matrix_unit.longest_block(self.elements)
        limit = v["k"] if longest is None else emit.minimum(v["k"], const(longest))
        v["kc"] = let("kc_used", emit.maximum(emit.minimum(v["kc"], limit), const(1)))
        if self.elements.rounds_once:
            v["piece"] = let("piece", self._piece())
        self.memory = Workspace(self)

    def steps(self, kb):
        """Steps of the micro-kernel over ``kb`` of k: elements of a panel; on a matrix unit whole chunks of them."""
        if self.elements.group == 1:
            return kb
        steps = emit.ceil_div(kb, const(self.elements.group))
        return let("steps", emit.round_up(steps, const(MATRIX_ROWS)) if self.elements.arithmetic.matrix else steps)

    @property
    def piece_dimension(self) -> str:
        """The dimension of C that is looped over inside the loop over k."""
        outer = self.variant.outer
        return LOOP_DIMENSION[outer[outer.index("pc") + 1]]

    def _piece(self):
        """How much of that dimension goes through all blocks of k before the rest begins, so that the sums that wait
        stay within ``SUMS_LIMIT``: whole blocks, one for each task; all of it if there is one block of k."""
        v, inside = self.values, self.piece_dimension
        other = v["nc" if inside == "m" else "mc"]
        share = v[inside + "c"] * (v["tasks"] if LOOP_DIMENSION.get(self.spec.parallel) == inside else const(1))
        fitting = tirx.truncdiv(const(SUMS_LIMIT // self.elements.sums.itemsize), other * share)
        limited = share * emit.maximum(fitting, const(1))
        return emit.T.if_then_else(v["k"] <= v["kc"], emit.maximum(v[inside], const(1)), limited)

    def _even_block(self, loop_name: str, dimension: str):
        """Blocks of equal size instead of full ones and a rest; as many as the tasks can share out evenly."""
        extent, tile, block = self.values[dimension], const(self.tile[dimension]), self.values[dimension + "c"]
        if self.spec.parallel == loop_name:
            multiple = partition.blocks_to_share(self, extent, tile) if partition.applies(self) else self.values["tasks"]
            blocks = emit.round_up(emit.maximum(emit.ceil_div(extent, block), const(1)), multiple)
            even = emit.ceil_div(extent, blocks)
        else:
            even = emit.T.if_then_else(extent <= block, extent, emit.ceil_div(extent, emit.ceil_div(extent, block)))
        return emit.maximum(emit.round_up(even, tile), tile)

    def private(self, at: str) -> bool:
        """A buffer that is packed inside the parallel loop belongs to one task; one packed outside is shared."""
        outer = self.variant.outer
        return bool(self.spec.parallel) and outer.index(at) >= outer.index(self.spec.parallel)

    def workspace(self) -> tvm.tirx.PrimFunc:
        """``int32 f(args, bytes)``: bytes[0] becomes the size of ``work`` that the kernel needs for ``args``.

        (A function that TVM compiles can return nothing but a status.)
        """
        with emit.function(self.spec.symbol + "_workspace") as builder:
            args, out = emit.argument("args", emit.INDEX), emit.argument("bytes", emit.INDEX)
            self._read_arguments(args)
            needed = emit.View("needed", out, emit.INDEX, (1,))
            size = self.memory.size if self.spec.blocked else unblocked.scratch(self)
            needed.set(size * const(self.elements.panels.itemsize), const(0))
        return builder.get()

    # ---- P1: operands ---------------------------------------------------------------------------------------------

    def kernel(self) -> tvm.tirx.PrimFunc:
        """``int32 f(A, B, C, work, scale, args)``; returns 0."""
        with emit.function(self.spec.symbol) as builder:
            elements = self.elements
            types = elements.stored | {"work": elements.panels.dtype, "scale": elements.scale}
            given = {name: emit.argument(name, dtype) for name, dtype in types.items()}
            args = emit.argument("args", emit.INDEX)
            with emit.body(elements.definitions):
                self._read_arguments(args)
                if self.spec.shape is not None:
                    specialised.products(self, given)
                else:
                    self.following = unblocked.following(self, given)
                    with loop("q", self.values["batch"]) as q:
                        self._product(given, emit.opaque("product", q))
        return builder.get()

    def _product(self, given: dict[str, Any], q) -> None:
        """Product q of the stack. What depends on sizes and strides only, LLVM computes once for all of them."""
        moved = {
            operand: emit.pointer(f"{operand}_q", given[operand], self.elements.stored[operand], q * self.values[step] * self._parts)
            for operand, step in _STEPS.items()
        }
        self.pointers = given | moved
        self._view_operands()
        if self.spec.blocked:
            emit.branch(self.values["k"] == const(0), lambda: plain.empty(self), self._multiply)
        else:
            unblocked.product(self, q)

    @property
    def _parts(self):
        return const(self.elements.parts)

    def _view_operands(self) -> None:
        dtype = self.elements.stored["C"]
        rows, columns = (self.values[s] * self._parts for s in _STRIDES["C"])
        #: Indices of C are (row, column), of complex numbers (row, column, part); with unit stride (row, column of parts).
        self.c_any = emit.View("C", self.pointers["C"], dtype, (rows, columns, *self._part_stride))
        self.c_rows = emit.View("C_rows", self.pointers["C"], dtype, (rows, 1))
        self.unit_columns = self.values["csc"] == const(1)
        self.scale = emit.View("scale", self.pointers["scale"], self.elements.scale, (1,))
        self.sources = {
            operand: self._source(operand, *PANELS[self.variant.resident][operand])
            for operand in PANELS[self.variant.resident]
            if operand != "C"
        }

    @property
    def _part_stride(self) -> tuple[int, ...]:
        return () if self.elements.parts == 1 else (1,)

    def _source(self, operand: str, across: str, along: str) -> Operand:
        """An operand as its micro-panels see it: ``across`` the panels, ``along`` each of them."""
        stride = {d: self.values[s] for d, s in zip(OPERAND_DIMENSIONS[operand], _STRIDES[operand])}
        e, k, pointer, dtype = stride[across], stride[along], self.pointers[operand], self.elements.stored[operand]
        parts, part = self._parts, self._part_stride
        unit = (1,) if not part else (self.elements.parts, *part)
        return Operand(
            name=operand,
            any=emit.View(operand, pointer, dtype, (e * parts, k * parts, *part)),
            unit_e=emit.View(operand + "_unit_e", pointer, dtype, (k * parts, 1)),
            unit_k=emit.View(operand + "_unit_k", pointer, dtype, (e * parts, *unit)),
            stride_e=e,
            stride_k=k,
        )

    # ---- P4, P5, P7: the loops over cache blocks --------------------------------------------------------------------

    def _multiply(self) -> None:
        if self.spec.step == "basic":
            plain.triple_loop(self, {d: Block(const(0), self.values[d]) for d in "mnk"})
        else:
            self._outer_loops(list(self.variant.outer), {}, None)

    def _outer_loops(self, loops: list[str], blocks: dict[str, Block], task) -> None:
        """The cache-block loops, outermost first; packings where the variant places them."""
        if not loops:
            self._block_product(blocks, task)
            return
        name, rest = loops[0], loops[1:]
        if name == "pc" and self.elements.rounds_once and self.piece_dimension not in blocks:
            self._pieces(loops, blocks, task)
            return
        dimension = LOOP_DIMENSION[name]
        whole = blocks.get(dimension)  # a piece of it, or all

        def body(index, task) -> None:
            step = self.values[dimension + "c"]
            passed = let(dimension + ("_passed" if whole else "0"), index * step)
            extent = whole.size if whole else self.values[dimension]
            start = let(dimension + "0", whole.start + passed) if whole else passed
            enter(start, let(dimension + "b", emit.minimum(step, extent - passed)), task)

        def enter(start, size, task) -> None:
            inner = blocks | {dimension: Block(start, size)}
            here = [operand for operand, at in self.packed.items() if at == name]
            for operand in here:
                self._pack(operand, name, inner, task)
                if not rest and self._asks_for_next:
                    end = whole.start + whole.size if whole else self.values[dimension]
                    self.packed_next = ahead.lines_behind(self, operand, inner[dimension], end, inner["k"])
            with macrokernel.partial_sums(self, name, inner, task):
                self._outer_loops(rest, inner, task)

        if self.spec.symmetric and name == "ic":
            triangle.row_blocks(self, blocks["n"], enter)
            return
        count = let(f"{name}_blocks", emit.blocks_in(whole.size if whole else self.values[dimension], self._step(name)))
        if self.spec.parallel != name:
            with loop(name, count) as index:
                body(index, task)
        elif name == "pc":
            split_k.share_out(self, count, blocks, body)
        elif partition.applies(self):
            partition.share_out(self, name, count, blocks, body)
        else:
            with emit.parallel("task", self.values["tasks"]) as task:
                first, share = self.share(count, task)
                with loop(name, share, first) as index:
                    body(index, task)

    @property
    def _asks_for_next(self) -> bool:
        """Whether tiles ask for what is packed after their block. Tiles of half a matrix are not counted; those of a matrix unit
        have no loop to do so in."""
        spec = self.spec
        resident_c = self.variant.resident == "C" and spec.step == STEPS[-1] and not spec.symmetric
        return resident_c and ahead.prefetches(self) and not self.elements.arithmetic.matrix

    def _pieces(self, loops: list[str], blocks: dict[str, Block], task) -> None:
        """All blocks of k for one piece of C after the other: see ``_piece``."""
        dimension, step = self.piece_dimension, self.values["piece"]
        extent = self.values[dimension]
        with loop("piece_index", emit.blocks_in(extent, step)) as index:
            start = let("piece0", index * step)
            piece = Block(start, let("piece_size", emit.minimum(step, extent - start)))
            inner = blocks | {dimension: piece}
            self.sums_origin = tuple(inner[d].start for d in "mn")
            self._outer_loops(loops, inner, task)

    def _step(self, name: str):
        return self.values[LOOP_DIMENSION[name] + "c"]

    def share(self, count, task):
        """(first, number) of the iterations of ``count`` that fall to ``task``: contiguous and as even as can be."""
        tasks = self.values["tasks"]
        first = let("first", tirx.truncdiv(count * task, tasks))
        return first, let("share", tirx.truncdiv(count * (task + const(1)), tasks) - first)

    def _block_product(self, blocks: dict[str, Block], task) -> None:
        step = self.spec.step
        if step == "blocked":
            plain.triple_loop(self, blocks)
        elif step == "packed":
            plain.packed_loops(self, blocks, task, in_tile=False)
        elif step == "microkernel":
            plain.packed_loops(self, blocks, task, in_tile=True)
        elif self.variant.resident == "C":
            macrokernel.resident_c(self, blocks, task)
        else:
            macrokernel.resident_operand(self, blocks, task)

    # ---- P5, P6: packing ------------------------------------------------------------------------------------------

    def _pack(self, operand: str, at: str, blocks: dict[str, Block], task) -> None:
        """Pack the current block of A or B; of C, only find the place (``partial_sums`` fills it)."""
        panels = self.panels[operand] = self.memory.panels(operand, task)
        if operand == "C":
            return
        if self.elements.arithmetic.matrix:
            with loop("plane", const(self.elements.arithmetic.planes)) as plane:
                self._pack_panels(operand, at, blocks, panels.sliced(1, plane), self.elements.plane(plane))
        else:
            self._pack_panels(operand, at, blocks, panels, self.elements)

    def _pack_panels(self, operand: str, at: str, blocks: dict[str, Block], panels: emit.View, elements: Elements) -> None:
        across, along = PANELS[self.variant.resident][operand]
        width, e, p = self.tile[across], blocks[across], blocks[along]
        count = let("panels", emit.ceil_div(e.size, const(width)))

        matrix = elements.arithmetic.matrix

        def pack(first, number) -> None:
            if operand == "A" and matrix:
                matrix_unit.pack_rows(
                    elements, panels, self.sources[operand], width=width, first=first, e0=e.start, extent=e.size,
                    count=number, p0=p.start, kb=p.size, vectorised=self.vectorised_packing,
                )  # fmt: skip
                return
            pack_panels(
                elements, self.isa, panels, self.sources[operand],
                width=width, first=first, e0=e.start, extent=e.size, count=number, p0=p.start, kb=p.size,
                zero_padded=across == "k", vectorised=self.vectorised_packing,
            )  # fmt: skip
            if operand == "B" and elements.shifted:
                append_shift(elements, panels, width, first, number, self.steps(p.size))
            if matrix:
                packed = emit.ceil_div(p.size, const(elements.group))
                matrix_unit.fill_chunks(elements, panels, width, first, number, packed, self.steps(p.size))

        if self.spec.parallel and not self.private(at):
            with emit.parallel("packer", self.values["tasks"]) as packer:
                pack(*self.share(count, packer))
        else:
            pack(const(0), count)

    @property
    def vectorised_packing(self) -> bool:
        """Whether packings use vectors; before the last step of the paper nothing does."""
        return self.spec.step == STEPS[-1] and "vector-packing" not in self.spec.without

    # ---- what C becomes -------------------------------------------------------------------------------------------

    def update(self, first, write) -> None:
        """Emit ``write(update)`` for each way of bringing a finished sum of one block of k to C.

        ``update(sum, load, splat)`` is C's new value; it calls ``load()`` only where it needs the old one. C = sum in the
        first block of k, C += sum in later ones; with alpha and beta for gemm. A slot of ``split_k`` takes the sum as it is.
        """
        if self.slot is not None:
            write(lambda x, c, s: x)
            return
        elements = self.elements
        if self.spec.op == "matmul":
            emit.branch(
                first,
                lambda: write(lambda x, c, s: elements.result(x, emit.lanes_of(x))),
                lambda: write(lambda x, c, s: elements.joined(c(), x, emit.lanes_of(x))),
            )
            return
        if elements.parts > 1:
            self._update_complex(first, write)
            return
        alpha, beta = let("alpha", self.scale.get(const(0))), let("beta", self.scale.get(const(1)))

        def scaled(kept):
            """alpha.x, and what ``kept(load, splat, lanes)`` makes of the old C."""
            return lambda: write(
                lambda x, c, s: elements.scaled(s(alpha), x, kept and kept(c, s, emit.lanes_of(x)), emit.lanes_of(x))
            )

        times_beta = scaled(lambda c, s, lanes: s(beta) * elements.wide(c(), lanes))
        # beta == 0: C is not read, so a NaN in it vanishes, as in BLAS.
        no_beta = beta == emit.tirx.const(0, elements.scale)
        emit.branch(
            first,
            lambda: emit.branch(no_beta, scaled(None), times_beta),
            scaled(lambda c, s, lanes: elements.wide(c(), lanes)),
        )

    def _update_complex(self, first, write) -> None:
        """``update`` for gemm of complex numbers: vectors of pairs, alpha and beta pairs."""
        elements = self.elements
        alpha, beta = ([let(f"{name}{q}", self.scale.get(const(at + q))) for q in (0, 1)] for name, at in (("alpha", 0), ("beta", 2)))

        def times(pair, x, s):
            return elements.complex_product(tuple(map(s, pair)), x)

        def scaled(kept):
            return lambda: write(lambda x, c, s: times(alpha, x, s) if kept is None else times(alpha, x, s) + kept(c, s))

        zero = emit.tirx.const(0, elements.scale)
        no_beta = emit.both(beta[0] == zero, beta[1] == zero)
        times_beta = scaled(lambda c, s: times(beta, c(), s))
        emit.branch(first, lambda: emit.branch(no_beta, scaled(None), times_beta), scaled(lambda c, s: c()))
