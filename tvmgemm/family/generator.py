"""The generator: one row of ``variants.VARIANTS`` and a KernelSpec in, the loops of a kernel out.

A kernel is a plain C function ``int32 f(A, B, C, work, scale, args)`` (see ``ARGUMENTS``), a second one says how many
bytes of ``work`` the same arguments need. Nothing about sizes is compiled in: m, n, k, strides and block sizes are
arguments, edges are masked, 64-bit throughout.

The parts of the paper's generator are: the spec (P0), ``_view_operands`` (P1), the packing layouts of
``variants.PANELS`` (P2), ``block_sizes`` and ``workspace`` (P3, blocking), ``outer_loops`` (P4, loop order; P5,
placement of the packings; P7, the parallel loop), ``macrokernel``, ``resident_operand`` and ``packing`` (P6, fine
grain), ``codegen`` (P8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx

from ..spec import STEPS, KernelSpec
from . import ahead, along_k, block_sizes, emit, outer_loops, plain, specialised, unblocked
from .arithmetic import MATRIX_ROWS
from .elements import Elements
from .emit import const, let, loop
from .isa import isa_of
from .packing import Operand
from .placement import packed
from .validity import check
from .variants import LOOP_DIMENSION, OPERAND_DIMENSIONS, PANELS, VARIANTS
from .views import View, pointer
from .workspace import Workspace

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
class Generator:
    """The state of one generation.

    ``values``: variables of the code by name, such as the arguments and block sizes. ``panels``: the packed blocks that
    are current. ``slot``: the slot that sums go to (``split_k``). ``panels_here``: (first, number) of the panels that a
    task has of the current block (``partition``). ``following``: the next product of a stack (``unblocked``).
    ``packed_next``: what tiles prefetch for the next packing (``ahead``). All None where they do not apply.
    ``rows_of_b``: B with contiguous rows (``unblocked``). ``sums_origin``: row and column of C of the first sum that
    waits for the next block of k. Both are set where there are such.
    """

    spec: KernelSpec
    values: dict[str, Any] = field(init=False, default_factory=dict)
    panels: dict[str, View] = field(init=False, default_factory=dict)
    slot: Any = field(init=False, default=None)
    panels_here: tuple | None = field(init=False, default=None)
    following: unblocked.Following | None = field(init=False, default=None)
    packed_next: ahead.Lines | None = field(init=False, default=None)
    rows_of_b: View = field(init=False, repr=False)
    sums_origin: tuple[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.isa = isa_of(spec.isa)
        self.variant = VARIANTS[spec.variant]
        self.elements = Elements(spec)
        self.vectors = self.elements.sums
        parts = self.elements.parts
        self.tile = {"m": (spec.mr or 1) * parts, "n": (spec.nr or 1) * parts, "k": spec.kr or 1}
        self.packed = packed(spec)

    # ---- P3: arguments, workspace ----------------------------------------------------------------------------------

    def _read_arguments(self, args) -> None:
        buffer = View("args", args, emit.INDEX, (1,))
        v = self.values = {name: let(name, buffer.get(const(i))) for i, name in enumerate(ARGUMENTS)}
        if self.elements.parts > 1:  # from here on rows and columns are those of parts
            v |= {name: let(f"{name}_parts", v[name] * const(self.elements.parts)) for name in ("m", "n", "mc", "nc")}
        if not self.spec.blocked:  # no blocks but those of k, and no work space but for B
            return
        block_sizes.settle(self)
        self.memory = Workspace(self)

    def workspace(self) -> tvm.tirx.PrimFunc:
        """``int32 f(args, bytes)``: bytes[0] becomes the size of ``work`` that the kernel needs for ``args``.

        (A function that TVM compiles can return nothing but a status.)
        """
        with emit.function(self.spec.symbol + "_workspace") as builder:
            args, out = emit.argument("args", emit.INDEX), emit.argument("bytes", emit.INDEX)
            self._read_arguments(args)
            needed = View("needed", out, emit.INDEX, (1,))
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
            operand: pointer(f"{operand}_q", given[operand], self.elements.stored[operand], q * self.values[step] * self._parts)
            for operand, step in _STEPS.items()
        }
        self.pointers = given | moved
        self._view_operands()
        if self.spec.blocked:
            emit.branch(self.values["k"] == const(0), lambda: plain.empty(self), self._terms)
        else:
            unblocked.product(self, q)

    def _terms(self) -> None:
        """One product with k > 0 of a kernel with cache blocks."""
        along_k.product(self, lambda: outer_loops.multiply(self))

    @property
    def _parts(self):
        return const(self.elements.parts)

    def _view_operands(self) -> None:
        dtype = self.elements.stored["C"]
        rows, columns = (self.values[s] * self._parts for s in _STRIDES["C"])
        #: Indices of C are (row, column), of complex numbers (row, column, part); with unit stride (row, column of
        #: parts).
        self.c_any = View("C", self.pointers["C"], dtype, (rows, columns, *self._part_stride))
        self.c_rows = View("C_rows", self.pointers["C"], dtype, (rows, 1))
        self.unit_columns = self.values["csc"] == const(1)
        self.scale = View("scale", self.pointers["scale"], self.elements.scale, (1,))
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
        e, k, base, dtype = stride[across], stride[along], self.pointers[operand], self.elements.stored[operand]
        parts, part = self._parts, self._part_stride
        unit = (1,) if not part else (self.elements.parts, *part)
        return Operand(
            name=operand,
            any=View(operand, base, dtype, (e * parts, k * parts, *part)),
            unit_e=View(operand + "_unit_e", base, dtype, (k * parts, 1)),
            unit_k=View(operand + "_unit_k", base, dtype, (e * parts, *unit)),
            stride_e=e,
            stride_k=k,
        )

    # ---- what the loops ask ----------------------------------------------------------------------------------------

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

    def share(self, count, task):
        """(first, number) of the iterations of ``count`` that fall to ``task``: contiguous and as even as can be."""
        tasks = self.values["tasks"]
        first = let("first", tirx.truncdiv(count * task, tasks))
        return first, let("share", tirx.truncdiv(count * (task + const(1)), tasks) - first)

    def count_tiles(self, name: str, blocks: dict[str, outer_loops.Block]):
        """The number of micro-tiles of the current blocks that the loop ``name`` over tiles goes through."""
        dimension = LOOP_DIMENSION[name]
        return let(f"{name}_tiles", emit.ceil_div(blocks[dimension].size, const(self.tile[dimension])))

    @property
    def vectorised_packing(self) -> bool:
        """Whether packings use vectors; before the last step of the paper nothing does."""
        return self.spec.step == STEPS[-1] and "vector-packing" not in self.spec.without
