"""The generator: one row of ``variants.VARIANTS`` and a KernelSpec in, the loops of a kernel out.

A kernel is a plain C function ``int32 f(A, B, C, work, scale, args)`` (see ``ARGUMENTS``), a second one says how many
bytes of ``work`` the same arguments need. Nothing about sizes is compiled in: m, n, k, strides and block sizes are
arguments, edges are masked, 64-bit throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx

from ..problem import DTYPES
from ..spec import KernelSpec
from . import emit, microkernel
from .emit import const, let, loop
from .isa import ISAS
from .packing import Operand, pack_panels, slack
from .tiles import check_tile
from .variants import LOOP_DIMENSION, VARIANTS, Variant

#: The int64 arguments of a kernel, in order; strides in elements. The same list stands in native/tvmgemm.h.
ARGUMENTS = ("m", "n", "k", "rsa", "csa", "rsb", "csb", "rsc", "csc", "mc", "nc", "kc", "tasks")

#: Buffers of ``work`` start on cache-line boundaries.
CACHE_LINE = 64

#: Element dimension of an operand that is packed: its own, not k.
OWN_DIMENSION = {"A": "m", "B": "n"}


def generate(spec: KernelSpec) -> tvm.IRModule:
    """The kernel of ``spec`` and its workspace function, as an IRModule. ValueError for a spec that cannot be built."""
    generator = _Generator(spec)
    return tvm.IRModule({spec.symbol: generator.kernel(), spec.symbol + "_workspace": generator.workspace()})


@dataclass
class _Block:
    """The part of one dimension that the current iterations of the outer loops cover: start and size."""

    start: Any
    size: Any


@dataclass
class _Generator:
    spec: KernelSpec
    variant: Variant = field(init=False)
    values: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        dtype = DTYPES[spec.dtype]
        self.isa = ISAS[spec.isa]
        self.variant = VARIANTS[spec.variant]
        self.vectors = emit.Vectors(spec.dtype, dtype.itemsize, self.isa.lanes(dtype.itemsize))
        self.itemsize = dtype.itemsize
        self.width = {"A": spec.mr, "B": spec.nr}
        self.packed = [(x, at) for x, at in self.variant.packed if x.lower() in spec.packing.replace("none", "")]
        check_tile(spec.mr, spec.nr, spec.isa, dtype.itemsize)
        if spec.parallel and spec.parallel not in self.variant.parallel_loops:
            raise ValueError(
                f"parallel loop {spec.parallel!r}: {spec.variant} can share out {', '.join(self.variant.parallel_loops)}"
            )

    # ---- arguments, block sizes, workspace ------------------------------------------------------------------------

    def _read_arguments(self, args) -> None:
        buffer = emit.View("args", args, emit.INDEX, (1,))
        self.values = {name: let(name, buffer.get(const(i))) for i, name in enumerate(ARGUMENTS)}
        for block, loop_name, tile in (("mc", "ic", self.spec.mr), ("nc", "jc", self.spec.nr)):
            self.values[block] = let(f"{block}_even", self._even_block(block, loop_name, tile))
        kc = emit.minimum(self.values["kc"], self.values["k"])
        self.values["kc_used"] = let("kc_used", emit.maximum(kc, const(1)))
        self._lay_out_workspace()

    def _even_block(self, block: str, loop_name: str, tile: int):
        """Blocks of equal size instead of full ones and a rest; as many as the tasks can share out evenly."""
        extent = self.values[LOOP_DIMENSION[loop_name]]
        blocks = emit.maximum(emit.ceil_div(extent, self.values[block]), const(1))
        if self.spec.parallel == loop_name:
            blocks = emit.round_up(blocks, self.values["tasks"])
        return emit.maximum(emit.round_up(emit.ceil_div(extent, blocks), const(tile)), const(tile))

    def _private(self, at: str) -> bool:
        """A buffer that is packed inside the parallel loop belongs to one task; one packed outside is shared."""
        outer = self.variant.outer
        return bool(self.spec.parallel) and outer.index(at) >= outer.index(self.spec.parallel)

    def _lay_out_workspace(self) -> None:
        """Offsets, panel strides and sizes, in elements, of what lies in ``work``: tiles of C on their way to a C with
        gaps (one per task), then the packed blocks."""
        line = const(CACHE_LINE // self.itemsize)
        tiles = const(self.spec.mr * self.spec.nr) * self.values["tasks"]
        offset = tirx.Select(self.values["csc"] == const(1), const(0), emit.round_up(tiles, line))
        for operand, at in self.packed:
            width = self.width[operand]
            panels = tirx.truncdiv(self.values["mc" if operand == "A" else "nc"], const(width))
            stride = self.values["kc_used"] * const(width) + const(slack(width, self.vectors.lanes))
            size = emit.round_up(panels * stride, line)
            self.values[operand + "_stride"] = let(f"{operand}c_panel", stride)
            self.values[operand + "_size"] = let(f"{operand}c_size", size)
            self.values[operand + "_offset"] = let(f"{operand}c_offset", offset)
            copies = self.values["tasks"] if self._private(at) else const(1)
            offset = self.values[operand + "_offset"] + self.values[operand + "_size"] * copies
        self.values["work_size"] = let("work_size", offset)

    def workspace(self) -> tvm.tirx.PrimFunc:
        """``int32 f(args, bytes)``: bytes[0] becomes the size of ``work`` that the kernel needs for ``args``.

        (A function that TVM compiles can return nothing but a status.)
        """
        with emit.function(self.spec.symbol + "_workspace") as builder:
            args, out = emit.argument("args", emit.INDEX), emit.argument("bytes", emit.INDEX)
            self._read_arguments(args)
            needed = emit.View("needed", out, emit.INDEX, (1,))
            needed.set(self.values["work_size"] * const(self.itemsize), const(0))
        return builder.get()

    # ---- the kernel -----------------------------------------------------------------------------------------------

    def kernel(self) -> tvm.tirx.PrimFunc:
        """``int32 f(A, B, C, work, scale, args)``; returns 0."""
        with emit.function(self.spec.symbol) as builder:
            dtype = self.spec.dtype
            pointers = {name: emit.argument(name, dtype) for name in ("A", "B", "C", "work", "scale")}
            self._read_arguments(emit.argument("args", emit.INDEX))
            self._view_operands(pointers)
            self._outer_loops(list(self.variant.outer), {})
        return builder.get()

    def _view_operands(self, pointers) -> None:
        v = self.values
        self.work = pointers["work"]

        def source(name: str, stride_e: str, stride_k: str) -> Operand:
            e, k, pointer, dtype = v[stride_e], v[stride_k], pointers[name], self.spec.dtype
            return Operand(
                any=emit.View(name, pointer, dtype, (e, k)),
                unit_e=emit.View(name + "_unit_e", pointer, dtype, (k, 1)),
                unit_k=emit.View(name + "_unit_k", pointer, dtype, (e, 1)),
                stride_e=e,
                stride_k=k,
            )

        self.operands = {"A": source("A", "rsa", "csa"), "B": source("B", "csb", "rsb")}
        self.c_any = emit.View("C", pointers["C"], self.spec.dtype, (v["rsc"], v["csc"]))
        self.c_rows = emit.View("C_rows", pointers["C"], self.spec.dtype, (v["rsc"], 1))
        self.scale = emit.View("scale", pointers["scale"], self.spec.dtype, (1,))

    def _outer_loops(self, loops: list[str], blocks: dict[str, _Block], task=None) -> None:
        """The cache-block loops, outermost first; packings where the variant places them."""
        if not loops:
            self._inner_loops(blocks, task)
            return
        name, rest = loops[0], loops[1:]

        def body(index, task) -> None:
            dimension = LOOP_DIMENSION[name]
            step = self.values[{"m": "mc", "n": "nc", "k": "kc_used"}[dimension]]
            start = let(dimension + "0", index * step)
            size = let(dimension + "b", emit.minimum(step, self.values[dimension] - start))
            inner = blocks | {dimension: _Block(start, size)}
            for operand, at in self.packed:
                if at == name:
                    self._pack(operand, at, inner, task)
            self._outer_loops(rest, inner, task)

        count = let(f"{name}_blocks", self._block_count(name))
        if self.spec.parallel != name:
            with loop(name, count) as index:
                body(index, task)
            return
        with emit.parallel("task", self.values["tasks"]) as task:
            first, share = self._share(count, task)
            with loop(name, share, first) as index:
                body(index, task)

    def _block_count(self, name: str):
        dimension = LOOP_DIMENSION[name]
        if dimension == "k":  # k == 0 still makes one pass, which writes the zeros
            return emit.maximum(emit.ceil_div(self.values["k"], self.values["kc_used"]), const(1))
        return emit.ceil_div(self.values[dimension], self.values[dimension + "c"])

    def _share(self, count, task):
        """(first, number) of the iterations of ``count`` that fall to ``task``: contiguous and as even as can be."""
        tasks = self.values["tasks"]
        first = let("first", tirx.truncdiv(count * task, tasks))
        return first, let("share", tirx.truncdiv(count * (task + const(1)), tasks) - first)

    # ---- packing --------------------------------------------------------------------------------------------------

    def _panels(self, operand: str, at: str, task) -> emit.View:
        """The packed block of an operand: (panel, p, e)."""
        v, width = self.values, self.width[operand]
        offset = v[operand + "_offset"]
        if self._private(at):
            offset = offset + task * v[operand + "_size"]
        return emit.View(
            operand + "c", self.work, self.spec.dtype, (v[operand + "_stride"], const(width), 1), offset
        )

    def _pack(self, operand: str, at: str, blocks: dict[str, _Block], task) -> None:
        own, along = blocks[OWN_DIMENSION[operand]], blocks["k"]
        panels = self._panels(operand, at, task)
        self.values[operand + "_panels"] = panels
        width = self.width[operand]
        count = let("panels", emit.ceil_div(own.size, const(width)))

        def pack(first, number) -> None:
            pack_panels(
                self.vectors, self.isa, panels, self.operands[operand],
                width=width, first=first, e0=own.start, extent=own.size, count=number, p0=along.start, kb=along.size,
            )  # fmt: skip

        if self.spec.parallel and not self._private(at):
            with emit.parallel("packer", self.values["tasks"]) as packer:
                pack(*self._share(count, packer))
        else:
            pack(const(0), count)

    # ---- the macro-kernel -----------------------------------------------------------------------------------------

    def _inner_loops(self, blocks: dict[str, _Block], task) -> None:
        """The loops over micro-tiles of the current block of C, and the micro-kernel."""
        spec = self.spec
        counts = {
            "ir": let("ir_tiles", emit.ceil_div(blocks["m"].size, const(spec.mr))),
            "jr": let("jr_tiles", emit.ceil_div(blocks["n"].size, const(spec.nr))),
        }
        outer, inner = self.variant.inner
        with loop(outer, counts[outer]) as x, loop(inner, counts[inner]) as y:
            at = {outer: x, inner: y}
            i, j = at["ir"] * const(spec.mr), at["jr"] * const(spec.nr)
            tile = microkernel.Tile(
                vectors=self.vectors,
                mr=spec.mr,
                nr=spec.nr,
                i0=let("i0", blocks["m"].start + i),
                j0=let("j0", blocks["n"].start + j),
                rows=let("rows", blocks["m"].size - i),
                columns=let("columns", blocks["n"].size - j),
                registers=microkernel.registers(self.vectors, spec.mr, spec.nr),
            )
            own_tile = const(0) if task is None else task * const(spec.mr * spec.nr)
            scratch = emit.View("Cs", self.work, spec.dtype, (const(spec.nr), 1), own_tile)
            if self.packed:
                self._prefetch_c(tile)
            microkernel.clear(tile)
            self._multiply(tile, at, blocks["k"])
            self._write_back(tile, scratch, blocks["k"])

    def _prefetch_c(self, tile: microkernel.Tile) -> None:
        """Ask for the tile of C while the micro-kernel runs: it comes from L3 or memory and is needed at the end."""
        line = CACHE_LINE // self.itemsize
        for i in range(tile.mr):
            for c in range(0, tile.nr, line):
                self.c_rows.prefetch(tile.i0 + const(i), tile.j0 + const(c))

    def _multiply(self, tile: microkernel.Tile, at: dict[str, Any], along: _Block) -> None:
        """The micro-kernel; an operand that is not packed is read in place, clamped or masked at the edge."""
        a_packed, b_packed = ("A" in dict(self.packed)), ("B" in dict(self.packed))

        def a_at(full: bool):
            if a_packed:
                return lambda i, p: self.values["A_panels"].get(at["ir"], p, const(i))
            last = None if full else tile.rows - const(1)
            rows = [
                let(f"row{i}", tile.i0 + (const(i) if full else emit.minimum(const(i), last)))
                for i in range(tile.mr)
            ]
            return lambda i, p: self.operands["A"].any.get(rows[i], along.start + p)

        def b_at(full: bool):
            lanes = self.vectors.lanes
            if b_packed:
                return lambda c, p: self.values["B_panels"].get_vector(lanes, at["jr"], p, const(c))
            b = self.operands["B"].unit_e
            if full:
                return lambda c, p: b.get_vector(lanes, along.start + p, tile.j0 + const(c))
            masks = dict(zip(tile.chunks(), tile.masks()))
            return lambda c, p: self.vectors.masked_load(b.address(along.start + p, tile.j0 + const(c)), masks[c])

        def ahead(p) -> None:
            for c in range(0, self.spec.nr, CACHE_LINE // self.itemsize):
                self.values["B_panels"].prefetch(at["jr"], p + const(microkernel.PREFETCH_ROWS), const(c))

        def run(full: bool) -> None:
            microkernel.multiply_add(tile, along.size, a_at(full), b_at(full), ahead if b_packed else None)

        if a_packed and b_packed:
            run(True)
        else:
            emit.branch(tile.full, lambda: run(True), lambda: run(False))

    def _write_back(self, tile: microkernel.Tile, scratch, along: _Block) -> None:
        """C = accumulated in the first block of k, C += accumulated in the others; with alpha and beta for gemm."""

        def write(update) -> None:
            microkernel.write_back(tile, self.c_any, self.c_rows, self.values["csc"] == const(1), scratch, update)

        first = along.start == const(0)
        if self.spec.op == "matmul":
            emit.branch(first, lambda: write(lambda x, c, s: x), lambda: write(lambda x, c, s: c() + x))
            return
        alpha, beta = let("alpha", self.scale.get(const(0))), let("beta", self.scale.get(const(1)))
        emit.branch(
            first,
            # beta == 0: C is not read, so a NaN in it vanishes, as in BLAS.
            lambda: emit.branch(
                beta == self.vectors.scalar(0.0),
                lambda: write(lambda x, c, s: s(alpha) * x),
                lambda: write(lambda x, c, s: s(beta) * c() + s(alpha) * x),
            ),
            lambda: write(lambda x, c, s: c() + s(alpha) * x),
        )
