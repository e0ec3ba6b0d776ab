"""KernelSpec: everything that decides the machine code of a kernel, and nothing that is known only at run time."""

from __future__ import annotations

from dataclasses import asdict, dataclass

#: Which operands the kernel packs into contiguous micro-panels before it multiplies.
PACKINGS = ("ab", "a", "b", "none")


@dataclass(frozen=True)
class KernelSpec:
    """What is compiled. Sizes, strides, block sizes and the number of tasks are arguments of the kernel.

    ``dtype``: element type of A, B and C. ``isa``: a name of ``family.isa.ISAS``. ``op``: ``"matmul"`` writes
    C = A.B and never reads C; ``"gemm"`` computes C = alpha.A.B + beta.C. ``variant``: a name of
    ``family.variants.VARIANTS``. ``mr``, ``nr``: the micro-tile in elements. ``packing``: one of ``PACKINGS``; an
    operand B that is not packed must have unit column stride, every other operand any strides. ``parallel``: the
    outer loop whose iterations are shared out to tasks, or ``""``.
    """

    dtype: str
    isa: str
    variant: str
    mr: int
    nr: int
    op: str = "matmul"
    packing: str = "ab"
    parallel: str = ""

    @property
    def name(self) -> str:
        """Readable, safe in a file name, unique per spec: ``matmul-float32-B3A2C0-14x32-ab-ic-x86-64-v4``."""
        parts = (self.op, self.dtype, self.variant, f"{self.mr}x{self.nr}", self.packing, self.parallel or "serial")
        return "-".join((*parts, self.isa))

    @property
    def symbol(self) -> str:
        """The exported C name of the kernel."""
        return "tvmgemm_" + self.name.replace("-", "_")

    def to_dict(self) -> dict:
        """The fields as JSON-ready values, in a fixed order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict) -> KernelSpec:
        """The inverse of ``to_dict``; TypeError for unknown or missing fields."""
        return cls(**fields)
