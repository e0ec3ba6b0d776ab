"""KernelSpec: everything that decides the machine code of a kernel, and nothing that is known only at run time."""

from __future__ import annotations

from dataclasses import asdict, dataclass

#: The five steps in which the paper builds its generator, and so do we: each adds one idea to the one before.
STEPS = ("basic", "blocked", "packed", "microkernel", "optimised")

#: Fine-grain optimisations (the paper's part P6) that can be left out to see what each is worth. Without
#: "register-loads" every multiply-add reads its vector of B from memory, instead of one load for all rows of the tile.
SWITCHES = ("vector-packing", "register-loads", "prefetch")


@dataclass(frozen=True)
class KernelSpec:
    """What is compiled. Sizes, strides, block sizes and the number of tasks are arguments of the kernel.

    ``dtype``: a name of ``problem.DTYPES``. ``isa``: a name of ``family.isa.ISAS``. ``variant``: a name of
    ``family.variants.VARIANTS``. ``mr``, ``nr``, ``kr``: the micro-tile in elements; the one that is not a dimension of
    the resident operand is 0. ``op``: ``"matmul"`` writes C = A.B and never reads C; ``"gemm"`` computes C = alpha.A.B
    + beta.C. ``packing``: which operands are packed, one of the variant's ``packings``; a B that a resident-C kernel
    reads in place must have unit column stride, and so must a C that is not packed by a variant that packs it.
    ``symmetric``: B is A^T in the same memory, half of C is computed and copied to the other half. ``parallel``: the
    outer loop whose iterations are shared out to tasks, or ``""``. ``step``: one of ``STEPS``. ``without``: those of
    ``SWITCHES`` that are left out. ``blocked``: False leaves out the loops over cache blocks and everything else that a
    small product can do without (``family.unblocked``), but with packing ``"b"`` the copy of a B that has no contiguous
    rows. ``arithmetic``: a name of ``family.arithmetic.ARITHMETICS``, or ``""`` for the default of dtype, instruction
    set and packing. ``shape``: the m, n, k that the kernel is for and that are constants of its code
    (``family.specialised``), or None.
    """

    dtype: str
    isa: str
    variant: str
    mr: int
    nr: int
    kr: int = 0
    op: str = "matmul"
    packing: str = "ab"
    symmetric: bool = False
    parallel: str = ""
    step: str = "optimised"
    without: tuple[str, ...] = ()
    blocked: bool = True
    arithmetic: str = ""
    shape: tuple[int, int, int] | None = None

    @property
    def tile(self) -> str:
        """The micro-tile of the resident operand, rows x columns: ``14x32``."""
        return "x".join(str(size) for size in self.tile_sizes)

    @property
    def tile_sizes(self) -> tuple[int, int]:
        """Rows and columns of the resident operand's micro-tile."""
        return {"C": (self.mr, self.nr), "A": (self.mr, self.kr), "B": (self.kr, self.nr)}[self.variant[4]]

    @property
    def name(self) -> str:
        """Readable, safe in a file name, unique per spec: ``matmul-float32-B3A2C0-14x32-ab-ic-x86-64-v4``."""
        if self.shape is not None:
            return "-".join((self.op, self.dtype, "shape", "x".join(map(str, self.shape)), self.isa))
        parts = [self.op, self.dtype, self.variant, self.tile, self.packing]
        parts += ["symmetric"] if self.symmetric else []
        parts += [self.parallel or "serial"]
        parts += [self.step] if self.step != STEPS[-1] else []
        parts += [] if self.blocked else ["unblocked"]
        parts += [f"no-{switch}" for switch in self.without]
        parts += [self.arithmetic] if self.arithmetic else []
        return "-".join((*parts, self.isa))

    @property
    def symbol(self) -> str:
        """The exported C name of the kernel."""
        return "tvmgemm_" + self.name.replace("-", "_")

    def to_dict(self) -> dict:
        """The fields as plain values, in a fixed order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict) -> KernelSpec:
        """The inverse of ``to_dict``; TypeError for unknown or missing fields."""
        shape = fields.get("shape")
        return cls(**{**fields, "without": tuple(fields.get("without", ())), "shape": shape and tuple(shape)})
